"""Reference for segments: one after the other, by PyTorch's own products.

N sorted rows, S segments, E groups, B samples, d input features, p output features. Reads where
segments begin on the host: on a GPU it waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from flash_clipping.ops import certificate
from flash_clipping.ops.runtime.shapes import accumulator
from flash_clipping.ops.segments.work import Lists, Rows


def _pieces(lists: Lists) -> Iterator[tuple[int, int]]:
    """First row of every segment, and the first that is no longer its own."""
    return itertools.pairwise(lists.starts.tolist())


def segment_sums(X_Nf: Tensor, lists: Lists) -> Tensor:
    """See :func:`flash_clipping.ops.segments.segment_sums`."""
    dtype = accumulator(X_Nf)
    sums = [X_Nf[i:j].sum(0, dtype=dtype) for i, j in _pieces(lists)]
    return torch.stack(sums) if sums else X_Nf.new_zeros((0, X_Nf.shape[1]), dtype=dtype)


def segment_sqnorms(A: Rows, G: Rows, lists: Lists) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.segments.segment_sqnorms`."""
    d, p = A.X.shape[1], G.X.shape[1]
    dtype = accumulator(A.X, G.X)
    sq_S, spread_S = (A.X.new_zeros(len(lists), dtype=dtype) for _ in range(2))
    for s, (i, j) in enumerate(_pieces(lists)):
        if i == j:
            continue
        a, g = A.between(i, j).to(dtype), G.between(i, j).to(dtype)
        if (j - i) * (d + p) <= 2 * d * p:
            AA, GG = a @ a.mT, g @ g.mT
            sq_S[s] = AA.mul_(GG).sum()
        else:
            sq_S[s] = (g.mT @ a).square_().sum()
        spread_S[s] = certificate.spread(a.unsqueeze(0), g.unsqueeze(0))[0]
    return sq_S, certificate.doubt(spread_S)


def grouped_sums(A: Rows, G: Rows, lists: Lists, coef_B: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.segments.grouped_sums`; a group at a time in wide dtypes."""
    dtype = accumulator(A.X, G.X)
    B = len(coef_B)
    lengths = lists.lengths_S.view(-1, B)
    out = A.X.new_zeros((len(lengths), G.X.shape[1], A.X.shape[1]), dtype=dtype)
    for e, (i, j) in enumerate(_pieces(lists.joined(B))):
        if i == j:
            continue
        coef = coef_B.to(dtype).repeat_interleave(lengths[e]).unsqueeze(1)
        dropped = coef == 0  # 0 · inf is NaN, so it must be zero in both operands
        a = A.between(i, j).to(dtype).masked_fill(dropped, 0)
        g = (G.between(i, j).to(dtype) * coef).masked_fill(dropped, 0)
        torch.mm(g.mT, a, out=out[e])
    return out


def segment_grads(A: Rows, G: Rows, lists: Lists, samples: int) -> Tensor:
    """See :func:`flash_clipping.ops.segments.segment_grads`."""
    grads = products(A, G, lists)
    return grads.unflatten(0, (-1, samples)).transpose(0, 1).contiguous()


def products(A: Rows, G: Rows, lists: Lists) -> Tensor:
    """``Σ g_n a_nᵀ`` of every run of rows, ``[S, p, d]`` in the operands' dtype."""
    one = A.X.new_ones(1, dtype=accumulator(A.X, G.X))
    return grouped_sums(A, G, lists, one).to(torch.promote_types(A.X.dtype, G.X.dtype))


def grouped_linear(X_Nd: Tensor, W_Epd: Tensor, lists: Lists) -> Tensor:
    """See :func:`flash_clipping.ops.segments.grouped_linear`."""
    out = X_Nd.new_zeros((len(X_Nd), W_Epd.shape[1]))
    for e, (i, j) in enumerate(_pieces(lists)):
        if i < j:
            out[i:j] = X_Nd[i:j] @ W_Epd[e].mT
    return out


def sums_of_tokens(X_Nf: Tensor, rows_Mk: Tensor, end: Tensor, weight_Mk: Tensor | None) -> Tensor:
    """See :func:`flash_clipping.ops.segments.sums_of_tokens`; one choice after the other."""
    dtype = accumulator(X_Nf)
    total_Mf = X_Nf.new_zeros((len(rows_Mk), X_Nf.shape[1]), dtype=dtype)
    for j, rows_M in enumerate(rows_Mk.unbind(1)):
        rows_Mf = X_Nf[rows_M].to(dtype)
        if weight_Mk is not None:
            rows_Mf *= weight_Mk[:, j, None].to(dtype)
        total_Mf += rows_Mf.masked_fill_((rows_M >= end)[:, None], 0)
    return total_Mf.to(sum_dtype(X_Nf, weight_Mk))


def sum_dtype(X_Nf: Tensor, weight_Mk: Tensor | None) -> torch.dtype:
    """The wider dtype of rows and weights, as their product has it."""
    return X_Nf.dtype if weight_Mk is None else torch.promote_types(X_Nf.dtype, weight_Mk.dtype)
