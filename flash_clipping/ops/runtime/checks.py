"""Checks of values that may be on a device: what fails is a Python error, and no step waits.

A CPU is asked at once. What a GPU finds is a boolean on it. Where it is false, the step's sums are
replaced by zeros before noise is added (:meth:`DeviceChecks.gate`), so that noise alone is
released; and a later forward or step, which finds it on the host, raises the error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flash_clipping.errors import FlashClippingError

_LATER = (
    " (A GPU found it, and it is read later: of the sums of that step nothing was released, but "
    "noise alone.)"
)

#: A boolean of one element, what is said where it is false, and the class of the error.
Check = tuple[Tensor, str, type[Exception]]


class DeviceChecks:
    """The checks of a process that no Python has seen yet.

    Attributes:
        sent: those on their way to the host.
    """

    def __init__(self) -> None:
        self._new: list[Check] = []  # not sent yet
        #: Whether all that were sent since the last gate hold.
        self._holds: Tensor | None = None
        self.sent: deque[tuple[Tensor, torch.cuda.Event | None, list[Check]]] = deque()
        #: Those of a CUDA graph that is captured.
        self._captured: list[Check] | None = None
        self._at_once = False

    def add(self, check: Check) -> None:
        """Check one more; raises at once what is on a CPU."""
        holds, message, error = check
        if self._at_once or not is_awaited(holds):
            if not holds:
                raise error(message)
        elif self._captured is not None:
            self._captured.append(check)
        else:
            self._new.append(check)
            if len(self._new) >= 64:  # forwards that no step follows
                self._send()

    def gate(self) -> Tensor | None:
        """Whether all checks since the last gate hold: ``[]``, bool, on a device; ``None`` where
        there were none. What does not is raised by :meth:`raise_found` later."""
        self._send()
        holds, self._holds = self._holds, None
        return holds

    def _send(self) -> None:
        of_devices: dict[torch.device, list[Check]] = {}
        for check in self._new:
            of_devices.setdefault(check[0].device, []).append(check)
        self._new = []
        for device, found in of_devices.items():
            holds_N = torch.stack([holds.reshape(()) for holds, *_ in found])
            on_host, event = holds_N.to("cpu", non_blocking=True), None
            if holds_N.is_cuda:
                with torch.cuda.device(device):
                    event = torch.cuda.Event()
                    event.record()
            self.sent.append((on_host, event, found))
            holds = holds_N.all()
            if self._holds is not None:
                holds = holds & self._holds.to(device, non_blocking=True)
            self._holds = holds

    def raise_found(self, wait: bool = False) -> None:
        """Raise the error of a check that has failed, as far as the host knows; with ``wait`` of
        all."""
        if wait:
            self._send()
        while self.sent:
            on_host, event, found = self.sent[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    return
            self.sent.popleft()
            for holds, (_, message, error) in zip(on_host.tolist(), found, strict=True):
                if not holds:
                    raise error(message + _LATER)

    @contextmanager
    def captured(self) -> Iterator[list[Check]]:
        """Checks are part of a CUDA graph: those that each of its replays makes again."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Wait for each check, as on a CPU: of a look at batches that are not the user's."""
        before, self._at_once = self._at_once, True
        try:
            yield
        finally:
            self._at_once = before


def is_awaited(holds: Tensor) -> bool:
    """Whether to read this would be to wait for a device."""
    return holds.is_cuda


#: Those of this process.
device_checks = DeviceChecks()


def check_on_device(
    holds: Tensor, message: str, error: type[Exception] = FlashClippingError
) -> None:
    """Refuse what does not hold, with this message: on a CPU at once, of a GPU later, without
    waiting for it. ``holds``: one boolean."""
    device_checks.add((holds, message, error))
