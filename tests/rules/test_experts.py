"""Mixtures of experts of transformers, as they are: norms and clipped sums against autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.granitemoe import modeling_granitemoe

from tests.support.errors import raises

pytest.importorskip("transformers")

from transformers.integrations.moe import use_experts_implementation

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import (
    Loss,
    check_by_autograd,
    squares,
    truth_by_autograd,
)
from tests.support.mixtures import FAMILIES, language_loss, mixture, tokens
from tests.support.oracle import assert_close

pytestmark = pytest.mark.without_gate

# Normalizations and softmax of these models are in fp32, and round otherwise in other batches.
ROUNDED = 5e-7


def check(model: nn.Module, batch: tuple[Tensor, ...], loss: Loss, tolerance: float) -> None:
    check_by_autograd(model, batch, loss, tolerance=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_match_autograd(family: str) -> None:
    if family == "GraniteMoe" and not hasattr(modeling_granitemoe, "GraniteMoeExperts"):
        pytest.skip("older transformers: its experts are layers that read rows of any samples")
    model = mixture(family)
    check(model, tokens(), language_loss, ROUNDED)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_implementations_of_experts_match_autograd(family: str, implementation: str) -> None:
    model = mixture(family)
    batch = tokens()
    truth = truth_by_autograd(copy.deepcopy(model), batch, language_loss)
    model.float()
    model.set_experts_implementation(implementation)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0)
    language_loss(flash, batch).backward()
    assert_close(flash.get_norm_sample(), truth.norms, 1e-5, "norms")
    for name, grad in truth.clipped(1.0).items():
        assert_close(model.get_parameter(name).grad, grad, 1e-4, name)


# -- one block by itself, in float64 all through ---------------------------------------------------


class Config:
    _experts_implementation = "eager"


class Plain(nn.Module):
    """As transformers describes such a class: gate and up side by side, no biases."""

    def __init__(self, config: Config, width: int = 6, between: int = 5, experts: int = 4):
        super().__init__()
        self.num_experts = experts
        torch.manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * between, width))
        self.down_proj = nn.Parameter(torch.randn(experts, width, between))
        self.act_fn = nn.SiLU()

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for e in range(self.num_experts):
            token, place = torch.where(chosen == e)
            gate, up = (hidden[token] @ self.gate_up_proj[e].mT).chunk(2, -1)
            rows = (self.act_fn(gate) * up) @ self.down_proj[e].mT
            out = out.index_add(0, token, rows * weights[token, place, None])
        return out


Experts = use_experts_implementation(type("Experts", (Plain,), {"forward": Plain.forward}))


class WithBiases(Plain):
    def __init__(self, config: Config):
        super().__init__(config)
        self.gate_up_proj = nn.Parameter(self.gate_up_proj.detach().mT.contiguous())
        self.down_proj = nn.Parameter(self.down_proj.detach().mT.contiguous())
        self.gate_up_proj_bias = nn.Parameter(torch.randn(4, 10))
        self.down_proj_bias = nn.Parameter(torch.randn(4, 6))

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for e in range(self.num_experts):
            token, place = torch.where(chosen == e)
            both = hidden[token] @ self.gate_up_proj[e] + self.gate_up_proj_bias[e]
            gate, up = both.chunk(2, -1)
            rows = (self.act_fn(gate) * up) @ self.down_proj[e] + self.down_proj_bias[e]
            out = out.index_add(0, token, rows * weights[token, place, None])
        return out


ExpertsWithBiases = use_experts_implementation(is_transposed=True, has_bias=True)(WithBiases)


class WithoutGate(Plain):
    def __init__(self, config: Config):
        super().__init__(config)
        self.up_proj = nn.Parameter(self.gate_up_proj.detach()[:, :5].clone())
        del self.gate_up_proj

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for e in range(self.num_experts):
            token, place = torch.where(chosen == e)
            rows = self.act_fn(hidden[token] @ self.up_proj[e].mT) @ self.down_proj[e].mT
            out = out.index_add(0, token, rows * weights[token, place, None])
        return out


ExpertsWithoutGate = use_experts_implementation(has_gate=False)(WithoutGate)


class Block(nn.Module):
    """A router and its experts; ``route`` chooses in place of the router's own choice."""

    def __init__(self, experts: Any = Experts, route: Any = None, k: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.router = nn.Linear(6, 6), nn.Linear(6, 4)
        self.experts, self.route, self.k = experts(Config()), route, k
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing:
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)

    def body(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(hidden).flatten(0, 1).softmax(-1).topk(self.k, -1)
        if self.route is not None:
            chosen = self.route(x.flatten(0, 1))
            weights = weights.masked_fill(chosen == 4, float("nan"))  # of no expert: anything
        return hidden + self.experts(tokens, chosen, weights).view_as(x)


def block(*args: Any, **kwargs: Any) -> nn.Module:
    return Block(*args, **kwargs).double()


def inputs(B: int, T: int) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return (torch.randn(B, T, 6, dtype=torch.float64),)


@pytest.mark.parametrize("experts", [Experts, ExpertsWithBiases, ExpertsWithoutGate])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 9), (2, 1), (4, 3), (3, 40)])
def test_blocks_of_any_size_match_autograd(experts: Any, B: int, T: int) -> None:
    check(block(experts), inputs(B, T), squares, 1e-9)


def to_one(x: Tensor) -> Tensor:
    return torch.stack([torch.full((len(x),), 2), torch.full((len(x),), 3)], 1)


def to_one_by_sign(x: Tensor) -> Tensor:
    return torch.stack([(x[:, 0] > 0).long(), torch.full((len(x),), 3)], 1)


def some_to_none(x: Tensor) -> Tensor:
    return torch.stack([torch.where(x[:, 0] > 0, 4, 0), torch.full((len(x),), 1)], 1)


def twice_the_same(x: Tensor) -> Tensor:
    return torch.stack([(x[:, 0] > 0).long()] * 2, 1)


@pytest.mark.parametrize("route", [to_one, to_one_by_sign, some_to_none, twice_the_same])
@pytest.mark.parametrize("experts", [Experts, ExpertsWithBiases])
def test_routes_of_any_kind_match_autograd(route: Any, experts: Any) -> None:
    """Experts without rows, with all, with none of a sample; choices of no expert; one twice."""
    check(block(experts, route), inputs(4, 5), squares, 1e-9)


@pytest.mark.filterwarnings("ignore:experts")
def test_a_gate_with_parameters_is_refused_and_exact_one_by_one() -> None:
    """As many rows as samples, sorted by expert: nothing but the gate's parameter tells."""

    class Learned(Plain):
        def __init__(self, config: Config):
            super().__init__(config)
            self.act_fn = nn.PReLU()

    learned = use_experts_implementation(type("Learned", (Learned,), {"forward": Plain.forward}))
    with raises("FC201", match=r'experts \(Learned\)(?s:.*)mode="one_by_one"'):
        squares(GradSampleModuleFlashClipping(block(learned, k=1)), inputs(4, 1)).backward()
    check_by_autograd(block(learned, k=1), inputs(4, 1), squares, mode="one_by_one")
