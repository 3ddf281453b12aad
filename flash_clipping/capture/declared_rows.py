"""Rows that the user says which samples they are of: ``with samples(index, count=B): ...``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.units import INTEGERS
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import PerSampleGrad, UnitMap
from flash_clipping.ops.runtime.checks import check_on_device


class DeclaredRows:
    """Which sample each row is of that layers read, on their batch axis.

    Attributes:
        index_M: sample of every row; -1 for none.
        count: how many samples there are.
        merged: of inputs with fewer rows, each of which is made of several of these.
    """

    def __init__(self, index_M: Tensor, count: int, merged: DeclaredRows | None = None):
        self.index_M, self.count, self.merged = index_M, count, merged
        self._map = UnitMap(index_M, count)

    def check(self, path: str, args: Sequence[Any], axis: int, batch: int | None) -> None:
        """Refuse inputs that are not as many rows, or not on this device, and a batch of another
        number of samples."""
        where = f"{path}: called inside flash_clipping.samples(index, count={self.count})"
        if axis:
            raise FlashClippingError(
                f"FC263 {where}, with a model that was wrapped with batch_first=False. Wrap it "
                "with batch_first=True, and give these layers their rows on the first axis."
            )
        if batch is not None and batch != self.count:
            raise FlashClippingError(
                f"FC260 {where}, but the model was called with a batch of {batch} samples. Pass "
                "the number of samples in the batch as count."
            )
        rows = len(self.index_M)
        for x in args:
            if not isinstance(x, Tensor):
                continue
            if x.dim() == 0 or x.shape[0] != rows:
                raise FlashClippingError(
                    f"FC260 {where}: found an input of shape {tuple(x.shape)}, but index has "
                    f"{rows} entries. The first axis must be the rows: one entry for each."
                )
            if x.device != self.index_M.device:
                raise FlashClippingError(
                    f"FC260 {where}: its input is on {x.device}, and index on "
                    f"{self.index_M.device}. Move index there."
                )

    def read_as(self, x: Any) -> DeclaredRows:
        """These, or the merged ones where ``x`` has as many rows."""
        merged = self.merged
        if merged is not None and isinstance(x, Tensor) and x.dim():
            return merged if len(x) == len(merged.index_M) else self
        return self

    def of_samples(self, factor: PerSampleGrad) -> PerSampleGrad:
        """What was recorded row by row, for samples."""
        return factor.by_units(self._map)


class LostRows(DeclaredRows):
    """Rows of a layer that a checkpoint runs again, outside of the declaration."""

    def __init__(self, path: str):
        self.path = path

    def of_samples(self, factor: PerSampleGrad) -> PerSampleGrad:
        raise FlashClippingError(
            f"FC262 {self.path}: activation checkpointing runs this layer again, outside of the "
            "flash_clipping.samples(index, count) that it was called in. Write `with samples(...)` "
            "inside the function that is checkpointed, or checkpoint with use_reentrant=False."
        )


_declared: ContextVar[DeclaredRows | None] = ContextVar("declared_rows", default=None)


#: What holds for layers that are called now, and lets others hold, inside of :func:`declared`.
declared_rows, declare = _declared.get, _declared.set


@contextmanager
def declared(rows: DeclaredRows | None) -> Iterator[None]:
    """Layers that are called inside read these rows."""
    before = _declared.set(rows)
    try:
        yield
    finally:
        _declared.reset(before)


@contextmanager
def samples(index: Tensor, *, count: int) -> Iterator[None]:
    """Layers that are called inside read rows of any samples: say of which.

    ::

        for e, expert in enumerate(experts):                    # in a module's forward
            token, place = torch.where(chosen == e)             # of hidden [B·T, d]
            with flash_clipping.samples(token // T, count=B):
                out = out.index_add(0, token, expert(hidden[token]))

    Every layer with a rule that is called inside must have these rows along the first axis of its
    inputs. The gradient of a sample is the sum over its rows. The sample of a row must
    follow from that row alone, or from what is public: no clipping bounds what one sample does
    to the choice of another's rows. Elsewhere, and where a model is not wrapped, this does nothing.

    Args:
        index: ``[rows]``, integers: the sample of each row, 0 to ``count - 1`` in the order of the
            batch, or -1 for rows of none, whose gradient is left out. On the layers' device.
        count: how many samples the batch has.

    Raises:
        FlashClippingError: ``index`` is no such tensor. Values out of range are refused at once on
            a CPU, and later of a GPU, without waiting for it.
    """
    if torch.compiler.is_compiling():
        raise FlashClippingError(
            "FC261 flash_clipping.samples(...): found inside what torch.compile traces; expected "
            "an ordinary forward. Keep this module out of it: torch.compiler.disable(module)."
        )
    integers = isinstance(index, Tensor) and index.dtype in INTEGERS and not index.is_meta
    if not integers or index.dim() != 1 or isinstance(count, bool) or not isinstance(count, int):
        found = (
            f"a tensor of shape {tuple(index.shape)} and {index.dtype} on {index.device}"
            if isinstance(index, Tensor)
            else type(index).__name__
        )
        raise FlashClippingError(
            f"FC260 flash_clipping.samples(index, count): found {found} and count={count!r}; "
            "expected one integer for each row, and the number of samples."
        )
    check_on_device(
        (index >= -1).logical_and(index < count).all(),
        f"FC260 flash_clipping.samples(index, count={count}): index has values outside of -1 to "
        f"{count - 1}. Give each row its sample's place in the batch, or -1 for none.",
    )
    # A copy: the map is read in backward, and index is the user's.
    with declared(DeclaredRows(index.detach().to(torch.int64, copy=True), count)):
        yield


#: What knows inputs without an axis for samples, from a model and its keyword arguments: by the
#: ``id`` of such an input, the sample of each of its rows.
_PARTS: list[Callable[[nn.Module, Mapping[str, Any]], dict[int, Tensor]]] = []


def register_parts(find: Callable[[nn.Module, Mapping[str, Any]], dict[int, Tensor]]) -> None:
    """Ask ``find(root, kwargs)`` which inputs have rows that are parts of samples."""
    _PARTS.append(find)


def parts_of_samples(root: nn.Module, kwargs: Mapping[str, Any]) -> dict[int, Tensor]:
    """The sample of each row of inputs that have no axis for samples, by the input's ``id``."""
    return {key: sample_N for find in _PARTS for key, sample_N in find(root, kwargs).items()}


def rows_of_samples(x: Tensor, sample_N: Tensor, order: Sequence[int]) -> Tensor:
    """The rows of these samples, in this order; waits for the device."""
    chosen = [(sample_N == b).nonzero().flatten() for b in order]
    return x.detach().index_select(0, torch.cat(chosen))
