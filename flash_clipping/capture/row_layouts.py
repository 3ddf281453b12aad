"""Where samples lie in what a layer reads, if not along its first axis by themselves.

Positions before samples, ``[T, B, d]``; all first windows of a batch before all second ones,
``[windows * B, ...]``; heads folded behind samples into the second axis. A probe shows which
(:mod:`flash_clipping.capture.proof.probe`). A layer that works row by row then gets its rows sample
by sample, and returns them as they were.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_clipping.errors import FlashClippingError


@dataclass(frozen=True)
class Layout:
    """Along ``axis`` lie ``outer`` times all samples, each of them with as many entries together.

    Attributes:
        axis: of what is read.
        outer: how often all samples follow each other along it.
    """

    axis: int
    outer: int = 1

    def parts(self, x: Tensor, B: int) -> int | None:
        """Entries of each sample along the axis; ``None`` where they cannot lie so."""
        if x.dim() <= self.axis or not B or x.shape[self.axis] % (B * self.outer):
            return None
        return x.shape[self.axis] // B

    def front(self, x: Tensor, B: int) -> Tensor:
        """``x`` as ``[B, ...]``, a view where strides allow."""
        return x.unflatten(self.axis, (self.outer, B, -1)).movedim(self.axis + 1, 0)

    def apart(self, x: Tensor, B: int) -> Tensor:
        """``x`` as ``[B, ...]``, each of them as it would be in a batch of one sample."""
        return self.front(x, B).flatten(self.axis + 1, self.axis + 2)

    def back(self, x: Tensor) -> Tensor:
        """What :meth:`front` returned, or as many rows with other features, as it was."""
        return x.movedim(0, self.axis + 1).flatten(self.axis, self.axis + 2)

    def only(self, x: Tensor, b: int, B: int) -> Tensor:
        """``x`` with 0 in the place of all samples but ``b``."""
        found = torch.zeros_like(x, memory_format=torch.contiguous_format)
        self.front(found, B)[b] = self.front(x, B)[b]
        return found


#: Rows of one sample lie together, along the first axis.
TOGETHER = Layout(0)

#: How often a sample's entries follow each other along the axis -> the layout that was seen.
Seen = dict[int, Layout]


def layout_of(key: str, x: Tensor, B: int, seen: Mapping[int, Layout]) -> Layout:
    """The layout of ``x`` by what was seen of layouts there.

    One in which a sample's entries lie together holds for other numbers of entries as well; of
    others, ``outer`` may be what changes.

    Raises:
        FlashClippingError: nothing like it was seen.
    """
    if x.shape[:1] == (B,) and all(layout.axis == 0 for layout in seen.values()):
        return TOGETHER  # one row of each
    for parts, layout in seen.items():
        if layout.parts(x, B) == parts:
            return layout
    kinds = set(seen.values())
    if len(kinds) == 1:
        (layout,) = kinds
        if layout.outer == 1 and layout.parts(x, B) is not None:
            return layout
    raise FlashClippingError(
        f"{key}: found a tensor of shape {tuple(x.shape)} in a batch of {B} samples; expected "
        "samples to lie in it as they did before the first step. They may lie otherwise, so "
        "that per-sample gradients would be wrong. Call the model with inputs of the shapes that "
        "it is trained on, or keep the batch the first axis of what this layer reads."
    )
