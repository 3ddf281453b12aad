"""Biases, scales and shifts: per-sample gradients that are vectors, summed many at a time.

Shape suffixes: ``B`` samples, ``T`` positions, ``n`` elements of the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_clipping.factors.base import Dense, Factor, accumulation_dtype, parts_of_sample
from flash_clipping.ops.row_sum import row_sums
from flash_clipping.ops.runtime.shapes import Normalized


@dataclass(eq=False)
class RowSum(Factor):
    """``g_b = sum_t rows_bt``: a bias, or a scale whose gradient came in few partial sums, or one.

    With ``normalized``, ``g_b = sum_t rows_bt xhat_bt``: a scale, from the output gradient itself.
    Added up when the norms are taken, one launch for many, rather than one by one.
    """

    rows_BTn: Tensor
    #: Of the parameter, where that has several axes.
    shape: Sequence[int] | None = None
    normalized: Normalized | None = None

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
