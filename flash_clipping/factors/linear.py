"""Linear maps: ``g_b = G_b^T A_b``.

Shape suffixes: ``B`` samples, ``T`` positions, ``d`` input features, ``p`` output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_clipping.factors.base import Dense, Factor, parts_of_sample
from flash_clipping.ops import certificate
from flash_clipping.ops.clipped_sum import clipped_sums
from flash_clipping.ops.linear import linear_sqnorms
from flash_clipping.ops.outer import outer_grads, outer_sqnorms
from flash_clipping.ops.runtime import cost


@dataclass(eq=False)
class Outer(Factor):
    """``g_b = G_b^T A_b`` (``p x d``): a linear map with input ``A`` and output gradient ``G``."""

    A_BTd: Tensor
    G_BTp: Tensor

    @property
    def batch_size(self) -> int:
        return self.G_BTp.shape[0]

    def operands(self) -> tuple[Any, ...]:
        return self.A_BTd, self.G_BTp

    def shares_input_with(self) -> tuple[Any, ...]:
        """A key that is equal for factors that read the same memory."""
        A = self.A_BTd
        return (A.data_ptr(), A.shape, A.stride(), A.dtype, A.device)

    def sqnorms(self, backend: str) -> Tensor:
        ((sq_1B, _),) = linear_sqnorms([(self.A_BTd, [self.G_BTp])], backend=backend)
        return sq_1B[0]

    def doubt(self, backend: str) -> Tensor | None:
        if self.A_BTd.shape[1] == 1:
            return None  # nothing cancels
        return certificate.doubt(certificate.spread(self.A_BTd, self.G_BTp))

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            return self.G_BTp.flatten(0, 1).mT @ self.A_BTd.flatten(0, 1)
        return clipped_sums(self.A_BTd, [self.G_BTp], coef_B, backend=backend)[0]

    def dense(self) -> Tensor:
        return self.G_BTp.mT @ self.A_BTd

    def fold(self, samples: int) -> Factor:
        A, G = self.A_BTd, self.G_BTp
        T = parts_of_sample(len(A), samples) * A.shape[1]
        return Outer(A.reshape(samples, T, A.shape[2]), G.reshape(samples, T, G.shape[2]))

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

    def stored(self, backend: str) -> Dense:
        """Form the per-sample gradients once, and let go of ``A`` and ``G``."""
        if self.G_BTp.is_cuda and self.A_BTd.shape[2] * self.G_BTp.shape[2] <= Dense.SMALL:
            # Their norms are taken with those of all other small ones.
            return Dense(outer_grads(self.A_BTd, self.G_BTp))
        parts_Bn, grads_Bpd = outer_sqnorms(
            self.A_BTd, self.G_BTp, store=True, in_parts=True, backend=backend
        )
        assert grads_Bpd is not None
        return Dense(grads_Bpd, parts_Bn)

    @classmethod
    def concatenate(cls, factors: Sequence[Outer]) -> Factor:
        return cls(
            torch.cat([factor.A_BTd for factor in factors], dim=1),
            torch.cat([factor.G_BTp for factor in factors], dim=1),
        )
