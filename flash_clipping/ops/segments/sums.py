"""Kernels for sums over the rows of segments and groups, and for products with a group's matrix.

N rows, M blocks of rows, E groups, d input features, p output features, F features of one operand.
Rows are sorted by segment; an operand may lie unsorted, with the place of every sorted row beside
it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from flash_clipping.ops.segments.norms import places, tile_in_groups


@triton.jit
def row_sums_kernel(
    X_ptr, begin_ptr, end_ptr, out_ptr, F, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """``Σ x_n`` over a run of rows, some columns of it."""
    parts = tl.cdiv(F, BLOCK)
    run = tl.program_id(0) // parts
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(end_ptr + run)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.load(begin_ptr + run), end, ROWS):
        n = first + tl.arange(0, ROWS)
        at = n.to(tl.int64)[:, None] * stride + columns[None, :]
        x = tl.load(X_ptr + at, mask=(n < end)[:, None] & (columns < F)[None, :], other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    tl.store(out_ptr + run.to(tl.int64) * F + columns, total, mask=columns < F)


@triton.jit
def grouped_sums_kernel(
    A_ptr,
    G_ptr,
    A_rows_ptr,
    G_rows_ptr,
    group_ptr,
    firsts_ptr,
    begin_ptr,
    end_ptr,
    coef_ptr,
    ends_product_ptr,
    out_ptr,
    samples,
    d,
    p,
    A_stride,
    G_stride,
    A_GATHERED: tl.constexpr,
    G_GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of a group's ``Σ coef(n) g_n a_nᵀ``, a block of rows at a time. What the tensor
    cores add up is one segment's product, or a part of it; its coefficient is applied to that, in
    fp32. A block whose coefficient is 0 is not read."""
    tiles_p, tiles_d = tl.cdiv(p, BLOCK), tl.cdiv(d, BLOCK)
    tile = tl.program_id(0) % (tiles_p * tiles_d)
    group = tl.load(group_ptr + tl.program_id(0) // (tiles_p * tiles_d))
    row, column = tile_in_groups(tile, tiles_p, tiles_d, GROUP)
    rows = row * BLOCK + tl.arange(0, BLOCK)
    columns = column * BLOCK + tl.arange(0, BLOCK)
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    first = tl.load(firsts_ptr + group * samples)
    last = tl.load(firsts_ptr + (group + 1) * samples)
    for block in range(first, last):
        coef = tl.load(coef_ptr + block)
        begin = tl.load(begin_ptr + block)
        n = begin + tl.arange(0, BLOCK_T)
        inside = n < tl.where(coef != 0, tl.load(end_ptr + block), begin)
        at = places(G_rows_ptr, n, inside, G_stride, G_GATHERED)[:, None]
        within = inside[:, None] & (rows < p)[None, :]
        g = tl.load(G_ptr + at + rows[None, :], mask=within, other=0.0)
        at = places(A_rows_ptr, n, inside, A_stride, A_GATHERED)[:, None]
        within = inside[:, None] & (columns < d)[None, :]
        a = tl.load(A_ptr + at + columns[None, :], mask=within, other=0.0)
        product = tl.dot(tl.trans(g), a, product, input_precision=PRECISION)
        if tl.load(ends_product_ptr + block) != 0:
            total += coef * product
            product = tl.zeros((BLOCK, BLOCK), tl.float32)
    place = group.to(tl.int64) * p * d + rows.to(tl.int64)[:, None] * d + columns[None, :]
    tl.store(out_ptr + place, total, mask=(rows < p)[:, None] & (columns < d)[None, :])


@triton.jit
def blocks_kernel(
    X_ptr,
    rows_ptr,
    begin_ptr,
    end_ptr,
    coef_ptr,
    out_ptr,
    rest_ptr,
    F,
    stride,
    width,
    GATHERED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of a block, and zeros up to ``ROWS``; for rows whose coefficient is 0 as well. Rows come
    to lie ``width`` apart. ``SPLIT``: times the coefficient, rounded, and what rounding took."""
    parts = tl.cdiv(F, BLOCK)
    block = tl.program_id(0) // parts
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(begin_ptr + block)
    end = tl.load(end_ptr + block)
    if begin < end:  # else it is not used
        n = begin + tl.arange(0, ROWS)
        coef = tl.load(coef_ptr + n, mask=n < end, other=0.0)
        inside = coef != 0
        at = places(rows_ptr, n, inside, stride, GATHERED)[:, None] + columns[None, :]
        x = tl.load(X_ptr + at, mask=inside[:, None] & (columns < F)[None, :], other=0.0)
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        place = row[:, None] * width + columns[None, :]
        if SPLIT:
            scaled = x.to(tl.float32) * coef[:, None]
            x = scaled.to(x.dtype)
            rest = (scaled - x.to(tl.float32)).to(x.dtype)
            tl.store(rest_ptr + place, rest, mask=(columns < F)[None, :])
        tl.store(out_ptr + place, x, mask=(columns < F)[None, :])


@triton.jit
def grouped_linear_kernel(
    X_ptr,
    W_ptr,
    begin_ptr,
    end_ptr,
    of_ptr,
    out_ptr,
    groups,
    d,
    p,
    X_stride,
    W_stride_e,
    W_stride_p,
    W_stride_d,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A block of a group's rows times some columns of its transposed matrix."""
    tiles_p = tl.cdiv(p, BLOCK)
    block = tl.program_id(0) // tiles_p
    columns = tl.program_id(0) % tiles_p * BLOCK + tl.arange(0, BLOCK)
    group = tl.load(of_ptr + block)
    if group < groups:
        n = tl.load(begin_ptr + block) + tl.arange(0, BLOCK)
        inside = n < tl.load(end_ptr + block)
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        W_ptr += group.to(tl.int64) * W_stride_e
        for step in range(0, tl.cdiv(d, BLOCK_D)):
            f = step * BLOCK_D + tl.arange(0, BLOCK_D)
            at = n.to(tl.int64)[:, None] * X_stride + f[None, :]
            x = tl.load(X_ptr + at, mask=inside[:, None] & (f < d)[None, :], other=0.0)
            at = columns.to(tl.int64)[None, :] * W_stride_p + f.to(tl.int64)[:, None] * W_stride_d
            w = tl.load(W_ptr + at, mask=(f < d)[:, None] & (columns < p)[None, :], other=0.0)
            product = tl.dot(x, w, product, input_precision=PRECISION)
        place = n.to(tl.int64)[:, None] * p + columns[None, :]
        within = inside[:, None] & (columns < p)[None, :]
        tl.store(out_ptr + place, product.to(out_ptr.dtype.element_ty), mask=within)


@triton.jit
def clear_kernel(out_ptr, end_ptr, N, F, stride, BLOCK: tl.constexpr):
    """Zeros in all rows from the end of the last segment on; ordinarily there are none."""
    for n in range(tl.load(end_ptr) + tl.program_id(0), N, tl.num_programs(0)):
        for first in range(0, F, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
            tl.store(out_ptr + tl.cast(n, tl.int64) * stride + columns, zeros, mask=columns < F)


@triton.jit
def tokens_kernel(
    X_ptr,
    rows_ptr,
    end_ptr,
    weight_ptr,
    out_ptr,
    k,
    F,
    stride,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of one token, times their weights, added up in order; some columns."""
    parts = tl.cdiv(F, BLOCK)
    token = (tl.program_id(0) // parts).to(tl.int64)
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(end_ptr)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(k):
        row = tl.load(rows_ptr + token * k + j)
        # Of a row of no sample, nothing.
        width = tl.where(row < end, F, 0)
        x = tl.load(X_ptr + row * stride + columns, mask=columns < width, other=0.0)
        x = x.to(tl.float32)
        if WEIGHTED:
            weight = tl.load(weight_ptr + token * k + j).to(tl.float32)
            x *= tl.where(row < end, weight, 0.0)
        total += x
    tl.store(out_ptr + token * F + columns, total, mask=columns < F)
