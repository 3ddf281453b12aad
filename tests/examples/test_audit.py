"""The empirical audit: the bound itself, and both runs of the example."""

from __future__ import annotations

import functools
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("rich")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def audit() -> Iterator[ModuleType]:
    """The example, imported the way ``python examples/audit.py`` would."""
    spec = importlib.util.spec_from_file_location("example_audit", EXAMPLES / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(EXAMPLES))
        del sys.modules[spec.name]


# -- the bound ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "published"),
    [
        (1000, 100, 75, 1e-4, 0.673),  # appendix D of the paper
        (100_000, 1510, 1439, 1e-5, 2.675),  # section 7
    ],
)
def test_bound_has_the_published_values(
    audit: ModuleType, canaries: int, guesses: int, correct: int, delta: float, published: float
) -> None:
    found = audit.epsilon_lower_bound(canaries, guesses, correct, delta)
    # One unit of the last digit that the paper prints: one value is rounded there, one cut off.
    assert found == pytest.approx(published, abs=1e-3)


def test_bound_of_perfect_guesses_in_closed_form(audit: ModuleType) -> None:
    """Pure ε: all r right has probability q^r, so q = 0.05^(1/r)."""
    for guesses in (1, 10, 300):
        q = 0.05 ** (1 / guesses)
        expected = max(0.0, math.log(q / (1 - q)))
        assert audit.epsilon_lower_bound(1000, guesses, guesses) == pytest.approx(
            expected, abs=1e-6
        )


def test_p_value_by_hand(audit: ModuleType) -> None:
    # W ~ Binomial(2, 3/4): P[W >= 2] = 9/16; P[W = 1] = 6/16; P[W = 0] = 1/16.
    epsilon = math.log(3)
    assert audit.p_value(5, 2, 2, epsilon) == pytest.approx(9 / 16)
    # max(6/16, 7/16 / 2) = 6/16, times 2 m delta
    assert audit.p_value(5, 2, 2, epsilon, 0.01) == pytest.approx(9 / 16 + 2 * 5 * 0.01 * 6 / 16)
    assert audit.p_value(5, 2, 0, epsilon, 0.01) == 1.0
    with pytest.raises(ValueError, match="correct <= guesses <= canaries"):
        audit.p_value(5, 2, 3, epsilon)


def test_chance_guessing_gives_no_bound(audit: ModuleType) -> None:
    for guesses in (2, 100, 1000):
        for correct in (0, guesses // 4, guesses // 2):
            assert audit.epsilon_lower_bound(1000, guesses, correct, 1e-5) == 0.0


def test_bound_is_monotone(audit: ModuleType) -> None:
    by_correct = [audit.epsilon_lower_bound(1000, 200, v, 1e-5) for v in range(100, 201, 5)]
    assert by_correct == sorted(by_correct) and by_correct[0] == 0 < by_correct[-1]
    by_delta = [audit.epsilon_lower_bound(1000, 200, 180, d) for d in (0.0, 1e-6, 1e-4, 1e-3, 1e-2)]
    assert by_delta == sorted(by_delta, reverse=True) and by_delta[0] > by_delta[3]
    assert by_delta[-1] == 0.0  # at 2 m delta = 20 nothing can be concluded
    by_confidence = [audit.epsilon_lower_bound(1000, 200, 180, 0, c) for c in (0.5, 0.95, 0.999)]
    assert by_confidence == sorted(by_confidence, reverse=True)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_bound_holds_for_a_mechanism_of_known_epsilon(audit: ModuleType, epsilon: float) -> None:
    """Randomised response is as leaky as ε allows: above ε in at most 5 % of runs, yet near it."""
    generator = torch.Generator().manual_seed(0)
    probability = torch.tensor(1 / (1 + math.exp(-epsilon)))
    bound_of = functools.cache(functools.partial(audit.epsilon_lower_bound, 300, 300))
    bounds = []
    for _ in range(400):
        correct = int((torch.rand(300, generator=generator) < probability).sum())
        bounds.append(bound_of(correct))
    assert sum(bound > epsilon for bound in bounds) / 400 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert sorted(bounds)[200] > 0.5 * epsilon


def test_guesses_are_counted(audit: ModuleType) -> None:
    score = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    included = torch.tensor([True, False, True, False, True, False])
    assert audit.right_guesses(score, included, 2) == 2  # in: 0, out: 5
    assert audit.right_guesses(score, included, 4) == 2  # in: 0, 1; out: 4, 5
    assert audit.right_guesses(score, included, 1) == 1
    assert audit.right_guesses(score, included, 6) == 4


# -- the run --------------------------------------------------------------------------------------

SHORT = ["--device", "cpu", "--samples", "200", "--canaries", "200", "--guesses", "60"]


@pytest.mark.parametrize("model", ["convolutions", "current"])
def test_a_short_audit_runs(
    audit: ModuleType, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    found = audit.main([*SHORT, "--epochs", "2", "--model", model])
    assert not found.violated and found.as_expected
    assert found.epsilon <= 4.0 and 60 < found.included < 140
    out = capsys.readouterr().out
    assert "lower bound" in out and "Nothing contradicts" in out


def test_a_short_audit_catches_broken_clipping(
    audit: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same run with samples clipped to 50 C; ε = 1 leaves room for 200 canaries to tell."""
    short = [*SHORT, "--guesses", "150", "--epochs", "5", "--epsilon", "1"]
    found = audit.main([*short, "--broken"])
    assert found.violated and found.as_expected and found.correct > 0.9 * found.guesses
    assert "leaked more" in capsys.readouterr().out
    assert not audit.main(short).violated


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_audit_stays_under_the_accountants_epsilon(audit: ModuleType, seed: int) -> None:
    found = audit.main(["--device", "cpu", "--seed", str(seed)])
    assert not found.violated
    # And it is not blind: canaries are told apart far better than by chance.
    assert found.lower_bound > 0.4


@pytest.mark.slow
def test_audit_catches_broken_clipping(audit: ModuleType) -> None:
    found = audit.main(["--device", "cpu", "--broken"])
    assert found.violated and found.correct > 0.97 * found.guesses
