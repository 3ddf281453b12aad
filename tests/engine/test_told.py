"""What is said to who waits for the look before a first step."""

from __future__ import annotations

import sys
import time

import pytest

from flash_clipping.engine.model_watch import ModelWatch, told_to_who_waits


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_long_look_is_said_on_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)

    @told_to_who_waits(0.05)
    def look(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    assert look(0.0) == 0.0
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
    assert look(0.4) == 0.4
    said = capsys.readouterr().err
    assert said.count("which rows are samples") == said.count("\n") == int(is_terminal)


def test_the_look_before_a_first_step_is_such_a_look() -> None:
    assert hasattr(ModelWatch._prove, "__wrapped__")
