"""The shapes that layers of a region see, told from the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch

from flash_clipping._compat import pytree
from flash_clipping.capture.compiled.tracing import Calls
from flash_clipping.capture.compiled.wiring import Seen
from flash_clipping.capture.inputs import tensors_in


class Affine:
    """Shapes that follow from those of inputs, as far as these are combinations of known ones.

    Sizes grow evenly with the sizes that they depend on: with the batch, with the length of texts.
    So any combination of two that were seen can be told (``s = s_0 + r (s_1 - s_0)``), and what
    cannot be told so is learned.
    """

    def __init__(self) -> None:
        self._first: tuple[Sequence[int], Calls] | None = None
        #: Differences to the first, of inputs and of what was learned, in echelon form: the place
        #: of the leading 1, and both vectors.
        self._rows: list[tuple[int, list[Fraction], list[Fraction]]] = []
        self._even = True

    def refute(self) -> None:
        """What was told turned out wrong: nothing is told any more."""
        self._even = False

    def add(self, sizes: Sequence[int], calls: Calls) -> None:
        if self._first is None:
            self._first = sizes, calls
            return
        if not self._even or _form(calls) != _form(self._first[1]):
            self._even = False
            return
        of_inputs, learned = self._difference(sizes), self._from_first(calls)
        rest, known = self._reduced(of_inputs)
        learned = [a - b for a, b in zip(learned, known, strict=True)]
        lead = next((i for i, size in enumerate(rest) if size), None)
        if lead is None:
            self._even = not any(learned)
            return
        factor = rest[lead]
        row = lead, [size / factor for size in rest], [size / factor for size in learned]
        self._rows.append(row)

    def find(self, sizes: Sequence[int]) -> Calls | None:
        """What follows for these sizes of the inputs, if anything."""
        if self._first is None or not self._even:
            return None
        rest, learned = self._reduced(self._difference(sizes))
        if any(rest):
            return None
        first = _sizes(self._first[1])
        found = [size + more for size, more in zip(first, learned, strict=True)]
        if any(size < 0 or size.denominator != 1 for size in found):
            return None
        return _with_sizes(self._first[1], iter([int(size) for size in found]))

    def _difference(self, sizes: Sequence[int]) -> list[Fraction]:
        assert self._first is not None
        return [Fraction(a - b) for a, b in zip(sizes, self._first[0], strict=True)]

    def _from_first(self, calls: Calls) -> list[Fraction]:
        assert self._first is not None
        pairs = zip(_sizes(calls), _sizes(self._first[1]), strict=True)
        return [Fraction(a - b) for a, b in pairs]

    def _reduced(self, of_inputs: list[Fraction]) -> tuple[list[Fraction], list[Fraction]]:
        """What is left when known rows are taken away, and what these say was learned."""
        rest, learned = (
            of_inputs,
            [Fraction(0)] * len(_sizes(self._first[1] if self._first else [])),
        )
        for lead, row, of_row in self._rows:
            if times := rest[lead]:
                rest = [a - times * b for a, b in zip(rest, row, strict=True)]
                learned = [a + times * b for a, b in zip(learned, of_row, strict=True)]
        return rest, learned


def _sizes(calls: Calls) -> list[int]:
    of_calls = [seen for of_tap in calls for seen in of_tap if seen is not None]
    return [size for seen in of_calls for size in (*seen.x_shape, *seen.y_shape)]


def _form(calls: Calls) -> Hashable:
    """All about these calls but sizes."""
    return tuple(
        tuple(
            None if s is None else (len(s.x_shape), len(s.y_shape), s.x_dtype, s.y_dtype, *s[4:])
            for s in of_tap
        )
        for of_tap in calls
    )


def _with_sizes(calls: Calls, sizes: Iterator[int]) -> Calls:
    def changed(seen: Seen | None) -> Seen | None:
        if seen is None:
            return None
        x_shape = tuple(next(sizes) for _ in seen.x_shape)
        return seen._replace(x_shape=x_shape, y_shape=tuple(next(sizes) for _ in seen.y_shape))

    return [[changed(seen) for seen in of_tap] for of_tap in calls]


def kind_and_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, list[int]]:
    """What a region was called with, apart from the sizes of tensors, and these."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kind: list[Hashable] = [repr(spec)]
    sizes: list[int] = []
    devices = set()
    for leaf in leaves:
        if leaf is None or isinstance(leaf, bool | int | float | str):
            kind.append(leaf)
            continue
        kind.append(repr(type(leaf)))
        for x in tensors_in(leaf):
            kind += (x.dtype, x.device, x.dim())
            sizes += x.shape
            devices.add(x.device.type)
    for device in sorted(devices):
        if torch.is_autocast_enabled(device):
            kind.append(torch.get_autocast_dtype(device))
    return tuple(kind), sizes
