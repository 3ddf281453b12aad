"""Layers that are reached where no run of a proof gets: when a counter of steps says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping
from tests.support.oracle import per_sample_truth

B, T, K = 4, 3, 6


class EveryThird(nn.Module):
    """Calls its second layer in every third step, with samples in their order, or in reverse."""

    def __init__(self, reverses: bool) -> None:
        super().__init__()
        self.reverses, self.steps = reverses, 0
        self.first, self.second, self.last = (nn.Linear(K, K) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.first(x).tanh()
        if self.steps % 3 == 0:
            h = self.second(h.flip(0)).flip(0) if self.reverses else self.second(h)
        return self.last(h)


def test_rows_of_other_samples_are_refused() -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(EveryThird(reverses=True))
    for _ in range(2):
        flash(torch.randn(B, T, K)).square().sum().backward()
    with pytest.raises(FlashClippingError, match="second .*booked to others"):
        flash(torch.randn(B, T, K))


def test_own_rows_are_served_and_looked_at_once() -> None:
    torch.manual_seed(0)
    model = EveryThird(reverses=False)
    flash = GradSampleModuleFlashClipping(model, loss_reduction="sum")
    epochs = []
    for step in range(9):
        x = torch.randn(B, T, K)
        flash.zero_grad()
        flash(x).square().sum().backward()
        epochs.append(flash._session.proof.epoch)
        if step % 3 == 2:
            plain = EveryThird(reverses=False)
            plain.load_state_dict(model.state_dict())
            plain.steps = 2
            truth = per_sample_truth(plain, (x,), _loss_of_third)
            torch.testing.assert_close(
                flash.per_sample_gradient_norms, truth.norms.float(), rtol=1e-4, atol=1e-4
            )
    assert epochs[5] == epochs[8]


def _loss_of_third(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).square().flatten(1).sum(1)
