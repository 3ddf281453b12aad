"""Linear maps, ``g_b = G_b^T A_b``; biases, scales and shifts; several of them in one parameter.

Shape suffixes: ``B`` samples, ``T`` positions, ``d`` input features, ``p`` output features, ``n``
elements of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_clipping.factors.base import (
    DenseGrad,
    Factored,
    PerSampleGrad,
    accumulation_dtype,
    parts_of_sample,
)
from flash_clipping.factors.units import UnitMap
from flash_clipping.ops.clipped_sum import clipped_sums
from flash_clipping.ops.linear import linear_sqnorms
from flash_clipping.ops.outer import outer_grads, outer_sqnorms
from flash_clipping.ops.rows import row_sums
from flash_clipping.ops.runtime import cost
from flash_clipping.ops.runtime.shapes import Normalized
from flash_clipping.ops.segments import Rows, Segments, grouped_sums, segment_grads, segment_sqnorms


@dataclass(eq=False)
class LinearGrad(Factored):
    """``g_b = G_b^T A_b`` (``p x d``): a linear map with input ``A`` and output gradient ``G``."""

    A_BTd: Tensor
    G_BTp: Tensor
    positions = "A_BTd", "G_BTp"

    @property
    def batch_size(self) -> int:
        return self.G_BTp.shape[0]

    def operands(self) -> tuple[Any, ...]:
        return self.A_BTd, self.G_BTp

    def shares_input_with(self) -> tuple[Any, ...]:
        """A key that is equal for factors that read the same memory."""
        A = self.A_BTd
        return (A.data_ptr(), A.shape, A.stride(), A.dtype, A.device)

    def measure(self, backend: str) -> tuple[Tensor, Tensor]:
        ((sq_1B, doubt_1B),) = linear_sqnorms([(self.A_BTd, [self.G_BTp])], backend=backend)
        return sq_1B.mT, doubt_1B[0]

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            return self.G_BTp.flatten(0, 1).mT @ self.A_BTd.flatten(0, 1)
        return clipped_sums(self.A_BTd, [self.G_BTp], coef_B, backend=backend)[0]

    def dense(self) -> Tensor:
        return self.G_BTp.mT @ self.A_BTd

    def fold(self, samples: int) -> PerSampleGrad:
        A, G = self.A_BTd, self.G_BTp
        T = parts_of_sample(len(A), samples) * A.shape[1]
        return LinearGrad(A.reshape(samples, T, A.shape[2]), G.reshape(samples, T, G.shape[2]))

    def is_worth_storing(self, readers: Callable[[], int]) -> bool:
        A, G = self.A_BTd, self.G_BTp
        if A.dim() != 3:  # refused, with the layer's path, when norms are taken
            return False
        B, T, d = A.shape
        p = G.shape[-1]
        if not cost.may_hold_gradients(T, d, p):
            return False
        shared = readers()
        if not shared or not cost.may_hold_gradients(T, d, p, shared):
            return False
        algorithm = cost.choose_on(
            G.device.type, B, T, d, p, G.element_size(), may_store=True, shared=shared
        )
        return algorithm == "outer_store"

    def stored(self, backend: str) -> DenseGrad:
        """Form the per-sample gradients once, and let go of ``A`` and ``G``."""
        B, T, d = self.A_BTd.shape
        elements = d * self.G_BTp.shape[2]
        # Norms of small ones are taken together. A kernel that squares as well goes along all
        # positions in one block: few of these leave the device idle, and a library cuts T.
        is_idle = T >= 8192 and B * elements < 1 << 22 and self.G_BTp.element_size() <= 2
        if self.G_BTp.is_cuda and (elements <= DenseGrad.SMALL or is_idle):
            return DenseGrad(outer_grads(self.A_BTd, self.G_BTp))
        parts_Bn, grads_Bpd = outer_sqnorms(
            self.A_BTd, self.G_BTp, store=True, in_parts=True, backend=backend
        )
        assert grads_Bpd is not None
        return DenseGrad(grads_Bpd, parts_Bn)

    def _segments(self, units: UnitMap) -> tuple[Rows, Rows, Segments]:
        """The operands by units."""
        segments = units.segments(self.A_BTd.shape[1])
        A, G = (segments.rows(x.flatten(0, 1)) for x in (self.A_BTd, self.G_BTp))
        return A, G, segments

    def measure_units(self, units: UnitMap, backend: str) -> tuple[Tensor, Tensor]:
        return segment_sqnorms(*self._segments(units), backend=backend)

    def clipped_sum_of_units(self, units: UnitMap, coef_U: Tensor, backend: str) -> Tensor:
        if self.A_BTd.shape[1] > 1:
            return super().clipped_sum_of_units(units, coef_U, backend)
        # A kernel that takes rows for samples would take a step for each of them.
        return grouped_sums(*self._segments(units), coef_U, backend=backend)[0]

    def are_units_worth_storing(self, count: int, readers: Callable[[], int]) -> bool:
        """Where their gradients take no more memory than the operands: one product is then for
        norms and sums. How many rows each unit has decides nothing: a plan must not depend on
        that."""
        if self.A_BTd.dim() != 3 or self.G_BTp.dim() != 3:
            return False
        N, d, p = self.A_BTd.shape[:2].numel(), self.A_BTd.shape[2], self.G_BTp.shape[2]
        elements = count * d * p
        if not 0 < elements <= N * (d + p):
            return False
        shared = readers()  # who reads A as well keeps it as long
        return shared > 0 and elements <= N * (d / shared + p)

    def stored_units(self, units: UnitMap, backend: str) -> DenseGrad:
        """In the operands' dtype: what is measured is what is released."""
        return DenseGrad(segment_grads(*self._segments(units), backend=backend).squeeze(1))

    @classmethod
    def concatenate(cls, factors: Sequence[LinearGrad]) -> PerSampleGrad:
        return cls(
            torch.cat([factor.A_BTd for factor in factors], dim=1),
            torch.cat([factor.G_BTp for factor in factors], dim=1),
        )


