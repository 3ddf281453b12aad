"""Matrices of which each sees some rows of some samples: experts, or rows that lie anywhere.

N rows, E groups (one matrix each), B samples, d input features, p output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping.factors.base import Dense, Factor, MeasuredOnce
from flash_clipping.ops.segments import (
    Rows,
    Segments,
    grouped_sums,
    segment_grads,
    segment_sqnorms,
)


class SegmentedOuter(MeasuredOnce):
    """``g_b[e] = Σ g_n a_nᵀ`` over the rows n of sample b in group e, ``[E, p, d]``.

    Args:
        A, G: inputs ``[N, d]`` and output gradients ``[N, p]`` of all rows, sorted as ``segments``
            says, or with the place of each.
        stacked: whether the parameter is ``[E, p, d]``, or one matrix ``[p, d]`` (E is 1).
    """

    def __init__(
        self, A: Rows | Tensor, G: Rows | Tensor, segments: Segments, stacked: bool = True
    ):
        self.A = A if isinstance(A, Rows) else Rows(A)
        self.G = G if isinstance(G, Rows) else Rows(G)
        self.segments, self.stacked = segments, stacked

    @property
    def batch_size(self) -> int:
        return self.segments.samples

    def operands(self) -> tuple[Any, ...]:
        segments = self.segments
        return *self.A, *self.G, segments.samples, segments.groups, self.stacked

    def measure(self, backend: str) -> tuple[Tensor, Tensor]:
        found = segment_sqnorms(self.A, self.G, self.segments, backend=backend)
        # Gradients of different matrices are orthogonal: squares add up, and so do doubts.
        sq_B, doubt_B = map(self.segments.by_sample, found)
        return sq_B.unsqueeze(1), doubt_B

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        sums = grouped_sums(self.A, self.G, self.segments, coef_B, backend=backend)
        return sums if self.stacked else sums[0]

    def dense(self) -> Tensor:
        grads = segment_grads(self.A, self.G, self.segments)
        return grads if self.stacked else grads[:, 0]

    def is_worth_storing(self, readers: Callable[[], int]) -> bool:
        """Where that takes no more memory than the operands: low ranks, and experts that read much
        more rows of a sample than they are wide. Lengths of segments decide nothing: a plan must
        not depend on them."""
        d, p = self.A.X.shape[1], self.G.X.shape[1]
        segments = self.segments
        fits = segments.samples * segments.groups * d * p <= len(segments) * (d + p)
        return self.stacked and fits and readers() > 0

    def stored(self, backend: str) -> Dense:
        return Dense(self.dense())

    @classmethod
    def concatenate(cls, factors: Sequence[SegmentedOuter]) -> Factor:
        joined = factors[0]
        for factor in factors[1:]:
            segments, order_N = joined.segments.both(factor.segments)
            A_Nd = torch.cat([joined.A.sorted(), factor.A.sorted()])
            G_Np = torch.cat([joined.G.sorted(), factor.G.sorted()])
            A, G = Rows(A_Nd, order_N), Rows(G_Np, order_N)
            joined = cls(A, G, segments, joined.stacked)
        return joined
