"""Arguments of a call cut into those of single samples, and outputs of single samples put together.

An argument that is not cut would show every sample the rows of all others, so what it is must be
known: a tensor or an array with a row for each sample, a list with an entry for each, a batch of
graphs; or a number, or one row that all samples share. Everything else raises an error.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from flash_clipping.capture.inputs import (
    DEPTH,
    attributes_of,
    map_tensors,
    parts_of,
    rebuilt,
    tensors_in,
)
from flash_clipping.errors import FlashClippingError

#: What is left of an argument for some rows.
_Cut = Callable[[Sequence[int]], Any]

#: What a forward may write into, and is looked into.
HOLDERS = (dict, OrderedDict, defaultdict, list)


class Batch:
    """The arguments of one call.

    Args:
        args, kwargs: of the call.
        axis: that holds samples.
        drawn: how many samples the loader drew, where that is known.
        are_samples: arguments that were lists of samples, or of inputs of all samples, in calls in
            which that could be told.

    Attributes:
        count: B.
        tensors: those among the arguments; before them, if lists say who is a sample, one on the
            meta device that has as many rows.
        made: dicts and lists that were cut, those for the last rows, and what these held.

    Raises:
        FlashClippingError: an argument is neither samples' nor the same for all, or may be both.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axis: int,
        drawn: int | None,
        are_samples: dict[str, bool],
    ):
        self.axis, self._are_samples = axis, are_samples
        named = {f"argument {n}": value for n, value in enumerate(args)} | kwargs
        leaves = [found for name, value in named.items() for found in _leaves(name, value)]
        self.tensors = [x for _, leaf in leaves for x in tensors_in(leaf)]
        self.count = self._counted(leaves, drawn)
        if not self.tensors or self._rows_in(self.tensors[0]) != self.count:
            self.tensors.insert(0, torch.empty((self.count,) * (axis + 1), device="meta"))
        self._cuts = {name: self._cut(name, value) for name, value in named.items()}
        self._positional = len(args)
        self.made: list[tuple[Any, Any, Any]] = []

    def of(
        self, rows: Sequence[int], copied: Callable[[Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these rows alone, and copies of what is not cut."""
        self.made, self._copied = [], copied
        found = {name: cut(rows) for name, cut in self._cuts.items()}
        return tuple([found.pop(f"argument {n}") for n in range(self._positional)]), found

    def left(self, first: int) -> dict[tuple[int, Any], Any]:
        """What requires grad, and a forward has put into the dicts and lists that were made for it:
        by their numbers, from ``first`` on, and keys."""
        return {
            (number, key): value
            for number, (_, made, before) in enumerate(self.made, first)
            for key, value in _items(made).items()
            if value is not before.get(key, self)
            if any(x.requires_grad for x in tensors_in(value))
        }

    def _counted(self, leaves: Sequence[tuple[str, Any]], drawn: int | None) -> int:
        """How many samples there are: the first array tells; without any, lists do."""
        lists = [(name, leaf) for name, leaf in leaves if type(leaf) in (list, tuple)]
        for _, leaf in leaves:
            if isinstance(leaf, PackedSequence):
                return int(leaf.batch_sizes[0])
            if _is_graphs(leaf):
                return int(leaf.num_graphs)
            if type(leaf) not in (list, tuple) and leaf.ndim > self.axis:
                return int(leaf.shape[self.axis])
        ways: list[int] = []  # numbers of entries come first
        for name, leaf in lists:
            rows, are_samples = self._rows_in(leaf), self._are_samples.get(name)
            of_leaf = [len(leaf)] if rows is None or are_samples else [len(leaf), rows]
            if rows is not None and (type(leaf) is tuple or are_samples is False):
                of_leaf = [rows]  # a tuple is of inputs
            ways = [n for n in ways if n in of_leaf] or of_leaf
        if len({*ways}) > 1 and drawn not in ways:
            raise FlashClippingError(
                f"FC182 the model: {', '.join(name for name, _ in lists)}: found lists of tensors "
                f"that may be {ways[0]} samples or {ways[1]}: a list has an entry for each sample, "
                "or inputs with a row for each. Say how many samples there are before the call:\n"
                f"    model.expect_samples({ways[0]})"
            )
        return drawn if drawn in ways else [*ways, 0][0]

    def _rows_in(self, held: Any) -> int | None:
        """How many rows all tensors in a container have; ``None`` if they differ, or are those of
        targets of a detector."""
        if isinstance(held, list | tuple) and all(isinstance(x, Mapping) for x in held):
            return None
        sizes = {x.shape[self.axis] if x.dim() > self.axis else None for x in tensors_in(held)}
        return sizes.pop() if len(sizes) == 1 else None

    def _cut(self, name: str, leaf: Any, depth: int = DEPTH) -> _Cut:
        if _is_array(leaf):
            return self._cut_tensor(name, leaf)
        if type(leaf) in (list, tuple):
            return self._cut_list(name, leaf)
        if isinstance(leaf, PackedSequence):
            of_samples = unpack_sequence(leaf)
            return lambda rows: pack_sequence([of_samples[b] for b in rows], enforce_sorted=False)
        if _is_graphs(leaf):
            kind = type(leaf)
            return lambda rows: kind.from_data_list([leaf.get_example(b) for b in rows])
        parts = parts_of(name, leaf) if depth else {}
        if not any([*_leaves(path, part, depth - 1)] for path, part in parts.values()):
            is_shared = isinstance(leaf, nn.Module) or inspect.isroutine(leaf)
            return lambda rows: leaf if is_shared else self._noted(leaf, self._copied(leaf))
        cuts = {key: self._cut(*part, depth - 1) for key, part in parts.items()}
        return lambda rows: self._noted(
            leaf, rebuilt(leaf, {key: cut(rows) for key, cut in cuts.items()})
        )

    def _noted(self, leaf: Any, made: Any) -> Any:
        """``made`` of ``leaf``, noted if a forward may write into it."""
        if type(made) in HOLDERS:
            self.made.append((leaf, made, _items(made).copy()))
        return made

    def _cut_list(self, name: str, leaf: Any) -> _Cut:
        rows, kind = self._rows_in(leaf), type(leaf)
        is_cut, known = len(leaf) == self.count, self._are_samples.get(name)
        if self.count > 1:
            of_numbers = kind is tuple and all(isinstance(x, int | float) for x in leaf)
            if is_cut and known is None and (rows == self.count or of_numbers):
                if of_numbers and len({*leaf}) > 1 or kind is list:
                    what = "numbers" if of_numbers else f"tensors with {rows} rows each"
                    raise FlashClippingError(
                        f"FC182 the model: {name}: found a {kind.__name__} of {self.count} {what} "
                        f"in a batch of {self.count} samples: it may have an entry for each, or be "
                        "of all. Give the model inputs with rows in a tuple, or one by one; what "
                        "has an entry for each in a list; or begin with a batch of another size."
                    )
                is_cut = False
            elif is_cut and (known is False or rows == self.count):
                is_cut = bool(known)
            elif not is_cut or tensors_in(leaf):
                self._are_samples[name] = is_cut
        if is_cut:
            return lambda rows: kind([map_tensors(Tensor.clone, leaf[b]) for b in rows])
        cuts = [self._cut(f"{name}[{n}]", part) for n, part in enumerate(leaf)]
        return lambda rows: self._noted(leaf, kind([cut(rows) for cut in cuts]))

    def _cut_tensor(self, name: str, x: Any) -> _Cut:
        axis = 0 if x.ndim == 1 else self.axis  # labels beside [T, B]
        if x.ndim > axis and x.shape[axis] == self.count:
            # Copies, of which a forward may change its own in place.
            return lambda rows: x[(*[slice(None)] * axis, [*rows])]
        if x.ndim <= self.axis or x.shape[self.axis] == 1:
            rest = x.shape[self.axis + 1 :]
            if rest[:1] != (self.count,):
                self._are_samples[name] = False
            elif self.count > 1 and self._are_samples.get(name) is None:
                raise FlashClippingError(
                    f"FC181 the model: {name}: found a tensor of shape {[*x.shape]} in a batch of "
                    f"{self.count} samples: it may be one row for all samples, or hold samples "
                    f"along axis {self.axis + 1}. Give the model a tensor with a row for each "
                    "sample, or begin with a batch of another size."
                )
            return lambda rows: copy.copy(x) if type(x).__module__ == "numpy" else x.clone()
        kind = "a tensor" if isinstance(x, Tensor) else "an array"
        raise FlashClippingError(
            f"FC181 the model: {name}: found {kind} of shape {[*x.shape]} in a batch of "
            f"{self.count} samples, which has no row for each. Give the model a tensor with a row "
            "for each sample, or a list with an entry for each. Or make it the model's own, before "
            "it is wrapped, if it is the same for all batches:\n"
            f"    model.forward = functools.partial(model.forward, {name.partition('[')[0]}=...)"
        )


def _items(held: Any) -> dict[Any, Any]:
    return dict(enumerate(held)) if isinstance(held, list) else held


def _leaves(name: str, value: Any, depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """What may be cut in an argument, by names: arrays, lists, tuples, batches."""
    is_whole = isinstance(value, PackedSequence) or type(value) in (list, tuple)
    if is_whole or _is_array(value) or _is_graphs(value):
        yield name, value
    elif depth:
        for path, part in parts_of(name, value).values():
            yield from _leaves(path, part, depth - 1)


def _is_array(value: Any) -> bool:
    """Whether it is a tensor, or an array of NumPy."""
    is_numpy = type(value).__module__ == "numpy"
    return isinstance(value, Tensor) or (is_numpy and hasattr(value, "ndim"))


def _is_graphs(leaf: Any) -> bool:
    """Whether it is a batch of graphs as ``torch_geometric`` makes it."""
    return hasattr(leaf, "get_example") and hasattr(leaf, "num_graphs")


# -- outputs ---------------------------------------------------------------------------------------


#: The axis that samples lie along, and whether it is there for several samples alone.
Way: TypeAlias = tuple[int, bool]


def way_of(one: Tensor, other: Tensor, both: Tensor) -> Way | None:
    """How a tensor grows, from those of two samples alone, and together; ``None`` if it does not,
    as a loss."""
    for axis, size in enumerate(both.shape):
        rest = [*both.shape]
        del rest[axis]
        if both.dim() == one.dim() + 1 and size == 2 and rest == [*one.shape] == [*other.shape]:
            return axis, True
        if both.dim() == one.dim() == other.dim() and size != one.shape[axis]:
            return axis, False
    return None


class Joined:
    """Puts outputs of single samples together.

    Args:
        groups: the rows of each.
        axis: of samples.
        mean: whether numbers are averaged, over rows; otherwise they are added up.
    """

    def __init__(self, groups: Sequence[Sequence[int]], axis: int, mean: bool):
        self._counts = [*map(len, groups)]
        self._axis, self._mean = axis, mean
        #: Of tensors of the first sample, by ``id``, without a row for each of its rows.
        self.ways: dict[int, Way] = {}
        order = [row for rows in groups for row in rows]
        #: Where each row is among those of the groups, one after the other.
        self._places = sorted(range(len(order)), key=order.__getitem__)
        self._in_order = order == sorted(order)

    def __call__(self, values: Sequence[Any]) -> Any:
        """One value of all samples' values: of their type, where they are alike."""
        first = values[0]
        kind = type(first)
        if all(isinstance(value, Tensor) for value in values):
            return self._tensors(values)
        if any(type(value) is not kind for value in values):
            return [*values]
        if isinstance(first, list | tuple):
            if kind is list and self._are_entries(values):
                return [entry for value in values for entry in value]
            if all(len(value) == len(first) for value in values):
                parts = [self(part) for part in zip(*values, strict=True)]
                return kind(*parts) if hasattr(first, "_fields") else kind(parts)
        elif isinstance(first, Mapping) or dataclasses.is_dataclass(first) or tensors_in(first):
            held = [x if isinstance(x, Mapping) else attributes_of(x) for x in values]
            if all(of_one.keys() == held[0].keys() for of_one in held):
                return rebuilt(first, {key: self([x[key] for x in held]) for key in held[0]})
        elif all(value is first or value == first for value in values):
            return first
        return [*values]

    def apart(self, values: Sequence[Any]) -> Any:
        """The same by copies of tensors, whose graph is told from those of the samples."""
        own = {id(x) for x in tensors_in(values)}
        return map_tensors(lambda x: x.clone() if id(x) in own else x, self(values))

    def _are_entries(self, values: Sequence[list[Any]]) -> bool:
        """Whether lists have an entry for each row, and not a tensor with such rows."""
        if [*map(len, values)] != self._counts:
            return False
        pairs = [(x, n) for v, n in zip(values, self._counts, strict=True) for x in tensors_in(v)]
        return not all(self._has_rows(x, n) for x, n in pairs)

    def _has_rows(self, x: Tensor, count: int) -> bool:
        return x.dim() > self._axis and x.shape[self._axis] == count

    def _tensors(self, values: Sequence[Tensor]) -> Any:
        first, way = values[0], self.ways.get(id(values[0]))
        if len(values) > 1 and all(x is first for x in values):
            return first
        if any(x.dim() != first.dim() for x in values):
            return [*values]
        are_rows = way is None and all(map(self._has_rows, values, self._counts))
        is_constant = not (way or are_rows or any(x.requires_grad for x in values))
        if is_constant and all(map(first.equal, values)):  # whatever samples hold
            return first
        if way is None and not first.dim() and (first.is_floating_point() or first.is_complex()):
            total = sum(self._counts)  # a loss
            weights = [count / total if self._mean else 1.0 for count in self._counts]
            return sum(x * weight for x, weight in zip(values, weights, strict=True))
        axis, is_new = (self._axis, False) if are_rows else way or (0, True)
        shapes = {(*x.shape[:axis], *x.shape[axis + (not is_new) :]) for x in values}
        if len(shapes) > 1 or (way is not None and not self._in_order):
            return [*values]
        joined = (torch.stack if is_new else torch.cat)([*values], axis)
        if not are_rows or self._in_order:
            return joined
        return joined.index_select(axis, torch.tensor(self._places, device=joined.device))
