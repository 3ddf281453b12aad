"""Layers of folded rows that no gradient reaches do not stand in the way of those that it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises

B, T, D, H = 4, 7, 8, 2

pytestmark = pytest.mark.usefixtures("same_numbers")


class PooledAttention(nn.Module):
    """As in MViTv2: heads are folded into the batch of a convolution, and the class token, which
    the head reads alone, passes by that of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.qkv, self.head = nn.Linear(D, D), nn.Linear(D, 3 * D), nn.Linear(D, 3)
        self.of_class = nn.Parameter(torch.randn(1, 1, D))
        self.pools = nn.ModuleList(nn.Conv1d(D // H, D // H, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.of_class.expand(len(x), 1, -1), self.patch(x)], 1)
        pooled = []
        heads = self.qkv(h).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        for one, pool in zip(heads, self.pools, strict=True):
            rest = pool(one[:, :, 1:].flatten(0, 1).mT).mT.unflatten(0, (len(x), H))
            pooled.append(torch.cat([one[:, :, :1], rest], 2))
        q, k, v = pooled
        return self.head(((q @ k.mT).softmax(-1) @ v + q)[:, :, 0].flatten(1))


class Quantized(nn.Module):
    """A vector quantizer: the output is a straight-through estimate.

    Args:
        learnt: codes are a table, which gets no gradient without ``pulls``; otherwise they are
            frozen, and a linear map of them is learnt.
        pulls: whether codes are pulled towards what chose them, by a second output.
    """

    def __init__(self, learnt: bool, pulls: bool) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(5, D), nn.Linear(D, 5)
        self.table, self.map = nn.Embedding(10, D), nn.Linear(D, D, bias=False)
        self.table.weight.requires_grad_(learnt)
        self.map.weight.requires_grad_(not learnt)
        self.learnt, self.pulls = learnt, pulls

    def forward(self, x: Tensor) -> Any:
        z = self.encode(x.reshape(-1, 5))
        codes = self.table.weight.detach() if self.learnt else self.map(self.table.weight)
        chosen = torch.cdist(z.detach(), codes.detach()).argmin(1)
        q = self.table(chosen) if self.learnt else codes[chosen]
        y = self.decode((z + (q - z).detach()).view(len(x), -1, D))
        return (y, (q - z.detach()).square().view(len(x), -1).mean(1)) if self.pulls else y


class WindowOfOne(nn.Module):
    """As in CrossFormer: biases by relative position are made by a layer. In a window of one place
    the softmax takes them out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head, self.biases = nn.Linear(D, 3 * D), nn.Linear(D, 3), nn.Linear(2, H)
        self.register_buffer("places", torch.zeros(1, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.reshape(-1, 1, D)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT + self.biases(self.places).permute(2, 0, 1)
        return self.head((scores.softmax(-1) @ v).reshape(len(x), T, D)).mean(1)


MODELS = {
    "pooled attention": (PooledAttention, D),
    "codes": (lambda: Quantized(learnt=True, pulls=False), 5),
    "codes, pulled": (lambda: Quantized(learnt=True, pulls=True), 5),
    "mapped codes": (lambda: Quantized(learnt=False, pulls=False), 5),
    "mapped codes, pulled": (lambda: Quantized(learnt=False, pulls=True), 5),
    "window of one": (WindowOfOne, D),
}


def losses(output: Any) -> Tensor:
    y, *others = output if isinstance(output, tuple) else (output,)
    return sum(others, y.flatten(1).square().sum(1))


def norms_of(model: nn.Module, x: Tensor) -> Tensor:
    """Autograd's, one sample at a time."""
    params = [param for param in model.parameters() if param.requires_grad]
    found = []
    for b in range(len(x)):
        loss = losses(model(x[b : b + 1])).sum()
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        found.append(torch.cat([g.flatten() for g in grads if g is not None]).norm())
    return torch.stack(found)


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_exact(name: str) -> None:
    make, features = MODELS[name]
    model, x = make().double(), torch.randn(B, T, features, dtype=torch.float64)
    expected = norms_of(model, x)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "loss_reduction": "sum"}
    flash = GradSampleModuleFlashClipping(model, **options)
    losses(flash(x)).sum().backward()
    torch.testing.assert_close(flash.get_norm_sample().double(), expected)


class Opens(nn.Module):
    """A layer of folded rows, whose result counts ``gate`` times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.folded, self.gate = nn.Linear(D, D), nn.Linear(D, D), 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.gate * self.folded(x.reshape(-1, D)).tanh().view(x.shape)


def test_a_gradient_that_comes_later_is_refused_then_looked_at() -> None:
    model, x = Opens().double(), torch.randn(B, T, D, dtype=torch.float64)
    options: dict[str, Any] = {"max_grad_norm": 1.0, "loss_reduction": "sum"}
    flash = GradSampleModuleFlashClipping(model, **options)
    losses(flash(x)).sum().backward()
    flash.zero_grad()
    model.gate = 1.0
    with raises("FC230"):
        losses(flash(x)).sum().backward()
    flash.zero_grad()
    losses(flash(x)).sum().backward()
    found = flash.get_norm_sample().double()
    flash.disable_hooks()
    torch.testing.assert_close(found, norms_of(model, x))
