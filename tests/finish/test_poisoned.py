"""One sample that is not finite contributes nothing and harms no other sample.

A batch with one poisoned sample is compared with the same batch without it: norms of the others,
coefficients, and the clipped sum. Every model of ``tests/zoo`` is run so as well.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import warns
from tests.support.oracle import assert_close
from tests.support.poison import (
    BAD,
    BATCH,
    OTHERS,
    RUNS,
    Stage,
    check_poisoned,
    losses,
    take,
)
from tests.support.sums import norm_of


class Branch(nn.Module):
    """Two layers side by side; the gradient of one of them can be poisoned alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.stage = nn.Linear(4, 3), nn.Linear(4, 3), Stage()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.stage(self.right(x))


@RUNS
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_layer_not_finite_alone_is_left_out(value: float, mode: str, reduction: str) -> None:
    """The sample's finite gradients in the other layers are left out as well."""
    torch.manual_seed(0)
    model = Branch()
    batch = (torch.randn(BATCH, 3, 4),)
    clean = copy.deepcopy(model)
    model.stage.gradient = (BAD, value)
    found = check_poisoned(model, batch, reduction, mode, clean=clean)
    assert torch.isfinite(norm_of(found, model.left.weight)).all()


@RUNS
def test_whole_batch_is_poisoned(mode: str, reduction: str) -> None:
    """All coefficients are 0 and the sum is zero, so that the step adds only noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    x = torch.full((BATCH, 4), math.nan)
    with warns("FC555"):
        flash = take(model, (x,), reduction, mode=mode)
    assert not flash.get_clipping_coef().any()
    for name, param in model.named_parameters():
        assert param.grad is not None and not param.grad.any(), name


@RUNS
def test_poisoned_samples_warn_once(mode: str, reduction: str) -> None:
    """One warning for the life of a wrapped model, and none for finite batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
    flash = GradSampleModuleFlashClipping(model, loss_reduction=reduction, mode=mode)

    def step(bad: bool) -> list[str]:
        x = torch.randn(BATCH, 4)
        if bad:
            x[BAD] = math.inf
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = losses(flash, (x,))
            (rows.mean() if reduction == "mean" else rows.sum()).backward()
        return [str(w.message) for w in caught if "not finite" in str(w.message)]

    assert [len(step(bad)) for bad in (False, True, True, False, True)] == [0, 1, 0, 0, 0]


@RUNS
@pytest.mark.parametrize("clipping", ["per_layer", "automatic"])
def test_poisoned_sample_is_left_out_by_any_clip(clipping: str, mode: str, reduction: str) -> None:
    """Coefficients are never NaN, and the sum is finite and without the sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.LayerNorm(6), nn.Linear(6, 3))
    x = torch.randn(BATCH, 4)
    clean = copy.deepcopy(model)
    rest = (x[OTHERS],)
    x[BAD, 0] = math.nan
    bound: Any = [0.5] * 6 if clipping == "per_layer" else 0.5
    expected = take(clean, rest, reduction, mode=mode, clipping=clipping, max_grad_norm=bound)
    with warns("FC555"):
        found = take(model, (x,), reduction, mode=mode, clipping=clipping, max_grad_norm=bound)
    coef = found.get_clipping_coef()
    assert torch.isfinite(coef).all() and (coef >= 0).all()
    if clipping == "per_layer":
        assert (coef <= 1).all()
    assert not coef[..., BAD].any()
    assert_close(coef[..., OTHERS], expected.get_clipping_coef(), 1e-5, "coefficients")
    for name, param in model.named_parameters():
        assert_close(param.grad, clean.get_parameter(name).grad, 1e-5, name)
