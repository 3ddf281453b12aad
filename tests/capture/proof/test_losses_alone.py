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


class OwnLoss(nn.Module):
    """Its loss compares samples, or is a mean over samples or over what counts of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed, self.drop = how, nn.Linear(K, 5), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x))
        if self.how == "contrasts":
            return nn.functional.cross_entropy(h @ h.T, torch.arange(len(h)))
        if self.how == "deviation":
            return h.square().mean(1).std()
        counts = (x[:, 0] > 0).float()
        if self.how == "mean of some":
            return (h.square().sum(1) * counts).sum() / counts.sum().clamp(min=1)
        return h.square().mean()


@pytest.mark.parametrize("how", ["contrasts", "deviation"])
def test_a_loss_that_compares_samples_is_refused(how: str) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(OwnLoss(how))
    with pytest.raises(FlashClippingError, match="the model's own loss asks of a sample changes"):
        flash(torch.randn(B, K)).backward()
    assert all(param.grad is None for param in flash.parameters())


@pytest.mark.parametrize("how", ["mean", "mean of some"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_mean_of_losses_is_not(how: str, count: int) -> None:
    """Also one that is divided by what counts in the batch: one factor for all."""
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(OwnLoss(how))
    x = torch.randn(count, K)
    x[0, 0] = 1.0
    flash(x).backward()
    assert flash.get_norm_sample().shape == (count,)
