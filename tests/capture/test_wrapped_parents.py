"""Layers whose own forward computes what one with a rule does: exact, and in its factors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import check_by_autograd, squares
from tests.support.recorded import recorded_factors

pytestmark = pytest.mark.without_gate

B, T, D = 3, 4, 6


class SpeltEmbedding(nn.Embedding):
    """As BART's and Gemma's: rows of the table, times a number or a buffer, at other positions."""

    def __init__(self, how: str):
        super().__init__(11, D, padding_idx=1)
        self.how = how
        self.register_buffer("scale", torch.tensor(2.5))

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "scaled":
            return super().forward(ids) * 2.5
        if self.how == "by_buffer":
            return super().forward(ids) * self.scale.to(self.weight.dtype)
        if self.how == "cast":
            return F.embedding(ids, self.weight.double() * 0.5, self.padding_idx)
        if self.how == "normalized_rows":  # more than rows of the table
            return F.embedding(ids, F.normalize(self.weight, dim=1))
        if self.how == "by_vmap":
            return F.embedding(ids, torch.func.vmap(torch.tanh)(self.weight))
        return super().forward((ids + 2) % 11)


class SpeltLinear(nn.Linear):
    """A linear map, spelt in several ways."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]):
        super().__init__(D, D)
        self.how = how
        self.gain = 1.5

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def changed_in_place(m: Any, x: Tensor) -> Tensor:
    weight = m.weight * 2.0
    weight.view(-1).mul_(3.0)  # by another name, so that the first one's history is out of date
    return x @ weight


LINEAR: dict[str, tuple[Callable[[Any, Tensor], Tensor], set[str]]] = {
    "parents": (lambda m, x: F.linear(x, m.weight, m.bias) * m.gain, {"LinearGrad", "SumGrad"}),
    "by_name": (
        lambda m, x: F.linear(input=x, weight=m.weight, bias=m.bias),
        {"LinearGrad", "SumGrad"},
    ),
    "falcon": (lambda m, x: x @ m.weight.T + m.bias, {"LinearGrad", "DenseGrad"}),
    "transposed": (lambda m, x: torch.matmul(x, m.weight) - m.bias, {"LinearGrad", "DenseGrad"}),
    "turned_twice": (
        lambda m, x: F.linear(x, m.weight.t().mT, -1.0 - m.bias),
        {"LinearGrad", "DenseGrad"},
    ),
    "scaled_weight": (
        lambda m, x: F.linear(x, 0.3 * m.weight / 2, 2 * m.bias),
        {"LinearGrad", "DenseGrad"},
    ),
    "shifted": (lambda m, x: x @ (1 - m.weight.double()), {"LinearGrad"}),
    "changed_in_place": (changed_in_place, {"DenseGrad"}),
    "standardised": (lambda m, x: F.linear(x, m.weight - m.weight.mean(1, True)), {"DenseGrad"}),
    "reshaped": (lambda m, x: x @ m.weight.reshape(-1)[[*range(D * D)]].view(D, D), {"DenseGrad"}),
    "permuted": (lambda m, x: x @ m.weight[[*reversed(range(D))]], {"DenseGrad"}),
    "scaled_by_itself": (
        lambda m, x: F.linear(x, m.weight) * m.weight.sum(),
        {"LinearGrad", "DenseGrad"},
    ),
    "twice": (
        lambda m, x: F.linear(torch.tanh(x @ m.weight), m.weight, m.bias),
        {"LinearGrad", "SumGrad"},
    ),
}


class Norm(nn.Module):
    """A scale of normalized values, spelt in several ways."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor], *shape: int):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(shape or (D,)))
        self.bias = nn.Parameter(torch.randn(shape or (D,)))
        self.eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def hat(m: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.eps)


def per_head(m: Any, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, D // 2)).transpose(1, 2)
    return (m.weight[: D // 2] * hat(m, heads) + m.bias[D // 2 :]).transpose(1, 2).flatten(2)


def gated(m: Any, x: Tensor) -> Tensor:
    return m.weight * hat(m, x * F.silu(x.flip(1)))


def channels_first(m: Any, x: Tensor) -> Tensor:
    return (m.weight[:, None] * hat(m, x).mT + m.bias[:, None]).mT


DENSE, ROWS = {"DenseGrad"}, {"SumGrad"}
NORM: dict[str, tuple[Callable[[Any, Tensor], Tensor], set[str]]] = {
    "llama": (lambda m, x: m.weight * hat(m, x), DENSE),
    "gemma": (lambda m, x: hat(m, x) * (1.0 + m.weight.double()), DENSE),
    "eps_outside": (lambda m, x: m.weight * (x / (x.norm(dim=-1, keepdim=True) + m.eps)), DENSE),
    "per_head": (per_head, DENSE),
    "gated": (gated, DENSE),
    "channels_first": (channels_first, DENSE),
    "one_axis_more": (lambda m, x: hat(m, x) * m.weight[None, None] + m.bias.view(1, -1), DENSE),
    "enlarged": (lambda m, x: hat(m, x) * (m.weight + x.new_ones(T, 1).cumsum(0)), DENSE),
    "layer_norm": (lambda m, x: F.layer_norm(x, (D,), m.weight, m.bias, m.eps), ROWS),
    "rms_norm": (lambda m, x: F.rms_norm(x, (D,), m.weight), ROWS),
    "rms_norm_shifted": (lambda m, x: F.rms_norm(x, (D,), 2 - m.weight, m.eps), DENSE),
    "both_axes": (lambda m, x: F.layer_norm(x, (T, D), bias=m.bias.expand(T, D)), DENSE),
    "twice": (lambda m, x: m.weight * hat(m, m.weight * hat(m, x)), DENSE),
}


class Convolution(nn.Conv1d):
    """A convolution that pads by itself, and one that standardises its weight."""

    def __init__(self, standardised: bool):
        super().__init__(D, D, 3, stride=2, groups=2)
        self.standardised = standardised

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.standardised:
            weight = (weight - weight.mean((1, 2), keepdim=True)) / weight.std((1, 2), keepdim=True)
        x = F.pad(x.mT, (2, 0))
        return F.conv1d(x, weight, self.bias, self.stride, 1, 1, self.groups).mT


class Around(nn.Module):
    """A layer between two that have rules; ids are looked up in it, or before it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        looks_up = isinstance(layer, nn.Embedding)
        self.first = nn.Linear(D, D) if looks_up else nn.Embedding(11, D)
        self.last = nn.Linear(D, 2)
        self.looks_up = looks_up

    def forward(self, ids: Tensor) -> Tensor:
        first, second = (self.layer, self.first) if self.looks_up else (self.first, self.layer)
        return self.last(torch.tanh(second(first(ids))))


