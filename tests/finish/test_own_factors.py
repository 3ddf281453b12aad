"""Factors of users' own, and those that nobody may derive from."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import (
    GradSampleModuleFlashClipping,
    factors,
)
from flash_clipping.rules import registry
from flash_clipping.rules.linear import LinearRule
from tests.support.errors import raises
from tests.support.factors import Own
from tests.support.oracle import assert_close
from tests.support.wrapping import MODES


def test_a_factor_of_a_users_own_is_asked_for_its_norms() -> None:
    class Doubled(Own):
        def sqnorms(self, backend: str) -> Tensor:
            return 4 * super().sqnorms(backend)

    class OwnRule(LinearRule):
        def backward(self, layer, saved, grad_output, needs):
            grad_input, found = super().backward(layer, saved, grad_output, needs)
            return grad_input, {name: Doubled(each.dense()) for name, each in found.items()}

    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    plain = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_RULES", {**registry._RULES, nn.Linear: OwnRule()})
        flash = GradSampleModuleFlashClipping(model, loss_reduction="sum")
        with raises("FC210"):  # as it should be
            flash(x).square().sum().backward()
        patch.setattr("flash_clipping.capture.proof.gate.Gate.examine", lambda *_: None)
        flash = GradSampleModuleFlashClipping(flash.to_standard_module(), loss_reduction="sum")
        flash(x).square().sum().backward()
    for b in range(5):
        grads = torch.autograd.grad(plain(x[b : b + 1]).square().sum(), list(plain.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        assert_close(flash.get_norm_sample()[b], 2 * norm, 1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_factor_with_another_number_of_samples_is_refused(mode: str) -> None:
    class Halved(LinearRule):
        def backward(self, layer, saved, grad_output, needs):
            grad_input, found = super().backward(layer, saved, grad_output, needs)
            return grad_input, {name: Own(each.dense()[::2]) for name, each in found.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_RULES", {**registry._RULES, nn.Linear: Halved()})
        patch.setattr("flash_clipping.capture.proof.gate.Gate.examine", lambda *_: None)
        flash = GradSampleModuleFlashClipping(nn.Linear(4, 3), mode=mode)
        with raises("FC201", match="found 3 samples .* with a batch of 6"):
            flash(torch.randn(6, 4)).square().mean().backward()


@pytest.mark.parametrize(
    "name",
    [
        "EmbeddingBagGrad",
        "ConvolutionGrad",
        "DenseGrad",
        "EmbeddingGrad",
        "LinearGrad",
        "SumGrad",
        "StackedGrad",
        "TiedEmbeddingGrad",
    ],
)
def test_nobody_derives_from_the_librarys_own(name: str) -> None:
    """Steps handle these many at a time, and would pass an heir's norms by."""
    with raises("FC165", TypeError, match=f"Heir is derived from {name}, which is final"):
        type("Heir", (getattr(factors, name),), {})
