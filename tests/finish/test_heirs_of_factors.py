"""Subclasses of factors keep their own way with norms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.factors import Dense, Lookup, Outer
from flash_clipping.rules import registry
from flash_clipping.rules.embedding import EmbeddingRule
from flash_clipping.rules.linear import LinearRule
from tests.support.oracle import assert_close


def test_an_heir_of_kept_gradients_keeps_its_own_way_with_norms() -> None:
    class Doubled(Dense):
        def sqnorms(self, backend: str) -> Tensor:
            return 4 * super().sqnorms(backend)

    grads = torch.randn(3, 5)
    for parts in (None, grads.square()):
        factor = Doubled(grads, parts)
        for _ in range(2):  # the second time their parts are known
            found = factor.sqnorm_parts("torch").sum(1)
            assert_close(found, 4 * grads.square().sum(1), 1e-6)


def test_an_heir_of_an_embeddings_factor_keeps_its_own_way_with_norms() -> None:
    """Even where its norms come in parts, which are taken in another way."""

    class Doubled(Lookup):
        def sqnorms(self, backend: str) -> Tensor:
            return 4 * super().sqnorms(backend)

    class DoubledRule(EmbeddingRule):
        def backward(self, layer, saved, grad_output, needs):
            factor = super().backward(layer, saved, grad_output, needs)[1]["weight"]
            return None, {"weight": Doubled(factor.ids_BT, factor.G_BTd, factor.num_embeddings)}

    ids, layer, norms = torch.randint(9, (3, 5)), nn.Embedding(9, 4), []
    for rule in (EmbeddingRule(), DoubledRule()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "_RULES", {**registry._RULES, nn.Embedding: rule})
            wrapped = GradSampleModuleFlashClipping(nn.Sequential(copy.deepcopy(layer)))
        wrapped(ids).square().sum().backward()
        norms.append(wrapped.get_norm_sample())
    assert_close(norms[1], 2 * norms[0], 1e-6)


def test_an_heir_of_a_linear_factor_keeps_its_own_way_with_norms() -> None:
    """Even where its gradients would be worth storing, whose norms are taken in another way."""

    class Doubled(Outer):
        def sqnorms(self, backend: str) -> Tensor:
            return 4 * super().sqnorms(backend)

    class DoubledRule(LinearRule):
        def backward(self, layer, saved, grad_output, needs):
            grad_input, factors = super().backward(layer, saved, grad_output, needs)
            factor = factors["weight"]
            return grad_input, {"weight": Doubled(factor.A_BTd, factor.G_BTp)}

    torch.manual_seed(0)
    x, layer, norms = torch.randn(3, 64, 4), nn.Linear(4, 4, bias=False), []
    for rule in (LinearRule(), DoubledRule()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry, "_RULES", {**registry._RULES, nn.Linear: rule})
            wrapped = GradSampleModuleFlashClipping(nn.Sequential(copy.deepcopy(layer)))
        wrapped(x).square().sum().backward()
        norms.append(wrapped.get_norm_sample())
    assert_close(norms[1], 2 * norms[0], 1e-6)
