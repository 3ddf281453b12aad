"""Models that mix samples are refused, others are not, and no part of the oracle is for nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flash_clipping import register_rule
from flash_clipping.capture.no_trace import ModelsOwnError
from flash_clipping.capture.proof.oracle import WORDS
from flash_clipping.factors import PerSampleGrad
from flash_clipping.rules.linear import LinearRule
from tests.capture.proof.mixers import RIGHT, WRONG, WRONG_AFTER, Around, B, K, T
from tests.capture.proof.proving import (
    nothing_else_is_shown,
    prove,
    table_of,
    why_refused,
    wrapped,
)
from tests.capture.proof.states import every_state
from tests.support.errors import raises

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("same_numbers")]


@pytest.mark.parametrize("name", RIGHT)
def test_another_model_is_not(name: str) -> None:
    table = table_of(Around(RIGHT[name]), torch.randn(B, T, K), audits=2)
    assert table.outputs == (0,) and not table.unfit


# -- rules that are wrong --------------------------------------------------------------------------


class _Wrong(PerSampleGrad):
    """Per-sample gradients whose norms, or whose sum, are off."""

    def __init__(self, grads: Tensor, norm: float = 1.0, sum: float = 1.0) -> None:
        self.grads, self.norm, self.sum = grads, norm, sum

    @property
    def batch_size(self) -> int:
        return len(self.grads)

    def sqnorms(self, backend: str) -> Tensor:
        return self.grads.flatten(1).square().sum(1) * self.norm**2

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        coef_B = torch.ones(len(self.grads)) if coef_B is None else coef_B
        return torch.tensordot(coef_B, self.grads, 1) * self.sum

    def dense(self) -> Tensor:
        return self.grads


class Faulty(nn.Linear):
    """A linear layer with a rule of its own, which is wrong by two in a hundred."""


class FaultyNorm(Faulty):
    pass


class FaultySum(Faulty):
    pass


@register_rule(Faulty)
class _FaultyRule(LinearRule):
    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: Any) -> Any:
        grad_input, factors = super().backward(layer, saved, grad_output, needs)
        off = {"norm": 1.02} if isinstance(layer, FaultyNorm) else {"sum": 1.02}
        return grad_input, {name: _Wrong(f.dense(), **off) for name, f in factors.items()}


def with_layer(layer: nn.Module) -> nn.Module:
    model = Around(RIGHT["plain"])
    model.layer = layer
    return model


# -- every part ------------------------------------------------------------------------------------


def of_part(part: str) -> nn.Module:
    """A model that this part alone refuses."""
    if part == "VALUE":
        return Around(RIGHT["plain"], WRONG_AFTER["output, shifted"])
    if part == "NORM":
        return with_layer(FaultyNorm(8, 8))
    if part == "GRADIENT":
        return with_layer(FaultySum(8, 8))
    names = {
        "EXTREME": "outlier guard",
        "PERTURB": "behind two zero gates",
    }
    return Around(WRONG[names[part]])


@pytest.mark.parametrize("part", ["VALUE", "NORM", "GRADIENT", "EXTREME", "PERTURB"])
def test_each_part_alone_refuses_some_model(part: str) -> None:
    """Mutants without a part are killed here."""
    why = why_refused(of_part(part), torch.randn(B, T, K))
    assert why and WORDS.get(part, "") in why


def test_rows_that_are_booked_to_others_are_named_as_such() -> None:
    """Another part sees them as well, in other words."""
    model = Around(WRONG["two swapped inside"])
    assert WORDS["STRAY"] in why_refused(model, torch.randn(B, T, K), audits=1)


class _IntoTheFirst(torch.autograd.Function):
    """The first row's gradient gets the third's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[0] += grad[2]
        return grad


def test_audits_look_at_the_other_half_of_the_samples() -> None:
    x, inner = torch.randn(4, T, K), lambda m, h: _IntoTheFirst.apply(h)
    assert not why_refused(Around(inner), x)
    assert WORDS["NORM"] in why_refused(Around(inner), x, audits=1)


