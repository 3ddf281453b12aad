"""Kinds of calls of a model, and what was shown of each.

A model may lay its rows out otherwise in evaluation, or for another argument
(``channels_last=True``). Each of that makes another kind of call, which is checked before it is
trusted. Where rows of some layer are not the samples, lengths count as well: a text that is longer
than a window has two windows. A look takes a few samples of any batch, so that their number makes
another kind only where it was one: a sample that is alone.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import pytree
from flash_clipping.capture.inputs import batched_inputs
from flash_clipping.capture.row_layouts import Layout

#: Values of one argument that are told apart; one that counts steps has a new one in every step.
VALUES = 8

#: Kinds that are told apart.
KINDS = 64

_PLAIN = bool | int | float | complex | str | bytes | enum.Enum | torch.dtype | torch.device


@dataclass
class Kind:
    """What was shown of one kind of call.

    Attributes:
        sizes: the least and the largest of each size, but for the samples, in calls that were
            checked; ``None`` before.
        outputs: where samples lie in what the model returns.
        why: why an output is unfit, or "", by how many tensors were returned, and its number.
        apart: so many parameters were watched when documents were seen not to reach each other.
    """

    sizes: list[tuple[int, int]] | None = None
    outputs: Sequence[Layout | None] = ()
    why: dict[tuple[int, int], str] = field(default_factory=dict)
    apart: int = -1


class Kinds(dict[Hashable, Kind]):
    """Kinds of calls of one model.

    Args:
        axis: that holds the samples.
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self._axis = axis
        #: Values of every argument, by its place.
        self._values: dict[Hashable, set[Hashable]] = {}

    def of(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """The kind of a call of ``root``, noted from now on."""
        return self.setdefault(self._key(root, args, kwargs), Kind())

    def find(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Kind:
        """The kind of a call of ``root``; a new one if it was not met."""
        return self.get(self._key(root, args, kwargs), Kind())

    def note(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of ``root`` with these arguments was checked."""
        values, structure = of_arguments(args, kwargs)
        for place, value in enumerate(values):
            self._values.setdefault((structure, place), set()).add(value)
        kind, sizes = self.of(root, args, kwargs), self._sizes(args, kwargs)
        known = zip(kind.sizes or [(n, n) for n in sizes], sizes, strict=True)
        kind.sizes = [(min(low, n), max(high, n)) for (low, high), n in known]

    def covers(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], by_sizes: bool
    ) -> bool:
        """Whether what was shown holds for such a call.

        ``by_sizes``: some layer reads rows that are not the samples.
        """
        checked = sum(kind.sizes is not None for kind in self.values())
        if not checked or self._count(args, kwargs) < (1 if by_sizes else 2):
            return True
        ranges = self.find(root, args, kwargs).sizes
        if ranges is None:
            return checked >= KINDS
        sizes = zip(ranges, self._sizes(args, kwargs), strict=True)
        return not by_sizes or all(low <= n <= high for (low, high), n in sizes)

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        inputs = batched_inputs(args, kwargs)
        return next((x.shape[self._axis] for x in inputs if x.dim() > self._axis), 0)

    def _sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        axis = self._axis
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        return [n for x in tensors for n in (*x.shape[:axis], *x.shape[axis + 1 :])]

    def _key(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The mode of every module (a part of a model may be in evaluation), whether a sample is
        alone, and the arguments, but for those that have had many values."""
        values, structure = of_arguments(args, kwargs)
        seen = [self._values.get((structure, place), ()) for place in range(len(values))]
        known = zip(values, seen, strict=True)
        told = tuple([x if len(had) < VALUES else None for x, had in known])
        modes = tuple([module.training for module in root.modules()])
        return modes, min(self._count(args, kwargs), 2), told, structure


def of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Hashable, ...], str]:
    """What a call was given, tensors' values and sizes aside."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    kinds = [(type(x), x.dim() if isinstance(x, Tensor) else None) for x in leaves]
    values = [x if is_plain(x) else kind for x, kind in zip(leaves, kinds, strict=True)]
    return tuple(values), str(structure)


def is_plain(value: Any) -> bool:
    """Whether an argument is a value that can be compared."""
    return value is None or isinstance(value, _PLAIN)
