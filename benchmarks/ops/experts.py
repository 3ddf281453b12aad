"""Layers of experts by themselves, with routes that the batch says: uniform, or a few experts that
get most tokens (Zipf).

Written as suffixes: B samples, T positions, D width, E experts, k choices.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workload import Workload

VOCABULARY = 4096
CLASSES = 8

#: Sizes by name: those of Qwen3-30B-A3B, and of DeepSeek-V3.
SIZES: dict[str, dict[str, int]] = {
    "qwen3": dict(width=2048, hidden=768, experts=128, chosen=8),
    "deepseek": dict(width=7168, hidden=2048, experts=256, chosen=8),
    "tiny": dict(width=16, hidden=8, experts=4, chosen=2),
}


def draw_routes(
    generator: torch.Generator, *, batch: int, seq: int, experts: int, chosen: int, zipf: bool
) -> tuple[Tensor, Tensor]:
    """Ids and, behind each, its experts: drawn without replacement, by equal weights or 1/rank."""
    ids_BT1 = torch.randint(VOCABULARY, (batch, seq, 1), generator=generator)
    weight_E = torch.ones(experts) / (torch.arange(experts) + 1 if zipf else 1)
    draws = torch.multinomial(
        weight_E.expand(batch * seq, experts), chosen, generator=generator
    ).view(batch, seq, chosen)
    targets_BT = torch.randint(CLASSES, (batch, seq), generator=generator)
    return torch.cat([ids_BT1, draws], dim=2), targets_BT


class ExpertLayer(nn.Module):
    """A normalization, a router and experts, between a frozen embedding and a sum of features."""

    def __init__(self, experts: nn.Module, *, width: int, count: int, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        self.embedding = nn.Embedding(VOCABULARY, width).requires_grad_(False)
        self.norm = nn.RMSNorm(width)
        self.router = nn.Linear(width, count, bias=False)
        self.experts = experts

    def forward(self, routes_BTk: Tensor) -> Tensor:
        x_BTD = self.norm(self.embedding(routes_BTk[..., 0]))
        chosen_BTk = routes_BTk[..., 1:]
        # Which experts is given; how much each counts is learned.
        weight_BTk = self.router(x_BTD).float().softmax(-1).gather(-1, chosen_BTk)
        weight_BTk = (weight_BTk / weight_BTk.sum(-1, keepdim=True)).to(x_BTD.dtype)
        given = (x_BTD, chosen_BTk, weight_BTk)
        if self.flat:
            given = tuple(x.flatten(0, 1) for x in given)
        return self.experts(*given).view_as(x_BTD).unflatten(-1, (CLASSES, -1)).sum(-1)


def layer(
    name: str,
    *,
    batch: int,
    seq: int,
    sizes: str = "qwen3",
    zipf: bool = False,
    own: bool = False,
    rank: int = 0,
) -> Workload:
    """Experts of ``transformers`` as Qwen3-MoE has them, by its grouped products; ``own``:
    :class:`flash_clipping.layers.MixtureOfExperts`; with a rank, LoRA on frozen experts."""
    width, hidden, experts, chosen = SIZES[sizes].values()

    def build() -> nn.Module:
        made = _own(width, hidden, experts, rank) if own else _qwen3(width, hidden, experts)
        for param in made.parameters():
            nn.init.normal_(param, std=0.02)
        return ExpertLayer(made, width=width, count=experts, flat=not own)

    draw = functools.partial(
        draw_routes, batch=batch, seq=seq, experts=experts, chosen=chosen, zipf=zipf
    )
    return Workload(name, build, draw, batch=batch, positions=seq)


def _own(width: int, hidden: int, experts: int, rank: int) -> nn.Module:
    from flash_clipping.layers import MixtureOfExperts

    return MixtureOfExperts(width, hidden, experts, rank=rank)


def _qwen3(width: int, hidden: int, experts: int) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config: Any = Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=hidden, num_experts=experts
    )
    config._experts_implementation = "grouped_mm"
    return Qwen3MoeExperts(config)
