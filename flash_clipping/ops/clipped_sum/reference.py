"""Reference for clipped sums: scale one operand by the coefficients in fp32, then one matmul."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.error_bounds import APART, TOGETHER
from flash_clipping.ops.rows.reference import row_scale
from flash_clipping.ops.runtime.shapes import LaunchCache, accumulator

_DTYPE = operator.attrgetter("dtype")
_SUMMED_AS_THEY_ARE = {torch.float32}, {torch.float64}

CONVERTED = 1 << 22
"""Elements of 16-bit operands that are converted to fp32 at a time (one sample's at least)."""

FORMED = 1 << 18
"""Elements of small products that are formed at a time, before they are added up."""

STRIP = 512
"""Rows of large products that are."""


def clipped_sums_many(
    pairs: Sequence[tuple[Tensor, Tensor]], coef_B: Tensor, memo: LaunchCache | None = None
) -> list[Tensor]:
    """See :func:`flash_clipping.ops.clipped_sum.clipped_sums_many`."""
    sums: dict[int, Tensor] = {}
    by_input: dict[int, tuple[list[int], list[Tensor]]] = {}
    for i, (A, G) in enumerate(pairs):
        members, Gs = by_input.setdefault(id(A), ([], []))
        members.append(i)
        Gs.append(G)
    for members, Gs in by_input.values():
        found = _of_one_input(pairs[members[0]][0], Gs, coef_B)
        if len(members) == len(pairs):
            return found
        sums.update(zip(members, found, strict=True))
    return [sums[i] for i in range(len(pairs))]


def _of_one_input(A_BTd: Tensor, Gs: Sequence[Tensor], coef_B: Tensor) -> list[Tensor]:
    if {A_BTd.dtype, *map(_DTYPE, Gs)} in _SUMMED_AS_THEY_ARE:
        return _products(A_BTd, Gs, coef_B)
    dtype = accumulator(A_BTd, *Gs)
    per_sample = A_BTd[:1].numel() + sum(G[:1].numel() for G in Gs)
    # As many positions at least as a product adds up separately: results are added up in turn.
    least = -(-TOGETHER // max(1, A_BTd.shape[1]))
    samples = max(1, least, CONVERTED // max(1, per_sample))
    totals: list[Tensor] = []
    for b in range(0, max(1, A_BTd.shape[0]), samples):  # of no samples: zeros
        chunk = slice(b, b + samples)
        Gs_wide = [G[chunk].to(dtype) for G in Gs]
        sums = _products(A_BTd[chunk].to(dtype), Gs_wide, coef_B[chunk])
        totals = [a.add_(b) for a, b in zip(totals, sums, strict=True)] if totals else sums
    return totals


def _products(A_BTd: Tensor, Gs: Sequence[Tensor], coef_B: Tensor) -> list[Tensor]:
    """Clipped sums of operands of one dtype, summed in that dtype."""
    A_BTd = row_scale(A_BTd, coef_B)
    # 0 · inf is NaN, so a dropped sample must be zero in both operands. Only the CPU may look
    # whether there is one; on a GPU looking would wait for the device.
    if not (coef_B.is_cpu and bool(coef_B.all())):
        kept_B = (coef_B != 0).to(coef_B.dtype)
        Gs = [row_scale(G_BTp, kept_B) for G_BTp in Gs]
    if A_BTd.shape[1] > APART and len(A_BTd) > 1:
        return [_sum_of_samples(G_BTp, A_BTd) for G_BTp in Gs]
    rows_Nd, sums = A_BTd.flatten(0, 1), list[Tensor]()
    for G_BTp in Gs:
        sums.append(product_of_rows(G_BTp.flatten(0, 1), rows_Nd))
    return sums


def _sum_of_samples(G_BTp: Tensor, A_BTd: Tensor) -> Tensor:
    """``Σ_b G_bᵀ A_b``. What rounding makes of a long sample may not depend on who else is there:
    each is added up separately (:func:`flash_clipping.ops.error_bounds.additions`)."""
    p, d = G_BTp.shape[2], A_BTd.shape[2]
    total = A_BTd.new_zeros(p, d)
    at_once = max(1, FORMED // max(1, p * d))
    for G, A in zip(G_BTp.split(at_once), A_BTd.split(at_once), strict=True):
        total += product_of_rows(G, A).sum(0) if at_once > 1 else product_of_rows(G[0], A[0])
    return total


def product_of_rows(G: Tensor, A: Tensor) -> Tensor:
    """``Gᵀ A`` of rows ``[..., N, p]`` and ``[..., N, d]`` of one dtype, :data:`TOGETHER` of them
    at a time: libraries add up hundreds in turn, those of narrow matrices all of them, and what
    sums may lose grows with it (:func:`flash_clipping.ops.error_bounds.additions`)."""
    N, elements = A.shape[-2], A.shape[:-2].numel() * A.shape[-1] * G.shape[-1]
    if N <= TOGETHER:
        return G.mT @ A
    whole = N // TOGETHER * TOGETHER
    total = G[..., whole:, :].mT @ A[..., whole:, :]
    if elements > FORMED // 2:
        for strip, G_strip in zip(total.split(STRIP, -2), G.split(STRIP, -1), strict=True):
            buffer = torch.empty_like(strip)
            for i in range(0, whole, TOGETHER):
                rows = slice(i, i + TOGETHER)
                strip += torch.matmul(G_strip[..., rows, :].mT, A[..., rows, :], out=buffer)
        return total
    at_once = TOGETHER * (FORMED // max(1, elements))
    for i in range(0, whole, at_once):
        rows = slice(i, min(i + at_once, whole))
        g, a = (X[..., rows, :].unflatten(-2, (-1, TOGETHER)) for X in (G, A))
        total += (g.mT @ a).sum(-3)
    return total
