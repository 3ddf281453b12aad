"""Rows of one sample that lie anywhere: which belong together, and what is computed of them.

Tokens that a router sent to an expert, documents packed end to end, several rows of one user: every
row belongs to a sample, and perhaps to one of several matrices (its *group*). Rows of one group and
one sample are a *segment*; it may be empty, or a thousand times as long as another.

N rows, E groups, B samples, S = E·B segments, d input features, p output features. Operands are
sorted by segment: row n of an operand is row ``segments.order_N[n]`` of the layer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.ops.runtime import backend as backends
from flash_clipping.ops.segments import reference


class Segments:
    """Which sample, and which group, each of N rows belongs to. Made once for all layers that read
    these rows; never waits for the device.

    Args:
        sample_N: int64; the sample of each row, in ``0 .. samples - 1``, or negative for none.
        samples: how many samples there are, B.
        group_N: int64; the group of each row. Rows of a group outside ``0 .. groups - 1`` belong to
            no sample. ``None``: all are of one.
        groups: how many groups there are, E.

    Attributes:
        order_N: the rows, sorted by group, then by sample, then as they came; those of no sample
            last.
        starts: ``[E·B + 1]``, int64: where each segment begins among the sorted rows. The last is
            how many rows belong to a sample.
    """

    def __init__(
        self, sample_N: Tensor, samples: int, group_N: Tensor | None = None, groups: int = 1
    ):
        key_N = sample_N
        outside_N = sample_N < 0
        if group_N is not None:
            key_N = group_N * samples + sample_N
            outside_N = outside_N | (group_N < 0) | (group_N >= groups)
        key_N = key_N.masked_fill(outside_N, groups * samples)
        self.samples, self.groups = samples, groups
        self._key_N, self.order_N = torch.sort(key_N, stable=True)
        edges = torch.arange(groups * samples + 1, device=key_N.device)
        self.starts = torch.searchsorted(self._key_N, edges)

    def __len__(self) -> int:
        return len(self.order_N)

    @property
    def sample_N(self) -> Tensor:
        """Sample of every sorted row; of one that belongs to none, B - 1."""
        return torch.where(self.inside_N, self._key_N % max(self.samples, 1), self.samples - 1)

    @property
    def group_N(self) -> Tensor:
        """Group of every sorted row; of one that belongs to no sample, E - 1."""
        group_N = self._key_N.div(max(self.samples, 1), rounding_mode="floor")
        return group_N.clamp(max=self.groups - 1)

    @property
    def inside_N(self) -> Tensor:
        """Whether a sorted row belongs to a sample."""
        return self._key_N < self.groups * self.samples

    @property
    def group_starts(self) -> Tensor:
        """``[E + 1]``: where each group begins among the sorted rows."""
        if not self.samples:
            return self.starts.expand(self.groups + 1)
        return self.starts[:: self.samples]

    def unsorted(self, X_Nf: Tensor) -> Tensor:
        """Sorted rows in the layer's own order."""
        return torch.empty_like(X_Nf).index_copy_(0, self.order_N, X_Nf)

    def by_sample(self, of_segments_S: Tensor) -> Tensor:
        """What is known of every segment, ``[S, ...]``, added up for every sample: ``[B, ...]``."""
        return of_segments_S.unflatten(0, (self.groups, self.samples)).sum(0)

    def both(self, other: Segments) -> tuple[Segments, Tensor]:
        """These rows and those of ``other``, of as many samples and groups; and the order of the
        rows of both, sorted, laid end to end."""
        joined = Segments(
            torch.cat([self._sample_or_none(), other._sample_or_none()]),
            self.samples,
            torch.cat([self.group_N, other.group_N]),
            self.groups,
        )
        return joined, joined.order_N

    def _sample_or_none(self) -> Tensor:
        return self.sample_N.masked_fill(~self.inside_N, -1)


def segment_sqnorms(A_Nd: Tensor, G_Np: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Squared norms of ``Σ g_n a_nᵀ`` over the rows of every segment.

    Of short segments through Gram matrices, of long ones through the product itself: the first
    costs ``L² (d + p)``, the second ``2 L d p`` for L rows, whichever is less.

    Returns:
        ``[S]`` squared norms, and what rounding may hide of each
        (:mod:`flash_clipping.ops.certificate`); fp32 (float64 for float64).
    """
    with backends.full_precision(A_Nd.device):
        return reference.segment_sqnorms(A_Nd, G_Np, segments.starts)


def segment_sums(X_Nf: Tensor, segments: Segments) -> Tensor:
    """Rows of every segment added up, ``[S, f]`` in fp32 (float64 for float64)."""
    return reference.segment_sums(X_Nf, segments.starts)


def segment_grads(A_Nd: Tensor, G_Np: Tensor, segments: Segments) -> Tensor:
    """``Σ g_n a_nᵀ`` over the rows of every segment, ``[S, p, d]`` in the operands' dtype."""
    with backends.full_precision(A_Nd.device):
        return reference.products(A_Nd, G_Np, segments.starts)


def grouped_sums(A_Nd: Tensor, G_Np: Tensor, segments: Segments, coef_B: Tensor | None) -> Tensor:
    """``Σ_n coef(n) g_n a_nᵀ`` over the rows of every group, with the coefficient of the row's
    sample: ``[E, p, d]`` in fp32 (float64 for float64). ``None``: all ones.

    A row whose coefficient is 0, or that belongs to no sample, adds nothing, whatever it holds.
    """
    with backends.full_precision(A_Nd.device):
        if coef_B is None:
            return reference.products(A_Nd, G_Np, segments.group_starts)
        return reference.grouped_sums(A_Nd, G_Np, segments.group_starts, coef_B[segments.sample_N])


def grouped_linear(X_Nd: Tensor, W_Epd: Tensor, segments: Segments) -> Tensor:
    """Every row times the transposed matrix of its group, ``[N, p]``; 0 for rows of no sample."""
    return reference.grouped_linear(X_Nd, W_Epd, segments.group_starts)
