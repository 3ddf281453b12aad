"""Batch normalization: exact in eval mode, where it reads running statistics; else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flash_clipping import GradSampleModuleFlashClipping, diagnostics
from flash_clipping.engine.unsupported import validate
from tests.support.autograd import check_by_autograd, float64s, squares
from tests.support.errors import raises


def in_eval_mode(trainable: bool = False, **options: Any) -> nn.Module:
    """A model in train mode, but for its normalization."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, **options).requires_grad_(trainable)
    for values in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        if values is not None:
            nn.init.uniform_(values, 0.5, 2.0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    norm.eval()
    return model.double()


@pytest.mark.parametrize("mode, wrapper", [("one_pass", "wrapped"), ("two_pass", "hooks")])
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"trainable": True}], ids=str)
def test_in_eval_mode_it_is_exact(options: dict[str, Any], mode: str, wrapper: str) -> None:
    model = in_eval_mode(**options)
    assert model.training
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    check_by_autograd(model, float64s(5, 2, 4, 4), squares, mode=mode, wrapper=wrapper)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name])


def test_a_frozen_one_passes_the_engine_s_validation_and_the_check() -> None:
    validate(in_eval_mode())
    assert diagnostics.check(in_eval_mode(), *float64s(4, 2, 4, 4)).passed


def test_without_running_statistics_it_is_refused() -> None:
    with raises("FC101", NotImplementedError, match=r"1 \(BatchNorm2d"):
        GradSampleModuleFlashClipping(in_eval_mode(track_running_stats=False))


@pytest.mark.parametrize("strict", [True, False])
def test_train_mode_after_wrapping_is_refused(strict: bool) -> None:
    model = in_eval_mode()
    flash = GradSampleModuleFlashClipping(model, strict=strict)
    batch = float64s(5, 2, 4, 4)
    squares(flash, batch).backward()
    model.zero_grad(set_to_none=True)
    for wrapped in (flash, model):
        wrapped.train()
        with raises("FC101", NotImplementedError, match=r"1 \(BatchNorm2d") as error:
            squares(flash, batch)
        exec(str(error.value).splitlines()[-1].strip(), {"model": wrapped})  # what it says to do
        squares(flash, batch).backward()
        model.zero_grad(set_to_none=True)
