"""Layers whose own forward computes what one with a rule does: exact, and in its factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.autograd import squares
from tests.zoo.case import ModelCase
from tests.zoo.shared import ids

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
    "falcon": (lambda m, x: x @ m.weight.T + m.bias, {"LinearGrad", "DenseGrad"}),
    "transposed": (lambda m, x: torch.matmul(x, m.weight) - m.bias, {"LinearGrad", "DenseGrad"}),
    "scaled_weight": (
        lambda m, x: F.linear(x, 0.3 * m.weight / 2, 2 * m.bias),
        {"LinearGrad", "DenseGrad"},
    ),
    "shifted": (lambda m, x: x @ (1 - m.weight.double()), {"LinearGrad"}),
    "changed_in_place": (changed_in_place, {"DenseGrad"}),
    "standardised": (lambda m, x: F.linear(x, m.weight - m.weight.mean(1, True)), {"DenseGrad"}),
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
    "per_head": (per_head, DENSE),
    "gated": (gated, DENSE),
    "channels_first": (channels_first, DENSE),
    "enlarged": (lambda m, x: hat(m, x) * (m.weight + x.new_ones(T, 1).cumsum(0)), DENSE),
    "layer_norm": (lambda m, x: F.layer_norm(x, (D,), m.weight, m.bias, m.eps), ROWS),
    "rms_norm": (lambda m, x: F.rms_norm(x, (D,), m.weight), DENSE),
    "rms_norm_shifted": (lambda m, x: F.rms_norm(x, (D,), 2 - m.weight, m.eps), DENSE),
    "both_axes": (lambda m, x: F.layer_norm(x, (T, D), bias=m.bias.expand(T, D)), DENSE),
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


def spelled(layer: nn.Module) -> nn.Module:
    model = Around(layer).double()
    for param in model.layer.parameters():
        nn.init.normal_(param, std=0.7)
    squares(model, (torch.randint(0, 11, (B, T)),)).backward()
    for param in model.parameters():
        param.requires_grad_(param.grad is not None)  # not every spelling has a bias
        param.grad = None
    return model


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


#: They fix a dtype.
IN_FP32 = ("autocast", "functorch")

CAST: dict[str, Callable[[], nn.Module]] = {
    "gemma": lambda: Norm(lambda m, x: hat(m, x) * (1.0 + m.weight.float())),
    "linear": lambda: SpeltLinear(
        lambda m, x: F.linear(x.float(), m.weight.float(), m.bias.float()).double()
    ),
    "convolution": lambda: SpeltLinear(
        lambda m, x: F.conv1d(x.mT.float(), m.weight.float()[:, :, None]).double().mT
    ),
}

IN_FP64 = ("embedding_cast", "linear_shifted", "norm_gemma")

CASES: dict[str, ModelCase] = {
    **{
        name: ModelCase(
            lambda make=make: spelled(make()),
            ids(B, T, 11),
            factors=kinds,
            without=("autocast",) if name in IN_FP64 else (),
        )
        for name, (make, kinds) in LAYERS.items()
    },
    **{
        f"cast {name}": ModelCase(
            lambda make=make: spelled(make()), ids(B, T, 11), tolerance=1e-6, without=IN_FP32
        )
        for name, make in CAST.items()
    },
}
