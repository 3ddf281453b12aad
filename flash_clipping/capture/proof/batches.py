"""Batches made of the samples of one batch: in other places, fewer of them, one of them extreme,
some of them shorter, or all of them."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from flash_clipping._compat import pytree
from flash_clipping.capture.declared_rows import rows_of_samples
from flash_clipping.capture.inputs import (
    batched_inputs,
    entries_of,
    list_of_samples,
    map_tensors,
    tensors_of,
)

#: Factor of the floats of a sample that is far out.
FAR = 100.0

#: What transformers, and losses of PyTorch, do not count among the labels.
IGNORED = -100

#: How names of arguments that are labels end.
LABELS = "label", "labels", "target", "targets"

#: The part of a shorter sample that is left, in turn: a model may run on no texts of one word. All
#: of it is the sample as it is.
LEFT = 0.0, 0.5, 1.0

#: Samples of a batch that is checked; fewer where something else has as many rows.
FEW = 4, 3, 2

#: The part of a batch's positions that is checked, and the least length that texts are cut to.
SHARE, SHORT = 8, 32


#: The length of texts, and the part of them that is checked.
Window = tuple[int, slice]


class Samples:
    """The arguments of one call, as samples.

    An input with as many rows as there are samples may be something else (positions, a mask that
    all samples share). ``narrow`` leaves out some: 0 takes all that fit, 1 those with the most
    axes, 2 the first one alone.

    Args:
        args, kwargs: of the call.
        axis: that holds the samples.
        offsets: where the ids of each sample begin, of samples that lie end to end; and how many
            samples these are.
        parts: the sample of each row of inputs without such an axis, by the input's id.
        names: of ``args``.
        bags: offsets of bags beside other inputs, and the ids that they point into; what is as
            long as these belongs to them.
        window: what texts are cut to; every axis of the arguments that is as long is cut.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axis: int,
        narrow: int = 0,
        offsets: tuple[Tensor, int] | None = None,
        parts: Mapping[int, Tensor] | None = None,
        names: Sequence[str] = (),
        bags: Sequence[tuple[Tensor, Tensor]] = (),
        window: Window | None = None,
    ) -> None:
        self._axis, self._parts, self._window = axis, parts or {}, window
        own = weakref.proxy(self)  # pytrees keep what they ask in a reference cycle
        self._is_leaf = lambda leaf: own._is_list(leaf)
        # Tensors of their own: a causal model's labels are often its input ids.
        self._labels: set[int] = set()

        def of_own(x: Any, name: str) -> Any:
            if not name.endswith(LABELS) or not isinstance(x, Tensor) or id(x) in self._parts:
                return x
            x = x.detach()
            self._labels.add(id(x))
            return x

        args = tuple(map(of_own, args, itertools.chain(names, itertools.repeat(""))))
        kwargs = {name: of_own(x, name) for name, x in kwargs.items()}
        self.args, self.kwargs = args, kwargs
        #: All tensors of the call.
        self.tensors = batched_inputs(args, kwargs)
        #: How many samples there are.
        self.count = next((x.shape[axis] for x in self.tensors if x.dim() > axis), 0)
        self._offsets, self._ids_in_all = None, self.count
        if offsets is not None:
            self._offsets, self.count = offsets
        #: The same without what is packed.
        self.leaves = tensors_of((args, kwargs))
        #: By the id of a tensor, the offsets of its bags and how many rows there are.
        self._in_bags = {id(x): (pair[0], len(pair[1])) for pair in bags for x in pair}
        first = next(iter((*args, *kwargs.values())), None)
        #: The first argument, if it is a list of samples for sure.
        self._listed = first if isinstance(first, list) and entries_of(args, kwargs) else None
        found = [
            x
            for part in (*args, *kwargs.values())
            for leaf in pytree.tree_leaves(part, is_leaf=self._is_leaf)
            if not self._is_list(leaf)
            for x in tensors_of(leaf)
            if id(x) not in self._parts
        ]
        for starts, ids in bags:  # weights of ids
            for x in found:
                if x.dim() == 1 and len(x) == len(ids) != self.count:
                    self._in_bags.setdefault(id(x), (starts, len(ids)))
        found = [x for x in found if id(x) not in self._in_bags]
        found = [x for x in found if self._axis_of(x) is not None]
        #: Whether the rows of some input may be something else than samples.
        self.is_ambiguous = len(found) > 1 and any(
            n == self.count
            for x in found
            for axis, n in enumerate(x.shape)
            if axis != self._axis_of(x)
        )
        if narrow and found:
            most = max(x.dim() for x in found)
            found = found[:1] if narrow == 2 else [x for x in found if x.dim() == most]
        self._ids = {id(x) for x in found}
        #: Samples that have rows in inputs without such an axis.
        self.with_parts = {b for of_rows in self._parts.values() for b in of_rows.tolist()}
        #: What stands for no token.
        self.padding = 0
        #: Whether samples can be made shorter.
        self.may_be_shorter = offsets is None and not self._parts and not bags
        self.may_be_shorter &= any(not x.is_floating_point() for x in found)

    @property
    def are_alike(self) -> bool:
        """Whether there are several samples, of which the first input says nothing that tells them
        apart, and no other with several numbers for each: a mask may come first."""
        held = [x for x in self.leaves if self.holds(x) and id(x) not in self._labels]
        several = [x for n, x in enumerate(held) if not n or x.dim() > 1]
        axes = [self._axis_of(x) or 0 for x in several]
        rows = [x.detach().movedim(axis, 0) for x, axis in zip(several, axes, strict=True)]
        return self.count > 1 and bool(rows) and all(bool((x == x[:1]).all()) for x in rows)

    def holds(self, x: Tensor) -> bool:
        """Whether this tensor of the arguments has a row for each sample."""
        return id(x) in self._ids

    def few(self, seed: int) -> list[int]:
        """Some of the samples, others for another ``seed``; all of them if there are few, or if
        they may be ids that lie end to end."""
        first, *others = self.tensors
        ends = {len(x) for x in others if x.dim() == 1} - {len(first)}
        if first.dim() == 1 and ends and self._offsets is None:
            return [*range(self.count)]
        others = [x for x in self.leaves if x.dim() and not self.holds(x)]
        taken = {len(x) for x in others} | {x.shape[self._axis] for x in others if x.dim() > 1}
        taken |= {self.count} if self.is_ambiguous else set()
        fitting = (n for n in FEW if n <= self.count and n not in taken)
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(seed)).tolist()
        order.sort(key=lambda b: b not in self.with_parts)
        return sorted(order[: next(fitting, FEW[0])])

    def window_of(self, count: int) -> Window | None:
        """The length of the texts, and the part of it that ``count`` samples are cut to, where they
        would else have more than a part of the batch's positions: where most labels are, or most
        tokens that a mask counts. ``None`` to leave them as they are."""
        texts = [x for x in self.leaves if self.holds(x) and x.dim() == 2]
        texts = [x for x in texts if not (x.is_floating_point() or x.is_complex())]
        if not self.may_be_shorter or not texts:
            return None
        length = texts[0].shape[1 - self._axis]
        short = max(SHORT, self.count * length // (SHARE * count))
        if short >= length:
            return None
        counts = torch.ones(length)
        for x in texts:
            if x.shape == texts[0].shape:
                seen = (x != IGNORED) & ((x != 0) if bool(((x == 0) | (x == 1)).all()) else True)
                counts = counts * (seen.sum(self._axis).cpu() + 1e-3)
        begin = int(counts.unfold(0, short, 1).sum(1).argmax())
        return length, slice(begin, begin + short)

    def _is_list(self, value: Any) -> bool:
        if isinstance(value, list) and any(id(x) in self._in_bags for x in value):
            return False
        is_first = value is self._listed and value is not None
        return is_first or list_of_samples(value, self.count, self._axis)

    def _axis_of(self, x: Tensor) -> int | None:
        if x.dim() > self._axis and x.shape[self._axis] == self.count:
            return self._axis
        return 0 if x.dim() == 1 and len(x) == self.count else None  # labels beside [T, B] inputs

    def batch(
        self,
        order: Sequence[int],
        extreme: Collection[int] = (),
        shorter: Sequence[int] = (),
        left: float = 1.0,
        masks: bool = False,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these samples in these places.

        Args:
            order: the number of the sample in each place.
            extreme: places whose samples are changed: floats are 100 times as large, some with the
                other sign. On a GPU, or where none is negative (indices, probabilities), they are
                the largest or the smallest that a sample has there.
                Integers, and masks (no entries but 0 and 1), stay.
            shorter, left: places whose samples are cut to this part, one entry at least: integers
                behind it become :attr:`padding`, labels what does not count, bools what they are
                not where the sample begins, and one number of a sample, which may be its length,
                is cut itself.
            masks: floats that are a mask are cut as well. Values that were not observed are no
                padding, and a model may know no sample without any.
        """
        bags = None
        if self._offsets is not None:
            bags = self._bags(order, self._offsets, self._ids_in_all)

        def of(x: Tensor) -> Any:
            if bags is not None and x is self._offsets:
                return bags[0]
            if bags is not None and x.dim() == 1 and len(x) == self._ids_in_all:
                return x.detach()[bags[1]]
            if id(x) in self._in_bags:
                starts, numbers = self._bags(order, *self._in_bags[id(x)])
                return starts if x is self._in_bags[id(x)][0] else x.detach()[numbers]
            if id(x) in self._parts:
                rows = rows_of_samples(x, self._parts[id(x)], order)
                return rows if len(rows) else None  # texts without images
            if id(x) not in self._ids:
                return x
            is_labels = id(x) in self._labels
            x, axis = x.detach(), self._axis_of(x) or 0
            found = x.index_select(axis, torch.tensor(order, device=x.device))
            for place in extreme if found.numel() else ():
                row = found.select(axis, place)
                row.copy_(self._extreme(x, axis, row))
            is_cut = self.may_be_shorter and not x.is_floating_point()
            if left < 1 and (is_cut or (masks and _has_an_end(x))):
                for place in shorter:
                    row = found.select(axis, place)
                    row.copy_(self._shorter(x, row, left, is_labels))
            return found

        def of_leaf(leaf: Any) -> Any:
            if not isinstance(leaf, PackedSequence):
                return leaf
            rows = unpack_sequence(leaf)
            taken = [rows[b] for b in order]
            for place in extreme:
                taken[place] = self._extreme(leaf.data, 0, taken[place])
            return pack_sequence(taken, enforce_sorted=False)

        def of_list(leaf: Any) -> Any:
            if not self._is_list(leaf):
                return leaf
            taken = [leaf[b] for b in order]
            for place in extreme:
                taken[place] = map_tensors(_far, taken[place])
            return type(leaf)(taken)

        def cut(part: Any) -> Any:
            return pytree.tree_map(of_list, part, is_leaf=self._is_leaf)

        args, kwargs = tuple(map(cut, self.args)), {n: cut(x) for n, x in self.kwargs.items()}
        args, kwargs = map_tensors(of, (args, kwargs))
        if self._window is not None:
            args, kwargs = map_tensors(self._cut, (args, kwargs))
        args, kwargs = pytree.tree_map(
            of_leaf, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, PackedSequence)
        )
        return args, kwargs

    def _cut(self, x: Tensor) -> Tensor:
        assert self._window is not None
        length, part = self._window
        if length not in x.shape:
            return x
        return x[tuple([part if n == length else slice(None) for n in x.shape])]

    def _bags(self, order: Sequence[int], offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
        """The offsets of these samples, and the numbers of their ids, end to end, of so many."""
        edges = [*offsets.tolist(), total][: self.count + 1]
        bags = [range(edges[b], edges[b + 1]) for b in order]
        starts = [0, *itertools.accumulate(map(len, bags))]
        starts = starts[: len(order) + len(offsets) - self.count]
        numbers = [n for bag in bags for n in bag]
        return (
            torch.tensor(starts, dtype=offsets.dtype, device=offsets.device),
            torch.tensor(numbers, dtype=torch.long, device=offsets.device),
        )

    def _shorter(self, x: Tensor, row: Tensor, left: float, is_labels: bool) -> Tensor:
        """``row``, a sample of ``x``, integers or bools, without its end."""
        if row.is_complex() or not row.numel():
            return row
        if row.numel() == 1:
            if row.dtype == torch.bool:
                return row
            return torch.full_like(row, min(int(row), max(1, math.ceil(left * int(row)))))
        axis = 0 if len(row) > 1 else row.dim() - 1  # masks may have an axis of heads before
        row = row.movedim(axis, 0).clone()
        end = row[max(1, math.ceil(left * len(row))) :]
        if row.dtype == torch.bool:
            end.copy_(~row[:1])
        else:
            most = int(x.long().amax()) if x.numel() else 0
            padding = self.padding if most > 1 and most >= self.padding else 0
            if x.dtype.is_signed and (is_labels or bool((x == IGNORED).any())):
                padding = IGNORED
            of_none = end.long() < 0  # labels that do not count
            end.copy_(torch.where(of_none, end.long(), padding))
        return row.movedim(0, axis)

    def _extreme(self, x: Tensor, axis: int, row: Tensor) -> Tensor:
        """``row``, a sample of ``x`` (or several rows) along this axis, as far from the others as
        the model may take."""
        if not x.is_floating_point() or bool(((x == 0) | (x == 1)).all()):
            return row
        dtype, number = x.dtype, torch.arange(row.numel(), device=x.device).view(row.shape)
        if dtype.itemsize == 1:  # of which PyTorch has few operations
            x, row = x.float(), row.float()
        # A GPU ends the process of a model that makes indices of floats that are out of range.
        if x.is_cuda or not bool((x < 0).any()):
            return torch.where(number % 4 > 0, x.amax(axis), x.amin(axis)).to(dtype)
        # Some with the other sign: what compares entries with a threshold chooses others.
        return (row * torch.where(number % 4 == 0, -FAR, FAR).to(x.dtype)).to(dtype)


def _far(x: Tensor) -> Tensor:
    """A tensor of one sample of a list, with nothing beside it that tells a range."""
    return x * FAR if x.is_floating_point() and not x.is_cuda else x


def _has_an_end(x: Tensor) -> bool:
    """Whether samples can be cut: of integers and bools, and floats that are a mask."""
    return not x.is_floating_point() or bool(((x == 0) | (x == 1)).all())
