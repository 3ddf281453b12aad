"""Rows of a batch that are no samples.

Batches may be of one size, filled up with padding: a row that runs through the model like any other
and gets norm 0 and clipping coefficient 0, with which it adds exactly nothing, whatever its values
are. How many rows count is never a number in compiled or captured code: these read a mask.

Shape suffixes: ``B`` rows of a batch, ``P`` parameters.
"""

from __future__ import annotations

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

    def replaced(self, of_rows: Tensor, value: float) -> Tensor:
        """Norms or coefficients, one for each row, with this value for those of padding."""
        if self.rows is None:
            return of_rows
        if self.rows != of_rows.shape[-1]:  # only of a mask that graphs read
            raise FlashClippingError(
                f"FC705 GraphedStep: found a part of {of_rows.shape[-1]} rows, of batches of "
                f"{self.rows} (max_batch_size, and BatchMemoryManager). Take whole batches, of a "
                "smaller max_batch_size; or leave GraphedStep out."
            )
        return of_rows.masked_fill(self.mask(of_rows.device), value)


class Padding:
    """What the loader, or the loop, of a wrapped model says of the rows of its batches.

    Attributes:
        rows: of every batch; ``None``: batches are as they were drawn, and every row counts.
        given: the rows of the next calls, as the loop said; ``None``: those that were drawn.
    """

    def __init__(self) -> None:
        self.rows: int | None = None
        self.given: CountedRows | None = None
        #: What CUDA graphs read, by the number of rows: memory that stays, with the mask of the
        #: next replay.
        self._lasting: dict[int, CountedRows] = {}

    def __getstate__(self) -> dict[str, object]:  # a copy's next forward is of no loader's batch
        return self.__dict__ | {"_lasting": {}}

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
            return self._lasting[self.rows]  # see prepare
        if self.given is not None:
            return self.given
        if draw is None:
            return EVERY_ROW
        order = draw.order_R
        if order is not None and not torch.equal(order.sort()[0], torch.arange(draw.rows)):
            raise FlashClippingError(
                f"FC242 expect_rows: found {len(order)} rows, of a batch that max_batch_size gives "
                f"{draw.rows}; expected every row of the batch once."
            )
        return CountedRows(draw.rows, draw.samples, order)

    def expect(self, count: int, rows: int | None) -> None:
        """The first ``count`` of so many rows of the next calls count; ``None``: all that are
        there. For loops whose loader does not fill batches up, and that count no norms."""
        if rows is not None:
            self.rows, self.given = rows, CountedRows(rows, count)
        elif self.given is not None:
            self.rows = self.given = None

    def prepare(self, device: torch.device) -> None:
        """Make the memory that graphs on this device read; before any is captured."""
        if self.rows is None:
            return
        lasting = self._lasting.setdefault(self.rows, CountedRows(self.rows, 0))
        lasting.mask(device)

    def before_replay(self, draw: DrawnBatch | None, device: torch.device) -> None:
        """Let graphs read the mask of this batch."""
        if self.rows is None:
            return
        mask = self.of_call(draw, captured=False).mask(device)
        self._lasting[self.rows].mask(device).copy_(mask)


#: Of batches as they were drawn.
EVERY_ROW = CountedRows()

#: Of a draw without samples, for which the loader gives one row of the data. The row runs like any
#: other; its coefficient is 0, and it has no norm.
NO_ROW = CountedRows()
