"""Embeddings that write into their weights in forward are refused, by whatever name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import (
    FlashClippingError,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from tests.support.errors import raises

pytestmark = pytest.mark.without_gate


class Mine(nn.Embedding):
    pass


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag, Mine])
def test_refused_at_wrapping(cls: Any, trainable: bool) -> None:
    layer = cls(5, 4, max_norm=0.1).requires_grad_(trainable)
    model = nn.Sequential(nn.Sequential(layer), nn.Linear(4, 2))
    for wrap in (GradSampleModuleFlashClipping, GradSampleHooksFlashClipping):
        with raises("FC103", NotImplementedError, match=r"0\.0 .*max_norm=0\.1.*max_norm=None"):
            wrap(model)


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("cls", [nn.Embedding, nn.EmbeddingBag, Mine])
def test_refused_when_it_is_set_later(cls: Any, trainable: bool) -> None:
    layer = cls(5, 4).requires_grad_(trainable)
    before = layer.weight.detach().clone()
    model = GradSampleModuleFlashClipping(nn.ModuleDict({"e": layer, "h": nn.Linear(4, 2)}))
    model._module.forward = lambda ids: model._module["h"](model._module["e"](ids))
    layer.max_norm = 0.1
    with raises("FC103", (NotImplementedError, FlashClippingError), match=r"max_norm=0\.1"):
        model(torch.tensor([[1, 2], [3, 4]]))
    assert torch.equal(layer.weight, before)


class Functional(nn.Module):
    def __init__(self, trainable: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 4), requires_grad=trainable)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.embedding(ids, self.table, max_norm=0.1))


@pytest.mark.parametrize("trainable", [True, False])
def test_functional_use_is_refused(trainable: bool) -> None:
    model = GradSampleModuleFlashClipping(Functional(trainable))
    with raises("FC103", (NotImplementedError, FlashClippingError)):
        model(torch.tensor([[1, 2], [3, 4]])).sum().backward()
    assert torch.equal(model._module.table, torch.ones(5, 4))


class OfAnother(nn.Module):
    """Takes the table of a layer, in a module that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)
        self.table.weight.data.fill_(1.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.embedding(ids, self.table.weight, max_norm=0.1))


def test_functional_use_of_another_modules_table_is_refused() -> None:
    model = GradSampleModuleFlashClipping(OfAnother())
    with raises("FC103"):
        model(torch.tensor([[1, 2], [3, 4]]))
    assert torch.equal(model._module.table.weight, torch.ones(5, 4))
