"""Launches of the kernels for segments: nothing here waits for how long segments are.

N rows, S segments, E groups, B samples, d input features, p output features.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_clipping._compat import grouped_mm
from flash_clipping.ops import certificate
from flash_clipping.ops.runtime import cost, tiles
from flash_clipping.ops.runtime.launches import has_gluon, launch
from flash_clipping.ops.segments import norms, sums
from flash_clipping.ops.segments.work import Blocks, blocks_of, most_pairs, work_list

SUMMED = 256
"""Rows that one program adds up."""
PROMOTED = 1024
"""Rows, or features, after which a product is added to a sum in fp32: tensor cores truncate."""

RING_ROWS = 32
"""Rows of a block of :mod:`flash_clipping.ops.segments.hopper`."""
GATHERED_ONCE = 512
"""Rows of a segment, on average, from which on operands are put in order before norms are taken."""
SPLIT_BELOW = 96
"""Rows of a segment, on average, below which these are multiplied by their coefficients."""


@dataclass(frozen=True)
class Config:
    """A launch's parameters, open to benchmarks."""

    block: int = 128
    step: int = 64
    num_warps: int = 8
    num_stages: int = 3


def _rows_of(X: Tensor, rows_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """An operand with features next to each other, and the places of its rows (or anything)."""
    return tiles.with_unit_stride(X), X if rows_N is None else rows_N


def _stride(X: Tensor) -> int:
    return X.stride(0) if X.shape[0] > 1 else X.shape[1]


def _both(
    A: Tensor, G: Tensor, A_rows: Tensor | None, G_rows: Tensor | None
) -> tuple[list[Tensor], list[int], dict[str, bool]]:
    """What every kernel is told of its two operands: in one dtype, as one product takes them."""
    dtype = torch.promote_types(A.dtype, G.dtype)
    A, A_places = _rows_of(A.to(dtype), A_rows)
    G, G_places = _rows_of(G.to(dtype), G_rows)
    gathered = {"A_GATHERED": A_rows is not None, "G_GATHERED": G_rows is not None}
    return [A, G, A_places, G_places], [_stride(A), _stride(G)], gathered


def _row_sums(X_Nf: Tensor, begin_M: Tensor, end_M: Tensor) -> Tensor:
    """``[M, f]`` in fp32: rows from ``begin`` to ``end`` added up."""
    X_Nf = tiles.with_unit_stride(X_Nf)
    runs, F = len(begin_M), X_Nf.shape[1]
    out = torch.empty((runs, F), dtype=torch.float32, device=X_Nf.device)
    block = min(128, tiles.next_power_of_2(F))
    programs = runs * tiles.cdiv(F, block)
    if programs:
        arguments = (X_Nf, begin_M, end_M, out, F, _stride(X_Nf))
        launch(sums.row_sums_kernel, programs, *arguments, ROWS=32, BLOCK=block, num_warps=4)
    return out


def _of_segments(parts_Mf: Tensor, firsts: Tensor) -> Tensor:
    """What blocks have left, added up for every segment in order."""
    return _row_sums(parts_Mf, firsts[:-1], firsts[1:])


def segment_sums(X_Nf: Tensor, starts: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.segments.segment_sums`."""
    blocks = blocks_of(starts, len(X_Nf), SUMMED)
    return _of_segments(_row_sums(X_Nf, blocks.begin_M, blocks.end_M), blocks.firsts)


def segment_sqnorms(
    A: Tensor, A_rows: Tensor | None, G: Tensor, G_rows: Tensor | None, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.segments.segment_sqnorms`."""
    rows = _count(A, A_rows)
    S, d, p = len(starts) - 1, A.shape[1], G.shape[1]
    if rows > GATHERED_ONCE * S:  # products read a row more often than Gram matrices
        A, A_rows = (A, None) if A_rows is None else (A[A_rows], None)
        G, G_rows = (G, None) if G_rows is None else (G[G_rows], None)
    operands, strides, gathered = _both(A, G, A_rows, G_rows)
    longest = cost.longest_for_gram(d, p, operands[0].element_size())
    lengths_S = starts.diff()
    is_short_S = lengths_S <= longest
    of_short_S2 = _short_ones(operands, strides, gathered, starts, is_short_S, rows, longest)
    # Among so many rows there are at most so many of more than `longest`.
    long_ones = min(S, rows // (longest + 1))
    if not long_ones:
        sq_S, spread_S = of_short_S2.unbind(1)
        return sq_S.contiguous(), certificate.doubt(spread_S)
    ranked_S = torch.argsort(lengths_S, descending=True)
    sq_of_rank = _long_ones(operands, strides, gathered, starts, ranked_S[:long_ones], longest)
    rank_S = torch.empty_like(ranked_S)
    rank_S[ranked_S] = torch.arange(S, device=ranked_S.device)
    long_S1 = _spread(operands, strides, gathered, blocks_of(starts, rows, 64, ~is_short_S))
    sq_S = torch.where(is_short_S, of_short_S2[:, 0], sq_of_rank[rank_S.clamp(max=long_ones - 1)])
    spread_S = torch.where(is_short_S, of_short_S2[:, 1], long_S1[:, 0])
    return sq_S, certificate.doubt(spread_S)


def _count(X: Tensor, rows_N: Tensor | None) -> int:
    return len(X) if rows_N is None else len(rows_N)


def gram_config(dtype: torch.dtype, rows_each: float) -> Config:
    """For segments of so many rows on average."""
    step = 32 if dtype == torch.float32 else 64
    small = rows_each <= 256
    return Config(64, step, num_warps=4, num_stages=4) if small else Config(128, step)


def _short_ones(
    operands: Sequence[Tensor],
    strides: Sequence[int],
    gathered: dict[str, bool],
    starts: Tensor,
    is_short_S: Tensor,
    rows: int,
    longest: int,
) -> Tensor:
    """Squared norms and spreads of segments by Gram matrices, ``[S, 2]``."""
    A, G = operands[:2]
    S = len(is_short_S)
    config = gram_config(A.dtype, rows / max(1, S))
    blocks_S = (starts.diff() + (config.block - 1)) // config.block
    pairs_S = blocks_S * (blocks_S + 1) // 2 * is_short_S
    pairs = work_list(pairs_S, most_pairs(rows, S, min(longest, rows), config.block))
    parts_M2 = torch.empty((len(pairs.of_M), 2), dtype=torch.float32, device=A.device)
    launch(
        norms.gram_kernel,
        len(pairs.of_M),
        *operands,
        starts,
        pairs.of_M,
        pairs.firsts,
        parts_M2,
        S,
        A.shape[1],
        G.shape[1],
        *strides,
        **gathered,
        BLOCK=config.block,
        BLOCK_F=config.step,
        PROMOTE=PROMOTED // config.step,
        PRECISION=tiles.dot_precision(A.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return _of_segments(parts_M2, pairs.firsts)


def _long_ones(
    operands: Sequence[Tensor],
    strides: Sequence[int],
    gathered: dict[str, bool],
    starts: Tensor,
    ranked_R: Tensor,
    longest: int,
) -> Tensor:
    """Squared norms by products, of those of these segments that are longer; ``[R]``."""
    A, G = operands[:2]
    config = Config(step=32 if A.dtype == torch.float32 else 64)
    d, p = A.shape[1], G.shape[1]
    tiles_of_each = tiles.cdiv(d, config.block) * tiles.cdiv(p, config.block)
    parts = torch.empty((len(ranked_R), tiles_of_each), dtype=torch.float32, device=A.device)
    launch(
        norms.outer_kernel,
        parts.numel(),
        *operands,
        starts,
        ranked_R,
        parts,
        longest + 1,
        d,
        p,
        *strides,
        **gathered,
        BLOCK=config.block,
        BLOCK_T=config.step,
        PROMOTE=PROMOTED // config.step,
        GROUP=8,
        PRECISION=tiles.dot_precision(A.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return parts.sum(1)


def _spread(
    operands: Sequence[Tensor], strides: Sequence[int], gathered: dict[str, bool], blocks: Blocks
) -> Tensor:
    """``Σ ‖a_n‖ ‖g_n‖`` of segments that have blocks, ``[S, 1]``."""
    A, G = operands[:2]
    parts_M1 = torch.empty((len(blocks.of_M), 1), dtype=torch.float32, device=A.device)
    launch(
        norms.spread_kernel,
        len(parts_M1),
        *operands,
        blocks.begin_M,
        blocks.end_M,
        parts_M1,
        A.shape[1],
        G.shape[1],
        *strides,
        **gathered,
        BLOCK=64,
        BLOCK_F=64,
        num_warps=4,
    )
    return _of_segments(parts_M1, blocks.firsts)


def grouped_sums(
    A: Tensor,
    A_rows: Tensor | None,
    G: Tensor,
    G_rows: Tensor | None,
    starts: Tensor,
    coef_B: Tensor,
) -> Tensor:
    """See :func:`flash_clipping.ops.segments.grouped_sums`."""
    operands, strides, gathered = _both(A, G, A_rows, G_rows)
    rows, S, B = _count(A, A_rows), len(starts) - 1, len(coef_B)
    coef_B = coef_B.float().contiguous()
    # Groups of many rows first, so that the launch ends on short ones.
    group_E = torch.argsort(starts[::B].diff(), descending=True)
    shape = S // B, G.shape[1], A.shape[1]
    out = torch.empty(shape, dtype=torch.float32, device=A.device)
    if operands[0].dtype != torch.float32 and tiles.is_hopper(A.device) and has_gluon():
        split = operands[0].dtype == torch.bfloat16 and rows < SPLIT_BELOW * S
        ring_sums(operands, strides, gathered, starts, rows, coef_B, group_E, out, split)
    else:
        config = sums_config(operands[0].dtype, rows / S)
        blocks = blocks_of(starts, rows, config.step)
        launch_sums(operands, strides, gathered, blocks, coef_B, group_E, out, config)
    return out


def sums_config(dtype: torch.dtype, rows_each: float) -> Config:
    """For segments of so many rows on average."""
    if dtype == torch.float32 or rows_each <= 96:
        return Config(step=32, num_stages=4)
    return Config()


def launch_sums(
    operands: Sequence[Tensor],
    strides: Sequence[int],
    gathered: dict[str, bool],
    blocks: Blocks,
    coef_B: Tensor,
    group_E: Tensor,
    out: Tensor,
    config: Config,
) -> None:
    """Sums on any GPU."""
    (E, p, d), B = out.shape, len(coef_B)
    place_M = torch.arange(len(blocks.of_M), device=out.device, dtype=torch.int32)
    place_M -= blocks.firsts[blocks.of_M.clamp(max=E * B - 1)]
    each = PROMOTED // config.step
    launch(
        sums.grouped_sums_kernel,
        E * tiles.cdiv(p, config.block) * tiles.cdiv(d, config.block),
        *operands,
        group_E,
        blocks.firsts,
        blocks.begin_M,
        blocks.end_M,
        coef_B[blocks.of_M % B],
        blocks.last_M | (place_M % each == each - 1),
        out,
        B,
        d,
        p,
        *strides,
        **gathered,
        BLOCK=config.block,
        BLOCK_T=config.step,
        GROUP=8,
        PRECISION=tiles.dot_precision(operands[0].dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def ring_sums(
    operands: Sequence[Tensor],
    strides: Sequence[int],
    gathered: dict[str, bool],
    starts: Tensor,
    rows: int,
    coef_B: Tensor,
    group_E: Tensor,
    out: Tensor,
    split: bool,
) -> None:
    """Sums on Hopper: of copies that lie in blocks. ``split``: these are multiplied by their
    coefficients, in two parts."""
    (E, p, d), B = out.shape, len(coef_B)
    A, G, A_places, G_places = operands
    blocks = blocks_of(starts[::B].contiguous() if split else starts, rows, RING_ROWS)
    coef_N = coefficient_of_rows(starts, rows, coef_B)
    A_Mf, _ = in_blocks(A, A_places, strides[0], gathered["A_GATHERED"], blocks, coef_N)
    G_Mf, rest_Mf = in_blocks(
        G, G_places, strides[1], gathered["G_GATHERED"], blocks, coef_N, split
    )
    items = E * tiles.cdiv(p, 128) * tiles.cdiv(d, 128)
    launch(
        _hopper_kernel(),
        min(items, tiles.sm_count(out.device)),
        A_Mf,
        G_Mf,
        rest_Mf,
        coef_B,
        out,
        blocks.firsts,
        group_E,
        items,
        1 if split else B,
        len(blocks.of_M),
        d,
        p,
        A_Mf.shape[1],
        G_Mf.shape[1],
        DTYPE=tiles.TL_DTYPE[A.dtype],
        SPLIT=split,
        workspace=True,
        num_warps=4,
    )


def coefficient_of_rows(starts: Tensor, rows: int, coef_B: Tensor) -> Tensor:
    """``[N]``: the coefficient of every sorted row's sample; of rows of none, anything."""
    row_N = torch.arange(rows, dtype=torch.int32, device=starts.device)
    segment_N = torch.searchsorted(starts, row_N, right=True, out_int32=True) - 1
    return coef_B[segment_N % len(coef_B)]


def in_blocks(
    X: Tensor,
    places: Tensor,
    stride: int,
    gathered: bool,
    blocks: Blocks,
    coef_N: Tensor,
    split: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows in blocks of :data:`RING_ROWS`, on 16 bytes, and zeros: behind the last row of what
    blocks are of, and for rows whose coefficient is 0. Blocks that are not used are not written.

    Returns:
        The rows, twice; or with ``split`` the rows times their coefficients, and what rounding took
        from that.
    """
    F, each = X.shape[1], 16 // X.element_size()
    width = -(-F // each) * each
    M = len(blocks.of_M)
    out = X.new_empty((M * RING_ROWS, width))
    rest = torch.empty_like(out) if split else out
    block = 256
    launch(
        sums.blocks_kernel,
        M * tiles.cdiv(F, block),
        X,
        places,
        blocks.begin_M,
        blocks.end_M,
        coef_N,
        out,
        rest,
        F,
        stride,
        width,
        GATHERED=gathered,
        SPLIT=split,
        ROWS=RING_ROWS,
        BLOCK=block,
        num_warps=4,
    )
    return out, rest


@functools.cache
def _hopper_kernel() -> Any:
    # Not by every Triton, and not before it is wanted.
    from flash_clipping.ops.segments.hopper import grouped_sums_ring_kernel

    return grouped_sums_ring_kernel


def products(
    A: Tensor, A_rows: Tensor | None, G: Tensor, G_rows: Tensor | None, starts: Tensor
) -> Tensor:
    """``Σ g_n a_nᵀ`` of every run of rows, ``[S, p, d]`` in the operands' dtype: by a library
    where it can."""
    A = A if A_rows is None else A[A_rows]
    G = G if G_rows is None else G[G_rows]
    library = grouped_mm(G.mT, A)
    if library is not None:
        return library(G.mT, A, offs=starts[1:].contiguous())
    one = A.new_ones(1, dtype=torch.float32)
    return grouped_sums(A, None, G, None, starts, one).to(torch.promote_types(A.dtype, G.dtype))


def grouped_linear(X_Nd: Tensor, W_Epd: Tensor, starts: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.segments.grouped_linear`: by a library where it can."""
    N, (E, p, d) = len(X_Nd), W_Epd.shape
    X_Nd = tiles.with_unit_stride(X_Nd)
    library = grouped_mm(X_Nd, W_Epd)
    if library is not None:
        out = library(X_Nd, W_Epd.mT, offs=starts[1:].contiguous())
    else:
        out = X_Nd.new_empty((N, p))
        config = Config(step=32, num_stages=3)
        blocks = blocks_of(starts, N, config.block)
        launch(
            sums.grouped_linear_kernel,
            len(blocks.of_M) * tiles.cdiv(p, config.block),
            X_Nd,
            W_Epd,
            blocks.begin_M,
            blocks.end_M,
            blocks.of_M,
            out,
            E,
            d,
            p,
            _stride(X_Nd),
            *W_Epd.stride(),
            BLOCK=config.block,
            BLOCK_D=config.step,
            PRECISION=tiles.dot_precision(X_Nd.dtype),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    programs = min(N, 2 * tiles.sm_count(X_Nd.device))
    arguments = (out, starts[-1:], N, p, out.stride(0))
    launch(sums.clear_kernel, programs, *arguments, BLOCK=1024, num_warps=4)
    return out


def sums_of_tokens(X_Nf: Tensor, rows_Mk: Tensor, end: Tensor, weight_Mk: Tensor | None) -> Tensor:
    """See :func:`flash_clipping.ops.segments.sums_of_tokens`."""
    X_Nf = tiles.with_unit_stride(X_Nf)
    (tokens, k), F = rows_Mk.shape, X_Nf.shape[1]
    weights = rows_Mk if weight_Mk is None else weight_Mk.contiguous()
    out = X_Nf.new_empty((tokens, F))
    block = min(1024, tiles.next_power_of_2(F))
    launch(
        sums.tokens_kernel,
        tokens * tiles.cdiv(F, block),
        X_Nf,
        rows_Mk,
        end,
        weights,
        out,
        k,
        F,
        _stride(X_Nf),
        WEIGHTED=weight_Mk is not None,
        BLOCK=block,
        num_warps=4,
    )
    return out
