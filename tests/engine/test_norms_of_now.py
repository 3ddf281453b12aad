"""Norms are those of the last batch, or there are none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_norms_of_an_earlier_batch(mode: str) -> None:
    """Between a forward and its backward there are none; those without gradients do not count."""
    model = GradSampleModuleFlashClipping(nn.Linear(3, 2), mode=mode)
    model(torch.randn(4, 3)).sum().backward()
    first = model.get_norm_sample()
    with torch.no_grad():
        model(torch.randn(5, 3))
    assert torch.equal(model.get_norm_sample(), first)
    loss = model(torch.randn(6, 3)).sum()
    for ask in (model.get_norm_sample, model.get_clipping_coef):
        with raises("FC525", match="last forward yet"):
            ask()
    loss.backward()
    assert len(model.get_norm_sample()) == len(model.get_clipping_coef()) == 6


def test_a_backward_that_is_for_inputs_only_leaves_no_norms() -> None:
    model = GradSampleModuleFlashClipping(nn.Linear(3, 2))
    model(torch.randn(4, 3)).sum().backward()
    x = torch.randn(6, 3, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    with raises("FC525", match="last forward yet"):
        model.get_norm_sample()
