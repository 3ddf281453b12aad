"""Layers that read one input: gradients of the input, of some readers, and changes behind them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.oracle import assert_close
from tests.zoo.attention import USES, Readers, all_of_them, first_unused, one_twice, reading


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch).square().flatten(1).sum(1)


def make(use: Callable[..., Tensor] = all_of_them, **options: Any) -> tuple[Readers, Tensor]:
    torch.manual_seed(0)
    model = reading(use, **options).double()
    return model, torch.randn(4, 7, 4, dtype=torch.float64)


@pytest.mark.parametrize("use", [*USES[:2], first_unused, one_twice])
@pytest.mark.parametrize("hooks", [True, False])
def test_gradient_of_a_shared_input_is_autograds(use: Callable[..., Tensor], hooks: bool) -> None:
    """What hooks on it see, and what its producer gets, with clipping and without."""
    model, x = make(use)
    plain = copy.deepcopy(model)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    if not hooks:
        module.disable_hooks()
    module(x)  # the first forward is rehearsed, with backward passes of its own
    seen: dict[str, list[Tensor]] = {"plain": [], "wrapped": []}
    for name, owner in (("plain", plain), ("wrapped", model)):

        def look(layer: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
            output.register_hook(seen[name].append)

        owner.before.register_forward_hook(look)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(loss(plain, (x,)).mean(), x)
    loss(module, (x,)).mean().backward()
    assert x.grad is not None
    assert_close(x.grad, expected, 1e-12)
    assert_close(seen["wrapped"][0], seen["plain"][0], 1e-12)
    assert len(seen["wrapped"]) == len(seen["plain"]) == 1


def test_input_changed_in_place_behind_its_reader_is_an_error() -> None:
    """As it is without taps, where the reader saved it for backward."""

    def changed(x: Tensor, readers: nn.ModuleList) -> Tensor:
        x = x * 1.5
        first = readers[0](x)
        x.mul_(2)
        return first * readers[1](x) * readers[2](x)

    model, x = make(changed)
    module = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    total = loss(module, (x,)).mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
