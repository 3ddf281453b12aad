"""Reference for segments: one after the other, by PyTorch's own products.

N sorted rows, S segments, E groups, B samples, d input features, p output features. Reads where
segments begin on the host: on a GPU it waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from flash_clipping.ops.clipped_sum.reference import product_of_rows
from flash_clipping.ops.error_bounds import cores_of, doubt_of_sums, spread
from flash_clipping.ops.gram.reference import gram_sqnorms
from flash_clipping.ops.outer.reference import outer_sqnorms
from flash_clipping.ops.runtime.shapes import accumulator
from flash_clipping.ops.segments.work import Lists, Rows

ELEMENTS = 1 << 18
"""Of both operands, as many at a time where norms of several segments are measured together."""


def _pieces(lists: Lists) -> Iterator[tuple[int, int]]:
    """First row of every segment, and the first that is no longer its own."""
    return itertools.pairwise(lists.starts.tolist())


def segment_sums(X_Nf: Tensor, lists: Lists) -> Tensor:
    """See :func:`flash_clipping.ops.segments.segment_sums`."""
    dtype = accumulator(X_Nf)
    sums = [X_Nf[i:j].sum(0, dtype=dtype) for i, j in _pieces(lists)]
    return torch.stack(sums) if sums else X_Nf.new_zeros((0, X_Nf.shape[1]), dtype=dtype)


def segment_sqnorms(A: Rows, G: Rows, lists: Lists) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.segments.segment_sqnorms`; segments of much the same length at
    a time, like samples of a batch."""
    d, p = A.features, G.features
    dtype = accumulator(A.X, G.X)
    sq_S, doubt_S = (A.X.new_zeros(len(lists), dtype=dtype) for _ in range(2))
    for which, rows_bL, outside_bL1 in _alike(lists, d + p):
        a, g = (of.at(rows_bL).to(dtype) for of in (A, G))
        if outside_bL1 is not None:
            a, g = a.masked_fill_(outside_bL1, 0), g.masked_fill_(outside_bL1, 0)
        rows = rows_bL.shape[1]
        if rows * (d + p) <= 2 * d * p:
            sq_1b, _, spread_sq_1b = gram_sqnorms(a, [g])
            sq_b, spread_b = sq_1b[0], spread_sq_1b[0].sqrt_()
        else:
            sq_b, spread_b = outer_sqnorms(a, g, False)[0].sum(1), spread(a, g)
        # Those of one segment need not be neighbours where their sums are formed: rows of units.
        doubt_b = doubt_of_sums(sq_b, spread_b, A.size, cores_of(a, g))
        sq_S[which], doubt_S[which] = sq_b, doubt_b
    return sq_S, doubt_S


def _alike(lists: Lists, features: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Segments that have rows, longest first: some of them ``[b]``, their rows ``[b, L]`` with room
    up to the longest, and which of these are not theirs ``[b, L, 1]``; ``None`` for none."""
    order_S = lists.longest_first_S
    starts_S, lengths_S = lists.starts[:-1][order_S].long(), lists.lengths_S[order_S]
    lengths = lengths_S.tolist()
    first, end = 0, sum(length > 0 for length in lengths)
    while first < end:
        longest = lengths[first]
        last = min(end, first + max(1, ELEMENTS // (longest * features)))
        shortest = longest - longest // 4  # of Gram matrices up to a half is for room
        if lengths[last - 1] < shortest:
            last = next(i for i in range(first, last) if lengths[i] < shortest)
        places_L = torch.arange(longest, device=order_S.device)
        rows_bL = starts_S[first:last, None] + places_L
        outside_bL1 = None
        if lengths[last - 1] < longest:
            outside_bL = places_L >= lengths_S[first:last, None]
            rows_bL, outside_bL1 = rows_bL.masked_fill_(outside_bL, 0), outside_bL.unsqueeze(2)
        yield order_S[first:last], rows_bL, outside_bL1
        first = last


def grouped_sums(A: Rows, G: Rows, lists: Lists, coef_B: Tensor | None) -> Tensor:
    """See :func:`flash_clipping.ops.segments.grouped_sums`; a group at a time in wide dtypes."""
    dtype = accumulator(A.X, G.X)
    joined, coef_N1, dropped_N1 = lists, None, None
    if coef_B is not None:
        joined = lists.joined(len(coef_B))
        coef_S = coef_B.to(dtype).repeat(len(joined))
        coef_N1 = coef_S.repeat_interleave(lists.lengths_S).unsqueeze(1)
        if not bool(coef_B.all()):  # 0 · inf is NaN, so it must be zero in both operands
            dropped_N1 = coef_N1 == 0
    out = A.X.new_empty((len(joined), G.features, A.features), dtype=dtype)
    for e, (i, j) in enumerate(_pieces(joined)):
        if i == j:
            out[e].zero_()
            continue
        a, g = A.between(i, j).to(dtype), G.between(i, j).to(dtype)
        if coef_N1 is not None:
            g = g * coef_N1[i:j]
        if dropped_N1 is not None:
            a, g = a.masked_fill(dropped_N1[i:j], 0), g.masked_fill_(dropped_N1[i:j], 0)
        out[e] = product_of_rows(g, a)
    return out


def segment_grads(A: Rows, G: Rows, lists: Lists, samples: int) -> Tensor:
    """See :func:`flash_clipping.ops.segments.segment_grads`."""
    grads = products(A, G, lists)
    return torch.unflatten(grads, 0, (-1, samples)).transpose(0, 1).contiguous()


def products(A: Rows, G: Rows, lists: Lists) -> Tensor:
    """``Σ g_n a_nᵀ`` of every run of rows, ``[S, p, d]`` in the operands' dtype."""
    return grouped_sums(A, G, lists, None).to(torch.promote_types(A.X.dtype, G.X.dtype))


def grouped_linear(X_Nd: Tensor, W_Epd: Tensor, lists: Lists) -> Tensor:
    """See :func:`flash_clipping.ops.segments.grouped_linear`."""
    out = X_Nd.new_empty((len(X_Nd), W_Epd.shape[1]))
    end = 0
    for e, (i, j) in enumerate(_pieces(lists)):
        if i < j:
            torch.mm(X_Nd[i:j], W_Epd[e].mT, out=out[i:j])
            end = j
    out[end:].zero_()
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
