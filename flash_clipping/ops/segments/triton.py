"""The kernels for segments, by the names of :mod:`flash_clipping.ops.segments.reference`: nothing
here waits for how long segments are.

N rows, M blocks of rows or entries of a list, S segments, E groups, B samples, d input features, p
output features, F features of one operand. Rows are sorted by segment; an operand may lie unsorted,
with the place of every sorted row beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping._compat import grouped_mm
from flash_clipping.ops import error_bounds
from flash_clipping.ops.error_bounds import FLOOR
from flash_clipping.ops.gram.tiles import triangle
from flash_clipping.ops.runtime import cost, tiles
from flash_clipping.ops.runtime.tiles import has_gluon, launch, tile_in_groups
from flash_clipping.ops.segments.reference import sum_dtype
from flash_clipping.ops.segments.work import Blocks, Lists, Rows

BLOCK = 128
"""Rows, or features, of a tile."""
PROMOTED = 1024
"""Rows after which a product is added to a sum in fp32: tensor cores truncate."""
GRAM_PROMOTE = 2
"""Steps after which an entry of a Gram matrix is added to a sum in fp32: 64 features of fp32."""
GATHERED_ONCE = 512
"""Rows of a segment, on average, from which on operands are put in order before norms are taken."""
SPREAD_ROWS = 64
ROW_FLOOR = tl.constexpr(FLOOR)
SUMMED = 256
"""Rows that one program adds up."""
NARROW = 64
"""Features up to which an operand is a low rank: the ring's tiles would be half empty."""
RING_ROWS = 32
"""Rows of a block of :mod:`flash_clipping.ops.segments.hopper`."""
SPLIT_BELOW = 96
"""Rows of a segment, on average, below which these are multiplied by their coefficients."""


def operands_of(A: Rows, G: Rows) -> tuple[Rows, Rows]:
    """Both in one dtype, as one product takes them, and with features next to each other."""
    dtype = torch.promote_types(A.X.dtype, G.X.dtype)
    A_X, G_X = (tiles.with_unit_stride(rows.X.to(dtype)) for rows in (A, G))
    return Rows(A_X, A.places_N), Rows(G_X, G.places_N)


def tensors(A: Rows, G: Rows) -> tuple[Tensor | None, ...]:
    """The first four arguments of a kernel."""
    return A.X, G.X, A.places_N, G.places_N


def sizes(A: Rows, G: Rows) -> tuple[int, int, int, int]:
    """Features of both, and how far apart their rows are."""
    return A.features, G.features, A.stride, G.stride


@triton.jit
def places(rows_ptr, n, inside, stride):
    """Where sorted rows begin in an operand; ``rows_ptr`` is None where it lies sorted."""
    if rows_ptr is not None:
        n = tl.load(rows_ptr + n, mask=inside, other=0)
    return n.to(tl.int64) * stride


def row_sums(X_Nf: Tensor, begin_M: Tensor, end_M: Tensor) -> Tensor:
    """``[M, f]`` in fp32: rows from ``begin`` to ``end`` added up."""
    rows = Rows(tiles.with_unit_stride(X_Nf))
    runs, F = len(begin_M), rows.features
    out = torch.empty((runs, F), dtype=torch.float32, device=X_Nf.device)
    block = min(128, tiles.next_power_of_2(F))
    programs = runs * tiles.cdiv(F, block)
    if programs:
        arguments = (rows.X, begin_M, end_M, out, F, rows.stride)
        launch(row_sums_kernel, programs, *arguments, ROWS=32, BLOCK=block, num_warps=4)
    return out


def of_segments(parts_Mf: Tensor, firsts: Tensor) -> Tensor:
    """Parts that blocks have left, added up for every segment in order."""
    return row_sums(parts_Mf, firsts[:-1], firsts[1:])


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


# -- norms: of short segments by Gram matrices, of long ones by products ---------------------------


