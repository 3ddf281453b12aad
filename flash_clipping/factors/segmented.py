"""Matrices of which each sees some rows of some samples: experts, or rows that lie anywhere.

N rows, E groups (one matrix each), B samples, d input features, p output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping.factors.base import Factor
from flash_clipping.ops.segments import (
    Segments,
    grouped_sums,
    segment_grads,
    segment_sqnorms,
)


class SegmentedOuter(Factor):
    """``g_b[e] = Σ g_n a_nᵀ`` over the rows n of sample b in group e, ``[E, p, d]``.

    Args:
        A_Nd, G_Np: inputs and output gradients of all rows, sorted as ``segments`` says.
    """

    def __init__(self, A_Nd: Tensor, G_Np: Tensor, segments: Segments):
        self.A_Nd, self.G_Np, self.segments = A_Nd, G_Np, segments
        self._norms: tuple[Tensor, Tensor] | None = None

    @property
    def batch_size(self) -> int:
        return self.segments.samples

    def operands(self) -> tuple[Any, ...]:
        return self.A_Nd, self.G_Np, self.segments.samples, self.segments.groups

    def _measured(self, backend: str) -> tuple[Tensor, Tensor]:
        if self._norms is None:
            found = segment_sqnorms(self.A_Nd, self.G_Np, self.segments, backend=backend)
            # Gradients of different matrices are orthogonal: squares add up, and so do doubts.
            sq_B, doubt_B = map(self.segments.by_sample, found)
            self._norms = sq_B, doubt_B
        return self._norms

    def sqnorms(self, backend: str) -> Tensor:
        return self._measured(backend)[0]

    def doubt(self, backend: str) -> Tensor | None:
        return self._measured(backend)[1]

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return grouped_sums(self.A_Nd, self.G_Np, self.segments, coef_B)

    def dense(self) -> Tensor:
        grads = segment_grads(self.A_Nd, self.G_Np, self.segments)
        return grads.unflatten(0, (self.segments.groups, self.segments.samples)).transpose(0, 1)

    @classmethod
    def concatenate(cls, factors: Sequence[SegmentedOuter]) -> Factor:
        joined = factors[0]
        for factor in factors[1:]:
            segments, order_N = joined.segments.both(factor.segments)
            A_Nd = torch.cat([joined.A_Nd, factor.A_Nd])[order_N]
            joined = cls(A_Nd, torch.cat([joined.G_Np, factor.G_Np])[order_N], segments)
        return joined
