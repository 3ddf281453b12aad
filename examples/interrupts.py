"""Ctrl-C in the midst of training."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Turns the first Ctrl-C into a request to stop after the step; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._previous)
