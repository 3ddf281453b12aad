"""Where samples lie in what a layer reads, if not along its first axis alone.

Positions before samples, ``[T, B, d]``; heads folded behind samples into the second axis. The
look before a first step shows which (:mod:`flash_clipping.capture.proof.observe`). A layer that
works position by position then gets samples first, and returns them as they were. Rows of a sample
that lie apart along an axis (all first windows of a batch before all second ones) are refused.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_clipping.errors import FlashClippingError


@dataclass(frozen=True)
class Layout:
    """Along ``axis`` of what is read lie all samples, each with as many entries together."""

    axis: int

    def parts(self, x: Tensor, B: int) -> int | None:
        """Entries of each sample along the axis; ``None`` where they cannot lie so."""
        if x.dim() <= self.axis or not B or x.shape[self.axis] % B:
            return None
        return x.shape[self.axis] // B

    def check(self, key: str, x: Tensor, B: int) -> None:
        """Refuse a tensor in which samples cannot lie so.

        Raises:
            FlashClippingError: they cannot.
        """
        if self.parts(x, B) is None:
            raise FlashClippingError(
                f"FC232 {key}: found a tensor of shape {tuple(x.shape)} in a batch of {B} samples; "
                f"expected samples to lie along axis {self.axis}, as they did before the first "
                "step. Call the model with inputs of the shapes that it is trained on."
            )

    def front(self, x: Tensor, B: int) -> Tensor:
        """A view as ``[B, ...]``, each of them as it would be in a batch of one sample."""
        return torch.unflatten(x, self.axis, (B, -1)).movedim(self.axis, 0)

    def back(self, x: Tensor) -> Tensor:
        """What :meth:`front` returned, or as many rows with other features, as it was."""
        return x.movedim(0, self.axis).flatten(self.axis, self.axis + 1)

    def only(self, x: Tensor, b: int, B: int) -> Tensor:
        """``x`` with 0 in the place of all samples but ``b``."""
        found = torch.zeros_like(x, memory_format=torch.contiguous_format)
        self.front(found, B)[b] = self.front(x, B)[b]
        return found


#: Rows of one sample lie together, along the first axis.
TOGETHER = Layout(0)
