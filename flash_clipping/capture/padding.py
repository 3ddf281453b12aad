"""Batches of one size: which of their rows count, and which only fill them up.

A padding row runs through the model like any other, and gets norm 0 and clipping coefficient 0: a
sample with coefficient 0 adds exactly nothing, whatever its values are. How many rows count is
never a number in compiled or captured code. It is in a mask that these read.

Shape suffixes: ``B`` rows of the batch, ``P`` parameters.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.errors import FlashClippingError


class CountedRows:
    """The first ``count`` rows of a batch of ``rows`` count; ``None``: all of them.

    Args:
        rows: B.
        count: how many count.
        order_B: which row of the batch each row is; ``None``: they are in its order.
    """

    def __init__(self, rows: int | None = None, count: int = 0, order_B: Tensor | None = None):
        self.rows, self.count, self.order_B = rows, count, order_B
        self._mask_B: Tensor | None = None

    def mask(self, device: torch.device) -> Tensor:
        """``[B]``, bool: whether each row only fills the batch up. Made without waiting."""
        assert self.rows is not None
        if self._mask_B is None or self._mask_B.device != device:
            if self.order_B is None:
                self._mask_B = torch.arange(self.rows, device=device) >= self.count
            else:
                self._mask_B = (self.order_B >= self.count).to(device, non_blocking=True)
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
        if self.rows != of_rows.shape[-1]:  # only of a mask that graphs read
            raise FlashClippingError(
                f"GraphedStep: found a part of {of_rows.shape[-1]} rows, of batches of {self.rows} "
                "(max_batch_size, and BatchMemoryManager). Graphs read one mask, of a whole batch. "
                "Take whole batches, of a smaller max_batch_size; or leave GraphedStep out."
            )
        return of_rows.masked_fill(self.mask(of_rows.device), value)


class Padding:
    """What the loader of a wrapped model says of the rows of its batches.

    Attributes:
        rows: of every batch; ``None``: batches are as they were drawn, and every row counts.
    """

    def __init__(self) -> None:
        self.rows: int | None = None
        #: What CUDA graphs read: memory that stays, with the mask of the next replay.
        self._lasting: CountedRows | None = None

    def __getstate__(self) -> dict[str, object]:  # a copy's next forward is of no loader's batch
        return self.__dict__ | {"_lasting": None}

    def of_call(self, draw: DrawnBatch | None, captured: bool) -> CountedRows:
        """The rows of a call of the model that begins now.

        Args:
            draw: the batch that it is called with.
            captured: whether a CUDA graph is being made of it.

        Raises:
            FlashClippingError: rows of the batch are there twice, or not at all.
        """
        if self.rows is None:
            return EVERY_ROW
        if captured:
            assert self._lasting is not None  # see prepare
            return self._lasting
        if draw is None:
            return EVERY_ROW
        order = draw.order_R
        if order is not None and not torch.equal(order.sort()[0], torch.arange(draw.rows)):
            raise FlashClippingError(
                f"expect_rows: found {len(order)} rows, of a batch that max_batch_size gives "
                f"{draw.rows}; expected every row of the batch once."
            )
        return CountedRows(draw.rows, draw.samples, order)

    # -- CUDA graphs ----------------------------------------------------------------------------

    def prepare(self, device: torch.device) -> None:
        """Make the memory that graphs on this device read; before any is captured."""
        if self.rows is None:
            return
        if self._lasting is None or self._lasting.mask(device).device != device:
            self._lasting = CountedRows(self.rows, 0)
            self._lasting.mask(device)

    def before_replay(self, draw: DrawnBatch | None, device: torch.device) -> None:
        """Let graphs read the mask of this batch."""
        if self.rows is None:
            return
        assert self._lasting is not None
        self._lasting.mask(device).copy_(self.of_call(draw, captured=False).mask(device))


#: Of batches as they were drawn.
EVERY_ROW = CountedRows()


def refuse_several() -> NoReturn:
    """Refuse a backward pass through calls of which other rows count.

    Raises:
        FlashClippingError: always.
    """
    raise FlashClippingError(
        "the model: it was called with several padded batches before backward, of which "
        "other rows are padding. Call backward() for each batch before the next is taken."
    )
