"""Batches made of the samples of one batch: in other places, fewer of them, one of them extreme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from flash_clipping._compat import pytree
from flash_clipping.capture.image_patches import rows_of_samples
from flash_clipping.capture.inputs import batched_inputs, map_tensors

#: Factor of the floating inputs of an extreme sample.
EXTREME = 100.0


class Samples:
    """The arguments of one call, as samples.

    An input with as many rows as there are samples may be something else (positions, a mask that
    all samples share). ``narrow`` leaves out inputs of fewer axes: 0 takes all that fit, 1 those
    with more than one axis, 2 those with the most axes, 3 the first one alone.

    Args:
        args, kwargs: of the call.
        axis: that holds the samples.
        parts: the sample of each row of inputs without such an axis, by the input's id.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axis: int,
        narrow: int = 0,
        parts: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.args, self.kwargs = args, kwargs
        self._axis, self._parts = axis, parts or {}
        #: All tensors of the call.
        self.tensors = batched_inputs(args, kwargs)
        #: How many samples there are.
        self.count = next((x.shape[axis] for x in self.tensors if x.dim() > axis), 0)
        found = [
            x for x in self._leaves() if id(x) not in self._parts and self._axis_of(x) is not None
        ]
        #: Whether the rows of some input may be something else than samples.
        self.is_ambiguous = len(found) > 1 and any(
            n == self.count
            for x in found
            for axis, n in enumerate(x.shape)
            if axis != self._axis_of(x)
        )
        if narrow == 1:
            found = [x for x in found if x.dim() > 1]
        elif narrow == 2:
            found = [x for x in found if x.dim() == max(y.dim() for y in found)]
        elif narrow == 3:
            found = found[:1]
        self._ids = {id(x) for x in found}

    def _leaves(self) -> list[Tensor]:
        found: list[Tensor] = []

        def note(x: Tensor) -> Tensor:
            found.append(x)
            return x

        map_tensors(note, (self.args, self.kwargs))
        return found

    def _axis_of(self, x: Tensor) -> int | None:
        if x.dim() > self._axis and x.shape[self._axis] == self.count:
            return self._axis
        return 0 if x.dim() == 1 and len(x) == self.count else None  # labels beside [T, B] inputs

    def batch(
        self, order: Sequence[int], extreme: int | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these samples in these places.

        Args:
            order: the number of the sample in each place.
            extreme: a place whose sample is changed: floats are 100 times as large, integers come
                from both ends of those in the batch. Masks (no entries but 0 and 1) stay.
        """

        def of(x: Tensor) -> Tensor:
            if id(x) in self._parts:
                return rows_of_samples(x, self._parts[id(x)], order)
            if id(x) not in self._ids:
                return x
            x, axis = x.detach(), self._axis_of(x) or 0
            found = x.index_select(axis, torch.tensor(order, device=x.device))
            if extreme is not None and found.numel():
                found.select(axis, extreme).copy_(_extreme(x, found.select(axis, extreme)))
            return found

        def of_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, PackedSequence):
                return leaf
            rows = unpack_sequence(leaf)
            taken = [rows[b] for b in order]
            if extreme is not None:
                taken[extreme] = _extreme(leaf.data, taken[extreme])
            return pack_sequence(taken, enforce_sorted=False)

        args, kwargs = map_tensors(of, (self.args, self.kwargs))
        return pytree.tree_map(
            of_leaf, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, PackedSequence)
        )


def _extreme(x: Tensor, row: Tensor) -> Tensor:
    """``row``, a sample of ``x``, as far from the others as the model may take."""
    if x.dtype == torch.bool or x.is_complex() or bool(((x == 0) | (x == 1)).all()):
        return row
    if x.is_floating_point():
        return row * EXTREME
    is_odd = torch.arange(row.numel(), device=x.device).view(row.shape) % 2 > 0
    return torch.where(is_odd, x.max(), x.min())
