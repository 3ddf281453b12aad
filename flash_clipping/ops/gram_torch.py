"""Reference for gram norms: ``‖G_bᵀ A_b‖² = Σ (A_b A_bᵀ) ∘ (G_b G_bᵀ)``, a tile at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.shapes import Group, GroupSqnorms, accumulator

TILE = 256
"""Side of a tile, and TILE² the most elements that any Gram temporary holds."""


def gram_sqnorms(A_BTd: Tensor, Gs: Sequence[Tensor], bias: bool) -> GroupSqnorms:
    """See :func:`flash_clipping.ops.gram.gram_sqnorms`."""
    B, T, _ = A_BTd.shape
    dtype = accumulator(A_BTd, *Gs)
    weight_sq_LB = A_BTd.new_zeros((len(Gs), B), dtype=dtype)
    bias_sq_LB = torch.zeros_like(weight_sq_LB) if bias else None
    samples = max(1, TILE * TILE // max(1, min(T, TILE) ** 2))
    for b in range(0, B, samples):
        chunk = slice(b, b + samples)
        for i in range(0, T, TILE):
            for j in range(0, i + 1, TILE):
                twice = 1 if i == j else 2  # the tile (j, i) above the diagonal is the transpose
                AA = _gram_tile(A_BTd[chunk], i, j, dtype)
                for layer, G_BTp in enumerate(Gs):
                    GG = _gram_tile(G_BTp[chunk], i, j, dtype)
                    if bias_sq_LB is not None:
                        bias_sq_LB[layer, chunk].add_(GG.sum((1, 2)), alpha=twice)
                    weight_sq_LB[layer, chunk].add_(GG.mul_(AA).sum((1, 2)), alpha=twice)
    # Rounding can leave a sum that cancels to nothing just below zero; NaN stays NaN.
    return weight_sq_LB.clamp_(min=0), None if bias_sq_LB is None else bias_sq_LB.clamp_(min=0)


def gram_sqnorms_many(groups: Sequence[Group], bias: bool) -> list[GroupSqnorms]:
    """See :func:`flash_clipping.ops.gram.gram_sqnorms_many`."""
    return [gram_sqnorms(A_BTd, Gs, bias) for A_BTd, Gs in groups]


def _gram_tile(X_BTf: Tensor, i: int, j: int, dtype: torch.dtype) -> Tensor:
    rows = X_BTf[:, i : i + TILE].to(dtype)
    columns = rows if i == j else X_BTf[:, j : j + TILE].to(dtype)
    return torch.bmm(rows, columns.mT)
