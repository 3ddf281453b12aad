"""Reference for embedding norms: sort the ids of a sample, sum runs of equal ids, square."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.ops.shapes import accumulator

TILE = 256


def embedding_sqnorms(ids_BT: Tensor, G_BTd: Tensor, padding_idx: int | None) -> Tensor:
    """See :func:`flash_clipping.ops.embedding.embedding_sqnorms`."""
    dtype = accumulator(G_BTd)
    sq_B = G_BTd.new_zeros(G_BTd.shape[0], dtype=dtype)
    for b, (ids_T, G_Td) in enumerate(zip(ids_BT, G_BTd, strict=True)):
        sorted_T, order_T = ids_T.sort(stable=True)
        starts_T = torch.ones_like(sorted_T)
        starts_T[1:] = sorted_T[1:] != sorted_T[:-1]
        run_T = starts_T.cumsum(0) - 1
        rows_Td = G_Td.to(dtype)[order_T]
        if padding_idx is not None:
            rows_Td = rows_Td.masked_fill((sorted_T == padding_idx).unsqueeze(-1), 0)
        # index_put_ adds equal indices in a fixed order on every device; index_add_ does not.
        runs_Td = torch.zeros_like(rows_Td).index_put_((run_T,), rows_Td, accumulate=True)
        sq_B[b] = runs_Td.square_().sum()
    return sq_B


def tied_cross_term(
    ids_BT: Tensor,
    Gemb_BTd: Tensor,
    Ahead_BSd: Tensor,
    Ghead_BSV: Tensor,
    padding_idx: int | None,
) -> Tensor:
    """See :func:`flash_clipping.ops.embedding.tied_cross_term`."""
    dtype = accumulator(Gemb_BTd, Ahead_BSd, Ghead_BSV)
    B, T, _ = Gemb_BTd.shape
    S = Ahead_BSd.shape[1]
    cross_B = Gemb_BTd.new_zeros(B, dtype=dtype)
    for b in range(B):
        for t in range(0, T, TILE):
            ids = ids_BT[b, t : t + TILE]
            rows = Gemb_BTd[b, t : t + TILE].to(dtype)
            if padding_idx is not None:
                rows = rows.masked_fill((ids == padding_idx).unsqueeze(-1), 0)
            for s in range(0, S, TILE):
                products = Ahead_BSd[b, s : s + TILE].to(dtype) @ rows.mT
                weights = Ghead_BSV[b, s : s + TILE][:, ids]
                cross_B[b] += products.mul_(weights).sum()
    return cross_B
