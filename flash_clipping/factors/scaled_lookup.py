"""Tables of which a position reads many rows, and each receives a multiple of one vector.

Shape suffixes: ``B`` samples, ``T`` positions, ``L`` rows that a position reads, ``E`` rows of the
table, ``d`` features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_clipping.factors.base import Factor, accumulation_dtype
from flash_clipping.ops import certificate
from flash_clipping.ops.embedding import embedding_clipped_sum, embedding_sqnorms
from flash_clipping.ops.embedding.reference import sums_by_index

BUFFER = 1 << 25
"""About how many elements of rows are formed at a time (one feature of one sample at least)."""


@dataclass(eq=False)
class ScaledLookup(Factor):
    """Row ``ids[b, t, l]`` of the gradient of sample b receives ``scale[b, t, l] · X[b, t]``.

    An embedding's gradient, but for how it is kept: the rows that a
    :class:`~flash_clipping.factors.Lookup` would hold are L times as large as X. They are formed a
    few samples at a time, in fp32, for norms and again, the same numbers, for the clipped sum.

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

    @property
    def _none_BTL(self) -> Tensor:
        return self.ids_BTL < 0

    def _ids(self, samples: slice) -> Tensor:
        """``[b, T·L]``, row 0 in the place of none: it receives zeros."""
        return self.ids_BTL[samples].clamp(min=0).flatten(1)

    def _rows(self, samples: slice, features: slice) -> Tensor:
        """``[b, T·L, f]``, in fp32 (float64 for float64)."""
        dtype = accumulation_dtype(self.X_BTd.dtype)
        scale_bTL1 = self.scale_BTL[samples].to(dtype).unsqueeze(3)
        rows_bTLf = scale_bTL1 * self.X_BTd[samples, :, None, features].to(dtype)
        # A select: what belongs to no row may be infinite.
        return rows_bTLf.masked_fill_(self._none_BTL[samples].unsqueeze(3), 0).flatten(1, 2)

    def _pieces(self) -> Iterator[tuple[slice, slice]]:
        """Samples and features that are served at a time: by shapes alone."""
        B, T, L = self.ids_BTL.shape
        d = self.X_BTd.shape[2]
        size = max(1, T * L)
        features = min(d, max(1, BUFFER // size))
        samples = max(1, BUFFER // (size * max(1, features)))
        for b in range(0, B, samples):
            for f in range(0, d, max(1, features)):
                yield slice(b, b + samples), slice(f, f + features)

    def sqnorms(self, backend: str) -> Tensor:
        sq_B = self.X_BTd.new_zeros(self.batch_size, dtype=accumulation_dtype(self.X_BTd.dtype))
        for samples, features in self._pieces():
            # Features of a row are summed apart, and squares add up.
            sq_B[samples] += embedding_sqnorms(
                self._ids(samples),
                self._rows(samples, features),
                num_embeddings=self.num_embeddings,
                backend=backend,
            )
        return sq_B

    def doubt(self, backend: str) -> Tensor | None:
        dtype = accumulation_dtype(self.X_BTd.dtype)
        scale_BT = self.scale_BTL.to(dtype).abs().masked_fill(self._none_BTL, 0).sum(2)
        norm_BT = certificate.squared_rows(self.X_BTd, dtype).sqrt_()
        # As above: a position without rows may hold anything.
        norm_BT = norm_BT.masked_fill(self._none_BTL.all(2), 0)
        return certificate.doubt((scale_BT * norm_BT).sum(1))

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        E, d = self.num_embeddings, self.X_BTd.shape[2]
        dtype = accumulation_dtype(self.X_BTd.dtype)
        total_Ed = self.X_BTd.new_zeros((E, d), dtype=dtype)
        ordinary = coef_B is None
        if coef_B is None:
            coef_B = self.X_BTd.new_ones(self.batch_size, dtype=dtype)
        for samples, features in self._pieces():
            total_Ed[:, features] += embedding_clipped_sum(
                self._ids(samples),
                self._rows(samples, features),
                coef_B[samples],
                E,
                backend=backend,
            )
        return total_Ed.to(self.X_BTd.dtype) if ordinary else total_Ed

    def dense(self) -> Tensor:
        (B, _, d), E = self.X_BTd.shape, self.num_embeddings
        everything = slice(None)
        ids_BL = self._ids(everything) + E * torch.arange(B, device=self.ids_BTL.device)[:, None]
        rows_BLd = self._rows(everything, everything)
        return sums_by_index(rows_BLd, ids_BL, B * E).view(B, E, d)

    @classmethod
    def concatenate(cls, factors: Sequence[ScaledLookup]) -> Factor:
        first = factors[0]
        if any(factor.ids_BTL.shape[2] != first.ids_BTL.shape[2] for factor in factors):
            return super().concatenate(factors)
        ids, scales, vectors = (
            torch.cat([getattr(factor, name) for factor in factors], dim=1)
            for name in ("ids_BTL", "scale_BTL", "X_BTd")
        )
        return cls(ids, scales, vectors, first.num_embeddings)
