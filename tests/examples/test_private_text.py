"""The example of private text runs, small, and with privacy has a finite epsilon."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG turned off")

SMALL = [
    *("--width", "16", "--layers", "1", "--length", "48", "--rank", "2", "--public-steps", "3"),
    *("--steps", "2", "--batch-size", "32", "--max-physical-batch-size", "16", "--canaries", "40"),
    *("--held-out", "20", "--synthetic", "12", "--device", "cpu"),
]


SCRIPT = "private_text"


@pytest.mark.parametrize("private", [True, False])
def test_short_run_of_private_text_writes_its_results(
    script: Any,
    tmp_path: Path,
    private: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # To parse the standard library takes seconds.
    monkeypatch.setattr(script, "public_texts", lambda: [math.__doc__, *[re.__doc__] * 9])
    more = [] if private else ["--not-private"]
    before, after, found = script.main([*SMALL, "--output", str(tmp_path), *more])
    assert 1 < before < 400 and after != before
    assert found.canaries == 40 and not found.violated
    assert (found.epsilon <= 8.0) if private else math.isinf(found.epsilon)
    assert "12 synthetic passages, three of them:" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_synthetic_text_is_worth_more_than_before(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's run with half of the steps, and fewer passages."""
    settings = ["--width=64", "--layers=2", "--batch-size=256", "--device=cpu", "--synthetic=500"]
    steps = ["--public-steps=200", "--steps=60"]
    script.main([*settings, *steps, f"--output={tmp_path}"])
    out = capsys.readouterr().out
    found = {
        name: float(re.search(rf"^    {name} +([\d.]+)", out, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("public", "synthetic, before", "synthetic", "private", "synthetic in canaries")
    }
    assert found["private"] < found["synthetic"] < found["synthetic, before"]
    assert found["synthetic in canaries"] == 0
