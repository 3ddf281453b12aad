"""Which thread runs the forward of a wrapped model: one at a time, and no backward beside it."""

from __future__ import annotations

import threading

from flash_clipping.capture.forward_call import ForwardCall, in_backward
from flash_clipping.capture.refused_runs import refuse_threads
from flash_clipping.finish.backward_pass import BackwardPass


class RunningForward:
    """The thread that runs the root's forward, if one does."""

    def __init__(self) -> None:
        # Under the one key that is ever used: setting a default is one step for all threads.
        self._thread: dict[str, int] = {}

    def enter(self, backward_pass: BackwardPass | None) -> None:
        """The forward begins, in this thread.

        Args:
            backward_pass: the one that is running, if any.

        Raises:
            FlashClippingError: another thread runs the model's forward or backward.
        """
        if in_backward():  # recomputed, in a thread of autograd's, maybe
            return
        thread = threading.get_ident()
        if self._thread.setdefault("forward", thread) != thread:
            refuse_threads("forward", "forward")
        if backward_pass is not None and backward_pass.thread not in (None, thread):
            self.leave()
            refuse_threads("forward", "backward")

    def leave(self) -> None:
        """It has ended, or failed."""
        if self._thread.get("forward") == threading.get_ident() and not in_backward():
            del self._thread["forward"]

    def check(self, call: ForwardCall, backward_pass: BackwardPass | None) -> None:
        """Refuse a backward of ``call`` while another thread's forward or backward runs.

        Raises:
            FlashClippingError: it would be recorded as a part of that.
        """
        if backward_pass is not None and backward_pass.thread not in (None, call.thread):
            refuse_threads("backward", "backward")
        if self._thread.get("forward", call.thread) != call.thread:
            refuse_threads("backward", "forward")
