"""An attention that cannot run on a batch of 0."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

T, CLASSES = 6, 3


class ReshapingAttention(nn.Module):
    """Heads by ``reshape(batch, T, heads, -1)``, which fails on a batch of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.reshape(x.shape[0], T, 2, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.head(mixed.transpose(1, 2).reshape(x.shape[0], T, -1).mean(1))