@dataclass(eq=False)
class SumGrad(PerSampleGrad):
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
        return (self.rows_BTn,) if self.normalized is None else (self.rows_BTn, *self.normalized)

    def sqnorms(self, backend: str) -> Tensor:
        return DenseGrad(self._grads(backend)).sqnorms(backend)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return DenseGrad(self._grads(backend)).clipped_sum(coef_B, backend)

    def dense(self) -> Tensor:
        return self._grads("auto")

    def _grads(self, backend: str) -> Tensor:
        rows_BTn = self.rows_BTn
        if self.normalized is not None:
            grads, _ = row_sums([rows_BTn], [self.normalized], backend=backend)
        else:
            grads = rows_BTn.sum(1, dtype=accumulation_dtype(rows_BTn.dtype))
        return grads if self.shape is None else grads.view(-1, *self.shape)

    def fold(self, samples: int) -> PerSampleGrad:
        if self.normalized is not None:
            return super().fold(samples)
        rows_BTn = self.rows_BTn
        B, T, n = rows_BTn.shape
        return SumGrad(rows_BTn.reshape(samples, parts_of_sample(B, samples) * T, n), self.shape)

    def sums_of_units(self, units: UnitMap) -> Tensor:
        if self.normalized is not None:
            return super().sums_of_units(units)
        # As they are: every position of a row is one, and nothing is widened in between.
        shape = self.rows_BTn.shape[2:] if self.shape is None else self.shape
        sums_Un = units.sums(self.rows_BTn.flatten(0, 1), self.rows_BTn.shape[1])
        return sums_Un.view(units.count, *shape)

    @classmethod
    def concatenate(cls, factors: Sequence[SumGrad]) -> PerSampleGrad:
        if any(factor.normalized is not None for factor in factors):
            return DenseGrad.sum_of(factors)
        rows_BTn = torch.cat([factor.rows_BTn for factor in factors], dim=1)
        return cls(rows_BTn, factors[0].shape)


@dataclass(eq=False)
class StackedGrad(PerSampleGrad):
    """A parameter whose leading axis is made of parts, each with a gradient of its own.

    ``nn.MultiheadAttention`` keeps the projections of query, key and value in one matrix.
    """

    parts: Sequence[PerSampleGrad]

    @property
    def batch_size(self) -> int:
        return self.parts[0].batch_size

    def sqnorms(self, backend: str) -> Tensor:
        return torch.stack([part.sqnorms(backend) for part in self.parts]).sum(0)

    def error_bound(self, backend: str) -> Tensor | None:
        found = [part.error_bound(backend) for part in self.parts]
        doubts = [doubt_B for doubt_B in found if doubt_B is not None]
        return torch.stack(doubts).sum(0) if doubts else None

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return torch.cat([part.clipped_sum(coef_B, backend) for part in self.parts])

    def dense(self) -> Tensor:
        return torch.cat([part.dense() for part in self.parts], dim=1)

    def by_units(self, units: UnitMap) -> PerSampleGrad:
        return StackedGrad([part.by_units(units) for part in self.parts])
