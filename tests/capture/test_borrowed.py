"""Parameters that a module uses which another module owns.

Shape suffixes: B samples, T positions, d features.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import check_by_autograd, float64s, id_batch, squares
from tests.support.errors import raises

pytestmark = pytest.mark.without_gate


class Mixer(nn.Module):
    """Uses a layer, and its weight and bias by themselves as well, as state-space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.conv = nn.Linear(4, 4), nn.Conv1d(4, 4, 2, groups=4)
        self.decay = nn.Parameter(torch.randn(4))

    def forward(self, h: Tensor) -> Tensor:
        rows = F.pad(h.mT, (1, 0))
        h = F.conv1d(rows, self.conv.weight, self.conv.bias, groups=4).mT
        h = self.step(h) - self.step.bias + h @ self.step.weight.T
        return h * torch.sigmoid(self.decay + self.step.bias.to(h.dtype))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixer, self.head = nn.Linear(3, 4), Mixer(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixer(self.embed(x)))


class Queries(nn.Module):
    """Learned queries in a table that is never called, as DETR's; their user owns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.table = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        queries = self.table.weight.unsqueeze(0).repeat(len(x), 1, 1)
        return self.head(torch.softmax(queries @ h.mT, -1) @ h + queries)


class Tied(nn.Module):
    """The root takes an embedding's table for its head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.block(self.table(ids))
        return F.linear(h, self.table.weight) + h @ self.table.weight.t()


class NormedTable(nn.Module):
    """A table that is never called goes through layers, as DeBERTa's relative places do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.keys = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys(self.norm(self.table.weight).unsqueeze(0))
        return self.head(torch.tanh(self.embed(x) @ keys.mT))


def test_a_table_that_goes_through_layers() -> None:
    torch.manual_seed(0)
    check_by_autograd(NormedTable().double(), float64s(3, 4, 3), squares)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("wrapper", ["wrapped", "hooks"])
def test_layers_whose_parameters_a_parent_uses(wrapper: str, mode: str) -> None:
    torch.manual_seed(0)
    check_by_autograd(Block().double(), float64s(3, 5, 3), squares, wrapper=wrapper, mode=mode)


def test_queries() -> None:
    torch.manual_seed(0)
    check_by_autograd(Queries().double(), float64s(3, 6, 3), squares)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_table_that_is_also_the_head(mode: str) -> None:
    torch.manual_seed(0)
    check_by_autograd(Tied().double(), id_batch(3, 5), squares, mode=mode)


class NowAndThen(nn.Module):
    """Uses another module's parameter, but not when the model runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.uses = nn.Linear(3, 3), nn.Linear(3, 2), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return self.head(h + self.inner.bias if self.uses else h)


def test_a_use_that_was_not_seen_is_refused() -> None:
    model = NowAndThen().double()
    flash = GradSampleModuleFlashClipping(model)
    (x,) = float64s(3, 3)
    squares(flash, (x,)).backward()
    model.zero_grad(set_to_none=True)
    model.uses = True
    with raises("FC142", match="inner.bias:"):
        squares(flash, (x,)).backward()


def test_the_model_is_as_it_was_afterwards() -> None:
    model = Tied().double()
    before = {name: [*vars(module)] for name, module in model.named_modules()}
    flash = GradSampleModuleFlashClipping(model)
    squares(flash, id_batch(2, 4)).backward()
    flash.to_standard_module()
    assert {name: [*vars(module)] for name, module in model.named_modules()} == before
    assert type(model.table.weight) is nn.Parameter
    squares(model, id_batch(2, 4)).backward()
