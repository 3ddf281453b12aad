"""What is computed from parameters and constants alone, and meets the samples then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.uses import D
from tests.zoo.case import ModelCase, around
from tests.zoo.shared import rows


class Table(nn.Embedding):
    """Positions of its own, as Blenderbot's and BART's: a subclass, which no rule serves."""

    def forward(self, T: int) -> Tensor:
        return super().forward(torch.arange(T))


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, D))

    def forward(self, T: int) -> Tensor:
        return self.table[torch.arange(T)]


def at_positions(kind: str) -> ModelCase:
    positions = {"embedding": lambda: Table(9, D), "indexed": Indexed}[kind]
    return around(
        lambda m, x: x + m.positions(x.shape[1]),
        lambda: {"positions": positions()},
        lengths=(4, 2, 1, 3),
    )


def held() -> dict[str, Any]:
    return {
        "mlp": nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D), nn.Linear(D, D)),
        "emb": torch.randn(D),
        "embed": nn.Embedding(9, D),
        "conv": nn.Conv1d(D, D, 3, padding=1),
        "attention": nn.MultiheadAttention(D, 2, batch_first=True),
        "learned": torch.randn(3, D),
    }


GRID = torch.randn(7, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def grid(x: Tensor) -> Tensor:
    return GRID.to(x.dtype)


def attended(m: Any, x: Tensor) -> Tensor:
    every = grid(x)[None]
    return m.attention(every[:, : x.shape[1]], every, every)[0][0]


#: Of a module and samples ``[B, T, D]``, of which only numbers are read.
CONSTANTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "row": lambda m, x, T: m.mlp(m.emb[None])[0],
    "vector": lambda m, x, T: m.mlp(m.emb),
    "looked up": lambda m, x, T: m.embed(T[None]),
    "looked up flat": lambda m, x, T: m.embed(T),
    "looked up first": lambda m, x, T: m.embed(T[None])[0],
    "looked up for each": lambda m, x, T: m.embed(T.expand(len(x), len(T))),
    "sum of tables": lambda m, x, T: m.embed(T[None]) + m.embed(T),
    "through layers": lambda m, x, T: m.mlp(m.embed(T[None])),
    "buffer": lambda m, x, T: m.mlp(grid(x)[: len(T)]),
    "convolution": lambda m, x, T: m.conv(grid(x)[: len(T)].mT[None])[0].mT,
    "attention": lambda m, x, T: attended(m, x),
}


def added(constant: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: x + constant(m, x, torch.arange(x.shape[1]))


def queries(as_query: bool) -> Callable[[Any, Tensor], Tensor]:
    """Learned vectors, expanded over the batch, attend to the samples or are attended to."""

    def use(m: Any, x: Tensor) -> Tensor:
        learned = m.learned.expand(len(x), -1, -1)
        q, k = (learned, x) if as_query else (x, learned)
        return m.attention(q, k, k, need_weights=False)[0]

    return use


def recomputed(reentrant: bool, inside: bool) -> Callable[[Any, Tensor], Tensor]:
    """Constants inside or outside of checkpoints."""

    def use(m: Any, x: Tensor) -> Tensor:
        def work(x: Tensor) -> Tensor:
            x = torch.tanh(m.mlp(x))
            return x + m.embed(torch.arange(x.shape[1])) if inside else x

        if not inside:
            x = x + m.embed(torch.arange(x.shape[1]))
        for _ in range(2):
            x = checkpoint(work, x, use_reentrant=reentrant)
        return x

    return use


SHAPES = {"": (3, 5, 3), ", T is B": (5, 5, 3), ", one": (1, 5, 3)}

#: The kernel of a CPU for a norm of bf16 with a weight of fp32 does not go backward under ``vmap``.
THROUGH_A_NORM = ("row", "vector", "through layers", "buffer")

CASES: dict[str, ModelCase] = {
    **{
        f"{name}{shape}": around(
            added(constant),
            held,
            batch=rows(*SHAPES[shape]),
            lengths=(4, 2, 1, 3),
            without=("autocast",) if name in THROUGH_A_NORM else (),
        )
        for name, constant in CONSTANTS.items()
        for shape in SHAPES
    },
    **{f"positions, {kind}": at_positions(kind) for kind in ("embedding", "indexed")},
    **{
        f"{'queries' if as_query else 'keys'} that are learned{shape}": around(
            queries(as_query), held, batch=rows(*SHAPES[shape]), lengths=(3, 2)
        )
        for as_query in (True, False)
        for shape in ("", ", T is B")
    },
    **{
        f"reentrant {reentrant} checkpoint, constant inside {inside}": around(
            recomputed(reentrant, inside), held, without=("checkpointed", "compiled")
        )
        for reentrant in (False, True)
        for inside in (False, True)
    },
}
