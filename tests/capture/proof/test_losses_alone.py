"""Models that return their loss alone are compared by what the loss is computed from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping

B, K = 4, 6


class LossAlone(nn.Module):
    """A head that sees samples as they are is called last; the other may see them in reverse."""

    def __init__(self, reverses: bool) -> None:
        super().__init__()
        self.reverses = reverses
        self.first, self.last, self.beside = (nn.Linear(K, n) for n in (K, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flip(0)).flip(0) if self.reverses else self.first(x)
        return self.last(h.tanh()).square().sum() + self.beside(x).square().sum()


def test_every_layer_that_the_loss_reads_counts() -> None:
    torch.manual_seed(0)
    GradSampleModuleFlashClipping(LossAlone(False))(torch.randn(B, K)).backward()
    with pytest.raises(FlashClippingError, match="first.weight, first.bias: .* booked to others"):
        GradSampleModuleFlashClipping(LossAlone(True))(torch.randn(B, K)).backward()
