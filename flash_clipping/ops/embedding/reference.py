"""Reference for embedding norms: sort the ids of a sample, sum runs of equal ids, square."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator

TILE = 256

BUFFER = 2**16
"""About how many elements a temporary holds (some features of one sample at least)."""

WIDEST = 2**22
"""Elements of such features."""


def embedding_sqnorms(
    ids_BT: Tensor, G_BTd: Tensor, padding_idx: int | None, num_embeddings: int | None
) -> Tensor:
    """See :func:`flash_clipping.ops.embedding.embedding_sqnorms`: one part, ``[B, 1]``. In float64:
    all rows of one id are added up in turn."""
    B, T, d = G_BTd.shape
    sq_B = G_BTd.new_zeros(B, dtype=torch.float64)
    sorted_BT, order_BT = ids_BT.sort(dim=1, stable=True)
    starts_BT = torch.ones_like(sorted_BT)
    starts_BT[:, 1:] = sorted_BT[:, 1:] != sorted_BT[:, :-1]
    run_BT = starts_BT.cumsum(1) - 1
    samples = max(1, BUFFER // max(1, T * d))
    for b in range(0, B, samples):
        chunk = slice(b, b + samples)
        n = len(G_BTd[chunk])
        n1 = torch.arange(n, device=G_BTd.device).unsqueeze(1)
        for G_nTf in G_BTd[chunk].split(max(1, WIDEST // max(1, n * T)), dim=2):
            rows_nTf = G_nTf[n1, order_BT[chunk]].double()
            if padding_idx is not None:
                rows_nTf.masked_fill_((sorted_BT[chunk] == padding_idx).unsqueeze(-1), 0)
            runs = sums_by_index(rows_nTf, run_BT[chunk] + n1 * T, n * T)
            sq_B[chunk] += runs.square_().view(n, -1).sum(1)
    return sq_B.to(accumulator(G_BTd)).unsqueeze(1)


def sums_by_index(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """``[count, d]``: the sum of the rows ``[..., d]`` that have each index ``[...]``, in a fixed
    order on every device, which ``index_add_`` and ``index_put_`` do not promise."""
    sums: Tensor = torch.ops.aten.embedding_dense_backward(rows, index, count, -1, False)
    return sums


def tied_cross_term(
    ids_BT: Tensor, Gemb_BTd: Tensor, Ahead_BSd: Tensor, Ghead_BSV: Tensor, padding_idx: int | None
) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.embedding.tied_cross_term`; in float64, as Gram norms are
    (:mod:`flash_clipping.ops.gram.reference`)."""
    wanted, dtype = accumulator(Gemb_BTd, Ahead_BSd, Ghead_BSV), torch.float64
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
    return cross_B.to(wanted), torch.zeros_like(cross_B, dtype=wanted)
