"""The example of an empirical audit: an intact run and a broken one."""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("rich")

SCRIPT = "audit"
SHORT = ["--device", "cpu", "--samples", "200", "--canaries", "200", "--guesses", "60"]


@pytest.mark.parametrize("model", ["convolutions", "current"])
def test_a_short_audit_runs(
    script: ModuleType, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    found = script.main([*SHORT, "--epochs", "2", "--model", model])
    assert not found.violated
    assert found.epsilon <= 4.0 and 60 < found.included < 140
    out = capsys.readouterr().out
    assert "lower bound" in out and "Nothing contradicts" in out


def test_a_short_audit_catches_broken_clipping(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same run with samples clipped to 50 C; ε = 1 leaves room for 200 canaries to tell."""
    short = [*SHORT, "--guesses", "150", "--epochs", "5", "--epsilon", "1"]
    found = script.main([*short, "--broken"])
    assert found.violated and found.correct > 0.9 * found.guesses
    assert "leaked more" in capsys.readouterr().out
    assert not script.main(short).violated


@pytest.mark.parametrize("noise", ["inverse", "discrete"])
def test_a_short_audit_of_other_noise(script: ModuleType, noise: str) -> None:
    """ε is for what the run draws, and a run whose clipping is broken is found out."""
    if noise == "inverse":
        pytest.importorskip("dp_accounting")
    short = [*SHORT, "--guesses", "150", "--epochs", "5", "--epsilon", "1", "--noise", noise]
    found = script.main([*short, "--epochs", "2"])
    assert not found.violated and 0.9 < found.epsilon <= 1
    assert found.relation.startswith("zero out" if noise == "inverse" else "add or remove")
    assert script.main([*short, "--broken"]).violated


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["inverse", "buffers", "discrete"])
def test_audits_of_other_noise_stay_under_epsilon(script: ModuleType, noise: str) -> None:
    if noise != "discrete":
        pytest.importorskip("dp_accounting")
    found = script.main(["--device", "cpu", "--noise", noise])
    assert not found.violated and found.lower_bound > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_audit_stays_under_the_accountants_epsilon(script: ModuleType, seed: int) -> None:
    found = script.main(["--device", "cpu", "--seed", str(seed)])
    assert not found.violated
    # And it is not blind: canaries are told apart far better than by chance.
    assert found.lower_bound > 0.4


@pytest.mark.slow
def test_random_allocation_stays_under_its_epsilon(script: ModuleType) -> None:
    pytest.importorskip("dp_accounting")
    options = ["--device", "cpu", "--sampling", "random_allocation", "--batches", "10"]
    found = script.main(options)
    assert not found.violated and found.lower_bound > 0.3 and 3.9 < found.epsilon <= 4
    assert script.main([*options, "--broken"]).violated