# -- kinds of calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("name", ["dropout", "plain"])
def test_batches_of_all_sizes(name: str, count: int) -> None:
    assert table_of(Around(RIGHT[name]), torch.randn(count, T, K), audits=3).outputs == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["dropout", "norm", "mean", "hook, norm"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model = Around({**RIGHT, **WRONG}[name]).to(dtype)
    why = why_refused(model, torch.randn(B, T, K, dtype=dtype))
    assert bool(why) == (name in WRONG), why


def test_time_first() -> None:
    x = torch.randn(T, B, K)
    assert table_of(Around(RIGHT["plain"]), x, batch_first=False).outputs == (0,)
    mixes = Around(lambda m, h: m.layer(h) - h.mean(1, keepdim=True))
    assert why_refused(mixes, x, batch_first=False)


# -- nothing of the user's is changed --------------------------------------------------------------


class Counting(Around):
    def forward(self, x: Tensor) -> Any:
        self.seen.add_(1.0)
        self.seen = self.seen + 1
        self.history = [*getattr(self, "history", []), len(x)]
        self.drawn = random.random() + np.random.rand() + torch.rand(()).item()
        if self.fails_at == self.calls:
            raise KeyboardInterrupt
        return super().forward(x)

    fails_at = -1


@pytest.mark.parametrize("fails_at", [-1, 0, 1, 2])
def test_nothing_of_the_user_s_is_changed(fails_at: int) -> None:
    model = Counting(RIGHT["dropout"])
    x = torch.randn(B, T, K)
    flash = wrapped(model, x, strict=False)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    handle = model.layer.register_forward_hook(lambda *_: None)
    before = every_state(flash)
    model.fails_at = fails_at if fails_at < 0 else model.calls + fails_at
    try:
        prove(flash, (x,), {})
    except KeyboardInterrupt:
        assert fails_at >= 0
    model.fails_at = -1
    after = every_state(flash)
    assert before == after
    handle.remove()
    with nothing_else_is_shown():  # and the next step is as it would have been
        flash.zero_grad(set_to_none=True)
        flash(x).square().sum().backward()
    assert flash.get_norm_sample().shape == (B,)


def test_what_was_computed_before_goes_backward_afterwards() -> None:
    """Parameters are moved without a trace that autograd would see."""
    model = Around(RIGHT["plain"])
    x = torch.randn(B, T, K)
    flash = wrapped(model, x)
    loss = flash(x).square().sum()
    prove(flash, (x,), {})
    loss.backward()
    assert all(p.grad is not None for p in model.layer.parameters())


def test_casts_of_moved_parameters_are_forgotten() -> None:
    model = Around(RIGHT["plain"])
    x = torch.randn(B, T, K)
    with torch.autocast("cpu", torch.bfloat16):
        flash = wrapped(model, x)
        flash.disable_hooks()  # taps have casts of their own
        before = model(x)
        flash.enable_hooks()
        prove(flash, (x,), {})
        flash.disable_hooks()
        assert torch.equal(before, model(x))


def test_an_error_of_the_model_s_own_comes_through() -> None:
    flash = wrapped(Around(RIGHT["plain"]), torch.randn(B, T, K))
    with pytest.raises(ModelsOwnError, match="RuntimeError: mat1 and mat2") as caught:
        prove(flash, (torch.randn(B, T, K + 1),), {})
    assert type(caught.value.__cause__) is RuntimeError


@pytest.mark.parametrize("name", ["dropout", "mean"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_shows_nothing(name: str, poison: float) -> None:
    """The others are compared."""
    x = torch.randn(B, T, K)
    x[0, 1] = poison
    model = Around({**RIGHT, "mean": lambda m, h: m.layer(h) - h.detach()[1:].mean(0)}[name])
    assert bool(why_refused(model, x)) == (name == "mean")


def test_without_a_finite_sample_nothing_is_shown() -> None:
    table = table_of(Around(RIGHT["plain"]), torch.full((B, T, K), float("nan")))
    assert not table.outputs and not table.unfit


class Large(Around):
    """Backward takes too much memory for more than three samples."""

    def forward(self, x: Tensor) -> Any:
        if len(x) > 3 and torch.is_grad_enabled() and self.limited:
            raise torch.OutOfMemoryError
        return super().forward(x)

    limited = False


@pytest.mark.parametrize("name", ["dropout", "mean"])
def test_a_batch_that_does_not_fit_twice_is_looked_at_in_part(name: str) -> None:
    model = Large({**RIGHT, **WRONG}[name])
    x = torch.randn(12, T, K)
    flash = wrapped(model, x)
    model.limited = True
    if name == "dropout":
        assert prove(flash, (x,), {}, audit=1).outputs == (0,)
    else:
        with raises("FC210", match="output 0"):
            prove(flash, (x,), {}, audit=1)
    model.limited = False
