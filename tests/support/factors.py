"""A factor of a user's own."""

from __future__ import annotations

from torch import Tensor

from flash_clipping.factors import PerSampleGrad


class Own(PerSampleGrad):
    """Per-sample gradients ``[B, *parameter]``, kept as they are."""

    def __init__(self, grads: Tensor):
        self.grads = grads

    @property
    def batch_size(self) -> int:
        return len(self.grads)

    def sqnorms(self, backend: str) -> Tensor:
        return self.grads.flatten(1).square().sum(1)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            return self.grads.sum(0)
        return (coef_B.to(self.grads.dtype) @ self.grads.flatten(1)).view(self.grads.shape[1:])

    def dense(self) -> Tensor:
        return self.grads
