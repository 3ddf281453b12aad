"""Rows that the user says which samples they are of: ``with samples(index, count=B): ...``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Factor, UnitMap, by_units
from flash_clipping.ops.runtime.checks import check_on_device


class DeclaredRows:
    """Which sample each row is of that layers read, on their batch axis.

    Attributes:
        index_M: sample of every row; -1 for none.
        count: how many samples there are.
    """

    def __init__(self, index_M: Tensor, count: int):
        self.index_M, self.count = index_M, count
        self._map = UnitMap(index_M, count)

    def check(self, path: str, args: Sequence[Any], axis: int, batch: int | None) -> None:
        """Refuse what these rows cannot be.

        Raises:
            FlashClippingError: it is not as many rows, or not on this device; or there are not as
                many samples as in the batch.
        """
        where = f"{path}: called inside flash_clipping.samples(index, count={self.count})"
        if axis:
            raise FlashClippingError(
                f"{where}, with a model that was wrapped with batch_first=False. Wrap it with "
                "batch_first=True, and give these layers their rows on the first axis."
            )
        if batch is not None and batch != self.count:
            raise FlashClippingError(
                f"{where}, but the model was called with a batch of {batch} samples. Pass the "
                "number of samples in the batch as count."
            )
        rows = len(self.index_M)
        for x in args:
            if not isinstance(x, Tensor):
                continue
            if x.dim() == 0 or x.shape[0] != rows:
                raise FlashClippingError(
                    f"{where}: found an input of shape {tuple(x.shape)}, but index has {rows} "
                    "entries. The first axis must be the rows: one entry for each."
                )
            if x.device != self.index_M.device:
                raise FlashClippingError(
                    f"{where}: its input is on {x.device}, and index on {self.index_M.device}. "
                    "Move index there."
                )

    def of_samples(self, factor: Factor) -> Factor:
        """What was recorded row by row, for samples."""
        return by_units(factor, self._map)


_declared: ContextVar[DeclaredRows | None] = ContextVar("declared_rows", default=None)


#: An entry for each ``with samples(...)`` that runs, in whatever thread: layers that take the short
#: way need not ask for more while it is empty.
DECLARATIONS: list[None] = []


def declared_rows() -> DeclaredRows | None:
    """What holds for layers that are called now."""
    return _declared.get()


@contextmanager
def samples(index: Tensor, *, count: int) -> Iterator[None]:
    """Layers that are called inside read rows of any samples: say of which.

    ::

        for e, expert in enumerate(experts):                    # in a module's forward
            token, place = torch.where(chosen == e)             # of hidden [B·T, d]
            with flash_clipping.samples(token // T, count=B):
                out = out.index_add(0, token, expert(hidden[token]))

    Every layer with a rule that is called inside must have these rows along the first axis of its
    inputs. The gradient of a sample is the sum over its rows. What the samples of rows are must
    follow from each row alone, or from what is public: no clipping bounds what one sample does
    to the choice of another's rows. Elsewhere, and where a model is not wrapped, this does nothing.

    Args:
        index: ``[rows]``, integers: the sample of each row, 0 to ``count - 1`` in the order of the
            batch, or -1 for rows of none, whose gradient is left out. On the layers' device.
        count: how many samples the batch has.

    Raises:
        FlashClippingError: ``index`` is no such tensor. Values out of range are refused at once on
            a CPU; on a GPU by an assertion on the device, without waiting for it.
    """
    if torch.compiler.is_compiling():
        raise FlashClippingError(
            "flash_clipping.samples(...): found inside what torch.compile traces; expected an "
            "ordinary forward. Keep this module out of it: torch.compiler.disable(module)."
        )
    integers = isinstance(index, Tensor) and not (
        index.is_floating_point() or index.is_complex() or index.dtype == torch.bool
    )
    if not integers or index.dim() != 1 or isinstance(count, bool) or not isinstance(count, int):
        found = (
            f"a tensor of shape {tuple(index.shape)} and {index.dtype}"
            if isinstance(index, Tensor)
            else type(index).__name__
        )
        raise FlashClippingError(
            f"flash_clipping.samples(index, count): found {found} and count={count!r}; expected "
            "one integer for each row, and the number of samples."
        )
    check_on_device(
        (index >= -1).logical_and(index < count).all(),
        f"flash_clipping.samples(index, count={count}): index has values outside of -1 to "
        f"{count - 1}. Give each row its sample's place in the batch, or -1 for none.",
    )
    # A copy: the map is read in backward, and index is the user's.
    before = _declared.set(DeclaredRows(index.detach().to(torch.int64, copy=True), count))
    DECLARATIONS.append(None)
    try:
        yield
    finally:
        DECLARATIONS.pop()
        _declared.reset(before)
