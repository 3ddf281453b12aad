"""Parameters in parts, each with a gradient of its own, and with their elements elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_clipping.factors.base import DenseGrad, PerSampleGrad
from flash_clipping.factors.units import UnitMap


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


@dataclass(eq=False)
class RearrangedGrad(PerSampleGrad):
    """A gradient whose parameter has its elements elsewhere.

    Args:
        inner: the gradient as it is computed.
        arrange: turns ``[..., *inner's shape]`` into ``[..., *parameter]``; a plain function, the
            same object for every use.
    """

    inner: PerSampleGrad
    arrange: Callable[[Tensor], Tensor]

    @property
    def batch_size(self) -> int:
        return self.inner.batch_size

    def operands(self) -> tuple[Any, ...]:
        return type(self.inner), self.arrange, *self.inner.operands()

    def sqnorms(self, backend: str) -> Tensor:
        return self.inner.sqnorms(backend)

    def error_bound(self, backend: str) -> Tensor | None:
        return self.inner.error_bound(backend)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return self.arrange(self.inner.clipped_sum(coef_B, backend)).contiguous()

    def dense(self) -> Tensor:
        return self.arrange(self.inner.dense())

    def by_units(self, units: UnitMap) -> PerSampleGrad:
        return RearrangedGrad(self.inner.by_units(units), self.arrange)

    def is_worth_storing(self, readers: Callable[[], int]) -> bool:
        return self.inner.is_worth_storing(readers)

    def stored(self, backend: str) -> DenseGrad:
        return DenseGrad(self.dense().contiguous())

    @classmethod
    def concatenate(cls, factors: Sequence[RearrangedGrad]) -> PerSampleGrad:
        first = factors[0]
        inner = [factor.inner for factor in factors]
        alike = {(type(factor.inner), factor.arrange) for factor in factors}
        if len(alike) > 1:
            return DenseGrad.sum_of(factors)
        return cls(type(first.inner).concatenate(inner), first.arrange)