def segment_sqnorms(A: Rows, G: Rows, lists: Lists) -> tuple[Tensor, Tensor]:
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
        return sq_S.contiguous(), error_bounds.error_bound(spread_S, A.features, G.features)
    ranked_S, is_short_S = lists.longest_first_S, lists.lengths_S <= longest
    sq_of_rank = _long_ones(A, G, lists, long_ones, longest)
    rank_S = torch.empty_like(ranked_S)
    rank_S[ranked_S] = torch.arange(S, device=ranked_S.device)
    long_S1 = _spread(A, G, lists, longest)
    sq_S = torch.where(is_short_S, of_short_S2[:, 0], sq_of_rank[rank_S.clamp(max=long_ones - 1)])
    spread_S = torch.where(is_short_S, of_short_S2[:, 1], long_S1[:, 0])
    return sq_S, error_bounds.error_bound(spread_S, A.features, G.features)


def _short_ones(A: Rows, G: Rows, lists: Lists, longest: int) -> Tensor:
    """Squared norms and spreads of segments by Gram matrices, ``[S, 2]``."""
    step = 32 if A.X.dtype == torch.float32 else 64
    few_rows = A.size <= 256 * max(1, len(lists))
    block, warps, stages = (64, 4, 4) if few_rows else (128, 8, 3)
    pairs = lists.pairs(block, longest)
    parts_M2 = torch.empty((len(pairs.of_M), 2), dtype=torch.float32, device=A.X.device)
    launch(
        gram_kernel, len(pairs.of_M),
        *tensors(A, G), lists.starts, pairs.of_M, pairs.firsts, parts_M2, len(lists), *sizes(A, G),
        BLOCK=block, BLOCK_F=step, PROMOTE=GRAM_PROMOTE, PRECISION=tiles.dot_precision(A.X.dtype),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return of_segments(parts_M2, pairs.firsts)


def _long_ones(A: Rows, G: Rows, lists: Lists, ranks: int, longest: int) -> Tensor:
    """Squared norms by products of the longest segments, ``[R]``, where above ``longest``."""
    step = 32 if A.X.dtype == torch.float32 else 64
    tiles_d, tiles_p = (tiles.cdiv(f, BLOCK) for f in (A.features, G.features))
    parts = torch.empty((ranks, tiles_d * tiles_p), dtype=torch.float32, device=A.X.device)
    launch(
        outer_kernel, parts.numel(),
        *tensors(A, G), lists.starts, lists.longest_first_S, parts, longest + 1, *sizes(A, G),
        BLOCK=BLOCK, BLOCK_T=step, PROMOTE=PROMOTED // step, GROUP=8,
        PRECISION=tiles.dot_precision(A.X.dtype),
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return parts.sum(1)


def _spread(A: Rows, G: Rows, lists: Lists, longest: int) -> Tensor:
    """``Σ ‖a_n‖ ‖g_n‖`` of segments of more than ``longest`` rows, ``[S, 1]``."""
    blocks = lists.blocks(SPREAD_ROWS, longest)
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


# -- sums ------------------------------------------------------------------------------------------


def grouped_sums(A: Rows, G: Rows, lists: Lists, coef_B: Tensor) -> Tensor:
    A, G = operands_of(A, G)
    rows, S = A.size, len(lists)
    coef_B = coef_B.float().contiguous()
    size = S // len(coef_B), G.features, A.features
    out = torch.empty(size, dtype=torch.float32, device=A.X.device)
    is_wide = min(A.features, G.features) > NARROW
    is_half = A.X.dtype != torch.float32
    if is_wide and is_half and tiles.is_hopper(A.X.device) and has_gluon():
        split = A.X.dtype == torch.bfloat16 and rows < SPLIT_BELOW * S
        ring_sums(A, G, lists, coef_B, out, split)
    else:
        launch_sums(A, G, lists, coef_B, out, sums_config(A, G, rows / S))
    return out


def sums_config(A: Rows, G: Rows, rows_each: float) -> dict[str, Any]:
    """A kernel's constants for segments of so many rows on average. Tiles of low ranks are as
    narrow as these."""
    block_p, block_d = (min(128, max(16, tiles.next_power_of_2(rows.features))) for rows in (G, A))
    warps = 4 if min(block_p, block_d) <= NARROW else 8
    short = A.X.dtype == torch.float32 or rows_each <= 96
    step, stages = (32, 4) if short else (64, 3)
    tile = dict(BLOCK_P=block_p, BLOCK_D=block_d, BLOCK_T=step)
    return dict(tile, num_warps=warps, num_stages=stages)


def launch_sums(
    A: Rows,
    G: Rows,
    lists: Lists,
    coef_B: Tensor,
    out: Tensor,
    config: dict[str, Any],
    turned: int = 1,
) -> None:
    """Sums on any GPU. ``turned``: results lie as ``[turned, E / turned]`` in place of ``[E]``."""
    (E, p, d), B = out.shape, len(coef_B)
    blocks = lists.blocks(config["BLOCK_T"])
    each = PROMOTED // config["BLOCK_T"]
    tiles_p, tiles_d = tiles.cdiv(p, config["BLOCK_P"]), tiles.cdiv(d, config["BLOCK_D"])
    launch(
        grouped_sums_kernel, E * tiles_p * tiles_d,
        *tensors(A, G), lists.joined(B).longest_first_S, blocks.firsts, blocks.begin_M,
        blocks.end_M, coef_B[blocks.of_M % B],
        blocks.last_M | (blocks.place_M % each == each - 1), out, B,
        turned, E // turned, *sizes(A, G),
        GROUP=8, PRECISION=tiles.dot_precision(A.X.dtype), **config,
    )  # fmt: skip


def ring_sums(A: Rows, G: Rows, lists: Lists, coef_B: Tensor, out: Tensor, split: bool) -> None:
    """Sums on Hopper, of copies in blocks. ``split``: times their coefficients, in two parts."""
    from flash_clipping.ops.segments.hopper import grouped_sums_ring_kernel  # not every Triton can

    (E, p, d), B = out.shape, len(coef_B)
    groups = lists.joined(B)
    blocks = (groups if split else lists).blocks(RING_ROWS)
    coef_N = coef_B[lists.segment_N % B]
    A_Mf, _ = in_blocks(A, blocks, coef_N)
    G_Mf, rest_Mf = in_blocks(G, blocks, coef_N, split)
    rows, columns = tiles.LONG_TILE if split else tiles.SHORT_TILE
    stages = 4 if split else 11
    items = E * tiles.cdiv(p, rows) * tiles.cdiv(d, columns)
    launch(
        grouped_sums_ring_kernel, min(items, tiles.sm_count(out.device)),
        A_Mf, G_Mf, rest_Mf, coef_B, out, blocks.firsts, groups.longest_first_S, items,
        1 if split else B, len(blocks.of_M), d, p, A_Mf.shape[1], G_Mf.shape[1],
        DTYPE=tiles.TL_DTYPE[A.X.dtype], SPLIT=split, ROWS=rows, COLUMNS=columns, STAGES=stages,
        workspace=True, num_warps=4,
    )  # fmt: skip


def in_blocks(
    rows: Rows, blocks: Blocks, coef_N: Tensor, split: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows in blocks of :data:`RING_ROWS`, on 16 bytes, twice; with ``split`` rows times
    coefficients, and what rounding took from that. Zeros stand behind the last row of a segment or
    group, and for rows whose coefficient is 0; blocks that are not used are not written."""
    X, F, M = rows.X, rows.features, len(blocks.of_M)
    each = 16 // X.element_size()
    width = tiles.cdiv(F, each) * each
    out = X.new_empty((M * RING_ROWS, width))
    rest = torch.empty_like(out) if split else out
    block = 256
    launch(
        blocks_kernel, M * tiles.cdiv(F, block),
        X, rows.places_N, blocks.begin_M, blocks.end_M, coef_N, out, rest, F, rows.stride, width,
        SPLIT=split, ROWS=RING_ROWS, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out, rest


@triton.jit
def grouped_sums_kernel(
    A_ptr, G_ptr, A_rows_ptr, G_rows_ptr, group_ptr, firsts_ptr, begin_ptr, end_ptr, coef_ptr,
    ends_product_ptr, out_ptr,
    samples, turned, apart, d, p, A_stride, G_stride,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of a group's ``Σ coef(n) g_n a_nᵀ``, a block of rows at a time. The tensor cores add
    up one segment's product, or a part of it; its coefficient meets that in fp32. A block whose
    coefficient is 0 is not read."""
    tiles_p, tiles_d = tl.cdiv(p, BLOCK_P), tl.cdiv(d, BLOCK_D)
    tile = tl.program_id(0) % (tiles_p * tiles_d)
    group = tl.load(group_ptr + tl.program_id(0) // (tiles_p * tiles_d))
    row, column = tile_in_groups(tile, tiles_p, tiles_d, GROUP)
    rows = row * BLOCK_P + tl.arange(0, BLOCK_P)
    columns = column * BLOCK_D + tl.arange(0, BLOCK_D)
    product = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    first = tl.load(firsts_ptr + group * samples)
    last = tl.load(firsts_ptr + (group + 1) * samples)
    for block in range(first, last):
        coef = tl.load(coef_ptr + block)
        begin = tl.load(begin_ptr + block)
        n = begin + tl.arange(0, BLOCK_T)
        inside = n < tl.where(coef != 0, tl.load(end_ptr + block), begin)
        at = places(G_rows_ptr, n, inside, G_stride)[:, None]
        within = inside[:, None] & (rows < p)[None, :]
        g = tl.load(G_ptr + at + rows[None, :], mask=within, other=0.0)
        at = places(A_rows_ptr, n, inside, A_stride)[:, None]
        within = inside[:, None] & (columns < d)[None, :]
        a = tl.load(A_ptr + at + columns[None, :], mask=within, other=0.0)
        product = tl.dot(tl.trans(g), a, product, input_precision=PRECISION)
        if tl.load(ends_product_ptr + block) != 0:
            total += coef * product
            product = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    place = (group % turned).to(tl.int64) * apart + group // turned
    place = place * p * d + rows.to(tl.int64)[:, None] * d + columns[None, :]
    tl.store(
        out_ptr + place,
        total.to(out_ptr.dtype.element_ty),
        mask=(rows < p)[:, None] & (columns < d)[None, :],
    )


@triton.jit
def blocks_kernel(
    X_ptr, rows_ptr, begin_ptr, end_ptr, coef_ptr, out_ptr, rest_ptr,
    F, stride, width,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of a block, ``width`` apart, and zeros up to ``ROWS`` and for coefficients of 0.
    ``SPLIT``: times the coefficient, rounded, and what rounding took."""
    parts = tl.cdiv(F, BLOCK)
    block = tl.program_id(0) // parts
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(begin_ptr + block)
    end = tl.load(end_ptr + block)
    if begin < end:  # else it is not used
        n = begin + tl.arange(0, ROWS)
        coef = tl.load(coef_ptr + n, mask=n < end, other=0.0)
        inside = coef != 0
        at = places(rows_ptr, n, inside, stride)[:, None] + columns[None, :]
        x = tl.load(X_ptr + at, mask=inside[:, None] & (columns < F)[None, :], other=0.0)
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        place = row[:, None] * width + columns[None, :]
        if SPLIT:
            scaled = x.to(tl.float32) * coef[:, None]
            x = scaled.to(x.dtype)
            rest = (scaled - x.to(tl.float32)).to(x.dtype)
            tl.store(rest_ptr + place, rest, mask=(columns < F)[None, :])
        tl.store(out_ptr + place, x, mask=(columns < F)[None, :])


def segment_sums(X_Nf: Tensor, lists: Lists) -> Tensor:
    blocks = lists.blocks(SUMMED)
    return of_segments(row_sums(X_Nf, blocks.begin_M, blocks.end_M), blocks.firsts)


def products(A: Rows, G: Rows, lists: Lists) -> Tensor:
    """``Σ g_n a_nᵀ`` of every run of rows, ``[S, p, d]``: by a library where it can."""
    A_Nd, G_Np = A.sorted(), G.sorted()
    library = grouped_mm(G_Np.mT, A_Nd, len(lists))
    if library is not None:
        return library(G_Np.mT, A_Nd, offs=lists.ends)
    one = A_Nd.new_ones(1, dtype=torch.float32)
    sums = grouped_sums(Rows(A_Nd), Rows(G_Np), lists, one)
    return sums.to(torch.promote_types(A_Nd.dtype, G_Np.dtype))


def segment_grads(A: Rows, G: Rows, lists: Lists, samples: int) -> Tensor:
    """See :func:`flash_clipping.ops.segments.segment_grads`; of low ranks by one kernel, which
    writes each gradient where it belongs."""
    if min(A.features, G.features) > NARROW:
        grads = products(A, G, lists)
        return torch.unflatten(grads, 0, (-1, samples)).transpose(0, 1).contiguous()
    A, G = operands_of(A, G)
    out = A.X.new_empty((samples, len(lists) // samples, G.features, A.features))
    ones = torch.ones(1, device=A.X.device)
    config = sums_config(A, G, A.size / len(lists))
    launch_sums(A, G, lists, ones, out.flatten(0, 1), config, turned=samples)
    return out


def grouped_linear(X_Nd: Tensor, W_Epd: Tensor, lists: Lists) -> Tensor:
    """See :func:`flash_clipping.ops.segments.grouped_linear`: by a library where it can."""
    X = Rows(tiles.with_unit_stride(X_Nd))
    X_Nd, N, (E, p, d) = X.X, X.size, W_Epd.shape
    library = grouped_mm(X_Nd, W_Epd, E)
    if library is not None:
        out = library(X_Nd, W_Epd.mT, offs=lists.ends)
    else:
        out = X_Nd.new_empty((N, p))
        blocks = lists.blocks(BLOCK)
        launch(
            grouped_linear_kernel, len(blocks.of_M) * tiles.cdiv(p, BLOCK),
            X_Nd, W_Epd, blocks.begin_M, blocks.end_M, blocks.of_M, out, E, d, p, X.stride,
            *W_Epd.stride(),
            BLOCK=BLOCK, BLOCK_D=32, PRECISION=tiles.dot_precision(X_Nd.dtype),
            num_warps=8, num_stages=3,
        )  # fmt: skip
    programs = min(N, 2 * tiles.sm_count(X_Nd.device))
    arguments = (out, lists.starts[-1:], N, p, out.stride(0))
    launch(clear_kernel, programs, *arguments, BLOCK=1024, num_warps=4)
    return out


def sums_of_tokens(X_Nf: Tensor, rows_Mk: Tensor, end: Tensor, weight_Mk: Tensor | None) -> Tensor:
    X = Rows(tiles.with_unit_stride(X_Nf))
    (tokens, k), F = rows_Mk.shape, X.features
    weights = rows_Mk if weight_Mk is None else weight_Mk.contiguous()
    out = torch.empty((tokens, F), dtype=sum_dtype(X_Nf, weight_Mk), device=X_Nf.device)
    block = min(1024, tiles.next_power_of_2(F))
    launch(
        tokens_kernel, tokens * tiles.cdiv(F, block),
        X.X, rows_Mk, end, weights, out, k, F, X.stride,
        WEIGHTED=weight_Mk is not None, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def grouped_linear_kernel(
    X_ptr, W_ptr, begin_ptr, end_ptr, of_ptr, out_ptr,
    groups, d, p, X_stride, W_stride_e, W_stride_p, W_stride_d,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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
    X_ptr, rows_ptr, end_ptr, weight_ptr, out_ptr,
    k, F, stride,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
