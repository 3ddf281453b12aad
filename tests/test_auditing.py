"""Lower bounds on ε from one run: values, when they hold, and what they are made of."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch

from flash_clipping import auditing
from flash_clipping.__main__ import main
from tests.support.errors import raises


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "published"),
    [
        (1000, 100, 75, 1e-4, 0.673),  # appendix D of the paper
        (100_000, 1510, 1439, 1e-5, 2.675),  # section 7
    ],
)
def test_bound_has_the_published_values(
    canaries: int, guesses: int, correct: int, delta: float, published: float
) -> None:
    found = auditing.epsilon_lower_bound(canaries, guesses, correct, delta)
    # One unit of the last digit that the paper prints: one value is rounded there, one cut off.
    assert found == pytest.approx(published, abs=1e-3)


def test_bound_of_perfect_guesses_in_closed_form() -> None:
    """Pure ε: all r right has probability q^r, so q = 0.05^(1/r)."""
    for guesses in (1, 10, 300):
        q = 0.05 ** (1 / guesses)
        expected = max(0.0, math.log(q / (1 - q)))
        assert auditing.epsilon_lower_bound(1000, guesses, guesses) == pytest.approx(
            expected, abs=1e-6
        )


def test_p_value_by_hand() -> None:
    # W ~ Binomial(2, 3/4): P[W >= 2] = 9/16; P[W = 1] = 6/16; P[W = 0] = 1/16.
    epsilon = math.log(3)
    assert auditing.p_value(5, 2, 2, epsilon) == pytest.approx(9 / 16)
    # max(6/16, 7/16 / 2) = 6/16, times 2 m delta
    assert auditing.p_value(5, 2, 2, epsilon, 0.01) == pytest.approx(9 / 16 + 2 * 5 * 0.01 * 6 / 16)
    assert auditing.p_value(5, 2, 0, epsilon, 0.01) == 1.0
    with raises("FC302", ValueError, match=r"correct: found 3; .* in \[0, 2\]"):
        auditing.p_value(5, 2, 3, epsilon)


def test_chance_guessing_gives_no_bound() -> None:
    for guesses in (2, 100, 1000):
        for correct in (0, guesses // 4, guesses // 2):
            assert auditing.epsilon_lower_bound(1000, guesses, correct, 1e-5) == 0.0


def test_bound_is_monotone() -> None:
    by_correct = [auditing.epsilon_lower_bound(1000, 200, v, 1e-5) for v in range(100, 201, 5)]
    assert by_correct == sorted(by_correct) and by_correct[0] == 0 < by_correct[-1]
    by_delta = [
        auditing.epsilon_lower_bound(1000, 200, 180, d) for d in (0.0, 1e-6, 1e-4, 1e-3, 1e-2)
    ]
    assert by_delta == sorted(by_delta, reverse=True) and by_delta[0] > by_delta[3]
    assert by_delta[-1] == 0.0  # at 2 m delta = 20 nothing can be concluded
    by_confidence = [auditing.epsilon_lower_bound(1000, 200, 180, 0, c) for c in (0.5, 0.95, 0.999)]
    assert by_confidence == sorted(by_confidence, reverse=True)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_bound_holds_for_a_mechanism_of_known_epsilon(epsilon: float) -> None:
    """Randomised response is as leaky as ε allows: above ε in at most 5 % of runs, yet near it."""
    generator = torch.Generator().manual_seed(0)
    probability = torch.tensor(1 / (1 + math.exp(-epsilon)))
    bound_of = functools.cache(functools.partial(auditing.epsilon_lower_bound, 300, 300))
    bounds = []
    for _ in range(400):
        correct = int((torch.rand(300, generator=generator) < probability).sum())
        bounds.append(bound_of(correct))
    assert sum(bound > epsilon for bound in bounds) / 400 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert sorted(bounds)[200] > 0.5 * epsilon


def test_guesses_are_counted() -> None:
    score = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    included = torch.tensor([True, False, True, False, True, False])
    assert auditing.right_guesses(score, included, 2) == 2  # in: 0, out: 5
    assert auditing.right_guesses(score, included, 4) == 2  # in: 0, 1; out: 4, 5
    assert auditing.right_guesses(score, included, 1) == 1
    assert auditing.right_guesses(score, included, 6) == 4


def test_an_audit_of_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    included_M = torch.rand(300, generator=generator) < 0.5
    score_M = included_M + 0.3 * torch.randn(300, generator=generator)
    found = auditing.audit(score_M, included_M, guesses=200, epsilon=1.0, delta=1e-5)
    assert found.violated and found.lower_bound > 2
    assert "leaked more" in str(found) and "95.0%" not in found.verdict
    none = auditing.audit(torch.zeros(300), included_M, guesses=200, epsilon=1.0, delta=1e-5)
    assert not none.violated
    with raises("FC931", ValueError, match="1"):
        score_M[7] = math.nan
        auditing.audit(score_M, included_M, guesses=2, epsilon=1.0, delta=0.1)
    with raises("FC302", ValueError, match=r"guesses: found 400; .* in \[0, 300\]"):
        auditing.audit(torch.zeros(300), included_M, guesses=400, epsilon=1.0, delta=0.1)


# -- the command ----------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    included = [bool(i % 2) for i in range(200)]
    told = {"scores": [float(i) for i in included], "included": included, "delta": 1e-5}
    (tmp_path / "scores.json").write_text(json.dumps(told | {"epsilon": 1.0}))
    asked = ["audit", str(tmp_path / "scores.json"), "--guesses", "150"]
    assert main(asked) == 1
    assert "leaked more" in capsys.readouterr().out
    (tmp_path / "scores.json").write_text(json.dumps(told | {"epsilon": 50.0}))
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lower_bound"] > 3
    (tmp_path / "scores.json").write_text(json.dumps({"scores": [1.0]}))
    assert main(asked) == 2
    assert "FC932 missing key 'included', 'epsilon', 'delta';" in capsys.readouterr().err
