"""Reference for outer norms: form ``G_bᵀ A_b`` a few samples or rows at a time, square, sum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from flash_clipping.ops.clipped_sum.reference import product_of_rows
from flash_clipping.ops.error_bounds import TOGETHER, squared_norms
from flash_clipping.ops.runtime.shapes import accumulator

BUFFER, BUFFER_ON_GPU = 2**18, 2**24
"""The most gradient elements held at once when they are not kept (one row of p at least): what a
CPU's caches hold, and what keeps a GPU from waiting for launches. There as many elements of
operands are copied at once, or one sample's input."""


def outer_sqnorms(A_BTd: Tensor, G_BTp: Tensor, store: bool) -> tuple[Tensor, Tensor | None]:
    """See :func:`flash_clipping.ops.outer.outer_sqnorms`; norms come in parts ``[B, n]``."""
    B, T, d = A_BTd.shape
    p = G_BTp.shape[-1]
    dtype = accumulator(A_BTd, G_BTp)
    if store and dtype == A_BTd.dtype == G_BTp.dtype:  # what is kept needs no buffer
        kept_Bpd = torch.bmm(G_BTp.mT, A_BTd)
        return squared_norms(kept_Bpd).unsqueeze(1), kept_Bpd
    sq_B = A_BTd.new_zeros(B, dtype=dtype)
    grads_Bpd = A_BTd.new_empty((B, p, d), dtype=G_BTp.dtype) if store else None
    most = BUFFER_ON_GPU if A_BTd.is_cuda else BUFFER
    samples = max(1, most // max(1, p * d))
    rows = max(1, min(p, most // max(1, d)))
    if A_BTd.is_cuda:
        samples = max(1, min(samples, most // max(1, T * max(d, p))))
        rows = max(1, min(rows, most // max(1, T)))
    for b in range(0, B, samples):
        chunk = slice(b, b + samples)
        A = A_BTd[chunk].to(dtype)
        for i in range(0, p, rows):
            G_rows = G_BTp[chunk, :, i : i + rows].to(dtype)
            tile = G_rows.mT @ A if store else product_of_rows(G_rows, A)
            if grads_Bpd is not None:  # what is measured is what was rounded and kept
                tile = grads_Bpd[chunk, i : i + rows].copy_(tile).to(dtype)
            sq_B[chunk] += squared_norms(tile)
    return sq_B.unsqueeze(1), grads_Bpd


def weighted_sums_many(grads: Sequence[Tensor], coef_B: Tensor) -> list[Tensor]:
    """See :func:`flash_clipping.ops.outer.weighted_sums_many`."""
    # Whether no coefficient is 0, as far as looking costs nothing: on a CPU.
    all_count = coef_B.is_cpu and not bool((coef_B == 0).any())
    return [*map(_weighted_sum, grads, repeat(coef_B), repeat(all_count))]


def _weighted_sum(grads: Tensor, coef_B: Tensor, all_count: bool) -> Tensor:
    if len(grads) > TOGETHER:  # in two levels
        parts = zip(grads.split(TOGETHER), coef_B.split(TOGETHER), strict=True)
        first, *others = (_weighted_sum(*part, all_count) for part in parts)
        return sum(others, first)
    dtype = torch.promote_types(grads.dtype, torch.float32)
    if all_count and grads.dtype == coef_B.dtype == dtype:
        flat_BN = grads.reshape(grads.shape[0], grads.shape[1:].numel())
        return torch.mv(flat_BN.mT, coef_B).view(grads.shape[1:])
    total = torch.zeros(grads.shape[1:], dtype=dtype, device=grads.device)
    if coef_B.device.type == "cpu":
        for gradient, coefficient in zip(grads, coef_B.tolist(), strict=True):
            if coefficient != 0:
                total.add_(gradient, alpha=coefficient)
        return total
    for gradient, coefficient in zip(grads, coef_B.to(dtype), strict=True):
        total += torch.where(coefficient == 0, 0, gradient.to(dtype) * coefficient)
    return total
