"""Reference for gram norms: ``‖G_bᵀ A_b‖² = Σ (A_b A_bᵀ) ∘ (G_b G_bᵀ)``, a tile at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.certificate import FLOOR, doubt, squared_rows
from flash_clipping.ops.runtime.shapes import Group, GroupSqnorms, Memo, SqnormBlock, accumulator

TILE = 256
"""Side of a tile, and TILE² the most elements that any Gram temporary holds."""


def gram_sqnorms(A_BTd: Tensor, Gs: Sequence[Tensor]) -> GroupSqnorms:
    """See :func:`flash_clipping.ops.gram.gram_sqnorms`."""
    if len(Gs) == 1 and A_BTd.shape[2] > Gs[0].shape[2]:
        A_BTd, Gs = Gs[0], [A_BTd]  # which is which changes no norm; the wider may save its Gram
    B, T, d = A_BTd.shape
    dtype = accumulator(A_BTd, *Gs)
    sq_LB = A_BTd.new_zeros((len(Gs), B), dtype=dtype)
    spread_LB = torch.zeros_like(sq_LB)
    samples = max(1, TILE * TILE // max(1, min(T, TILE) ** 2))
    for b in range(0, B, samples):
        chunk = slice(b, b + samples)
        for i in range(0, T, TILE):
            for j in range(0, i + 1, TILE):
                twice = 1 if i == j else 2  # the tile (j, i) above the diagonal is the transpose
                AA = _gram_tile(A_BTd[chunk], i, j, dtype)
                if i == j:
                    A_sq_bt = AA.diagonal(dim1=1, dim2=2) + FLOOR * d
                for layer, G_BTp in enumerate(Gs):
                    if _is_wide(G_BTp, dtype):  # one tile is all of it
                        sq_LB[layer, chunk] = _quadratic_forms(AA, G_BTp[chunk])
                        G_sq_bt = squared_rows(G_BTp[chunk], dtype)
                    else:
                        GG = _gram_tile(G_BTp[chunk], i, j, dtype)
                        if i == j:
                            G_sq_bt = GG.diagonal(dim1=1, dim2=2) + FLOOR * G_BTp.shape[2]
                        sq_LB[layer, chunk].add_(GG.mul_(AA).sum((1, 2)), alpha=twice)
                    if i == j:
                        spread_LB[layer, chunk] += G_sq_bt.mul_(A_sq_bt).sqrt_().sum(1)
    return sq_LB, doubt(spread_LB)


def _is_wide(G_BTp: Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`_quadratic_forms` is faster: on CPUs, where a sample's rows fit a cache."""
    _, T, p = G_BTp.shape
    plain = G_BTp.device.type == "cpu" and G_BTp.dtype == dtype and G_BTp.stride(2) == 1
    return plain and 64 <= T <= TILE and p >= 4 * T and T * p <= 1 << 17


def _quadratic_forms(AA_BTT: Tensor, G_BTp: Tensor) -> Tensor:
    """``Σ (A Aᵀ) ∘ (G Gᵀ) = ⟨(A Aᵀ) G, G⟩``, ``[B]``; products of long rows, which CPUs prefer.

    ``A Aᵀ`` is symmetric: of rows ``t`` in the first half and ``t'`` in the second one order is
    counted twice, which saves a quarter of the products.
    """
    _, T, p = G_BTp.shape
    half = T // 2
    upper_BhT = AA_BTT[:, :half].clone()
    upper_BhT[:, :, half:] *= 2
    lower_Bhh = AA_BTT[:, half:, half:].contiguous()
    product = G_BTp.new_empty((T, p))
    forms = []
    for upper, lower, G in zip(upper_BhT, lower_Bhh, G_BTp, strict=True):
        torch.mm(upper, G, out=product[:half])
        torch.mm(lower, G[half:], out=product[half:])
        forms.append(torch.dot(product.view(-1), G.reshape(-1)))
    return torch.stack(forms)


def gram_blocks(groups: Sequence[Group], memo: Memo | None = None) -> list[SqnormBlock]:
    """See :func:`flash_clipping.ops.gram.gram_blocks`: a block for every group."""
    return [
        SqnormBlock([(i, j) for j in range(len(Gs))], *gram_sqnorms(A_BTd, Gs))
        for i, (A_BTd, Gs) in enumerate(groups)
    ]


def _gram_tile(X_BTf: Tensor, i: int, j: int, dtype: torch.dtype) -> Tensor:
    rows = X_BTf[:, i : i + TILE].to(dtype)
    columns = rows if i == j else X_BTf[:, j : j + TILE].to(dtype)
    return torch.bmm(rows, columns.mT)
