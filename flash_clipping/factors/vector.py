"""Biases, scales and shifts: per-sample gradients that are vectors, summed many at a time.

Shape suffixes: ``B`` samples, ``T`` positions, ``P`` parameters, ``n`` elements of one of them,
``N`` of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping.factors.base import Dense, Factor, accumulation_dtype, parts_of_sample
from flash_clipping.ops.outer import weighted_sum
from flash_clipping.ops.row_sum import row_sums
from flash_clipping.ops.runtime.shapes import Memo, Normalized


class RowSum(Factor):
    """``g_b = sum_t rows_bt``: a bias, or a scale whose gradient came in few partial sums, or one.

    With ``normalized``, ``g_b = sum_t rows_bt xhat_bt``: a scale, from the output gradient itself.
    Added up when the norms are taken, one launch for many, rather than one by one.
    """

    def __init__(
        self,
        rows_BTn: Tensor,
        shape: Sequence[int] | None = None,
        normalized: Normalized | None = None,
    ):
        self.rows_BTn = rows_BTn
        #: Of the parameter, where that has several axes.
        self.shape = None if shape is None else tuple(shape)
        self.normalized = normalized

    @property
    def batch_size(self) -> int:
        return self.rows_BTn.shape[0]

    def operands(self) -> tuple[Any, ...]:
        if self.normalized is None:
            return (self.rows_BTn,)
        # Not its statistics: `row_sums` looks at these itself.
        return self.rows_BTn, self.normalized.x_BTn

    def sqnorms(self, backend: str) -> Tensor:
        return Dense(self._grads(backend)).sqnorms(backend)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return Dense(self._grads(backend)).clipped_sum(coef_B, backend)

    def dense(self) -> Tensor:
        return self._grads("auto")

    def _grads(self, backend: str) -> Tensor:
        rows_BTn = self.rows_BTn
        if self.normalized is not None:
            grads, _ = row_sums([rows_BTn], [self.normalized], backend=backend)
        else:
            grads = rows_BTn.sum(1, dtype=accumulation_dtype(rows_BTn.dtype))
        return grads if self.shape is None else grads.view(-1, *self.shape)

    def fold(self, samples: int) -> Factor:
        if self.normalized is not None:
            return super().fold(samples)
        rows_BTn = self.rows_BTn
        B, T, n = rows_BTn.shape
        return RowSum(rows_BTn.reshape(samples, parts_of_sample(B, samples) * T, n), self.shape)

    @classmethod
    def concatenate(cls, factors: Sequence[RowSum]) -> Factor:
        if any(factor.normalized is not None for factor in factors):
            return Dense.sum_of(factors)
        rows_BTn = torch.cat([factor.rows_BTn for factor in factors], dim=1)
        return cls(rows_BTn, factors[0].shape)


class VectorStack:
    """Small per-sample gradients, side by side, and their squared norms.

    A model has a bias and a norm layer for every few matrices; one by one, their launches take
    longer than their arithmetic. Shape suffix ``P``: parameters; ``n``: elements of one of them,
    ``N`` of all.
    """

    def __init__(
        self,
        keys: list[int],
        sizes: list[int],
        grads_BN: Tensor,
        sq_PB: Tensor,
        shape: Sequence[int] | None = None,
    ):
        self.keys = keys
        self.sizes = sizes
        self.grads_BN = grads_BN
        self.sq_PB = sq_PB
        #: Of every parameter, where that is one.
        self.shape = shape

    @classmethod
    def of_dense(cls, keys: list[int], factors: Sequence[Dense]) -> VectorStack:
        """Of gradients of one shape and dtype."""
        # A stack takes over a memory format (channels_last) that all have in common.
        grads = torch.stack([factor.grads for factor in factors], dim=1).contiguous()
        B, P, *shape = grads.shape
        n = grads.shape[2:].numel()  # a scalar's is 1
        dtype = accumulation_dtype(grads.dtype)
        norms_BP = torch.linalg.vector_norm(grads.view(B, P, n), dim=2, dtype=dtype)
        return cls(keys, [n] * P, grads.view(B, P * n), norms_BP.square_().T, shape)

    @classmethod
    def of_sums(
        cls, keys: list[int], factors: Sequence[RowSum], backend: str, memo: Memo | None = None
    ) -> VectorStack:
        """Of sums over as many positions and in one dtype, of any sizes."""
        rows, x_hats, sizes = [], [], []
        for factor in factors:
            rows.append(factor.rows_BTn)
            x_hats.append(factor.normalized)
            sizes.append(factor.rows_BTn.shape[2])
        grads_BN, sq_PB = row_sums(rows, x_hats, backend=backend, memo=memo)
        return cls(keys, sizes, grads_BN, sq_PB)

    def clipped_sums(self, coefs: Sequence[Tensor], backend: str) -> Sequence[Tensor]:
        """One clipped sum per parameter, ``[n]`` or in its shape where all have one, in order and
        in fp32 (float64 for float64)."""
        if len(coefs) == 1 or all(coef is coefs[0] for coef in coefs):
            sums_N = weighted_sum(self.grads_BN, coefs[0], backend=backend)
            if self.shape is None:
                return sums_N.split(self.sizes)
            return sums_N.view(len(self.keys), *self.shape).unbind(0)
        columns = zip(self.grads_BN.split(self.sizes, 1), coefs, strict=True)
        sums = [weighted_sum(column, coef, backend=backend) for column, coef in columns]
        return sums if self.shape is None else [sum_n.view(self.shape) for sum_n in sums]
