"""Modules that use their parameters in any way, between two linear layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

B, T, D = 4, 5, 6

Batch = tuple[Tensor, ...]


class Holder(nn.Module):
    """Parameters and layers, and a function of them as forward."""

    def __init__(self, use: Callable[..., Tensor], **held: Any):
        super().__init__()
        self.use = use
        for name, value in held.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, Tensor) else value)

    def forward(self, *inputs: Any) -> Any:
        return self.use(self, *inputs)


class Around(nn.Module):
    """Something between two linear layers, whose gradients show what it does to its input's."""

    def __init__(self, middle: nn.Module):
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(3, D), middle, nn.Linear(D, 2)
        self.calls = 0

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.calls += 1
        y = self.middle(torch.tanh(self.first(x)), *others)
        if y.is_complex():
            y = y.real + 2 * y.imag
        return self.head(torch.tanh(y))


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return G * gain, (G * x).flatten(0, -2).sum(0)


def make_around(middle: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Around(middle()).double()


def seeded_batch() -> Batch:
    torch.manual_seed(1)
    return (torch.randn(B, T, 3, dtype=torch.float64),)


#: Every row of the table occurs, the padding of the tests below (2) in every sample.
IDS = torch.tensor([[2, 2, 1, 0, 3], [1, 2, 2, 6, 6], [0, 1, 2, 3, 4], [2, 2, 2, 2, 2]])


def attention_layer() -> nn.Module:
    return nn.MultiheadAttention(D, 2, batch_first=True)


@dataclasses.dataclass
class Data:
    a: Any
    b: Any = None
