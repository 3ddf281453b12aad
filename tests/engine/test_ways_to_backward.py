"""One gradient, many ways to ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn

from flash_clipping import FlashLoss, GradSampleModuleFlashClipping
from tests.support.engine import convolutional_network, digits


def gradients(
    backward: Callable[[Any, Any, Tensor, Tensor], None],
    module_options: dict[str, Any] | None = None,
    reduction: str = "mean",
) -> tuple[list[Tensor], Tensor]:
    """Clipped sums and norms on one batch of the digits, float64."""
    dataset = digits()
    x, y = dataset.tensors[0][:16].double(), dataset.tensors[1][:16]
    model = GradSampleModuleFlashClipping(
        convolutional_network().double(),
        max_grad_norm=0.5,
        loss_reduction=reduction,
        **(module_options or {}),
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        expected_batch_size=16,
        loss_reduction=reduction,
    )
    backward(model, optimizer, x, y)
    return [param.grad for param in model.parameters()], model.get_norm_sample()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_way_to_backward_gives_the_same_gradient(reduction: str) -> None:
    def plain(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y, reduction=reduction).backward()

    def criterion(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = nn.CrossEntropyLoss(reduction=reduction)
        FlashLoss(model, optimizer, loss, reduction)(model(x), y).backward()

    def opacus_criterion(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = nn.CrossEntropyLoss(reduction=reduction)
        DPLossFastGradientClipping(model, optimizer, loss, reduction)(model(x), y).backward()

    def hand_written_ghost_loop(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        losses = F.cross_entropy(model(x), y, reduction="none")
        getattr(losses, reduction)().backward(retain_graph=True)
        optimizer.zero_grad()
        coef = model.get_clipping_coef()
        model.disable_hooks()
        (coef * losses).sum().backward()
        model.enable_hooks()

    expected, expected_norms = gradients(plain, reduction=reduction)
    for way in (criterion, opacus_criterion, hand_written_ghost_loop):
        found, norms = gradients(way, reduction=reduction)
        torch.testing.assert_close(norms, expected_norms, rtol=1e-12, atol=0)
        for grad, expected_grad in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-14)
    for way in (plain, criterion):
        found, norms = gradients(way, {"mode": "two_pass"}, reduction)
        torch.testing.assert_close(norms, expected_norms, rtol=1e-12, atol=0)
        for grad, expected_grad in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-14)


def test_loss_arithmetic_is_differentiated() -> None:
    def twice(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        criterion = FlashLoss(model, optimizer, nn.CrossEntropyLoss())
        output = model(x)
        (criterion(output, y) / 4 + 0.75 * criterion(output, y) + 1).backward()

    def once(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    for found, expected in zip(gradients(twice)[0], gradients(once)[0], strict=True):
        torch.testing.assert_close(found, expected)
