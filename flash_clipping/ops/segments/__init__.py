"""Rows of one sample that stand anywhere: which belong together, their norms and their sums.

Tokens that a router sent to an expert, documents packed end to end, several rows of one user: every
row belongs to a sample, and perhaps to one of several matrices (its *group*). Rows of one group and
one sample are a *segment*; it may be empty, or a thousand times as long as another.

N rows, E groups, B samples, S = E·B segments, d input features, p output features; M tokens, each
of which was sent to k groups. Operands are sorted by segment: row n of an operand is row
``segments.order_N[n]`` of the layer's. Those that are not say where each row is (:class:`Rows`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.runtime import backend as backends
from flash_clipping.ops.runtime.shapes import accumulator
from flash_clipping.ops.segments import reference
from flash_clipping.ops.segments.work import Lists, Rows as Rows


class Segments:
    """Which sample, and which group, each of N rows belongs to. Made once for all layers that read
    these rows; never waits for the device.

    Args:
        sample_N: int64; the sample of each row, in ``0 .. samples - 1``, or negative for none.
        samples: how many samples there are, B.
        group_N: int64; the group of each row. Rows of a group outside ``0 .. groups - 1`` belong to
            no sample. ``None``: all are of one.
        groups: how many groups there are, E.
        is_sorted: whether rows are known to lie in the order of their segments already, those of
            no sample last; with one group. Nothing is sorted then.

    Attributes:
        order_N: the rows, sorted by group, then by sample, then as they came; those of no sample
            last.
        starts: ``[E·B + 1]``, int32: where each segment begins among the sorted rows. The last is
            how many rows belong to a sample.
    """

    def __init__(
        self,
        sample_N: Tensor,
        samples: int,
        group_N: Tensor | None = None,
        groups: int = 1,
        is_sorted: bool = False,
    ):
        key_N = sample_N
        outside_N = sample_N < 0
        if group_N is not None:
            key_N = group_N * samples + sample_N
            outside_N = outside_N | (group_N < 0) | (group_N >= groups)
        key_N = key_N.masked_fill(outside_N, groups * samples)
        if groups * samples < 1 << 31:
            key_N = key_N.int()  # half as long to sort
        self.samples, self.groups, self.is_sorted = samples, groups, is_sorted
        if is_sorted:
            self._key_N, self.order_N = key_N, torch.arange(len(key_N), device=key_N.device)
        else:
            self._key_N, self.order_N = torch.sort(key_N, stable=True)
        edges = torch.arange(groups * samples + 1, dtype=key_N.dtype, device=key_N.device)
        self.starts = torch.searchsorted(self._key_N, edges, out_int32=True)

    def __len__(self) -> int:
        return self.order_N.shape[0]

    def rows(self, X_Nf: Tensor) -> Rows:
        """The layer's own rows, sorted."""
        return Rows(X_Nf, None if self.is_sorted else self.order_N)

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

    @functools.cached_property
    def lists(self) -> Lists:
        """The lists that kernels read, of segments."""
        return Lists(self.starts, len(self))

    @property
    def of_groups(self) -> Lists:
        """The lists of groups; there must be samples."""
        return self.lists.joined(self.samples)

    @functools.cached_property
    def place_N(self) -> Tensor:
        """Where each of the layer's own rows is among the sorted ones."""
        places = torch.arange(len(self), device=self.order_N.device)
        return torch.empty_like(self.order_N).index_copy_(0, self.order_N, places)

    def unsorted(self, X_Nf: Tensor) -> Tensor:
        """Sorted rows in the layer's own order."""
        return X_Nf[self.place_N]

    def by_sample(self, of_segments_S: Tensor) -> Tensor:
        """Values of segments ``[S, ...]``, added up for every sample: ``[B, ...]``."""
        return torch.unflatten(of_segments_S, 0, (self.groups, self.samples)).sum(0)

    @classmethod
    def end_to_end(cls, parts: Sequence[Segments]) -> Segments:
        """The sorted rows of all of these, laid end to end; they have as many samples and groups as
        each other."""
        sample = torch.cat([part.sample_N.masked_fill(~part.inside_N, -1) for part in parts])
        group = torch.cat([part.group_N for part in parts])
        return cls(sample, parts[0].samples, group, parts[0].groups)


