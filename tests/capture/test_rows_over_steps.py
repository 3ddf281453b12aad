"""Rows that are no samples, or that lie in another order at a later step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import float64s, mean_squares, squares
from tests.support.errors import raises


class Around(nn.Module):
    """``inner`` between two layers that have the batch first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(3, 4), inner, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))))


def norms_like_the_truth(model: nn.Module, flash: Any, batch: tuple[Tensor, ...]) -> None:
    model.zero_grad(set_to_none=True)
    squares(flash, batch).backward()
    found = flash.get_norm_sample()
    flash.disable_hooks()
    truth = []
    for b in range(len(batch[0])):
        model.zero_grad(set_to_none=True)
        squares(flash, (batch[0][b : b + 1],)).backward()
        truth.append(math.hypot(*(float(p.grad.norm()) for p in model.parameters())))
    flash.enable_hooks()
    model.zero_grad(set_to_none=True)
    torch.testing.assert_close(found, found.new_tensor(truth), rtol=1e-9, atol=0)


class Windows(nn.Module):
    """Windows of four positions in front of the samples: of a longer text, rows that lie apart."""

    def __init__(self, inner: nn.Module, flat: bool = False) -> None:
        super().__init__()
        self.inner, self.flat = inner, flat

    def forward(self, h: Tensor) -> Tensor:
        w_WBTd = h.unflatten(1, (-1, 4)).transpose(0, 1)
        rows = w_WBTd.flatten(0, 2 if self.flat else 1)
        return self.inner(rows).view(w_WBTd.shape).transpose(0, 1).flatten(1, 2)


def test_rows_that_lie_apart_in_a_declared_module_are_refused() -> None:
    torch.manual_seed(0)
    model = Around(Windows(nn.Linear(4, 4))).double()
    flash = GradSampleModuleFlashClipping(model, folded_modules=["inner.inner"])
    with raises("FC202", match=r"expected rounding alone"):
        squares(flash, float64s(3, 8, 3)).backward()


@pytest.mark.parametrize("flat", [False, True])
def test_text_with_more_windows_than_the_first_is_refused(flat: bool) -> None:
    """With one window its rows are samples, or parts of them that lie together; with two they lie
    apart."""
    torch.manual_seed(0)
    model = Around(Windows(nn.Linear(4, 4), flat)).double()
    flash = GradSampleModuleFlashClipping(model)
    for positions in (4, 8, 4, 12):
        if positions == 4:
            norms_like_the_truth(model, flash, float64s(3, positions, 3))
            continue
        with raises("FC201", match=r"inner\.inner"):
            squares(flash, float64s(3, positions, 3)).backward()


class Turns(nn.Module):
    """In another order under a condition that does not hold in the first step."""

    def __init__(self, condition: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.ffn, self.condition = nn.Linear(4, 4), condition

    def forward(self, h: Tensor) -> Tensor:
        if self.condition(self, h):
            return self.ffn(h)
        return self.ffn(h.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("when", ["evaluation", "longer"])
def test_another_axis_at_a_later_step_is_refused(when: str, turned: bool) -> None:
    """Parts of other sizes would do along either axis: in the end it is values that tell."""
    torch.manual_seed(0)
    conditions: dict[str, Callable[[nn.Module, Tensor], object]] = {
        "evaluation": lambda self, h: not self.training,
        "longer": lambda _, h: h.shape[1] > 5,
    }
    model = Around(Turns(lambda m, h: bool(conditions[when](m, h)) != turned)).double()
    flash = GradSampleModuleFlashClipping(model)
    squares(flash, float64s(3, 4, 3)).backward()
    model.zero_grad(set_to_none=True)
    flash.train(when != "evaluation")
    x = float64s(3, 6, 3)
    for _ in range(2):
        with raises("FC201|FC232", match="ffn"):
            squares(flash, x).backward()
        assert all(param.grad is None for param in model.parameters())


class CallsAPart(nn.Module):
    """A training step calls a part of it, as Lightning's do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def training_step(self, x: Tensor) -> Tensor:
        return mean_squares(self.net(x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("after_a_call", [False, True])
def test_call_of_a_part_of_a_model_is_refused(after_a_call: bool) -> None:
    """A root whose forward is never called: nothing knew how many samples there are."""
    model = CallsAPart()
    model.forward = lambda x: model.net(x)  # type: ignore[method-assign]
    flash = GradSampleModuleFlashClipping(model)
    kept = flash(torch.randn(5, 5, 4)) if after_a_call else None
    with raises("FC401", match=r"net.0 \(Linear\)"):
        model.training_step(torch.randn(5, 5, 4))
    with torch.no_grad():
        model.training_step(torch.randn(5, 5, 4))
    mean_squares(flash(torch.randn(5, 5, 4))).backward()
    assert len(flash.get_norm_sample()) == 5
    del kept


class Beside(nn.Module):
    """Its output is each sample's own. A loss of its own, and what it keeps, are of neighbours."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)
        self.gain, self.how = nn.Parameter(torch.ones(4)), how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).tanh()
        rolled = h.roll(1, 0)
        self.kept = self.other(rolled) if self.how == "layer" else rolled * self.gain
        return self.head(h), self.kept.square().sum()


class Twice(nn.Module):
    """Uses one parameter for its output, and for neighbours in what it keeps, in either order."""

    def __init__(self, how: str, kept_first: bool) -> None:
        super().__init__()
        self.first, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.how, self.kept_first = how, kept_first

    def use(self, x: Tensor) -> Tensor:
        if self.how == "layer":
            return self.other(x)
        return F.linear(x, self.other.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.kept_first:
            self.kept = self.use(h.roll(1, 0))
        shown = self.use(h)
        if not self.kept_first:
            self.kept = self.use(h.roll(1, 0))
        return self.head(shown)


@pytest.mark.parametrize("kept_first", [False, True])
@pytest.mark.parametrize("how", ["layer", "bare parameter"])
def test_call_that_no_output_shows_beside_another_is_refused(how: str, kept_first: bool) -> None:
    torch.manual_seed(0)
    model = Twice(how, kept_first).double()
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC202", match="no output of the model that has a row for each"):
        flash(*float64s(4, 4))
        model.kept.square().sum().backward()


@pytest.mark.parametrize("loss", ["own", "kept"])
@pytest.mark.parametrize("how", ["layer", "bare parameter"])
def test_loss_of_what_no_output_shows_is_refused(how: str, loss: str) -> None:
    torch.manual_seed(0)
    model = Beside(how).double()
    flash = GradSampleModuleFlashClipping(model)
    words = "none has shown which of its rows belong to which sample"
    with raises("FC230", match=words) as caught:
        own = flash(*float64s(4, 4))[1]
        (own if loss == "own" else model.kept.square().sum()).backward()
    # Each of its rows is a whole sample: to declare parts would be wrong.
    assert "folded_modules" not in str(caught.value)
    assert all(param.grad is None for param in model.parameters())


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
