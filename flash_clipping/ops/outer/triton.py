"""Kernels that form ``G_bᵀ A_b`` tile by tile, square and sum it, and may keep it.

B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.tables import firsts_of, to_device
from flash_clipping.ops.runtime.tiles import (
    has_gluon,
    jit,
    launch,
    load_tile,
    sum_by_warp,
    tile_in_groups,
)

GROUP = 4
"""Tile rows walked together, so that the operands of a wave stay in the L2 cache."""


@triton.jit(do_not_specialize=["B", "T", "tiles_p", "tiles_d"])
def _outer_kernel(
    A_ptr, G_ptr, out_ptr, partial_ptr,
    B, T, d, p, A_stride_b, A_stride_t, G_stride_b, G_stride_t, tiles_p, tiles_d,
    STORE: tl.constexpr, TMA: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, PROMOTE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    if TMA:
        A = tl.make_tensor_descriptor(
            A_ptr, [B, T, d], [A_stride_b, A_stride_t, 1], [1, BLOCK_T, BLOCK_D]
        )
        G = tl.make_tensor_descriptor(
            G_ptr, [B, T, p], [G_stride_b, G_stride_t, 1], [1, BLOCK_T, BLOCK_P]
        )
    else:
        A, G = A_ptr, G_ptr
    per_sample = tiles_p * tiles_d
    for tile in tl.range(tl.program_id(0), B * per_sample, tl.num_programs(0), flatten=FLATTEN):
        b = tile // per_sample
        rest = tile % per_sample
        tile_p, tile_d = tile_in_groups(rest, tiles_p, tiles_d, GROUP)
        p0, d0 = tile_p * BLOCK_P, tile_d * BLOCK_D
        product = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        for step in range(0, tl.cdiv(T, BLOCK_T)):
            t = step * BLOCK_T
            g = load_tile(G, b, t, p0, T, p, G_stride_b, G_stride_t, BLOCK_T, BLOCK_P, TMA)
            a = load_tile(A, b, t, d0, T, d, A_stride_b, A_stride_t, BLOCK_T, BLOCK_D, TMA)
            product = tl.dot(tl.trans(g), a, product, input_precision=PRECISION)
            # See gram/triton.py: the accumulator of the tensor cores truncates.
            if PROMOTE > 0:  # noqa: SIM102
                if step % PROMOTE == PROMOTE - 1:
                    total += product
                    product = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        if PROMOTE > 0:
            product += total
        if STORE:
            kept = product.to(out_ptr.dtype.element_ty)
            rows = p0 + tl.arange(0, BLOCK_P)[:, None]
            columns = d0 + tl.arange(0, BLOCK_D)[None, :]
            start = out_ptr + b.to(tl.int64) * p * d
            inside = (rows < p) & (columns < d)
            tl.store(start + rows.to(tl.int64) * d + columns, kept, mask=inside)
            product = kept.to(tl.float32)
        squares = product * product
        parts = tile * PARTS + tl.arange(0, PARTS)
        tl.store(partial_ptr + parts, sum_by_warp(squares, BLOCK_P, PARTS))


@functools.lru_cache(maxsize=1024)
def config_for(
    dtype: torch.dtype, T: int, d: int, p: int, store: bool, tma: bool
) -> tuple[int, dict[str, Any]]:
    """Programs on a multiprocessor, and the kernel's constants. By rule, not by search: few
    kernels, quick to compile."""
    tile = dict(BLOCK_P=64 if p <= 64 else 128, BLOCK_D=64 if d <= 64 else 128, BLOCK_T=64)
    alone = dict(tile, PROMOTE=0, FLATTEN=False, num_warps=8, num_stages=3)
    if dtype == torch.float32:
        return 1, dict(alone, BLOCK_T=32, PROMOTE=2)
    if not tma:
        return 1, dict(alone, BLOCK_T=32, PROMOTE=32)
    # There are registers for a second accumulator only in a program of twice the threads. Norms
    # of kept gradients need none: what is measured is what was kept.
    if not store and T > 2048:
        return 1, dict(alone, PROMOTE=16, num_stages=4)
    # Two programs on a multiprocessor: one multiplies while the other squares, sums and stores.
    return 2, dict(alone, FLATTEN=True, num_warps=4)


def fills_ring(A_BTd: Tensor, G_BTp: Tensor) -> bool:
    """Whether the kernel for Hopper fits: its tiles, of 128 x 256, cover no more than others."""
    d, p = A_BTd.shape[2], G_BTp.shape[2]
    if A_BTd.dtype == torch.float32 or not tiles.is_hopper(A_BTd.device) or not has_gluon():
        return False
    fits = p > 64 and d % 8 == 0 and tiles.cdiv(d, 256) * 2 == tiles.cdiv(d, 128)
    return fits and tiles.fits_tma(A_BTd, G_BTp)


def outer_sqnorms(A_BTd: Tensor, G_BTp: Tensor, store: bool) -> tuple[Tensor, Tensor | None]:
    A_BTd, G_BTp = tiles.with_unit_stride(A_BTd), tiles.with_unit_stride(G_BTp)
    (B, T, d), p = A_BTd.shape, G_BTp.shape[-1]
    sizes = B, T, d, p, *A_BTd.stride()[:2], *G_BTp.stride()[:2]
    grads_Bpd = A_BTd.new_empty((B, p, d)) if store else None
    if store and fills_ring(A_BTd, G_BTp):
        from flash_clipping.ops.outer import hopper  # not every Triton can

        rows, columns = tiles.LONG_TILE
        per_sample = tiles.cdiv(p, rows) * tiles.cdiv(d, columns)
        partial = A_BTd.new_empty((B, per_sample * hopper.PARTS.value), dtype=torch.float32)
        launch(
            hopper._outer_ring_kernel, min(B * per_sample, tiles.sm_count(A_BTd.device)),
            A_BTd, G_BTp, grads_Bpd, partial, *sizes, B * per_sample,
            DTYPE=tiles.TL_DTYPE[A_BTd.dtype],
            workspace=True, num_warps=4,
        )  # fmt: skip
        return partial, grads_Bpd
    tma = tiles.has_tma(A_BTd.device) and tiles.fits_tma(A_BTd, G_BTp)
    at_once, constants = config_for(A_BTd.dtype, T, d, p, store, tma)
    tiles_p, tiles_d = tiles.cdiv(p, constants["BLOCK_P"]), tiles.cdiv(d, constants["BLOCK_D"])
    parts = constants["num_warps"]
    partial = A_BTd.new_empty((B, tiles_p * tiles_d * parts), dtype=torch.float32)
    launch(
        _outer_kernel, min(B * tiles_p * tiles_d, at_once * tiles.sm_count(A_BTd.device)),
        A_BTd, G_BTp, partial if grads_Bpd is None else grads_Bpd, partial, *sizes,
        tiles_p, tiles_d,
        STORE=store, TMA=tma, GROUP=GROUP, PARTS=parts,
        PRECISION=tiles.dot_precision(A_BTd.dtype), workspace=tma, **constants,
    )  # fmt: skip
    return partial, grads_Bpd


WEIGHTED_BLOCK = 1024
WEIGHTED_UNROLL = 4


@triton.jit
def _in_order_of_weight(columns, K, C):
    """Where elements in the order (o, k, c) are in the order (o, c, k)."""
    within = columns % (K * C)
    return columns - within + within % C * K + within // C


@triton.jit
def _weighted_block(grads_ptr, coef_ptr, stride_b, columns, B, N, UNROLL: tl.constexpr):
    """Some columns of ``Σ_b coef_b · grads_b``."""
    total = tl.zeros_like(columns).to(tl.float32)
    for first in range(0, B, UNROLL):
        for step in tl.static_range(UNROLL):
            b = first + step
            coef = tl.load(coef_ptr + b, mask=b < B, other=0.0).to(tl.float32)
            start = grads_ptr + tl.cast(b, tl.int64) * stride_b
            kept = columns < tl.where(coef != 0, N, 0)  # of a dropped sample, nothing
            grads = tl.load(start + columns, mask=kept, other=0.0)
            total += coef * grads.to(tl.float32)
    return total


@jit
def _weighted_sum_kernel(
    grads_ptr, coef_ptr, out_ptr,
    B, N, stride_b, K, C,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    if WHOLE:
        N, stride_b = tiles.multiple_of(N, 8), tiles.multiple_of(stride_b, 8)
    columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = _weighted_block(grads_ptr, coef_ptr, stride_b, columns, B, N, UNROLL)
    tl.store(out_ptr + _in_order_of_weight(columns, K, C), total, mask=columns < N)


def _in_memory_order(grads: Tensor) -> tuple[Tensor, int, int]:
    """``grads`` with the elements of a sample one after the other, and K and C (1 and 1: in the
    parameter's order): a view of gradients as kernels for convolutions leave them (K offsets of a
    window before C channels), else a copy."""
    if grads[0].is_contiguous():
        return grads, 1, 1
    if grads.dim() > 3:
        channels_last = grads.movedim(2, -1)
        if channels_last[0].is_contiguous():
            return channels_last, grads.shape[3:].numel(), grads.shape[2]
    return grads.contiguous(), 1, 1


def weighted_sum(grads: Tensor, coef_B: Tensor) -> Tensor:
    out = torch.empty(grads.shape[1:], dtype=torch.float32, device=grads.device)
    grads, K, C = _in_memory_order(grads)
    N = out.numel()
    launch(
        _weighted_sum_kernel, tiles.cdiv(N, WEIGHTED_BLOCK),
        grads, coef_B.contiguous(), out, grads.shape[0], N, grads.stride(0), K, C,
        WHOLE=tiles.in_eights(N, grads.stride(0)), BLOCK=WEIGHTED_BLOCK, UNROLL=WEIGHTED_UNROLL,
        num_warps=4,
    )  # fmt: skip
    return out


@jit
def _weighted_sums_kernel(
    table_ptr, coef_ptr,
    tensors, B,
    DTYPE: tl.constexpr, TENSORS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """:func:`_weighted_sum_kernel` for tensors named by a table; the blocks of all in one grid."""
    block = tl.program_id(0)
    row = table_ptr + tiles.row_of(table_ptr, tensors, block, COLUMNS, TENSORS) * COLUMNS
    grads_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(DTYPE)), 16)
    out_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16)
    N = tl.multiple_of(tl.load(row + 2), 8)
    K, C = tl.load(row + 3), tl.load(row + 4)
    columns = (block - tl.load(row + 5)) * BLOCK + tl.arange(0, BLOCK)
    total = _weighted_block(grads_ptr, coef_ptr, N, columns, B, N, UNROLL)
    tl.store(out_ptr + _in_order_of_weight(columns, K, C), total, mask=columns < N)


def weighted_sums_many(grads: Sequence[Tensor], coef_B: Tensor) -> list[Tensor]:
    first = grads[0]
    B = coef_B.shape[0]
    sizes = [tensor.numel() // B for tensor in grads]
    # One launch walks over contiguous tensors of one dtype on 16 bytes.
    plain = len(grads) > 1 and all([size % 8 == 0 for size in sizes])
    if plain:
        lying, Ks, Cs = zip(*[_in_memory_order(tensor) for tensor in grads], strict=True)
        plain = all(
            [x.dtype == first.dtype and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in lying]
        )
    if not plain:
        return [weighted_sum(tensor, coef_B) for tensor in grads]
    outs = [first.new_empty(tensor.shape[1:], dtype=torch.float32) for tensor in grads]
    firsts, blocks = firsts_of([tiles.cdiv(size, WEIGHTED_BLOCK) for size in sizes])
    addresses = [x.data_ptr() for x in lying], [x.data_ptr() for x in outs]
    rows = zip(*addresses, sizes, Ks, Cs, firsts, strict=True)
    table = to_device([*itertools.chain(*rows)], first.device, torch.int64, repeats=True)
    launch(
        _weighted_sums_kernel, blocks,
        table, coef_B.contiguous(), len(grads), B,
        DTYPE=tiles.TL_DTYPE[first.dtype], TENSORS=tiles.next_power_of_2(len(grads)),
        COLUMNS=6, BLOCK=WEIGHTED_BLOCK, UNROLL=WEIGHTED_UNROLL,
        num_warps=4,
    )  # fmt: skip
    return outs
