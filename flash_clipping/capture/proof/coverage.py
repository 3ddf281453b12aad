"""For which calls of a model it was shown where samples lie.

A model may lay its rows out otherwise in evaluation, or for another argument
(``channels_last=True``), or when the number of samples happens to fit into another size. Each of
that makes another kind of call, which is looked at before it is trusted. Where rows of some layer
are not the samples, other sizes count as well: a text that is longer than a window has two windows.
The number of samples alone makes no other kind.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import pytree
from flash_clipping.capture.inputs import batched_inputs

#: Values of one argument that are told apart; one that counts steps has a new one in every step.
VALUES = 8

#: Kinds that are told apart.
KINDS = 64

_PLAIN = bool | int | float | complex | str | bytes | enum.Enum | torch.dtype | torch.device


class Coverage:
    """Kinds of calls of one model that were looked at.

    Args:
        axis: that holds the samples.
    """

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._kinds: set[Hashable] = set()
        #: Values of every argument, by its place.
        self._values: dict[Hashable, set[Hashable]] = {}
        #: Of models some of whose layers read rows that are not the samples: the least and the
        #: largest of all sizes in a call, the number of samples first.
        self._ranges: dict[Hashable, list[tuple[int, int]]] = {}
        self._sizes: list[int] = []

    def note(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of ``root`` with these arguments was looked at."""
        held = (*root.parameters(), *root.buffers())
        self._sizes = sorted({n for x in held for n in x.shape if n > 1})
        if len(self._kinds) < KINDS:
            self._kinds.add(self._kind(root, args, kwargs))
        values, structure = of_arguments(args, kwargs)
        for place, value in enumerate(values):
            self._values.setdefault((structure, place), set()).add(value)
        kind, sizes = self._kind_by_sizes(root, args, kwargs)
        if len(self._ranges) < KINDS:
            before = self._ranges.get(kind, [(n, n) for n in sizes])
            known = zip(before, sizes, strict=True)
            self._ranges[kind] = [(min(low, n), max(high, n)) for (low, high), n in known]

    def covers(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], by_sizes: bool
    ) -> bool:
        """Whether what was shown holds for such a call.

        ``by_sizes``: some layer reads rows that are not the samples.
        """
        if not by_sizes:
            if not self._kinds or self._count(args, kwargs) <= 1:
                return True
            return len(self._kinds) >= KINDS or self._kind(root, args, kwargs) in self._kinds
        kind, sizes = self._kind_by_sizes(root, args, kwargs)
        if not sizes:
            return True
        if kind not in self._ranges:
            return len(self._ranges) >= KINDS
        (least, most), *ranges = self._ranges[kind]
        if not (least < 2 * sizes[0] and sizes[0] < 2 * most):
            return False
        return all(low <= n <= high for (low, high), n in zip(ranges, sizes[1:], strict=True))

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        inputs = batched_inputs(args, kwargs)
        return next((x.shape[self._axis] for x in inputs if x.dim() > self._axis), 0)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """What a call was given, but for arguments that have had many values."""
        values, structure = of_arguments(args, kwargs)
        seen = [self._values.get((structure, place), ()) for place in range(len(values))]
        known = zip(values, seen, strict=True)
        return tuple([x if len(had) < VALUES else None for x, had in known]), structure

    def _kind(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The mode, the arguments, and along which axes samples could lie by the sizes."""
        size = self._count(args, kwargs)
        axes = [
            tuple([a for a, n in enumerate(x.shape) if size > 1 and n % size == 0])
            for x in batched_inputs(args, kwargs)
        ]
        return modes_of(root), tuple(axes) if size > 1 else None, self._arguments(args, kwargs)

    def _kind_by_sizes(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Hashable, list[int]]:
        """The mode of every module, the arguments, and what so many samples may be taken for; and
        all sizes."""
        size, axis = self._count(args, kwargs), self._axis
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        others = [n for x in tensors for n in (*x.shape[:axis], *x.shape[axis + 1 :])]
        kind = (
            modes_of(root),
            tuple([x.dim() for x in tensors]),
            self._arguments(args, kwargs),
            _multiples(size, self._sizes),
            bool(_multiples(size, others)),
        )
        return kind, [size, *others] if size else []


def modes_of(root: nn.Module) -> tuple[bool, ...]:
    """The mode of every module: a part of a model may be in evaluation."""
    return tuple([module.training for module in root.modules()])


def of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Hashable, ...], str]:
    """What a call was given, tensors' values and shapes aside."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    values: list[Any] = [x if is_plain(x) else type(x) for x in leaves]
    return tuple(values), str(structure)


def is_plain(value: Any) -> bool:
    """Whether an argument is a value that can be compared."""
    return value is None or isinstance(value, _PLAIN)


def _multiples(size: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of these sizes that so many samples may be taken for, or each for several rows."""
    return tuple([n for n in sizes if size > 1 and n % size == 0])
