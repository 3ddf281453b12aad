"""The short way of layers that have been recorded once, and all that must lead away from it.

The oracle is one sample at a time through plain autograd, in float64.

Shape suffixes: B samples, T positions, d features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.tap import Tap
from flash_clipping.rules.normalization import FoundRMSNormRule, ShiftedRMSNormRule
from flash_clipping.rules.registry import find_rule
from tests.support.autograd import (
    check_truth,
    float64s,
    mean_squares,
    squares,
    truth_by_autograd,
)

pytestmark = pytest.mark.without_gate

C = 0.1


class Net(nn.Module):
    """Layers of several rules; ``twice``: one of them may be used again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 2)
        self.twice = self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.checkpointed:
            h = h + checkpoint(self.block, h, use_reentrant=False)
        else:
            h = h + self.block(h)
        if self.twice:
            h = h + self.block(h)
        return self.head(h)

    def block(self, h: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(h))))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that took the short way, in their order."""
    from flash_clipping.capture import tap as module

    taken: list[str] = []
    apply = module.apply_proven_layer

    def noted(tap: Tap, *given: Any) -> Any:
        taken.append(tap.path.split(" ")[0])
        return apply(tap, *given)

    monkeypatch.setattr(module, "apply_proven_layer", noted)
    return taken


def step(flash: Any, x: Tensor) -> None:
    flash.zero_grad(set_to_none=True)
    squares(flash, (x,)).backward()


def check(flash: Any, model: nn.Module, x: Tensor) -> None:
    """One more step is that of single samples."""
    found = squares(flash, (x,))
    found.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    flash.disable_hooks()
    truth = truth_by_autograd(model, (x,), squares)
    flash.enable_hooks()
    for name, p in model.named_parameters():
        p.grad = grads.get(name)
    check_truth(flash, model, truth, C, 1e-9)
    flash.zero_grad(set_to_none=True)


def wrapped() -> tuple[Any, Net, Tensor]:
    torch.manual_seed(0)
    model = Net().double()
    (x,) = float64s(4, 5, 3)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    step(flash, x)
    flash.zero_grad(set_to_none=True)
    return flash, model, x


LAYERS = ["first", "norm", "up", "down", "head"]


def test_every_layer_takes_it_from_the_second_step_on(short: list[str]) -> None:
    flash, model, x = wrapped()
    assert short == []
    check(flash, model, x)
    assert short[:5] == LAYERS


def freeze(model: Net) -> None:
    model.up.bias.requires_grad_(False)


def replace(model: Net) -> None:
    model.up.weight = nn.Parameter(torch.randn_like(model.up.weight))


def use_twice(model: Net) -> None:
    model.twice = True


def recompute(model: Net) -> None:
    model.checkpointed = True


@pytest.mark.parametrize("change", [freeze, replace, use_twice, recompute])
def test_steps_after_a_change_are_exact(change: Callable[[Net], None]) -> None:
    flash, model, x = wrapped()
    check(flash, model, x)
    change(model)
    for batch in (x, x[:2], x.flip(0)[:, :3]):
        check(flash, model, batch)


def test_a_tensor_in_the_place_of_a_parameter_is_noticed() -> None:
    flash, model, x = wrapped()
    model.up.__dict__["bias"] = torch.full((12,), 3.0, dtype=torch.float64)
    output = flash(x)
    output.square().mean().backward()
    grad = model.up._parameters["bias"].grad
    assert grad is None or not grad.any()  # it takes part in the step: it gets noise
    flash.disable_hooks()
    assert torch.equal(output, model(x))


# -- RMS norms of other libraries -----------------------------------------------------------------


class Foreign(nn.Module):
    """As ``transformers`` write it. ``plus``: added to the weight; ``dtype``: of the statistics."""

    def __init__(self, n: int, plus: float = 0.0, power: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(n))
        self.variance_epsilon, self.plus, self.power = 1e-5, plus, power

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(self.power).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + self.variance_epsilon)
        if self.plus:
            return (wide * (self.plus + self.weight.float())).type_as(x)
        return self.weight * wide.to(x.dtype)


def test_rms_norms_are_known_by_what_they_compute() -> None:
    assert type(find_rule(Foreign(6))) is FoundRMSNormRule
    assert type(find_rule(Foreign(6, plus=1.0))) is ShiftedRMSNormRule
    for other in (Foreign(6, plus=0.5), Foreign(6, power=4), Foreign(6).double()):
        assert find_rule(other) is None
    for attribute in ("variance_epsilon", "weight"):
        lacking = Foreign(6)
        delattr(lacking, attribute)
        assert find_rule(lacking) is None


class Counted(Foreign):
    """Computes what its class says now."""

    times, forwards = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).forwards += 1
        return super().forward(x) * self.times


def test_rms_norms_of_one_class_are_tried_once_for_each_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(4, 6)
    plain = nn.Sequential(*[Counted(6) for _ in range(3)])
    tried = []
    for times in (1.0, 2.0, 1.0):
        monkeypatch.setattr(Counted, "times", times)
        expected, before = plain(x), Counted.forwards
        flash = GradSampleModuleFlashClipping(plain)
        tried.append(Counted.forwards - before)
        with torch.no_grad():
            assert torch.allclose(flash(x), expected)
        flash.to_standard_module()
    assert tried == [6, 2, 6]  # once for all; no RMS norm after its first input, plus 0 and plus 1


class OverAllAxes(Foreign):
    def forward(self, x: Tensor) -> Tensor:
        variance = x.square().mean([*range(1, x.dim())], keepdim=True)
        return x * torch.rsqrt(variance + self.variance_epsilon) * self.weight


class ConstantStatistics(Foreign):
    def forward(self, x: Tensor) -> Tensor:
        variance = x.square().mean(-1, keepdim=True).detach()
        return x * torch.rsqrt(variance + self.variance_epsilon) * self.weight


class Gated(Foreign):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x if gate is None else x * gate)


class InTraining(Foreign):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.training else 1)


class Clamped(Foreign):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-8, 8))


class Centred(Foreign):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(1, keepdim=True) if x.dim() == 3 else y


@pytest.mark.parametrize(
    "kind", [OverAllAxes, ConstantStatistics, Gated, InTraining, Clamped, Centred]
)
def test_what_only_resembles_an_rms_norm_is_none(kind: type[Foreign]) -> None:
    assert find_rule(kind(6)) is None and find_rule(kind(6).eval()) is None
    assert find_rule(kind(1)) is None  # one gain for any number of features


def test_mixed_dtypes_run_the_modules_own_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 6), Foreign(6).bfloat16(), nn.Linear(6, 2).bfloat16())
    x = torch.randn(4, 3)
    assert model[1](model[0](x)).dtype == torch.float32
    flash = GradSampleModuleFlashClipping(nn.Sequential(model[0], model[1]))
    assert flash(x).dtype == torch.float32


@pytest.mark.parametrize("plus", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norms_of_other_libraries_are_exact(plus: float, dtype: torch.dtype) -> None:
    """In fp32 the truth is the module's own arithmetic; the weight is fp32 beside bf16 inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6).to(dtype), Foreign(6, plus))
    x = torch.randn(4, 5, 3, dtype=dtype)
    truth = truth_by_autograd(model, (x,), squares)
    model.zero_grad(set_to_none=True)
    expected = model(x)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    for _ in range(2):
        flash.zero_grad(set_to_none=True)
        output = flash(x)
        assert output.dtype == expected.dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(output.float(), expected.float(), rtol=tolerance, atol=tolerance)
        mean_squares(output).backward()
        assert torch.allclose(flash.get_norm_sample().double(), truth.norms, rtol=tolerance, atol=0)
