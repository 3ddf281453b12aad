"""What these layers, and experts of others, leave: factors of rows that lie anywhere.

E experts, N rows, p output features, d input features, B samples; T positions, of which each reads
L rows of a table of E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_clipping.factors import EmbeddingGrad, PerSampleGrad, accumulation_dtype
from flash_clipping.factors.base import Factored
from flash_clipping.factors.embedding import Scattered, TableGrad
from flash_clipping.factors.units import UnitMap
from flash_clipping.layers.exchange import Samples
from flash_clipping.ops import error_bounds
from flash_clipping.ops.embedding import sums_of_weighted_rows
from flash_clipping.ops.segments import (
    Rows,
    Segments,
    grouped_sums,
    segment_grads,
    segment_sqnorms,
)


class SegmentedLinearGrad(Factored):
    """``g_b[e] = Σ g_n a_nᵀ`` over the rows n of sample b in group e, ``[E, p, d]``.

    Args:
        A, G: inputs ``[N, d]`` and output gradients ``[N, p]`` of all rows, sorted as ``segments``
            says, or with the place of each.
        arrange: turns ``[..., E, p, d]`` into ``[..., *parameter]``, where that has its elements
            elsewhere; a plain function, the same object for every use.
    """

    def __init__(
        self,
        A: Rows | Tensor,
        G: Rows | Tensor,
        segments: Segments,
        arrange: Callable[[Tensor], Tensor] | None = None,
    ):
        self.A = A if isinstance(A, Rows) else Rows(A)
        self.G = G if isinstance(G, Rows) else Rows(G)
        self.segments, self.arrange = segments, arrange

    @property
    def batch_size(self) -> int:
        return self.segments.samples

    def measure(self, backend: str) -> tuple[Tensor, Tensor]:
        sq_B, doubt_B = _sqnorms(self.A, self.G, self.segments, backend)
        return sq_B.unsqueeze(1), doubt_B

    def measure_units(self, units: UnitMap, backend: str) -> tuple[Tensor, Tensor]:
        """Rows that are sorted by their samples, sorted again by the units of these."""
        sorted_ = self.segments
        unit_N = torch.where(sorted_.inside_N, units.index_M[sorted_.sample_N], -1)
        segments = Segments(unit_N, units.count, sorted_.group_N, sorted_.groups)
        A, G = (x.reordered(segments.order_N) for x in (self.A, self.G))
        return _sqnorms(A, G, segments, backend)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return self._arranged(grouped_sums(self.A, self.G, self.segments, coef_B, backend=backend))

    def dense(self) -> Tensor:
        return self._arranged(segment_grads(self.A, self.G, self.segments))

    def _arranged(self, grads: Tensor) -> Tensor:
        return grads if self.arrange is None else self.arrange(grads).contiguous()

    def is_worth_storing(self, readers: Callable[[], int]) -> bool:
        """Where that takes no more memory than the operands: low ranks, and experts that read much
        more rows of a sample than they are wide. Lengths of segments decide nothing: a plan must
        not depend on them."""
        d, p = self.A.X.shape[1], self.G.X.shape[1]
        segments = self.segments
        fits = segments.samples * segments.groups * d * p <= len(segments) * (d + p)
        return fits and readers() > 0

    @classmethod
    def concatenate(cls, factors: Sequence[SegmentedLinearGrad]) -> PerSampleGrad:
        if len({factor.arrange for factor in factors}) > 1:
            return super().concatenate(factors)
        segments = Segments.end_to_end([factor.segments for factor in factors])
        A_Nd = torch.cat([factor.A.sorted() for factor in factors])
        G_Np = torch.cat([factor.G.sorted() for factor in factors])
        return cls(segments.rows(A_Nd), segments.rows(G_Np), segments, factors[0].arrange)


def _sqnorms(A: Rows, G: Rows, segments: Segments, backend: str) -> tuple[Tensor, Tensor]:
    """Of every sample. Gradients of different matrices are orthogonal: squares add up, and so do
    doubts."""
    sq_S, doubt_S = segment_sqnorms(A, G, segments, backend=backend)
    return segments.by_sample(sq_S), segments.by_sample(doubt_S)


BUFFER = 1 << 25
"""About how many elements of rows are formed at a time (one feature of one sample at least)."""


@dataclass(eq=False)
class ScaledEmbeddingGrad(TableGrad):
    """Row ``ids[b, t, l]`` of the gradient of sample b receives ``scale[b, t, l] · X[b, t]``.

    An embedding's gradient, but for how it is kept: the rows that a
    :class:`~flash_clipping.factors.EmbeddingGrad` would hold are L times as large as X. They are
    formed a few samples at a time, in fp32, for norms, and not at all for the clipped sum.

    Args:
        ids_BTL: int64, below E; negative for no row, of which nothing is read.
        scale_BTL: what each is multiplied by.
        X_BTd: the vectors.
        num_embeddings: rows of the table, E.
    """

    ids_BTL: Tensor
    scale_BTL: Tensor
    X_BTd: Tensor
    num_embeddings: int

    @property
    def batch_size(self) -> int:
        return self.X_BTd.shape[0]

    def operands(self) -> tuple[object, ...]:
        return self.ids_BTL, self.scale_BTL, self.X_BTd, self.num_embeddings

    def _finite(self) -> tuple[Tensor, Tensor]:
        """``scale_BTL`` and ``X_BTd`` as they are added up; 0 where they belong to no row, as they
        may hold anything there."""
        dtype = accumulation_dtype(self.X_BTd.dtype)
        none_BTL = self.ids_BTL < 0
        scale_BTL = self.scale_BTL.to(dtype).masked_fill(none_BTL, 0)
        return scale_BTL, self.X_BTd.to(dtype).masked_fill(none_BTL.all(2, keepdim=True), 0)

    def _pieces(self, scale_BTL: Tensor, X_BTd: Tensor) -> Iterator[tuple[slice, EmbeddingGrad]]:
        """Samples and the gradient of some of their features, with its ``T·L`` rows, as much at a
        time as shapes alone allow. Row 0 stands for none, and receives zeros."""
        B, T, L = self.ids_BTL.shape
        d, size = X_BTd.shape[2], max(1, T * L)
        features = max(1, min(d, BUFFER // size))
        samples = max(1, BUFFER // (size * features))
        for b in range(0, B, samples):
            some = slice(b, b + samples)
            for f in range(0, d, features):
                yield some, self._looked_up(scale_BTL, X_BTd, some, slice(f, f + features))

    def measure(self, backend: str) -> tuple[Tensor, Tensor]:
        scale_BTL, X_BTd = self._finite()
        sq_B = X_BTd.new_zeros(self.batch_size)
        for samples, rows in self._pieces(scale_BTL, X_BTd):
            # Features of a row are summed apart, and squares add up.
            sq_B[samples] += rows.square_parts(backend).sum(1)
        norm_BT1 = error_bounds.squared_rows(X_BTd, X_BTd.dtype).sqrt_().unsqueeze(2)
        spread_B = (scale_BTL.abs() * norm_BT1).flatten(1).sum(1)
        if X_BTd.numel():  # rows of a sample meet those of others
            spread_B = rows.doubt(sq_B, spread_B, backend, among=self.ids_BTL.numel())
        return sq_B.unsqueeze(1), spread_B

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        scale_BTL, X_BTd = self._finite()
        if coef_B is not None:
            coef_B11 = coef_B.to(scale_BTL.dtype)[:, None, None]
            # Of a dropped sample nothing, whatever its vectors and scales hold.
            scale_BTL = torch.where(coef_B11 == 0, 0, coef_B11 * scale_BTL)
            X_BTd = X_BTd.masked_fill(coef_B11 == 0, 0)
        ids_N = self.ids_BTL.clamp(min=0).flatten()
        bags_N = torch.arange(X_BTd.shape[:2].numel(), device=ids_N.device)
        bags_N = bags_N.repeat_interleave(scale_BTL.shape[2])
        total_Ed = sums_of_weighted_rows(
            ids_N, bags_N, scale_BTL.flatten(), X_BTd.flatten(0, 1), self.num_embeddings
        )
        return total_Ed.to(self.X_BTd.dtype) if coef_B is None else total_Ed

    def lookup(self) -> EmbeddingGrad:
        """With all of its rows, as :meth:`_pieces`."""
        return self._looked_up(*self._finite())

    def _looked_up(
        self, scale_BTL: Tensor, X_BTd: Tensor, b: slice = slice(None), f: slice = slice(None)
    ) -> EmbeddingGrad:
        rows_bTLf = scale_BTL[b].unsqueeze(3) * X_BTd[b, :, None, f]
        ids_bN = self.ids_BTL[b].clamp(min=0).flatten(1)
        return EmbeddingGrad(ids_bN, rows_bTLf.flatten(1, 2), self.num_embeddings)

    def dense(self) -> Tensor:
        return self.lookup().dense()

    def scattered(self, units: UnitMap) -> Scattered:
        unit_N = units.bins_M.repeat_interleave(self.ids_BTL.shape[1:].numel())
        unit_N = unit_N.masked_fill(self.ids_BTL.flatten() < 0, units.count)
        lookup = self.lookup()
        rows = lookup.ids_BT.flatten(), lookup.G_BTd.flatten(0, 1)
        return Scattered(*rows, unit_N, units.count, self.num_embeddings)

    @classmethod
    def concatenate(cls, factors: Sequence[ScaledEmbeddingGrad]) -> PerSampleGrad:
        first = factors[0]
        if any(factor.ids_BTL.shape[2] != first.ids_BTL.shape[2] for factor in factors):
            return super().concatenate(factors)
        ids, scales, vectors = (
            torch.cat([getattr(factor, name) for factor in factors], dim=1)
            for name in ("ids_BTL", "scale_BTL", "X_BTd")
        )
        return cls(ids, scales, vectors, first.num_embeddings)


@dataclass
class OfSeveralProcesses:
    """A gradient of this process's experts, of the samples of all processes that sent it rows.

    No process knows a sample's gradient alone: the backward pass of a sharded model adds norms
    up over processes, and takes ``whole``.

    Attributes:
        whole: for the samples of all processes, one process after the other.
        samples: which of them are this process's.
    """

    whole: PerSampleGrad
    samples: Samples

    @property
    def batch_size(self) -> int:
        return self.samples.own

    def clipped_sum(self, coef_B: None, backend: str) -> Tensor:
        """Of all samples, with recording off: a ``DTensor``, as the parameter is one."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = self.samples.mesh
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        return DTensor.from_local(
            self.whole.clipped_sum(coef_B, backend), mesh, placements, run_check=False
        )
