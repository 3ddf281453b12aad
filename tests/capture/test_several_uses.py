"""Parameters with several uses: what is released of them, and uses that come later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import (
    float64s,
    squares,
)
from tests.support.errors import raises

pytestmark = pytest.mark.without_gate


@pytest.mark.parametrize("name", ["convolution", "linear and generic"])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_sum_of_several_uses_in_16_bits_is_what_was_measured(mode: str, name: str) -> None:
    """In bf16 a sum of two gradients is rounded; its norm is not that of both, unrounded."""

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Conv1d(4, 4, 3, bias=False) if name == "convolution" else nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if name == "convolution":
                return self.own(x[:, :4]).sum(1) + self.own(x[:, 4:]).sum(1)
            return self.own(x[:, :, :4]).sum(1) + (x[:, :, 4:] * self.own.weight.sum(0)).sum(1)

    worst = 0.0
    for seed in range(20):
        torch.manual_seed(seed)
        flash = GradSampleModuleFlashClipping(
            Uses().bfloat16(), mode=mode, max_grad_norm=1e-3, loss_reduction="sum"
        )
        flash(torch.randn(1, 8, 8).bfloat16()).float().sum().backward()
        sums = [p.grad.double().flatten() for p in flash.parameters() if p.grad is not None]
        worst = max(worst, torch.cat(sums).norm().item())
    assert 1e-3 * (1 - 1e-2) <= worst <= 1e-3 * (1 + 1e-4)


class NowAndThen(nn.Module):
    """Uses another module's parameter, but not when the model runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.uses = nn.Linear(3, 3), nn.Linear(3, 2), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.head(h + self.inner.bias if self.uses else h)


def test_use_of_another_modules_parameter_later_is_refused() -> None:
    model = NowAndThen().double()
    flash = GradSampleModuleFlashClipping(model)
    (x,) = float64s(3, 3)
    squares(flash, (x,)).backward()
    model.zero_grad(set_to_none=True)
    model.uses = True
    with raises("FC142", match="inner.bias:"):
        squares(flash, (x,)).backward()
