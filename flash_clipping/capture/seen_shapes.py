"""Shapes of inputs on which rehearsals have shown where samples lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: For each input, its axes behind the batch.
_Shapes = tuple[tuple[int, ...], ...]


class SeenShapes:
    """Batches that a model was rehearsed on.

    What was found of a layer's rows may depend on sizes: a text that is longer than a window has
    two windows, which may lie otherwise than one. So sizes must be between those that were seen;
    and batches not twice as large as ever, or half.

    Args:
        axis: that holds the samples.
    """

    def __init__(self, axis: int) -> None:
        self.axis = axis
        self.least = self.most = 0  # samples
        #: The most of them in a batch in which they were not all the same.
        self.most_unlike = 0
        self.ranges: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self.exact: set[_Shapes] = set()

    def note(self, samples: int, inputs: Sequence[Tensor]) -> None:
        """A batch was rehearsed."""
        if not are_alike(inputs, self.axis):
            self.most_unlike = max(self.most_unlike, samples)
        self.least = min(self.least, samples) if self.most else samples
        self.most = max(self.most, samples)
        shapes = self._shapes(inputs)
        self.exact.add(shapes)
        kind, sizes = self._flat(shapes)
        before = self.ranges.get(kind, [(n, n) for n in sizes])
        self.ranges[kind] = [
            (min(low, n), max(high, n)) for (low, high), n in zip(before, sizes, strict=True)
        ]

    def covers(self, samples: int, inputs: Sequence[Tensor], exactly: bool) -> bool:
        """Whether what was seen tells of this batch; ``exactly``: of its very sizes."""
        if not (self.least < 2 * samples and samples < 2 * self.most):
            return False
        shapes = self._shapes(inputs)
        if exactly:
            return shapes in self.exact
        kind, sizes = self._flat(shapes)
        if kind not in self.ranges:
            return False
        return all(
            low <= n <= high for (low, high), n in zip(self.ranges[kind], sizes, strict=True)
        )

    def _shapes(self, inputs: Sequence[Tensor]) -> _Shapes:
        return tuple((*x.shape[: self.axis], *x.shape[self.axis + 1 :]) for x in inputs)

    @staticmethod
    def _flat(shapes: _Shapes) -> tuple[tuple[int, ...], list[int]]:
        return tuple(map(len, shapes)), [n for shape in shapes for n in shape]


def are_alike(inputs: Sequence[Tensor], axis: int) -> bool:
    """Whether all samples of a batch are one and the same; waits for the device."""
    held = [x for x in inputs if not x.is_meta and x.dim() > axis and x.shape[axis]]
    return bool(held) and all(torch.equal(x, x.narrow(axis, 0, 1).expand_as(x)) for x in held)
