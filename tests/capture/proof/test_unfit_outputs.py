"""Gradients of single samples, compared with autograd's before they are trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import float64s, squares
from tests.support.errors import raises

Layers = Callable[[nn.Module, Tensor], Tensor]


class Around(nn.Module):
    """What a test is about, between two ordinary layers."""

    def __init__(self, inner: Layers, **parts: Any) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.randn(4))
        self.inner = inner
        self.calls = 0
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(torch.tanh(self.inner(self, self.embed(x))))


def signed(x: Tensor, gain: Tensor) -> Tensor:
    """A product with a sign of chance for each element."""
    if has_torch_function((x, gain)):
        return handle_torch_function(signed, (x, gain), x, gain)
    return x * gain * (2 * torch.empty_like(x).bernoulli_(0.5) - 1)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_gradient_of_the_right_norm_is_refused(mode: Any) -> None:
    """What runs again in backward, where other signs fall, has another gradient of the same norm,
    as dropout has one of almost the same."""
    torch.manual_seed(0)
    model = Around(lambda m, h: signed(m.layer(h), m.gain)).double()
    model.embed.requires_grad_(False)
    model.layer.requires_grad_(False)  # of what is behind signs, other norms would show it
    flash = GradSampleModuleFlashClipping(model, mode=mode)
    with raises("FC210", match="gain"):
        squares(flash, float64s(3, 3)).backward()


class TwoOutputs(Around):
    """Each sample's own, and similarities of all pairs."""

    def forward(self, x: Tensor) -> Any:
        rows = super().forward(x).flatten(1)
        if self.by == "einsum":
            return {"rows": rows, "pairs": torch.einsum("bd,cd,->bc", rows, rows, self.gain[0])}
        return {"rows": rows, "pairs": (self.gain[0] * rows) @ rows.T}


@pytest.mark.parametrize("by", ["product", "einsum"])
def test_only_a_gradient_of_the_unfit_output_is_refused(by: Any) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(TwoOutputs(lambda m, h: m.layer(h), by=by).double())
    (x,) = float64s(4, 5, 3)
    flash(x)["rows"].square().sum().backward()
    assert flash.get_norm_sample().shape == (4,)
    flash.zero_grad()
    with raises("FC210"):
        flash(x)["pairs"].square().sum().backward()


class PairsIf(Around):
    """Similarities of all pairs, if asked for, behind outputs that are the samples' own."""

    def forward(self, x: Tensor, pairs: bool = True, before: int = 0) -> Any:
        rows = super().forward(x).flatten(1)
        last = (self.gain[0] * rows) @ rows.T if pairs else rows
        return [rows * number for number in range(1, before + 1)], last


@pytest.mark.parametrize("unfit_first", [True, False])
def test_what_one_kind_of_call_may_not_give_is_refused_beside_another(unfit_first: bool) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(PairsIf(lambda m, h: m.layer(h)).double())
    (x,) = float64s(4, 5, 3)
    if unfit_first:
        flash(x)
    flash(x, pairs=False)[1].square().sum().backward()
    flash.zero_grad()
    with raises("FC210"):
        flash(x)[1].square().sum().backward()


def test_it_leaves_nothing_and_is_not_done_again() -> None:
    torch.manual_seed(0)
    model = Around(lambda m, h: m.layer(h) * m.gain).double()
    flash = GradSampleModuleFlashClipping(model)
    x = float64s(4, 5, 3)
    state = torch.get_rng_state()
    output = flash(*x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    output.square().sum().backward()
    calls = model.calls
    squares(flash, x).backward()
    assert model.calls == calls + 1
