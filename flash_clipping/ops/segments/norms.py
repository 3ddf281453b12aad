"""Kernels for the norms of segments.

N rows, S segments, M entries of a list, d input features, p output features. Rows are sorted by
segment; an operand may lie unsorted, with the place of every sorted row beside it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from flash_clipping.ops.certificate import FLOOR
from flash_clipping.ops.gram.tiles import triangle

ROW_FLOOR = tl.constexpr(FLOOR)


@triton.jit
def places(rows_ptr, n, inside, stride, GATHERED: tl.constexpr):
    """Where sorted rows begin in an operand."""
    if GATHERED:
        n = tl.load(rows_ptr + n, mask=inside, other=0)
    return n.to(tl.int64) * stride


@triton.jit
def _products_of_rows(
    X_ptr,
    at_i,
    at_j,
    in_i,
    in_j,
    F,
    BLOCK: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PROMOTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``x_i · x_j`` of a block's rows with another's; 0 for rows outside."""
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(0, tl.cdiv(F, BLOCK_F)):
        f = step * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
        x = tl.load(X_ptr + at_i[:, None] + f, mask=in_i[:, None] & (f < F), other=0.0)
        y = tl.load(X_ptr + at_j[:, None] + f, mask=in_j[:, None] & (f < F), other=0.0)
        product = tl.dot(x, tl.trans(y), product, input_precision=PRECISION)
        # The accumulator of the tensor cores truncates (gram/triton.py).
        if step % PROMOTE == PROMOTE - 1:
            total += product
            product = tl.zeros((BLOCK, BLOCK), tl.float32)
    return total + product


