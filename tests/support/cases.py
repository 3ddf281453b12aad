"""A step of one of the models of :mod:`tests.support.models`, against the oracle."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.models import Case
from tests.support.oracle import Truth, assert_close
from tests.support.sums import norm_of


def make_case(case: Case, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = case.make().to(dtype)
    batch = tuple(x.to(dtype) if x.is_floating_point() else x for x in case.batch())
    return model, batch


def step_case(
    module: GradSampleModuleFlashClipping, case: Case, batch: tuple[Tensor, ...], reduction: str
) -> None:
    losses = case.loss(module, batch)
    (losses.mean() if reduction == "mean" else losses.sum()).backward()


def check_case(
    module: GradSampleModuleFlashClipping, truth: Truth, max_grad_norm: float, tolerance: float
) -> None:
    assert_close(module.get_norm_sample(), truth.norms, tolerance, "norms")
    assert_close(module.get_clipping_coef(), truth.coef(max_grad_norm), tolerance, "coefficients")
    clipped = truth.clipped(max_grad_norm)
    for name, param in module._module.named_parameters():
        if param.requires_grad:
            assert_close(norm_of(module, param), truth.param_norms[name], 10 * tolerance, name)
            assert_close(param.grad, clipped[name], 10 * tolerance, name)
        else:
            assert param.grad is None


def bound_between(truth: Truth) -> float:
    """A clipping bound that clips some samples and not others."""
    return truth.norms.median().item()
