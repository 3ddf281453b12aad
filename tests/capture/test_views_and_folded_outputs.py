"""What modules that use parameters themselves do with results: change views of them in place, and
return several rows of each sample."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import (
    check_by_autograd,
    check_truth,
    float64s,
    squares,
    truth_by_autograd,
)
from tests.support.oracle import assert_close

pytestmark = pytest.mark.without_gate

B, T, D, HEADS = 3, 4, 6, 2


class Positions(nn.Module):
    """As Funnel's: scores by an ``einsum``, whose result is a view, masked in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(T, 2)
        self.kernel = nn.Parameter(torch.randn(T, HEADS, D // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.tanh(self.first(x)).unflatten(-1, (HEADS, -1))
        scores = torch.einsum("binh,tnh->bnit", heads, self.kernel)
        shifted = scores[..., 1:, :]
        shifted *= torch.linspace(0.5, 1.5, T, dtype=x.dtype)
        return self.last(scores)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_view_of_an_einsum_is_changed_in_place(mode: str) -> None:
    torch.manual_seed(0)
    check_by_autograd(Positions().double(), float64s(B, T, D), squares, mode=mode)


class Bias(nn.Module):
    """``folded``: it returns a row for every head of every sample."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.folded = folded
        self.bias = nn.Parameter(torch.randn(HEADS, T))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.bias.repeat(len(x), 1) if self.folded else self.bias
        y, _ = torch.max(x.mT * self.bias.sum(0), -1)
        return y, bias


class Attending(nn.Module):
    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.first, self.bias, self.last = nn.Linear(D, D), Bias(folded), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, bias = self.bias(self.first(x))
        scale = bias.view(len(x), HEADS, T).sum((1, 2)) if self.bias.folded else bias.sum((-1, -2))
        return self.last(y * scale.unsqueeze(-1))


def test_rows_of_heads_that_a_module_returns() -> None:
    torch.manual_seed(0)
    model, batch = Attending(True).double(), float64s(B, T, D)
    truth = truth_by_autograd(copy.deepcopy(model), batch, squares)
    flash = GradSampleModuleFlashClipping(model, force_functorch=True)
    squares(flash, batch).backward()
    assert_close(flash.get_norm_sample(), truth.norms, 1e-9, "norms")


def test_what_is_the_same_for_all_samples_is_returned_for_each() -> None:
    torch.manual_seed(0)
    model, batch = Attending(False).double(), float64s(B, T, D)
    truth = truth_by_autograd(copy.deepcopy(model), batch, squares)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, force_functorch=True)
    squares(flash, batch).backward()
    check_truth(flash, model, truth, 1.0, 1e-9)


class Mix(nn.Module):
    """As hyper-connections': mixes the streams of each sample, which lie in the batch axis."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(streams, streams))

    def forward(self, x: Tensor) -> Tensor:
        streams = x.unflatten(0, (-1, len(self.weight)))
        return torch.einsum("bsd,st->btd", streams, self.weight).flatten(0, 1)


class Streams(nn.Module):
    def __init__(self, streams: int) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(D, D), Mix(streams), nn.Linear(D, 2)
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.first(x)).repeat_interleave(self.streams, 0)
        return self.last(torch.tanh(self.mix(rows)).unflatten(0, (-1, self.streams)).sum(1))


@pytest.mark.parametrize("streams", [2, 3])
def test_streams_of_a_sample_are_mixed(streams: int) -> None:
    torch.manual_seed(0)
    model, batch = Streams(streams).double(), float64s(5, D)
    check_by_autograd(model, batch, squares, force_functorch=True)