def around(layer: nn.Module) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Around(layer).double()
    for param in model.layer.parameters():
        nn.init.normal_(param, std=0.7)
    batch = (torch.randint(0, 11, (B, T)),)
    squares(model, batch).backward()
    for param in model.parameters():
        param.requires_grad_(param.grad is not None)  # not every spelling has a bias
        param.grad = None
    return model, batch


LAYERS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    **{
        f"embedding_{how}": (lambda how=how: SpeltEmbedding(how), {"EmbeddingGrad"})
        for how in ("scaled", "by_buffer", "offset", "cast")
    },
    "embedding_normalized_rows": (lambda: SpeltEmbedding("normalized_rows"), DENSE),
    **{
        f"linear_{name}": (lambda how=how: SpeltLinear(how), kinds)
        for name, (how, kinds) in LINEAR.items()
    },
    **{f"norm_{name}": (lambda how=how: Norm(how), kinds) for name, (how, kinds) in NORM.items()},
    "convolution": (lambda: Convolution(False), {"ConvolutionGrad", "DenseGrad"}),
    "convolution_standardised": (lambda: Convolution(True), DENSE),
}


@pytest.mark.parametrize("name", LAYERS)
def test_exact_and_in_the_factors_of_the_parent(name: str) -> None:
    make, kinds = LAYERS[name]
    model, batch = around(make())
    kind = type(model.get_submodule("layer")).__name__

    flash = GradSampleModuleFlashClipping(copy.deepcopy(model), max_grad_norm=1.0)
    found = recorded_factors(flash, lambda: squares(flash, batch).backward())
    assert found[kind] == kinds
    check_by_autograd(model, batch, squares, steps=1)


def test_a_standardised_convolution_does_not_run_again_in_backward() -> None:
    """Its gradients are those of the layer's rule, not of the operation run sample by sample."""

    class Counting(TorchDispatchMode):
        convolutions = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.convolutions += func is torch.ops.aten.convolution.default
            return func(*args, **(kwargs or {}))

    model, batch = around(Convolution(True))
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    squares(flash, batch).backward()
    loss = squares(flash, batch)
    with Counting() as counting:
        loss.backward()
    assert counting.convolutions == 0


@pytest.mark.parametrize(
    "name", ["embedding_scaled", "linear_falcon", "linear_twice", "norm_gemma"]
)
def test_two_passes(name: str) -> None:
    model, batch = around(LAYERS[name][0]())
    check_by_autograd(model, batch, squares, mode="two_pass")


CAST: dict[str, Callable[[], nn.Module]] = {
    "gemma": lambda: Norm(lambda m, x: hat(m, x) * (1.0 + m.weight.float())),
    "float_norm": lambda: Norm(lambda m, x: (hat(m, x).float() * m.weight.float()).double()),
    "layer_norm": lambda: Norm(
        lambda m, x: F.layer_norm(x.float(), (D,), m.weight.float(), m.bias.float()).double()
    ),
    "linear": lambda: SpeltLinear(
        lambda m, x: F.linear(x.float(), m.weight.float(), m.bias.float()).double()
    ),
    "convolution": lambda: SpeltLinear(
        lambda m, x: F.conv1d(x.mT.float(), m.weight.float()[:, :, None]).double().mT
    ),
}


@pytest.mark.parametrize("name", CAST)
def test_what_is_computed_in_another_dtype(name: str) -> None:
    """A float64 parameter that is used in fp32 gets sums in float64, as exact as fp32 is."""
    model, batch = around(CAST[name]())
    check_by_autograd(model, batch, squares, tolerance=1e-6, steps=1)
    assert all(p.grad is None or p.grad.dtype == torch.float64 for p in model.parameters())
