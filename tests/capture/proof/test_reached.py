"""Layers that are not reached before the first step."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises
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


@pytest.mark.parametrize("reverses", [False, True])
def test_a_layer_that_no_look_reaches_is_refused(reverses: bool) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(EveryThird(reverses))
    for _ in range(2):
        flash(torch.randn(B, T, K)).square().sum().backward()
    with raises("FC230", match="second"):
        flash(torch.randn(B, T, K))


class Seldom(EveryThird):
    """Calls its second layer by a coin, of PyTorch's or Python's."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps = 3 if self.draw() < 0.3 else 2  # the forward adds one
        self.steps -= 1
        return super().forward(x)

    def draw(self) -> float:
        return torch.rand(()).item() if self.by_torch else random.random()

    by_torch = True


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("reverses", [False, True])
def test_a_layer_that_chance_reaches_is_looked_at_once(reverses: bool, by_torch: bool) -> None:
    torch.manual_seed(0)
    random.seed(0)
    model = Seldom(reverses)
    model.by_torch = by_torch
    flash = GradSampleModuleFlashClipping(model, loss_reduction="sum")

    def steps() -> None:
        epochs = []
        for _ in range(16):
            x = torch.randn(B, T, K)
            flash.zero_grad()
            flash(x).square().sum().backward()
            if model.steps == 3:
                epochs.append(flash._session.proof.epoch)
                plain = EveryThird(reverses)
                plain.load_state_dict(model.state_dict())
                plain.steps = 2
                truth = per_sample_truth(plain, (x,), _loss_of_third)
                torch.testing.assert_close(
                    flash.per_sample_gradient_norms, truth.norms.float(), rtol=1e-4, atol=1e-4
                )
        assert len(epochs) > 1 and len({*epochs}) == 1

    if reverses:
        with raises("FC202|FC210", match="second"):
            steps()
    else:
        steps()


def _loss_of_third(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).square().flatten(1).sum(1)
