"""Parameters that are used more than once in a step.

Norms and clipped sums against one plain backward per sample, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import (
    check_by_autograd,
    check_steps,
    float64s,
    id_batch,
    mean_squares,
    squares,
)
from tests.support.models import Gain
from tests.support.uses import Scaling
from tests.support.wrapping import MODES, WRAPPERS

pytestmark = pytest.mark.without_gate

# -- one model, several uses ----------------------------------------------------------------------


class Twice(nn.Module):
    """Applies one layer several times, with something else between."""

    def __init__(self, layer: nn.Module, times: int = 2, checkpointing: str = "none"):
        super().__init__()
        self.layer = layer
        self.times = times
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.times):
            # The first use is never checkpointed: its input need not require grad.
            if self.checkpointing == "none" or i == 0:
                x = torch.tanh(self.layer(x))
            else:
                reentrant = self.checkpointing == "reentrant"
                x = torch.tanh(checkpoint(self.layer, x, use_reentrant=reentrant))
        return x


class TiedLinears(nn.Module):
    """Two layers with one weight and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class TiedAcrossKinds(nn.Module):
    """One square matrix as ``Linear``, as ``transformers``' ``Conv1D`` and as an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear, self.conv1d = nn.Embedding(5, 5), nn.Linear(5, 5), Conv1D(5, 5)
        self.linear.weight = self.conv1d.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.conv1d(torch.tanh(self.linear(torch.tanh(self.embed(ids)))))


class SharedBias(nn.Module):
    """One vector as the bias of a linear layer, of a convolution and of a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(4, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.conv.bias = self.norm.bias = self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self.norm(x + self.conv(x.mT).mT)


class TiedHead(nn.Module):
    """An embedding whose table is also the output head, perhaps with a padding row."""

    def __init__(self, padding_idx: int | None = None, bare: bool = False, twice: bool = False):
        super().__init__()
        self.embed = nn.Embedding(9, 6, padding_idx=padding_idx)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.positions = nn.Parameter(torch.randn(5, 6)) if bare else None
        self.twice = twice

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions
        if self.twice:
            x = x + self.embed(ids.flip(1))
        hidden = torch.tanh(self.hidden(x))
        scores = self.head(hidden)
        return torch.cat([scores, self.head(x)], 1) if self.twice else scores


SHARED: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "linear_twice": (lambda: Twice(nn.Linear(4, 4)), lambda: float64s(5, 3, 4)),
    "linear_twice_2d": (lambda: Twice(nn.Linear(4, 4)), lambda: float64s(5, 4)),
    "linear_thrice_long": (lambda: Twice(nn.Linear(3, 3), times=3), lambda: float64s(3, 20, 3)),
    "conv_twice": (lambda: Twice(nn.Conv2d(3, 3, 3, padding=1)), lambda: float64s(4, 3, 5, 4)),
    "layer_norm_twice": (lambda: Twice(nn.LayerNorm(6)), lambda: float64s(4, 5, 6)),
    "rms_norm_twice": (lambda: Twice(nn.RMSNorm(6)), lambda: float64s(4, 5, 6)),
    "group_norm_twice": (lambda: Twice(nn.GroupNorm(2, 4)), lambda: float64s(4, 4, 5)),
    "tied_linears": (TiedLinears, lambda: float64s(5, 7, 5)),
    "tied_across_kinds": (TiedAcrossKinds, lambda: id_batch(4, 6, vocabulary=5)),
    "shared_bias": (SharedBias, lambda: float64s(4, 5, 4)),
    "tied_head": (TiedHead, lambda: id_batch(4, 5)),
    "tied_head_padding": (lambda: TiedHead(padding_idx=2), lambda: id_batch(4, 5)),
    "tied_head_bare_root": (lambda: TiedHead(bare=True), lambda: id_batch(4, 5)),
    "tied_head_twice": (lambda: TiedHead(twice=True), lambda: id_batch(4, 5)),
}


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", SHARED)
def test_shared_parameter(name: str, wrapper: str, mode: str) -> None:
    torch.manual_seed(0)
    make, batch = SHARED[name]
    check_by_autograd(make().double(), batch(), squares, wrapper=wrapper, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_shared_and_checkpointed(checkpointing: str, mode: str) -> None:
    """One use is recomputed in backward, the other is not."""
    torch.manual_seed(0)
    model = Twice(nn.Linear(4, 4), times=3, checkpointing=checkpointing).double()
    check_by_autograd(model, float64s(5, 3, 4), squares, mode=mode)


@pytest.mark.parametrize(
    ("checkpointing", "mode"),
    [
        ("non-reentrant", "one_pass"),
        ("non-reentrant", "two_pass"),
        ("reentrant", "one_pass"),
        ("reentrant", "two_pass"),
    ],
)
def test_bare_parameter_shared_with_a_checkpointed_use(checkpointing: str, mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Twice(Gain(4), checkpointing=checkpointing), nn.Linear(4, 3)).double()
    check_by_autograd(model, float64s(5, 3, 4), squares, mode=mode)


def test_layer_whose_bias_is_its_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    model[1].bias = model[1].weight
    check_by_autograd(model.double(), float64s(4, 4), squares)


@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_concatenation_with_bare_parameters(mode: str) -> None:
    """A class token alone is trained, and joined to the batch under checkpointing."""

    class ClassToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 4))
            self.project = nn.Linear(4, 4).requires_grad_(False)

        def join(self, x: Tensor) -> Tensor:
            return torch.cat([self.token.expand(x.shape[0], -1, -1), self.project(x)], dim=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.join(x).tanh()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ClassToken()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    check_by_autograd(Checkpointed().double(), float64s(5, 3, 4), squares, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_checkpointed_data_meets_bare_parameters(mode: str) -> None:
    """A model of bare parameters alone, the first of them recomputed on the batch itself."""

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Gain(4), Gain(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=False))

    torch.manual_seed(0)
    check_by_autograd(Scales().double(), float64s(5, 3, 4), squares, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_attention_output_shared_with_a_layer_outside_its_checkpoint(mode: str) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.last.weight = self.attention.out_proj.weight

        def attend(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.attend, self.first(x), use_reentrant=True))

    torch.manual_seed(0)
    check_by_autograd(Attending().double(), float64s(5, 3, 4), squares, mode=mode)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_shared_parameter_and_sum_reduction(reduction: str) -> None:
    torch.manual_seed(0)

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        rows = model(*batch).flatten(1).square().sum(1)
        return rows.mean() if reduction == "mean" else rows.sum()

    check_by_autograd(TiedHead().double(), id_batch(4, 5), loss, loss_reduction=reduction)


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["mlp", "embedding", "generic"])
def test_siamese(name: str, wrapper: str, mode: str) -> None:
    """A model called twice before one backward: the two uses of a sample are one gradient."""
    torch.manual_seed(0)
    if name == "mlp":
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))
        batch = (*float64s(5, 7, 4), *float64s(5, 7, 4))
    elif name == "embedding":
        model = nn.Sequential(nn.Embedding(9, 4), nn.Tanh(), nn.Linear(4, 3))
        batch = (*id_batch(5, 7), *id_batch(5, 7))
    else:
        model = nn.Sequential(nn.Linear(4, 4), Gain(4), nn.Linear(4, 3))
        batch = (*float64s(5, 7, 4), *float64s(5, 7, 4))

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        left, right = batch
        return mean_squares(model(left) - 0.5 * model(right))

    check_by_autograd(model.double(), batch, loss, wrapper=wrapper, mode=mode)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_siamese_of_different_lengths(mode: str) -> None:
    """The two calls see different numbers of positions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3)).double()

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        left, right = batch
        return mean_squares(model(left).mean(1) - 0.5 * model(right).mean(1))

    check_by_autograd(model, (*float64s(5, 7, 4), *float64s(5, 3, 4)), loss, mode=mode)


@pytest.mark.parametrize("name", ["convolution", "linear and generic"])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_what_is_released_of_several_uses_is_what_was_measured(mode: str, name: str) -> None:
    """In bf16 a sum of two gradients is rounded; its norm is not that of both, unrounded."""

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Conv1d(4, 4, 3, bias=False) if name == "convolution" else nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if name == "convolution":
                return self.own(x[:, :4]).sum(1) + self.own(x[:, 4:]).sum(1)
            return self.own(x[:, :, :4]).sum(1) + (x[:, :, 4:] * self.own.weight.sum(0)).sum(1)

    worst = 0.0
    for seed in range(20):
        torch.manual_seed(seed)
        flash = GradSampleModuleFlashClipping(
            Uses().bfloat16(), mode=mode, max_grad_norm=1e-3, loss_reduction="sum"
        )
        flash(torch.randn(1, 8, 8).bfloat16()).float().sum().backward()
        sums = [p.grad.double().flatten() for p in flash.parameters() if p.grad is not None]
        worst = max(worst, torch.cat(sums).norm().item())
    assert 1e-3 * (1 - 1e-2) <= worst <= 1e-3 * (1 + 1e-4)


# -- parameters that are not trained --------------------------------------------------------------


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_frozen_use_of_a_shared_parameter(wrapper: str) -> None:
    """A tied table that is detached where it serves as head has its embedding's gradient only."""

    class DetachedHead(TiedHead):
        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.hidden(self.embed(ids))), self.embed.weight.detach())

    torch.manual_seed(0)
    check_by_autograd(DetachedHead().double(), id_batch(4, 5), squares, wrapper=wrapper)


@pytest.mark.parametrize("mode", MODES)
def test_parameter_used_past_its_module(mode: str) -> None:
    """Whoever uses it stands in for it, in batches of other sizes as well."""

    class Functional(TiedHead):
        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.hidden(self.embed(ids))), self.embed.weight)

    torch.manual_seed(0)
    batches = [id_batch(*shape) for shape in ((4, 5), (1, 3), (5, 5), (2, 1))]
    check_steps(Functional().double(), batches, squares, mode=mode)


def test_parameter_used_past_all_functions() -> None:
    """Only the graph shows the use: a module above it stands in, and runs sample by sample."""

    class Functional(TiedHead):
        def forward(self, ids: Tensor) -> Tensor:
            return self.head(Scaling.apply(self.hidden(self.embed(ids)), self.hidden.bias))

    torch.manual_seed(0)
    check_by_autograd(Functional().double(), id_batch(4, 5), squares)
