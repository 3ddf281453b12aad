"""Models that read constants: positions, tables, learned vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OnConstants(nn.Module):
    """Computes something from parameters and constants alone, and adds it to the samples."""

    def __init__(self, how: str):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4))
        self.emb = nn.Parameter(torch.randn(4))
        self.embed = nn.Embedding(9, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.grid = torch.randn(7, 4, dtype=torch.float64)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        T, self.grid = x.shape[1], self.grid.to(x.dtype)
        constant = {
            "row": lambda: self.mlp(self.emb[None])[0],
            "mean": lambda: self.mlp(self.emb[None]).mean(0),
            "vector": lambda: self.mlp(self.emb),
            "looked_up": lambda: self.embed(torch.arange(T)[None]),
            "looked_up_T": lambda: self.embed(torch.arange(T)),
            "looked_up_first": lambda: self.embed(torch.arange(T)[None])[0],
            "looked_up_scaled": lambda: 2 * self.embed(torch.arange(T)),
            "looked_up_BT": lambda: self.embed(torch.arange(T).expand(len(x), T)),
            "sum_of_tables": lambda: (
                self.embed(torch.arange(T)[None]) + self.embed(torch.arange(T))
            ),
            "through_mlp": lambda: self.mlp(self.embed(torch.arange(T)[None])),
            "buffer": lambda: self.mlp(self.grid[:T]),
            "mean_of_buffer": lambda: self.mlp(self.grid).mean(0),
            "convolution": lambda: self.conv(self.grid[:T].mT[None])[0].mT,
            "attention": lambda: self.attention(
                self.grid[None, :T], self.grid[None], self.grid[None]
            )[0][0],
        }[self.how]()
        if self.how == "looked_up":
            assert constant.shape == (1, T, 4)
        return self.last(torch.tanh(x + constant))


class Table(nn.Embedding):
    """Positions of its own, as Blenderbot's and BART's: a subclass, which no rule serves."""

    def forward(self, T: int) -> Tensor:
        return super().forward(torch.arange(T))


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4))

    def forward(self, T: int) -> Tensor:
        return self.table[torch.arange(T)]


class AtPositions(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.positions = Table(9, 4) if kind == "embedding" else Indexed()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + self.positions(x.shape[1])))
