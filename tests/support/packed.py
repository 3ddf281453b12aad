"""A small model that reads documents packed end to end, and each document alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.oracle import Truth

LENGTHS = (3, 5, 1, 4)
VOCABULARY = 17


class Scale(nn.Module):
    """Uses a parameter itself, as the norms of ``transformers`` do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x / x.square().mean(-1, keepdim=True).add(1e-3).sqrt()


class Reader(nn.Module):
    """Attention within documents, which ``document [R, T]`` tells apart."""

    checkpoints: Any = None

    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(VOCABULARY, 6), nn.Embedding(8, 6)
        self.norm, self.scale = nn.LayerNorm(6), Scale(6)
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6, bias=False)
        self.between = between or nn.RMSNorm(6)
        self.head = nn.Linear(6, 4)

    def mask(self, document: Tensor) -> Tensor:
        T = document.shape[1]
        before = torch.ones(T, T, device=document.device).tril().bool()
        return (document[:, :, None] == document[:, None]) & before

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.scale(self.norm(x))).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    def forward(self, ids: Tensor, places: Tensor, document: Tensor) -> Tensor:
        x = self.table(ids) + self.places(places)
        if self.checkpoints is None:
            x = self.attend(x, self.mask(document))
        else:
            x = checkpoint(self.attend, x, self.mask(document), use_reentrant=self.checkpoints)
        return self.head(self.between(x))


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]


Row = list[tuple[int, Tensor]]


def packed(rows: list[Row], padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, places and documents ``[R, T]`` of rows of numbered documents."""
    T = max(sum(len(d) for _, d in row) for row in rows) + padding
    found: list[list[Tensor]] = [[], [], []]
    for row in rows:
        rest = T - sum(len(d) for _, d in row)
        ids = torch.cat([*(d for _, d in row), torch.zeros(rest, dtype=torch.long)])
        places = torch.cat([*(torch.arange(len(d)) for _, d in row), torch.arange(rest) % 8])
        numbers = torch.cat([*(torch.full((len(d),), n) for n, d in row), torch.full((rest,), -1)])
        for column, tensor in zip(found, (ids, places, numbers), strict=True):
            column.append(tensor)
    ids, places, numbers = map(torch.stack, found)
    return ids, places, numbers


def one_row(lengths: Sequence[int] = LENGTHS, padding: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return packed([list(enumerate(documents(lengths)))], padding)


def losses(output: Tensor) -> Tensor:
    """Of positions: weighted, so that none is like another."""
    weights = torch.linspace(0.5, 1.5, output.shape[-1], device=output.device)
    return (output.square() * weights).sum(-1)


def truth_of(model: nn.Module, parts: list[Row]) -> Truth:
    """Every document (of one number) alone in its row, through an ordinary backward."""
    grads: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for unit in sorted({n for row in parts for n, _ in row}):
        model.zero_grad(set_to_none=True)
        for document in [d for row in parts for n, d in row if n == unit]:
            ids, places, numbers = packed([[(0, document)]])
            losses(model(ids, places, numbers)).sum().backward()
        for name, param in model.named_parameters():
            found = torch.zeros_like(param) if param.grad is None else param.grad
            grads[name].append(found)
    model.zero_grad(set_to_none=True)
    return Truth.of({name: torch.stack(found) for name, found in grads.items()})


class ByOffsets(Reader):
    """Reads documents as flash-attention has them; tokens in one row, or without rows."""

    def forward(self, ids: Tensor, places: Tensor, starts: Tensor) -> Tensor:  # type: ignore[override]
        place_T = torch.arange(ids.shape[-1])
        document_1T = torch.searchsorted(starts, place_T, right=True)[None]
        if ids.dim() == 2:
            return super().forward(ids, places, document_1T)
        x = self.table(ids) + self.places(places)
        q, k, v = self.qkv(self.scale(self.norm(x))).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], self.mask(document_1T))
        return self.head(self.between(x + self.out(mixed[0])))
