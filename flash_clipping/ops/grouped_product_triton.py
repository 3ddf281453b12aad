"""Kernel for the clipped sums of many layers in one launch: small ones, and those to be repaired.

B samples, T positions, d input features, p output features.

A product that takes the device ten microseconds takes the host longer than that to scale, launch
and repair. Here a table names the operands of all such layers and every program computes one tile
of one of them. The coefficient is applied to the fp32 product of each sample, so nothing is scaled
in memory, nothing is rounded twice, and the rows of a dropped sample are never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import tiles_triton as tiles
from flash_clipping.ops.upload import to_device

_COLUMNS = 10  # of the table


@triton.jit
def _operand(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.cast(address, tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _width(value, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    # The compiler vectorizes loads only where it knows that rows are multiples of 16 bytes.
    if ALIGNED:
        EACH: tl.constexpr = 128 // DTYPE.primitive_bitwidth
        value = tl.multiple_of(value, EACH)
    return value


@triton.jit
def _grouped_product_kernel(
    table_ptr,
    coef_ptr,
    layers,
    tiles,
    B,
    T,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LAYERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    if SAMPLES > 0:  # a repair: nothing to do unless some sample was dropped
        samples = tl.arange(0, SAMPLES)
        coefs = tl.load(coef_ptr + samples, mask=samples < B, other=1.0)
        tiles = tl.where(tl.sum(tl.where(coefs == 0, 1, 0), 0) > 0, tiles, 0)
    index = tl.arange(0, LAYERS)
    first = tl.load(table_ptr + index * COLUMNS + 9, mask=index < layers, other=1 << 40)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # The layer whose range of tiles holds this one.
        layer = tl.sum(tl.where(first <= tile, 1, 0), 0) - 1
        row = table_ptr + layer * COLUMNS
        G_ptr = _operand(tl.load(row), DTYPE, ALIGNED)
        G_stride_b = _width(tl.load(row + 1), DTYPE, ALIGNED)
        G_stride_t = _width(tl.load(row + 2), DTYPE, ALIGNED)
        p = _width(tl.load(row + 3), DTYPE, ALIGNED).to(tl.int32)
        A_ptr = _operand(tl.load(row + 4), DTYPE, ALIGNED)
        A_stride_b = _width(tl.load(row + 5), DTYPE, ALIGNED)
        A_stride_t = _width(tl.load(row + 6), DTYPE, ALIGNED)
        d = _width(tl.load(row + 7), DTYPE, ALIGNED).to(tl.int32)
        out_ptr = _operand(tl.load(row + 8), DTYPE, ALIGNED)
        place = tile - tl.load(row + 9).to(tl.int32)
        tiles_d = tl.cdiv(d, BLOCK)
        rows = (place // tiles_d) * BLOCK + tl.arange(0, BLOCK)
        columns = (place % tiles_d) * BLOCK + tl.arange(0, BLOCK)
        steps = tl.cdiv(T, BLOCK_T)
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for step in range(0, B * steps):
            b = step // steps
            coef = tl.load(coef_ptr + b)
            t = (step % steps) * BLOCK_T + tl.arange(0, BLOCK_T)
            read = t < tl.where(coef == 0, 0, T)
            G = tl.load(
                G_ptr + b * G_stride_b + t[None, :] * G_stride_t + rows[:, None],
                mask=read[None, :] & (rows[:, None] < p),
                other=0.0,
            )
            A = tl.load(
                A_ptr + b * A_stride_b + t[:, None] * A_stride_t + columns[None, :],
                mask=read[:, None] & (columns[None, :] < d),
                other=0.0,
            )
            product = tl.dot(G, A, product, input_precision=PRECISION)
            if step % steps == steps - 1:
                total += coef * product
                product = tl.zeros((BLOCK, BLOCK), tl.float32)
        tl.store(
            out_ptr + rows[:, None].to(tl.int64) * d + columns[None, :],
            total.to(DTYPE),
            mask=(rows[:, None] < p) & (columns[None, :] < d),
        )


def grouped_products(
    pairs: Sequence[tuple[Tensor, Tensor]], coef_B: Tensor, *, block: int = 128
) -> list[Tensor]:
    """``Σ_b coef_b G_bᵀ A_b`` for pairs ``(A_BTd, G_BTp)`` of one B, one T and one dtype."""
    A_BTd, _ = pairs[0]
    each = A_BTd.element_size()
    # One buffer for all results, each on a 16-byte boundary.
    sizes = [tiles.cdiv(A.shape[2] * G.shape[2], 8) * 8 for A, G in pairs]
    buffer = torch.empty(sum(sizes), dtype=A_BTd.dtype, device=A_BTd.device)
    outs = []
    for part, (A, G) in zip(buffer.split(sizes), pairs, strict=True):
        d, p = A.shape[2], G.shape[2]
        outs.append((part if part.numel() == p * d else part[: p * d]).view(p, d))
    start, addresses = buffer.data_ptr(), []
    for size in sizes:
        addresses.append(start)
        start += size * each
    _launch(pairs, addresses, coef_B, repair=False, block=block)
    return outs


def repair_products(
    pairs: Sequence[tuple[Tensor, Tensor]], products: Sequence[Tensor], coef_B: Tensor
) -> None:
    """If some sample was dropped, overwrite the products by those of :func:`grouped_products`."""
    addresses = [product.data_ptr() for product in products]
    _launch(pairs, addresses, coef_B, repair=True, block=128)


def _launch(
    pairs: Sequence[tuple[Tensor, Tensor]],
    addresses: Sequence[int],
    coef_B: Tensor,
    *,
    repair: bool,
    block: int,
) -> None:
    B, T, _ = pairs[0][0].shape
    device, dtype = pairs[0][0].device, pairs[0][0].dtype
    held: list[Tensor] = []  # until the kernel has been launched
    table: list[int] = []
    aligned, count = True, 0
    for (A, G), address in zip(pairs, addresses, strict=True):
        A, A_row, A_aligned = tiles.table_row(A)
        G, G_row, G_aligned = tiles.table_row(G)
        held += (A, G)
        aligned = aligned and A_aligned and G_aligned and address % 16 == 0
        table += (*G_row, *A_row, address, count)
        count += tiles.cdiv(G_row[3], block) * tiles.cdiv(A_row[3], block)
    # A repair hardly ever has anything to do: then few programs look, and end.
    programs = min(count, tiles.sm_count(device)) if repair else count
    _grouped_product_kernel[(programs,)](
        to_device(table, device, torch.int64),
        coef_B.contiguous(),
        len(pairs),
        count,
        B,
        T,
        DTYPE=tiles.TL_DTYPE[dtype],
        ALIGNED=aligned,
        LAYERS=tiles.next_power_of_2(len(pairs)),
        COLUMNS=_COLUMNS,
        BLOCK=block,
        BLOCK_T=32 if dtype == torch.float32 else 64,
        PRECISION=tiles.dot_precision(dtype),
        SAMPLES=tiles.next_power_of_2(B) if repair else 0,
        num_warps=8,
        num_stages=3,
    )