@triton.jit
def gram_kernel(
    A_ptr,
    G_ptr,
    A_rows_ptr,
    G_rows_ptr,
    starts_ptr,
    of_ptr,
    firsts_ptr,
    out_ptr,
    segments,
    d,
    p,
    A_stride,
    G_stride,
    A_GATHERED: tl.constexpr,
    G_GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PROMOTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One pair of blocks of a segment: its part of the squared norm, and of the spread."""
    entry = tl.program_id(0)
    segment = tl.load(of_ptr + entry)
    if segment < segments:
        i, j = triangle(entry - tl.load(firsts_ptr + segment))
        start = tl.load(starts_ptr + segment)
        end = tl.load(starts_ptr + segment + 1)
        n_i = start + i * BLOCK + tl.arange(0, BLOCK)
        n_j = start + j * BLOCK + tl.arange(0, BLOCK)
        in_i, in_j = n_i < end, n_j < end
        at_i = places(A_rows_ptr, n_i, in_i, A_stride, A_GATHERED)
        at_j = places(A_rows_ptr, n_j, in_j, A_stride, A_GATHERED)
        AA = _products_of_rows(A_ptr, at_i, at_j, in_i, in_j, d, BLOCK, BLOCK_F, PROMOTE, PRECISION)
        at_i = places(G_rows_ptr, n_i, in_i, G_stride, G_GATHERED)
        at_j = places(G_rows_ptr, n_j, in_j, G_stride, G_GATHERED)
        GG = _products_of_rows(G_ptr, at_i, at_j, in_i, in_j, p, BLOCK, BLOCK_F, PROMOTE, PRECISION)
        times = tl.where(i == j, 1.0, 2.0)  # a block below the diagonal stands for two
        tl.store(out_ptr + 2 * entry, tl.sum(tl.sum(AA * GG, 1), 0) * times)
        spread = 0.0
        if i == j:
            diagonal = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
            A_sq = tl.sum(tl.where(diagonal, AA, 0.0), 1) + d * ROW_FLOOR
            G_sq = tl.sum(tl.where(diagonal, GG, 0.0), 1) + p * ROW_FLOOR
            spread = tl.sum(tl.where(in_i, tl.sqrt(A_sq * G_sq), 0.0), 0)
        tl.store(out_ptr + 2 * entry + 1, spread)


@triton.jit
def outer_kernel(
    A_ptr,
    G_ptr,
    A_rows_ptr,
    G_rows_ptr,
    starts_ptr,
    longest_ptr,
    out_ptr,
    shortest,
    d,
    p,
    A_stride,
    G_stride,
    A_GATHERED: tl.constexpr,
    G_GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PROMOTE: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of ``Gᵀ A`` of a segment of at least ``shortest`` rows, squared and summed. Segments
    come as ``longest`` lists them; what would be written for shorter ones is never read."""
    tiles_p, tiles_d = tl.cdiv(p, BLOCK), tl.cdiv(d, BLOCK)
    tile = tl.program_id(0) % (tiles_p * tiles_d)
    segment = tl.load(longest_ptr + tl.program_id(0) // (tiles_p * tiles_d))
    start = tl.load(starts_ptr + segment)
    end = tl.load(starts_ptr + segment + 1)
    if end - start >= shortest:
        row, column = tile_in_groups(tile, tiles_p, tiles_d, GROUP)
        rows = row * BLOCK + tl.arange(0, BLOCK)[None, :]
        columns = column * BLOCK + tl.arange(0, BLOCK)[None, :]
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for step in range(0, tl.cdiv(end - start, BLOCK_T)):
            n = start + step * BLOCK_T + tl.arange(0, BLOCK_T)
            inside = n < end
            at = places(G_rows_ptr, n, inside, G_stride, G_GATHERED)[:, None]
            g = tl.load(G_ptr + at + rows, mask=inside[:, None] & (rows < p), other=0.0)
            at = places(A_rows_ptr, n, inside, A_stride, A_GATHERED)[:, None]
            a = tl.load(A_ptr + at + columns, mask=inside[:, None] & (columns < d), other=0.0)
            product = tl.dot(tl.trans(g), a, product, input_precision=PRECISION)
            if step % PROMOTE == PROMOTE - 1:
                total += product
                product = tl.zeros((BLOCK, BLOCK), tl.float32)
        total += product
        tl.store(out_ptr + tl.program_id(0), tl.sum(tl.sum(total * total, 1), 0))


@triton.jit
def tile_in_groups(tile, tiles_p, tiles_d, GROUP: tl.constexpr):
    """Row and column of a tile. ``GROUP`` rows of tiles are walked together, so that programs at
    work at one time share what they read."""
    first = (tile // (GROUP * tiles_d)) * GROUP
    height = min(tiles_p - first, GROUP)
    within = tile % (GROUP * tiles_d)
    return first + within % height, within // height


@triton.jit
def spread_kernel(
    A_ptr,
    G_ptr,
    A_rows_ptr,
    G_rows_ptr,
    begin_ptr,
    end_ptr,
    out_ptr,
    d,
    p,
    A_stride,
    G_stride,
    A_GATHERED: tl.constexpr,
    G_GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """``Σ ‖a_n‖ ‖g_n‖`` over the rows of a block."""
    block = tl.program_id(0)
    begin = tl.load(begin_ptr + block)
    end = tl.load(end_ptr + block)
    if begin < end:  # else it is not used
        n = begin + tl.arange(0, BLOCK)
        inside = n < end
        at = places(A_rows_ptr, n, inside, A_stride, A_GATHERED)
        A_sq = _squared_rows(A_ptr, at, inside, d, BLOCK, BLOCK_F)
        at = places(G_rows_ptr, n, inside, G_stride, G_GATHERED)
        G_sq = _squared_rows(G_ptr, at, inside, p, BLOCK, BLOCK_F)
        tl.store(out_ptr + block, tl.sum(tl.where(inside, tl.sqrt(A_sq * G_sq), 0.0), 0))


@triton.jit
def _squared_rows(X_ptr, at, inside, F, BLOCK: tl.constexpr, BLOCK_F: tl.constexpr):
    """Squared norms of rows, enlarged as the certificate asks."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tl.cdiv(F, BLOCK_F)):
        f = step * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
        x = tl.load(X_ptr + at[:, None] + f, mask=inside[:, None] & (f < F), other=0.0)
        x = x.to(tl.float32)
        squares += tl.sum(x * x, 1)
    return squares + F * ROW_FLOOR
