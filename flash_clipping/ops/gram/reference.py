"""Reference for gram norms: ``‖G_bᵀ A_b‖² = Σ (A_b A_bᵀ) ∘ (G_b G_bᵀ)``, a tile at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.error_bounds import FLOOR, cores_of, doubt_of_sums
from flash_clipping.ops.runtime.shapes import Group, LaunchCache, SqnormBlock, accumulator

TILE, TILE_ON_GPU = 256, 1024
"""Side of a tile; its square is the most elements that any Gram temporary holds. A GPU would wait
for the launches of small ones."""

COPIED = 2**24
"""Elements of an operand that are copied to float64 at once on a GPU; more only of a wide layer's
smallest tile."""


def gram_sqnorms(A_BTd: Tensor, Gs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`flash_clipping.ops.gram.gram_sqnorms`; squared spreads as well. In float64: where
    positions cancel, products in fp32 may lose more than what is left of a norm."""
    B, T, d = A_BTd.shape
    wanted, dtype = accumulator(A_BTd, *Gs), torch.float64
    sq_LB = A_BTd.new_zeros((len(Gs), B), dtype=dtype)
    spread_LB = torch.zeros_like(sq_LB)
    side, widest = TILE, max(1, *(X.shape[-1] for X in (A_BTd, *Gs)))
    if A_BTd.is_cuda:
        side = max(TILE, min(TILE_ON_GPU, COPIED // widest))
    samples = max(1, side**2 // max(1, min(T, side) ** 2))
    if A_BTd.is_cuda:
        samples = max(1, min(samples, COPIED // (max(1, min(T, side)) * widest)))
    for b in range(0, B, samples):
        chunk = slice(b, b + samples)
        for i in range(0, T, side):
            for j in range(0, i + 1, side):
                twice = 1 if i == j else 2  # the tile (j, i) above the diagonal is the transpose
                AA = _gram_tile(A_BTd[chunk], i, j, side)
                if i == j:
                    A_sq_bt = AA.diagonal(dim1=1, dim2=2) + FLOOR * d
                for layer, G_BTp in enumerate(Gs):
                    GG = _gram_tile(G_BTp[chunk], i, j, side)
                    if i == j:
                        G_sq_bt = GG.diagonal(dim1=1, dim2=2) + FLOOR * G_BTp.shape[2]
                        spread_LB[layer, chunk] += G_sq_bt.mul_(A_sq_bt).sqrt_().sum(1)
                    sq_LB[layer, chunk].add_(GG.mul_(AA).sum((1, 2)), alpha=twice)
    sq_LB, spread_LB = sq_LB.to(wanted), spread_LB.to(wanted)
    doubt_LB = doubt_of_sums(sq_LB, spread_LB, T, cores_of(A_BTd, *Gs))
    return sq_LB, doubt_LB, spread_LB.square_()


def gram_blocks(groups: Sequence[Group], memo: LaunchCache | None = None) -> list[SqnormBlock]:
    """See :func:`flash_clipping.ops.gram.gram_blocks`: a block for every group."""
    return [
        SqnormBlock([(i, j) for j in range(len(Gs))], *gram_sqnorms(A_BTd, Gs))
        for i, (A_BTd, Gs) in enumerate(groups)
    ]


def _gram_tile(X_BTf: Tensor, i: int, j: int, side: int) -> Tensor:
    rows = X_BTf[:, i : i + side].double()
    columns = rows if i == j else X_BTf[:, j : j + side].double()
    return torch.bmm(rows, columns.mT)
