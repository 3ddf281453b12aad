"""A sample or a norm that overflows: dropped, and no other sample is harmed."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.oracle import assert_close
from tests.support.poison import BAD, BATCH, OTHERS, RUNS, TOLERANCE, check_poisoned

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16", "fp16"])


class Overflowing(nn.Module):
    """Squares its activations: finite inputs can overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).square())


@RUNS
@DTYPES
def test_layer_that_overflows_for_one_sample(dtype: torch.dtype, mode: str, reduction: str) -> None:
    """The input is finite; what a layer makes of it is not."""
    torch.manual_seed(0)
    model = Overflowing().to(dtype)
    x = torch.randn(BATCH, 3, 4).to(dtype)
    x[BAD] *= 2000 if dtype == torch.float16 else 1e25
    assert torch.isfinite(x).all() and not torch.isfinite(model(x)[BAD]).all()
    check_poisoned(model, (x,), reduction, mode, TOLERANCE[dtype])


@RUNS
def test_overflow_under_autocast_is_left_out(mode: str, reduction: str) -> None:
    """fp32 parameters, bf16 activations."""
    torch.manual_seed(0)
    model = Overflowing()
    x = torch.randn(BATCH, 3, 4)
    x[BAD] *= 1e25
    with torch.autocast("cpu", torch.bfloat16):
        check_poisoned(model, (x,), reduction, mode, TOLERANCE[torch.bfloat16])


@RUNS
@pytest.mark.parametrize("positions", [1, 2, 3, 40])
def test_norm_that_overflows_fp16(positions: int, mode: str, reduction: str) -> None:
    """A norm above 65504 is a number in fp32, and the sample is clipped like any other.

    With 40 positions the per-sample gradients are stored in fp16: rounded before the norm is
    taken, and the overflowing one left out.
    """
    torch.manual_seed(0)
    model = nn.Linear(16, 16).half()
    x = torch.randn(BATCH, positions, 16).half()
    weights = torch.randn(BATCH, positions, 16)
    weights[BAD] = (weights[BAD] * 30000).clamp(-60000, 60000)
    flash = GradSampleModuleFlashClipping(model, loss_reduction=reduction, mode=mode)
    rows = (flash(x).float() * weights).flatten(1).sum(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (rows.mean() if reduction == "mean" else rows.sum()).backward()
    scale = 1 / BATCH if reduction == "mean" else 1.0
    arrived = (weights * scale).half().double() / scale  # what autograd delivers in fp16
    grads = torch.cat([arrived.mT @ x.double(), arrived.sum(1).unsqueeze(-1)], -1)
    expected = grads.flatten(1).norm(dim=1)
    norms, coef = flash.get_norm_sample(), flash.get_clipping_coef()
    assert 65504 < expected[BAD] < math.inf
    tolerance = 1e-5 if positions < 40 else 2**-11
    assert_close(norms[OTHERS], expected[OTHERS], tolerance, "norms")
    assert torch.isfinite(coef).all() and (coef >= 0).all() and (coef <= 1).all()
    if positions < 40:
        assert_close(norms, expected, 1e-5, "norms")
        assert coef[BAD] > 0
    kept = torch.einsum("b,b...->...", coef.double(), grads)
    found = torch.cat([model.weight.grad, model.bias.grad.unsqueeze(-1)], -1)
    # Coefficients of 1e-6 leave few bits in fp16.
    assert_close(found, kept, 2**-5, "clipped sum")


@RUNS
def test_norm_that_overflows_fp32(mode: str, reduction: str) -> None:
    """A square above 3e38 is inf, and the sample is left out: never NaN, never above the bound."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x = torch.randn(BATCH, 4)
    x[BAD] *= 1e18  # squares once in the loss, once more in the norm
    check_poisoned(model, (x,), reduction, mode)
