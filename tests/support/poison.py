"""Models in which one sample is not finite, and steps that are compared with those without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import warns
from tests.support.oracle import assert_close

BATCH, BAD = 5, 2
OTHERS = [b for b in range(BATCH) if b != BAD]

#: Relative error between the batch with and without the sample. Norms and sums are in both cases
#: those of the same operands; a matmul may round differently for another number of rows, and with
#: mean reduction the gradients that arrive are divided by another number of samples.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-8}

RUNS = pytest.mark.parametrize(("mode", "reduction"), [("one_pass", "mean"), ("two_pass", "sum")])


class Poison(torch.autograd.Function):
    """Multiplies one sample's gradient by ``value``; the forward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sample: int | None, value: float) -> Tensor:
        ctx.sample, ctx.value = sample, value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.sample is not None:
            grad = grad.clone()
            grad[ctx.sample] *= ctx.value
        return grad, None, None


class Stage(nn.Module):
    """Between two halves of a model: lets one sample's activation or gradient be poisoned."""

    def __init__(self) -> None:
        super().__init__()
        self.activation: tuple[int, float] | None = None
        self.gradient: tuple[int, float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.activation is not None:
            sample, value = self.activation
            blow = torch.zeros_like(x)
            blow[sample].view(-1)[0] = value
            x = x + blow
        if self.gradient is not None:
            x = Poison.apply(x, *self.gradient)
        return x


def losses(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    rows = model(*batch).flatten(1).float()
    return (rows.square() * torch.linspace(0.5, 1.5, rows.shape[1])).sum(1) / 2


def take(
    model: nn.Module, batch: tuple[Tensor, ...], reduction: str, **options: Any
) -> GradSampleModuleFlashClipping:
    flash = GradSampleModuleFlashClipping(model, loss_reduction=reduction, **options)
    # Samples are known by then: a row that is poisoned by its place would look like no sample's.
    stages = [module for module in model.modules() if isinstance(module, Stage)]
    poisons = [stage.activation for stage in stages]
    for stage in stages:
        stage.activation = None
    flash(*batch)
    for stage, activation in zip(stages, poisons, strict=True):
        stage.activation = activation
    rows = losses(flash, batch)
    (rows.mean() if reduction == "mean" else rows.sum()).backward()
    return flash


def check_without(
    found: GradSampleModuleFlashClipping,
    model: nn.Module,
    expected: GradSampleModuleFlashClipping,
    clean: nn.Module,
    tolerance: float,
) -> None:
    """Norms, coefficients and clipped sums are those of the batch without the sample."""
    norms, coef = found.get_norm_sample(), found.get_clipping_coef()
    assert not torch.isfinite(norms[BAD])
    assert coef[BAD] == 0
    assert torch.isfinite(coef).all() and (coef >= 0).all() and (coef <= 1).all()
    assert_close(norms[OTHERS], expected.get_norm_sample(), tolerance, "norms")
    assert_close(coef[OTHERS], expected.get_clipping_coef(), tolerance, "coefficients")
    reference = dict(clean.named_parameters())
    # A gradient that cancels to nothing is compared at the scale of the whole sum.
    largest = max(p.grad.float().abs().max().item() for p in reference.values())
    assert largest > 0
    for name, param in model.named_parameters():
        assert torch.isfinite(param.grad).all(), name
        error = (param.grad.float() - reference[name].grad.float()).abs().max().item()
        assert error <= tolerance * largest, f"{name}: {error:.2e} of {largest:.2e}"


def bound_of(model: nn.Module, batch: tuple[Tensor, ...], reduction: str) -> float:
    """A bound that clips some samples and not others."""
    flash = take(copy.deepcopy(model), batch, reduction)
    return flash.get_norm_sample().median().item()


def check_poisoned(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    reduction: str,
    mode: str,
    tolerance: float = 1e-5,
    clean: nn.Module | None = None,
) -> GradSampleModuleFlashClipping:
    """A step on this batch is that of the batch without sample :data:`BAD`, and warns of it.

    Args:
        clean: the model without its poison, if it is the model that is poisoned.
    """
    clean = copy.deepcopy(model if clean is None else clean)
    rest = tuple(x[OTHERS] for x in batch)
    options: dict[str, Any] = {"mode": mode, "max_grad_norm": bound_of(clean, rest, reduction)}
    expected = take(clean, rest, reduction, **options)
    with warns("FC555"):
        found = take(model, batch, reduction, **options)
    check_without(found, model, expected, clean, tolerance)
    return found
