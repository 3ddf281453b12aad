"""Both examples, end to end, on very few steps."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.examples.conftest import EXAMPLES, TINY

METHODS = ["flash", "ghost", "hooks", "nonprivate"]
CPU = "--device=cpu"


@pytest.mark.usefixtures("randomness_of_opacus")
@pytest.mark.parametrize("name", [pytest.param("digits", marks=pytest.mark.slow), "language_model"])
def test_methods_report_and_agree(example, name, capsys):
    """Same seed, so same batches and same noise: private methods differ by rounding only."""
    losses, norms = {}, {}
    for method in METHODS:
        report = example.main([*TINY[name], CPU, "--method", method, "--max-steps=3"])
        losses[method], norms[method] = report.losses, report.median_norms

        assert report.step == len(report.losses) == 3
        assert all(math.isfinite(loss) for loss in report.losses)
        assert report.samples > 0 and report.seconds > 0 and report.peak_memory_mib > 0
        if method == "nonprivate":
            assert report.epsilon == math.inf
        else:
            assert 0 < report.epsilon < 8
        assert Path("runs", f"{name}-{method}.png").stat().st_size > 1000
        assert Path("runs", f"{name}-{method}.pt").exists()
        printed = capsys.readouterr().out
        assert ("median norm" in printed) == (method in ("flash", "ghost"))
        assert "samples/s" in printed and "peak memory" in printed
        assert "Stopped after step 3 of 6" in printed
    for method in ("ghost", "hooks"):
        torch.testing.assert_close(losses[method], losses["flash"], rtol=1e-4, atol=1e-4)
    assert norms["ghost"] == [(3, pytest.approx(norms["flash"][0][1], rel=1e-3))]


CURRENT = ["--ffn=moe", "--router=product-key", "--residual=mhc", "--lora=4"]


@pytest.mark.parametrize("name", ["language_model"])
def test_current_layers(example, name):
    """Experts, product keys and hyper-connections train in both ways."""
    command = [*TINY[name], CPU, *CURRENT, "--max-steps=2"]
    report = example.main(command)
    assert 0 < report.epsilon < 8
    report = example.main([*command, "--method=nonprivate"])
    assert all(math.isfinite(loss) for loss in report.losses)
    with pytest.raises(SystemExit):
        example.main([CPU, "--lora=4"])


def test_resume_without_checkpoint_says_so(example, name):
    with pytest.raises(SystemExit, match="no checkpoint at .*nowhere.pt"):
        example.main([*TINY[name], CPU, "--resume", "--checkpoint=nowhere.pt"])


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send SIGINT to a process")
@pytest.mark.parametrize("name", ["language_model"])
def test_interrupt_reports_epsilon_and_ends_cleanly(example, name, tmp_path, capsys):
    checkpoint = tmp_path / "runs" / f"{name}-flash.pt"

    def interrupt() -> None:
        deadline = time.monotonic() + 120
        while not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    report = example.main([*TINY[name], CPU, "--epochs=60"])
    thread.join()
    printed = capsys.readouterr().out
    assert 0 < report.step < report.total_steps
    assert "Stopped after step" in printed and "--resume" in printed
    assert "ε = 0." in printed or "ε = 1." in printed  # a fraction of the budget


def test_digits_are_learned_within_the_budget(monkeypatch, tmp_path):
    """A third of the default run: enough for the accuracy that the README promises."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    import digits

    report = digits.main([CPU, "--epochs=14"])
    assert report.epsilon <= 3
    assert report.metric >= 0.88


def test_noise_that_is_taken_back_helps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of correlated noise."""
    pytest.importorskip("dp_accounting")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import correlated_noise

    names = ["fixed order, independent", "fixed order, 8 diagonals"]
    names += ["fixed order, inverse of 4, optimised", "fixed order, 2 buffers"]
    found = correlated_noise.main(["--seeds=1", "--only", *names])
    for name in names[1:]:
        assert found[name][0] > found[names[0]][0] + 0.05
    assert capsys.readouterr().out.count("(zero out one sample)") == 4