def segment_sqnorms(
    A: Rows, G: Rows, segments: Segments, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Squared norms of ``Σ g_n a_nᵀ`` over the rows of every segment, and what rounding may hide of
    each (:mod:`flash_clipping.ops.error_bounds`), both ``[S]`` in fp32 (float64 for float64).

    Short segments go through Gram matrices, long ones through the product itself: ``L² (d + p)``
    against ``2 L d p`` for L rows, decided on the device, segment by segment.
    """
    if not _has_rows(A, G, segments):
        nothing_S = A.X.new_zeros(len(segments.starts) - 1, dtype=accumulator(A.X, G.X))
        return nothing_S, nothing_S
    return backends.run(reference.segment_sqnorms, backend, _decides(A, G), A, G, segments.lists)


def segment_sums(X_Nf: Tensor, segments: Segments, *, backend: str = "auto") -> Tensor:
    """Sorted rows of every segment added up, ``[S, f]`` in fp32 (float64 for float64)."""
    return backends.run(reference.segment_sums, backend, X_Nf, X_Nf, segments.lists)


def segment_grads(A: Rows, G: Rows, segments: Segments, *, backend: str = "auto") -> Tensor:
    """``Σ g_n a_nᵀ`` over the rows of every segment, ``[B, E, p, d]`` in the operands' dtype."""
    B = segments.samples
    if not _has_rows(A, G, segments):
        return _no_products(A, G, B, segments.groups)
    return backends.run(reference.segment_grads, backend, _decides(A, G), A, G, segments.lists, B)


def grouped_sums(
    A: Rows, G: Rows, segments: Segments, coef_B: Tensor | None, *, backend: str = "auto"
) -> Tensor:
    """``Σ_n coef(n) g_n a_nᵀ`` over the rows of every group, with the coefficient of the row's
    sample: ``[E, p, d]`` in fp32 (float64 for float64). ``None``: all ones, and the result in the
    operands' dtype.

    A row whose coefficient is 0, or that belongs to no sample, adds nothing, whatever it holds.
    """
    if not _has_rows(A, G, segments):
        return _no_products(A, G, segments.groups, is_wide=coef_B is not None)
    decides = _decides(A, G)
    if coef_B is None:
        return backends.run(reference.products, backend, decides, A, G, segments.of_groups)
    return backends.run(reference.grouped_sums, backend, decides, A, G, segments.lists, coef_B)


def _no_products(A: Rows, G: Rows, *lead: int, is_wide: bool = False) -> Tensor:
    dtype = accumulator(A.X, G.X) if is_wide else torch.promote_types(A.X.dtype, G.X.dtype)
    return A.X.new_zeros((*lead, G.features, A.features), dtype=dtype)


def grouped_linear(
    X_Nd: Tensor, W_Epd: Tensor, segments: Segments, *, backend: str = "auto"
) -> Tensor:
    """Every sorted row times the transposed matrix of its group, ``[N, p]``; 0 for rows of no
    sample."""
    if not X_Nd.numel() or not W_Epd.numel() or not segments.samples:
        return X_Nd.new_zeros((len(X_Nd), W_Epd.shape[1]))
    operands = X_Nd, W_Epd, segments.of_groups
    return backends.run(reference.grouped_linear, backend, X_Nd, *operands)


def sums_of_tokens(
    X_Nf: Tensor,
    segments: Segments,
    choices: int,
    weight_Mk: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Sorted rows of each token, times their weights if given, added up in the order of its
    choices: ``[M, f]`` in the wider dtype of rows and weights, accumulated in fp32 (float64 for
    float64). Rows of no sample add nothing, whatever they and their weights hold.

    Args:
        X_Nf: in the layer's own order rows ``m·k .. m·k + k - 1`` are token m's.
        choices: k.
    """
    tokens = len(segments) // choices
    if not X_Nf.numel():
        dtype = reference.sum_dtype(X_Nf, weight_Mk)
        return X_Nf.new_zeros((tokens, X_Nf.shape[1]), dtype=dtype)
    rows_Mk, end = segments.place_N.view(tokens, choices), segments.starts[-1]
    return backends.run(reference.sums_of_tokens, backend, X_Nf, X_Nf, rows_Mk, end, weight_Mk)


def _has_rows(A: Rows, G: Rows, segments: Segments) -> bool:
    return bool(len(segments) and segments.samples and A.X.numel() and G.X.numel())


def _decides(A: Rows, G: Rows) -> Tensor:
    """The operand whose dtype an implementation must take."""
    return max(A.X, G.X, key=Tensor.element_size)
