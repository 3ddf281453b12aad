"""Kernels that form ``G_bᵀ A_b`` tile by tile, square and sum it, and may keep it.

B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import tiles_triton as tiles
from flash_clipping.ops.tiles_triton import load_tile

GROUP = 8
"""Tile rows walked together, so that the operands of a wave stay in the L2 cache."""


@triton.jit
def _outer_kernel(
    A,
    G,
    out,
    partial_ptr,
    B,
    T,
    d,
    p,
    A_stride_b,
    A_stride_t,
    G_stride_b,
    G_stride_t,
    tiles_p,
    tiles_d,
    STORE: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    per_sample = tiles_p * tiles_d
    for tile in tl.range(tl.program_id(0), B * per_sample, tl.num_programs(0), flatten=FLATTEN):
        b = tile // per_sample
        rest = tile % per_sample
        first = (rest // (GROUP * tiles_d)) * GROUP
        height = min(tiles_p - first, GROUP)
        within = rest % (GROUP * tiles_d)
        p0 = (first + within % height) * BLOCK_P
        d0 = (within // height) * BLOCK_D
        product = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        for t in range(0, T, BLOCK_T):
            g = load_tile(G, b, t, p0, T, p, G_stride_b, G_stride_t, BLOCK_T, BLOCK_P, TMA)
            a = load_tile(A, b, t, d0, T, d, A_stride_b, A_stride_t, BLOCK_T, BLOCK_D, TMA)
            product = tl.dot(tl.trans(g), a, product, input_precision=PRECISION)
        if STORE:
            if TMA_STORE:  # p is a multiple of BLOCK_P: no tile reaches into the next sample
                kept = product.to(out.dtype)
                out.store([b * p + p0, d0], kept)
            else:
                kept = product.to(out.dtype.element_ty)
                rows = p0 + tl.arange(0, BLOCK_P)[:, None]
                columns = d0 + tl.arange(0, BLOCK_D)[None, :]
                start = out + b.to(tl.int64) * p * d
                inside = (rows < p) & (columns < d)
                tl.store(start + rows.to(tl.int64) * d + columns, kept, mask=inside)
            product = kept.to(tl.float32)
        tl.store(partial_ptr + tile, tl.sum(tl.sum(product * product, 1), 0))


def outer_sqnorms(A_BTd: Tensor, G_BTp: Tensor, store: bool) -> tuple[Tensor, Tensor | None]:
    """See :func:`flash_clipping.ops.outer.outer_sqnorms`."""
    return launch_outer(A_BTd, G_BTp, store)


def launch_outer(
    A_BTd: Tensor,
    G_BTp: Tensor,
    store: bool,
    *,
    blocks: tuple[int, int, int] | None = None,
    num_warps: int = 8,
    num_stages: int = 3,
    flatten: bool = False,
    tma: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The same with the launch's parameters open to benchmarks."""
    A_BTd, G_BTp = tiles.with_unit_stride(A_BTd), tiles.with_unit_stride(G_BTp)
    B, T, d = A_BTd.shape
    p = G_BTp.shape[-1]
    block_p, block_d, block_t = blocks or _blocks(A_BTd, d, p)
    tma = tma and tiles.has_tma(A_BTd.device) and tiles.fits_tma(A_BTd, G_BTp)
    tma_store = tma and p % block_p == 0 and d * A_BTd.element_size() % 16 == 0
    tiles_p, tiles_d = triton.cdiv(p, block_p), triton.cdiv(d, block_d)
    grads_Bpd = A_BTd.new_empty((B, p, d)) if store else None
    partial = torch.empty((B, tiles_p * tiles_d), dtype=torch.float32, device=A_BTd.device)
    out = partial if grads_Bpd is None else grads_Bpd
    A, G = A_BTd, G_BTp
    if tma:
        A = tiles.descriptor(A_BTd, [1, block_t, block_d])
        G = tiles.descriptor(G_BTp, [1, block_t, block_p])
        if tma_store and grads_Bpd is not None:
            out = tiles.descriptor(grads_Bpd.view(B * p, d), [block_p, block_d])
    _outer_kernel[(min(partial.numel(), tiles.sm_count(A_BTd.device)),)](
        A,
        G,
        out,
        partial,
        B,
        T,
        d,
        p,
        *A_BTd.stride()[:2],
        *G_BTp.stride()[:2],
        tiles_p,
        tiles_d,
        STORE=store,
        TMA=tma,
        TMA_STORE=tma_store,
        BLOCK_P=block_p,
        BLOCK_D=block_d,
        BLOCK_T=block_t,
        GROUP=GROUP,
        PRECISION=tiles.dot_precision(A_BTd.dtype),
        FLATTEN=flatten,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return partial.sum(1), grads_Bpd


def _blocks(A_BTd: Tensor, d: int, p: int) -> tuple[int, int, int]:
    """Tile of ``[p, d]`` and step along T, by rule: few kernels, quick to compile."""
    if A_BTd.element_size() == 4 or not tiles.has_tma(A_BTd.device):
        return 64 if p <= 64 else 128, 64 if d <= 64 else 128, 32
    if d <= 128 or p <= 64:
        return 64 if p <= 64 else 128, 64 if d <= 64 else 128, 64
    return 128, 256, 64


WEIGHTED_BLOCK = 2048


@triton.jit
def _weighted_sum_kernel(
    grads_ptr, coef_ptr, out_ptr, B, N, stride_b, BLOCK: tl.constexpr, UNROLL: tl.constexpr
):
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, B, UNROLL):
        for step in tl.static_range(UNROLL):
            b = first + step
            coef = tl.load(coef_ptr + b, mask=b < B, other=0.0).to(tl.float32)
            start = grads_ptr + tl.cast(b, tl.int64) * stride_b
            kept = columns < tl.where(coef != 0, N, 0)  # of a dropped sample, nothing
            grads = tl.load(start + columns, mask=kept, other=0.0)
            total += coef * grads.to(tl.float32)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def weighted_sum(grads: Tensor, coef_B: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.outer.weighted_sum`."""
    if not grads[0].is_contiguous():
        grads = grads.contiguous()
    out = torch.empty(grads.shape[1:], dtype=grads.dtype, device=grads.device)
    N = out.numel()
    _weighted_sum_kernel[(triton.cdiv(N, WEIGHTED_BLOCK),)](
        grads,
        coef_B.contiguous(),
        out,
        grads.shape[0],
        N,
        grads.stride(0),
        BLOCK=WEIGHTED_BLOCK,
        UNROLL=4,
        num_warps=4,
    )
    return out
