"""For which calls of a model it was shown where samples lie.

A model may lay its rows out otherwise in evaluation, or for another argument
(``channels_last=True``). Each of that makes another kind of call, which is checked before it is
trusted. Where rows of some layer are not the samples, lengths count as well: a text that is longer
than a window has two windows. A look takes a few samples of any batch, so that their number makes
another kind only where it was one: a sample that is alone.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
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
    """Kinds of calls of one model that were checked.

    Args:
        axis: that holds the samples.
    """

    def __init__(self, axis: int) -> None:
        self._axis = axis
        #: Of every kind, the least and the largest of each size in its calls, but for the samples.
        self._kinds: dict[Hashable, list[tuple[int, int]]] = {}
        #: Values of every argument, by its place.
        self._values: dict[Hashable, set[Hashable]] = {}

    def note(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of ``root`` with these arguments was checked."""
        kind, sizes = self._kind(root, args, kwargs), self._sizes(args, kwargs)
        if len(self._kinds) < KINDS:
            known = zip(self._kinds.get(kind, [(n, n) for n in sizes]), sizes, strict=True)
            self._kinds[kind] = [(min(low, n), max(high, n)) for (low, high), n in known]
        values, structure = of_arguments(args, kwargs)
        for place, value in enumerate(values):
            self._values.setdefault((structure, place), set()).add(value)

    def covers(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], by_sizes: bool
    ) -> bool:
        """Whether what was shown holds for such a call.

        ``by_sizes``: some layer reads rows that are not the samples.
        """
        if not self._kinds or self._count(args, kwargs) < (1 if by_sizes else 2):
            return True
        ranges = self._kinds.get(self._kind(root, args, kwargs))
        if ranges is None:
            return len(self._kinds) >= KINDS
        sizes = zip(ranges, self._sizes(args, kwargs), strict=True)
        return not by_sizes or all(low <= n <= high for (low, high), n in sizes)

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        inputs = batched_inputs(args, kwargs)
        return next((x.shape[self._axis] for x in inputs if x.dim() > self._axis), 0)

    def _sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        axis = self._axis
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        return [n for x in tensors for n in (*x.shape[:axis], *x.shape[axis + 1 :])]

    def _kind(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The mode, whether a sample is alone, and the arguments, but for those that have had many
        values."""
        values, structure = of_arguments(args, kwargs)
        seen = [self._values.get((structure, place), ()) for place in range(len(values))]
        known = zip(values, seen, strict=True)
        told = tuple([x if len(had) < VALUES else None for x, had in known])
        return modes_of(root), min(self._count(args, kwargs), 2), told, structure


def kind_of(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """The modes of modules, and what the call was given."""
    return modes_of(root), of_arguments(args, kwargs)


def modes_of(root: nn.Module) -> tuple[bool, ...]:
    """The mode of every module: a part of a model may be in evaluation."""
    return tuple([module.training for module in root.modules()])


def of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Hashable, ...], str]:
    """What a call was given, tensors' values and sizes aside."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    kinds = [(type(x), x.dim() if isinstance(x, Tensor) else None) for x in leaves]
    values = [x if is_plain(x) else kind for x, kind in zip(leaves, kinds, strict=True)]
    return tuple(values), str(structure)


def is_plain(value: Any) -> bool:
    """Whether an argument is a value that can be compared."""
    return value is None or isinstance(value, _PLAIN)
