"""A warning about samples whose gradients are not finite, for which no step waits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flash_clipping.errors import warn


class NonFiniteWarning:
    """Warns once, from coefficients. On a GPU a step's are checked in a later one."""

    def __init__(self) -> None:
        self.warned = False
        #: On CUDA: the least coefficient of a step, when it is there, and whether that is awaited.
        self._least: tuple[Tensor, torch.cuda.Event, bool] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_least": None}

    def note(self, coef: Tensor) -> None:
        """Look at a step's coefficients, which are 0 for such samples and positive for others."""
        if self.warned or not coef.numel():
            return
        if not coef.is_cuda:
            if not bool(coef.all()):
                self._warn()
            return
        if self._least is None:
            pinned = torch.empty((), dtype=coef.dtype, pin_memory=True)
            self._least = (pinned, torch.cuda.Event(), False)
        least, event, pending = self._least
        if pending:
            if not event.query():
                return
            self._least = (least, event, False)
            if float(least) == 0:
                self._warn()
                return
        least.copy_(coef.amin(), non_blocking=True)
        event.record()
        self._least = (least, event, True)

    def _warn(self) -> None:
        self.warned = True
        warn(
            "FC555 The gradient of at least one sample was not finite (inf or NaN). Such samples "
            "get clipping coefficient 0 and add nothing to the sum. Look for the input that is.",
            stacklevel=2,
        )
