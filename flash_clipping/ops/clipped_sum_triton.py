"""Clipped sums on a GPU: scale one operand, one library matmul, and care for dropped samples.

A dropped sample (coefficient 0) is zero in the scaled operand, but ``0 · inf`` is NaN where the
other operand is not finite. The host does not look whether there is one: it would wait for the
device. Small operands are copied with dropped samples set to zero, in the launch that scales. For
large ones a kernel looks at the coefficients and, only if one is 0, computes the product again
with those rows masked: slow, right, and hardly ever needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import tiles_triton as tiles
from flash_clipping.ops.clipped_sum_torch import rows_for_matmul, scales_input
from flash_clipping.ops.grouped_product_triton import grouped_products
from flash_clipping.ops.row_scale_triton import row_scale, scale_and_clean

SMALL_BYTES = 4 * 2**20
"""Copying this much costs about what launching the repair kernel does (3 µs at 4.3 TB/s)."""


def clipped_sums(A_BTd: Tensor, Gs: Sequence[Tensor], coef_B: Tensor) -> list[Tensor]:
    """See :func:`flash_clipping.ops.clipped_sum.clipped_sums`."""
    if len(Gs) == 1:
        G_BTp = Gs[0]
        if scales_input(A_BTd, Gs):
            return [_scaled_and_other(A_BTd, G_BTp, coef_B, swap=False)]
        return [_scaled_and_other(G_BTp, A_BTd, coef_B, swap=True)]
    scaled = row_scale(A_BTd, coef_B)
    return [_repaired_product(scaled, G_BTp, coef_B, swap=False) for G_BTp in Gs]


def clipped_sums_many(pairs: Sequence[tuple[Tensor, Tensor]], coef_B: Tensor) -> list[Tensor]:
    """See :func:`flash_clipping.ops.clipped_sum.clipped_sums_many`."""
    # One launch for all pairs of one kind.
    by_kind: dict[tuple[torch.Size, torch.dtype, torch.dtype], list[int]] = {}
    for i, (A, G) in enumerate(pairs):
        by_kind.setdefault((A.shape[:2], A.dtype, G.dtype), []).append(i)
    sums: dict[int, Tensor] = {}
    for (_, A_dtype, G_dtype), members in by_kind.items():
        alike = [pairs[i] for i in members]
        if A_dtype != G_dtype:
            dtype = torch.promote_types(A_dtype, G_dtype)
            alike = [(A.to(dtype), G.to(dtype)) for A, G in alike]
        sums.update(zip(members, grouped_products(alike, coef_B), strict=True))
    return [sums[i] for i in range(len(pairs))]


def _scaled_and_other(x: Tensor, other: Tensor, coef_B: Tensor, *, swap: bool) -> Tensor:
    if other.numel() * other.element_size() <= SMALL_BYTES:
        return _product(*scale_and_clean(x, other, coef_B), swap=swap)
    return _repaired_product(row_scale(x, coef_B), other, coef_B, swap=swap)


def _product(scaled: Tensor, other: Tensor, *, swap: bool) -> Tensor:
    """``otherᵀ scaled``, or ``scaledᵀ other`` with ``swap`` (where G is the scaled operand)."""
    scaled_NF, other_NF = rows_for_matmul(scaled, other)
    left, right = (scaled_NF, other_NF) if swap else (other_NF, scaled_NF)
    with torch.autocast(left.device.type, enabled=False):
        return left.mT @ right


def _repaired_product(scaled: Tensor, other: Tensor, coef_B: Tensor, *, swap: bool) -> Tensor:
    product = _product(scaled, other, swap=swap)
    left, right = (scaled, other) if swap else (other, scaled)
    if left.dtype != right.dtype:
        left, right = left.to(product.dtype), right.to(product.dtype)
    left, right = tiles.with_unit_stride(left), tiles.with_unit_stride(right)
    B, T, d = right.shape
    p = left.shape[-1]
    block = 64
    grid = min(tiles.sm_count(product.device), tiles.cdiv(p, block) * tiles.cdiv(d, block))
    _repair_kernel[(grid,)](
        left,
        right,
        coef_B.contiguous(),
        product,
        B,
        T,
        d,
        p,
        *left.stride()[:2],
        *right.stride()[:2],
        BLOCK=block,
        BLOCK_B=tiles.next_power_of_2(B),
        BLOCK_T=32,
        PRECISION=tiles.dot_precision(product.dtype),
        num_warps=4,
        num_stages=2,
    )
    return product


@triton.jit
def _repair_kernel(
    left_ptr,
    right_ptr,
    coef_ptr,
    product_ptr,
    B,
    T,
    d,
    p,
    left_stride_b,
    left_stride_t,
    right_stride_b,
    right_stride_t,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Overwrite the product with one that leaves dropped samples out, if there are any."""
    samples = tl.arange(0, BLOCK_B)
    coefs = tl.load(coef_ptr + samples, mask=samples < B, other=1.0)
    dropped = tl.sum(tl.where(coefs == 0, 1, 0), 0)
    if dropped > 0:
        tiles_d = tl.cdiv(d, BLOCK)
        for tile in range(tl.program_id(0), tl.cdiv(p, BLOCK) * tiles_d, tl.num_programs(0)):
            p0 = (tile // tiles_d) * BLOCK
            d0 = (tile % tiles_d) * BLOCK
            total = tl.zeros((BLOCK, BLOCK), tl.float32)
            for b in range(0, B):
                coef = tl.load(coef_ptr + b)
                length = tl.where(coef == 0, 0, T)
                sample = tl.cast(b, tl.int64)
                for t in range(0, length, BLOCK_T):
                    left = tiles.load_tile(
                        left_ptr,
                        sample,
                        t,
                        p0,
                        T,
                        p,
                        left_stride_b,
                        left_stride_t,
                        BLOCK_T,
                        BLOCK,
                        False,
                    )
                    right = tiles.load_tile(
                        right_ptr,
                        sample,
                        t,
                        d0,
                        T,
                        d,
                        right_stride_b,
                        right_stride_t,
                        BLOCK_T,
                        BLOCK,
                        False,
                    )
                    total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
            rows = p0 + tl.arange(0, BLOCK)[:, None]
            columns = d0 + tl.arange(0, BLOCK)[None, :]
            tl.store(
                product_ptr + rows.to(tl.int64) * d + columns,
                total.to(product_ptr.dtype.element_ty),
                mask=(rows < p) & (columns < d),
            )
