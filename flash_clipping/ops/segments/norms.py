"""Norms of segments: of short ones by Gram matrices, of long ones by their products.

N rows, S segments, M entries of a list, d input features, p output features. Rows are sorted by
segment; an operand may lie unsorted, with the place of every sorted row beside it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import certificate
from flash_clipping.ops.certificate import FLOOR
from flash_clipping.ops.gram.tiles import triangle
from flash_clipping.ops.runtime import cost, tiles
from flash_clipping.ops.runtime.launches import launch
from flash_clipping.ops.runtime.tiles import tile_in_groups
from flash_clipping.ops.segments.operands import (
    Config,
    of_segments,
    operands_of,
    places,
    sizes,
    tensors,
)
from flash_clipping.ops.segments.work import Lists, Rows

PROMOTED = 1024
"""Rows, or features, after which a product is added to a sum in fp32: tensor cores truncate."""
GATHERED_ONCE = 512
"""Rows of a segment, on average, from which on operands are put in order before norms are taken."""
SPREAD_ROWS = 64
ROW_FLOOR = tl.constexpr(FLOOR)


def segment_sqnorms(A: Rows, G: Rows, lists: Lists) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.segments.segment_sqnorms`."""
    A, G = operands_of(A, G)
    rows, S = A.size, len(lists)
    if rows > GATHERED_ONCE * S:  # products read a row more often than Gram matrices
        A, G = Rows(A.sorted()), Rows(G.sorted())
    longest = cost.longest_for_gram(A.features, G.features, A.X.element_size())
    of_short_S2 = _short_ones(A, G, lists, longest)
    # Among so many rows there are at most so many of more than `longest`.
    long_ones = min(S, rows // (longest + 1))
    if not long_ones:
        sq_S, spread_S = of_short_S2.unbind(1)
        return sq_S.contiguous(), certificate.doubt(spread_S)
    ranked_S, is_short_S = lists.longest_first_S, lists.lengths_S <= longest
    sq_of_rank = _long_ones(A, G, lists, long_ones, longest)
    rank_S = torch.empty_like(ranked_S)
    rank_S[ranked_S] = torch.arange(S, device=ranked_S.device)
    long_S1 = _spread(A, G, lists, longest)
    sq_S = torch.where(is_short_S, of_short_S2[:, 0], sq_of_rank[rank_S.clamp(max=long_ones - 1)])
    spread_S = torch.where(is_short_S, of_short_S2[:, 1], long_S1[:, 0])
    return sq_S, certificate.doubt(spread_S)


def _short_ones(A: Rows, G: Rows, lists: Lists, longest: int) -> Tensor:
    """Squared norms and spreads of segments by Gram matrices, ``[S, 2]``."""
    step = 32 if A.X.dtype == torch.float32 else 64
    few_rows = A.size <= 256 * max(1, len(lists))
    config = Config(64, step, num_warps=4, num_stages=4) if few_rows else Config(128, step)
    pairs = lists.pairs(config.block, longest)
    parts_M2 = torch.empty((len(pairs.of_M), 2), dtype=torch.float32, device=A.X.device)
    launch(
        gram_kernel, len(pairs.of_M),
        *tensors(A, G), lists.starts, pairs.of_M, pairs.firsts, parts_M2, len(lists), *sizes(A, G),
        BLOCK=config.block, BLOCK_F=step, PROMOTE=PROMOTED // step,
        PRECISION=tiles.dot_precision(A.X.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return of_segments(parts_M2, pairs.firsts)


def _long_ones(A: Rows, G: Rows, lists: Lists, ranks: int, longest: int) -> Tensor:
    """Squared norms by products of the longest segments, ``[R]``, where above ``longest``."""
    config = Config(step=32 if A.X.dtype == torch.float32 else 64)
    tiles_d, tiles_p = (tiles.cdiv(f, config.block) for f in (A.features, G.features))
    parts = torch.empty((ranks, tiles_d * tiles_p), dtype=torch.float32, device=A.X.device)
    launch(
        outer_kernel, parts.numel(),
        *tensors(A, G), lists.starts, lists.longest_first_S, parts, longest + 1, *sizes(A, G),
        BLOCK=config.block, BLOCK_T=config.step, PROMOTE=PROMOTED // config.step, GROUP=8,
        PRECISION=tiles.dot_precision(A.X.dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return parts.sum(1)


def _spread(A: Rows, G: Rows, lists: Lists, longest: int) -> Tensor:
    """``Σ ‖a_n‖ ‖g_n‖`` of segments of more than ``longest`` rows, ``[S, 1]``."""
    blocks = lists.blocks(SPREAD_ROWS, above=longest)
    parts_M1 = torch.empty((len(blocks.of_M), 1), dtype=torch.float32, device=A.X.device)
    launch(
        spread_kernel, len(parts_M1),
        *tensors(A, G), blocks.begin_M, blocks.end_M, parts_M1, *sizes(A, G),
        BLOCK=SPREAD_ROWS, BLOCK_F=64,
        num_warps=4,
    )  # fmt: skip
    return of_segments(parts_M1, blocks.firsts)


@triton.jit
def gram_kernel(
    A_ptr, G_ptr, A_rows_ptr, G_rows_ptr, starts_ptr, of_ptr, firsts_ptr, out_ptr,
    segments, d, p, A_stride, G_stride,
    BLOCK: tl.constexpr, BLOCK_F: tl.constexpr, PROMOTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
        at_i = places(A_rows_ptr, n_i, in_i, A_stride)
        at_j = places(A_rows_ptr, n_j, in_j, A_stride)
        AA = _products_of_rows(A_ptr, at_i, at_j, in_i, in_j, d, BLOCK, BLOCK_F, PROMOTE, PRECISION)
        at_i = places(G_rows_ptr, n_i, in_i, G_stride)
        at_j = places(G_rows_ptr, n_j, in_j, G_stride)
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
def _products_of_rows(
    X_ptr,
    at_i, at_j, in_i, in_j, F,
    BLOCK: tl.constexpr, BLOCK_F: tl.constexpr, PROMOTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
def outer_kernel(
    A_ptr, G_ptr, A_rows_ptr, G_rows_ptr, starts_ptr, longest_ptr, out_ptr,
    shortest, d, p, A_stride, G_stride,
    BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, PROMOTE: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of ``Gᵀ A`` of a segment of at least ``shortest`` rows, squared and summed; the
    place of a shorter one is not written, and never read."""
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
            at = places(G_rows_ptr, n, inside, G_stride)[:, None]
            g = tl.load(G_ptr + at + rows, mask=inside[:, None] & (rows < p), other=0.0)
            at = places(A_rows_ptr, n, inside, A_stride)[:, None]
            a = tl.load(A_ptr + at + columns, mask=inside[:, None] & (columns < d), other=0.0)
            product = tl.dot(tl.trans(g), a, product, input_precision=PRECISION)
            if step % PROMOTE == PROMOTE - 1:
                total += product
                product = tl.zeros((BLOCK, BLOCK), tl.float32)
        total += product
        tl.store(out_ptr + tl.program_id(0), tl.sum(tl.sum(total * total, 1), 0))


@triton.jit
def spread_kernel(
    A_ptr, G_ptr, A_rows_ptr, G_rows_ptr, begin_ptr, end_ptr, out_ptr,
    d, p, A_stride, G_stride,
    BLOCK: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """``Σ ‖a_n‖ ‖g_n‖`` over the rows of a block."""
    block = tl.program_id(0)
    begin = tl.load(begin_ptr + block)
    end = tl.load(end_ptr + block)
    if begin < end:  # else it is not used
        n = begin + tl.arange(0, BLOCK)
        inside = n < end
        at = places(A_rows_ptr, n, inside, A_stride)
        A_sq = _squared_rows(A_ptr, at, inside, d, BLOCK, BLOCK_F)
        at = places(G_rows_ptr, n, inside, G_stride)
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
