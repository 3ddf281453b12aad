"""Reference for segments: one after the other, by PyTorch's own products.

N sorted rows, S segments or groups, d input features, p output features. Reads where segments begin
on the host: on a GPU it waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from flash_clipping.ops import certificate
from flash_clipping.ops.runtime.shapes import accumulator


def _pieces(starts: Tensor) -> Iterator[tuple[int, int]]:
    """First row of every segment, and the first that is no longer its own."""
    return itertools.pairwise(starts.tolist())


def segment_sums(X_Nf: Tensor, starts: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.segments.segment_sums`."""
    dtype = accumulator(X_Nf)
    sums = [X_Nf[i:j].sum(0, dtype=dtype) for i, j in _pieces(starts)]
    return torch.stack(sums) if sums else X_Nf.new_zeros((0, X_Nf.shape[1]), dtype=dtype)


def segment_sqnorms(A_Nd: Tensor, G_Np: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.segments.segment_sqnorms`."""
    d, p = A_Nd.shape[1], G_Np.shape[1]
    dtype = accumulator(A_Nd, G_Np)
    sq_S, spread_S = (A_Nd.new_zeros(len(starts) - 1, dtype=dtype) for _ in range(2))
    for s, (i, j) in enumerate(_pieces(starts)):
        if i == j:
            continue
        A, G = A_Nd[i:j].to(dtype), G_Np[i:j].to(dtype)
        rows = j - i
        if rows * (d + p) <= 2 * d * p:
            AA, GG = A @ A.mT, G @ G.mT
            sq_S[s] = AA.mul_(GG).sum()
        else:
            sq_S[s] = (G.mT @ A).square_().sum()
        spread_S[s] = certificate.spread(A.unsqueeze(0), G.unsqueeze(0))[0]
    return sq_S, certificate.doubt(spread_S)


def products(A_Nd: Tensor, G_Np: Tensor, starts: Tensor) -> Tensor:
    """``Σ g_n a_nᵀ`` of every piece, ``[S, p, d]``."""
    dtype = torch.promote_types(A_Nd.dtype, G_Np.dtype)
    out = A_Nd.new_zeros((len(starts) - 1, G_Np.shape[1], A_Nd.shape[1]), dtype=dtype)
    for s, (i, j) in enumerate(_pieces(starts)):
        if i < j:
            torch.mm(G_Np[i:j].mT.to(dtype), A_Nd[i:j].to(dtype), out=out[s])
    return out


def grouped_sums(A_Nd: Tensor, G_Np: Tensor, starts: Tensor, coef_N: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.segments.grouped_sums`; a piece at a time in wide dtypes."""
    dtype = accumulator(A_Nd, G_Np)
    out = A_Nd.new_zeros((len(starts) - 1, G_Np.shape[1], A_Nd.shape[1]), dtype=dtype)
    for e, (i, j) in enumerate(_pieces(starts)):
        if i == j:
            continue
        coef = coef_N[i:j].to(dtype).unsqueeze(1)
        dropped = coef == 0  # 0 · inf is NaN, so it must be zero in both operands
        A = A_Nd[i:j].to(dtype).masked_fill(dropped, 0)
        G = (G_Np[i:j].to(dtype) * coef).masked_fill(dropped, 0)
        torch.mm(G.mT, A, out=out[e])
    return out


def grouped_linear(X_Nd: Tensor, W_Epd: Tensor, starts: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.segments.grouped_linear`."""
    out = X_Nd.new_zeros((len(X_Nd), W_Epd.shape[1]))
    for e, (i, j) in enumerate(_pieces(starts)):
        if i < j:
            out[i:j] = X_Nd[i:j] @ W_Epd[e].mT
    return out
