"""Batches of one size: which of their rows count, and which only fill them up.

A padding row runs through the model like any other, and gets norm 0 and clipping coefficient 0: a
sample with coefficient 0 adds exactly nothing, whatever its values are. How many rows count is
never a number in compiled or captured code. It is in a mask that these read.

Shape suffixes: ``B`` rows of the batch, ``P`` parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flash_clipping.errors import FlashClippingError


class CountedRows:
    """The first ``count`` rows of a batch of ``rows`` count; ``None``: all of them.

    Args:
        rows: B.
        count: how many count.
    """

    def __init__(self, rows: int | None = None, count: int = 0):
        self.rows, self.count = rows, count
        self._mask_B: Tensor | None = None

    def mask(self, device: torch.device) -> Tensor:
        """``[B]``, bool: whether each row only fills the batch up. Made without waiting."""
        assert self.rows is not None
        if self._mask_B is None or self._mask_B.device != device:
            self._mask_B = torch.arange(self.rows, device=device) >= self.count
        return self._mask_B

    def norms(self, norms_PB: Tensor) -> Tensor:
        """Norms of what is released: 0 for padding."""
        return self._replaced(norms_PB, 0.0)

    def bounds(self, upper: Tensor) -> Tensor:
        """What samples are clipped by, infinite for padding: every way to clip makes that 0."""
        return self._replaced(upper, torch.inf)

    def positive(self, coef: Tensor) -> Tensor:
        """Coefficients in which a 0 means a sample that is not finite, and not padding."""
        return self._replaced(coef, 1.0)

    def _replaced(self, of_rows: Tensor, value: float) -> Tensor:
        if self.rows is None:
            return of_rows
        return of_rows.masked_fill(self.mask(of_rows.device), value)


class Padding:
    """What the loader of a wrapped model says of the rows of its batches.

    Attributes:
        rows: of every batch; ``None``: batches are as they were drawn, and every row counts.
    """

    def __init__(self) -> None:
        self.rows: int | None = None
        self._announced: CountedRows | None = None
        #: What CUDA graphs read: memory that stays, with the mask of the next replay.
        self._lasting: CountedRows | None = None

    def __getstate__(self) -> dict[str, object]:  # a copy's next forward is of no loader's batch
        return self.__dict__ | {"_announced": None, "_lasting": None}

    def announce(self, count: int | None) -> None:
        """So many rows of the next batch count; ``None``: nothing is known of it."""
        self._announced = None if count is None else CountedRows(self.rows, count)

    def of_call(self, batch_size: int | None, recorded: bool, captured: bool) -> CountedRows:
        """The rows of a call of the model that begins now.

        Args:
            batch_size: of its inputs.
            recorded: whether it may be followed by a backward.
            captured: whether a CUDA graph is being made of it.

        Raises:
            FlashClippingError: a call that is recorded is not of the batch that was announced.
        """
        if self.rows is None or not recorded:
            return EVERY_ROW
        found = self._known()
        if batch_size != self.rows:
            raise FlashClippingError(
                f"the model: called with a batch of {batch_size} rows; expected the "
                f"{self.rows} rows of the loader's batch (max_batch_size), at once: the last of "
                "them may be padding."
            )
        if not captured:
            return found
        assert self._lasting is not None  # see prepare
        return self._lasting

    def _known(self) -> CountedRows:
        if self._announced is None:
            raise FlashClippingError(
                "the model: make_private was called with max_batch_size=..., and no batch of the "
                "loader that it returned was announced for this forward, so that nobody knows "
                "which of its rows are padding. Take batches from that loader, one for each step, "
                "and not ahead of it; run other data under torch.no_grad()."
            )
        return self._announced

    # -- CUDA graphs ----------------------------------------------------------------------------

    def prepare(self, device: torch.device) -> None:
        """Make the memory that graphs on this device read; before any is captured."""
        if self.rows is None:
            return
        if self._lasting is None or self._lasting.mask(device).device != device:
            self._lasting = CountedRows(self.rows, 0)
            self._lasting.mask(device)
        self.before_replay(device)

    def before_replay(self, device: torch.device) -> None:
        """Let graphs read the mask of the batch that was announced.

        Raises:
            FlashClippingError: none was.
        """
        if self.rows is None:
            return
        assert self._lasting is not None
        self._lasting.mask(device).copy_(self._known().mask(device))


#: Of batches as they were drawn.
EVERY_ROW = CountedRows()


def counted_rows(of_calls: Iterable[CountedRows | None]) -> CountedRows:
    """The rows of calls of the model whose gradients are one.

    Raises:
        FlashClippingError: they are of several batches.
    """
    found = {id(rows): rows for rows in of_calls if rows is not None}
    if len(found) > 1:
        raise FlashClippingError(
            "the model: it was called with several padded batches before backward, of which "
            "other rows are padding. Call backward() for each batch before the next is taken."
        )
    return found.popitem()[1] if found else EVERY_ROW
