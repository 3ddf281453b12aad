"""Experts of one hidden unit each, which a product-key router chooses (PEER, arXiv 2407.04153).

T axes of tokens, d features, E experts, h heads, k choices of each head, L = h·k, f features of the
shared expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping.layers.product_key_router import ProductKeyRouter

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class ProductKeyExperts(nn.Module):
    """A feed-forward layer of many small experts: ``y = shared(x) + Σ_j w_j v_j act(⟨u_j, x⟩)``.

    The sum is over the experts that a :class:`~flash_clipping.layers.ProductKeyRouter` chooses for
    the token, ``w_j = exp(score_j)``, and ``u``, ``v`` are rows of two tables ``[E, d]``.

    Args:
        width: features of a token, d.
        experts: how many experts there are: a square.
        k: how many each head chooses.
        shared: features of the SwiGLU that every token takes besides, or 0 for none.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        router: options of the router: ``heads``, ``norm``, ``groups``, ``bias``, ``backend``.

    Raises:
        ValueError: as the router, or an unknown activation.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        k: int,
        *,
        shared: int = 0,
        activation: str = "gelu",
        **router: Any,
    ):
        super().__init__()
        self.router = ProductKeyRouter(width, experts, k, **router)
        self.tables = ExpertTables(width, experts, activation)
        self.shared = SwiGLU(width, shared) if shared else None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """``[..., d]`` to ``[..., d]``, in the dtype of x.

        Args:
            x: the samples first, tokens behind them.
            valid: ``[...]``, bool: tokens where it is false have no experts. The shared expert
                reads them.
        """
        scores, indices = self.router(x, valid)
        y: Tensor = self.tables(x, indices, scores.exp())
        return y if self.shared is None else y + self.shared(x)


class ExpertTables(nn.Module):
    """``y = Σ_j w_j v_j act(⟨u_j, x⟩)`` with rows of two tables, for the experts of each token.

    Attributes:
        down: ``[E, d]``, the rows u that read.
        up: ``[E, d]``, the rows v that write.
    """

    def __init__(self, width: int, experts: int, activation: str = "gelu"):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"ExpertTables: found activation={activation!r}; expected one of "
                f"{', '.join(ACTIVATIONS)}."
            )
        self.activation = activation
        self.down = nn.Parameter(torch.randn(experts, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(experts, width) / width**0.5)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """
        Args:
            x: ``[..., d]``.
            indices: ``[..., L]``, integers. One outside of ``0 ... E - 1``, as -1 is, stands for no
                expert: it addresses nothing and adds nothing, whatever its weight is.
            weights: ``[..., L]``.
        """
        chosen, none = self.experts_of(indices)
        # Where there is no expert, a select: what is selected away may hold anything, and its
        # gradient is exactly 0.
        u = F.embedding(chosen, self.down).masked_fill(none.unsqueeze(-1), 0)
        v = F.embedding(chosen, self.up).masked_fill(none.unsqueeze(-1), 0)
        before = (u * x.unsqueeze(-2)).sum(-1).masked_fill(none, 0)
        unit = self.act(before) * weights.masked_fill(none, 0)
        return (v * unit.unsqueeze(-1)).sum(-2).to(x.dtype)

    def experts_of(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Indices that all address a row, int64, and where there is no expert."""
        none = (indices < 0) | (indices >= len(self.down))
        return indices.long().masked_fill(none, 0), none

    def act(self, x: Tensor) -> Tensor:
        """The activation function."""
        return ACTIVATIONS[self.activation](x)

    def extra_repr(self) -> str:
        experts, width = self.down.shape
        return f"{experts}, {width}, activation={self.activation!r}"


class SwiGLU(nn.Module):
    """``down(silu(gate x) · up x)``, ``[..., d]`` to ``[..., d]``."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y
