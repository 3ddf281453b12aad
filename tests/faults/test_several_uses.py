"""A model or a layer that is called several times before one backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import truth_by_autograd
from tests.support.faults import Net, batch
from tests.support.models import Scale
from tests.support.wrapping import MODES


def check_against_autograd(
    model: nn.Module, losses: Callable[..., Tensor], *data: Tensor, mode: str
) -> None:
    truth = truth_by_autograd(model, data, lambda model, sample: losses(model, *sample).sum())
    bound = truth.norms.median().item()
    clipped = truth.clipped(bound)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode)
    for _ in range(2):
        module.zero_grad(set_to_none=True)
        losses(module, *data).mean().backward()
        torch.testing.assert_close(module.get_norm_sample(), truth.norms)
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad, clipped[name])


@pytest.mark.parametrize("mode", MODES)
def test_model_called_twice_before_one_backward(mode: str) -> None:
    """Two views of each sample: its gradient is the sum of both."""

    def losses(model: nn.Module, ids: Tensor, signal: Tensor) -> Tensor:
        first, second = model(ids, signal), model(ids.flip(1), 2 * signal)
        return (first - second).square().flatten(1).sum(1)

    ids, signal, _ = batch(size=5)
    check_against_autograd(Net().double(), losses, ids, signal.double(), mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_layer_called_twice(mode: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)
            self.scale = Scale(4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.scale(torch.tanh(self.norm(self.layer(x))))
            return x

    torch.manual_seed(0)
    data = torch.randn(5, 3, 4).double()
    check_against_autograd(
        Twice().double(), lambda m, x: m(x).square().flatten(1).sum(1), data, mode=mode
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("used", ["both", "first", "second"])
def test_loss_from_two_outputs(used: str, mode: str) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(4, 6)
            self.heads = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 3)])

        def forward(self, x: Tensor) -> dict[str, Any]:
            x = torch.tanh(self.trunk(x))
            return {"first": self.heads[0](x), "others": [self.heads[1](x), None]}

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x)
        parts = {
            "first": output["first"].square().flatten(1).sum(1),
            "second": output["others"][0].exp().flatten(1).sum(1),
        }
        return parts["first"] + 2 * parts["second"] if used == "both" else parts[used]

    torch.manual_seed(0)
    check_against_autograd(TwoHeads().double(), losses, torch.randn(5, 3, 4).double(), mode=mode)
