"""The example of correlated noise: it runs, and its gain is there."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_noise_that_is_taken_back_helps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("dp_accounting")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example = importlib.import_module("correlated_noise")
    names = ["fixed order, independent", "fixed order, 8 diagonals"]
    names += ["fixed order, inverse of 4, optimised", "fixed order, 2 buffers"]
    found = example.main(["--seeds=1", "--only", *names])
    for name in names[1:]:
        assert found[name][0] > found[names[0]][0] + 0.05
    assert capsys.readouterr().out.count("(zero out one sample)") == 4
