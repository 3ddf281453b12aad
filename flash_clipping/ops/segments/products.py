"""Rows times their group's matrix, products of runs of rows, and the rows of one token added up.

N rows, M blocks of rows, S runs, E groups, d input features, p output features, F features of one
operand. Rows are sorted by segment.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping._compat import grouped_mm
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch
from flash_clipping.ops.segments.operands import Config, operands_of, stride
from flash_clipping.ops.segments.reference import sum_dtype
from flash_clipping.ops.segments.sums import NARROW, grouped_sums, launch_sums, sums_config
from flash_clipping.ops.segments.work import Lists


def products(
    A: Tensor, A_rows: Tensor | None, G: Tensor, G_rows: Tensor | None, lists: Lists
) -> Tensor:
    """``Σ g_n a_nᵀ`` of every run of rows, ``[S, p, d]`` in the operands' dtype: by a library
    where it can."""
    A = A if A_rows is None else A[A_rows]
    G = G if G_rows is None else G[G_rows]
    library = grouped_mm(G.mT, A, len(lists))
    if library is not None:
        return library(G.mT, A, offs=lists.ends)
    one = A.new_ones(1, dtype=torch.float32)
    return grouped_sums(A, None, G, None, lists, one).to(torch.promote_types(A.dtype, G.dtype))


def segment_grads(
    A: Tensor,
    A_rows: Tensor | None,
    G: Tensor,
    G_rows: Tensor | None,
    lists: Lists,
    samples: int,
) -> Tensor:
    """See :func:`flash_clipping.ops.segments.segment_grads`; of low ranks by one kernel, which
    writes each gradient where it belongs."""
    operands = operands_of(A, A_rows, G, G_rows)
    if min(operands.d, operands.p) > NARROW:
        grads = products(A, A_rows, G, G_rows, lists)
        return grads.unflatten(0, (-1, samples)).transpose(0, 1).contiguous()
    size = samples, len(lists) // samples, operands.p, operands.d
    out = torch.empty(size, dtype=operands.dtype, device=A.device)
    ones = torch.ones(1, device=A.device)
    config = sums_config(operands, operands.rows / len(lists))
    launch_sums(operands, lists, ones, out.flatten(0, 1), config, turned=samples)
    return out


def grouped_linear(X_Nd: Tensor, W_Epd: Tensor, lists: Lists) -> Tensor:
    """See :func:`flash_clipping.ops.segments.grouped_linear`: by a library where it can."""
    N, (E, p, d) = len(X_Nd), W_Epd.shape
    X_Nd = tiles.with_unit_stride(X_Nd)
    library = grouped_mm(X_Nd, W_Epd, E)
    if library is not None:
        out = library(X_Nd, W_Epd.mT, offs=lists.ends)
    else:
        out = X_Nd.new_empty((N, p))
        config = Config(step=32, num_stages=3)
        blocks = lists.blocks(config.block)
        launch(
            grouped_linear_kernel, len(blocks.of_M) * tiles.cdiv(p, config.block),
            X_Nd, W_Epd, blocks.begin_M, blocks.end_M, blocks.of_M, out, E, d, p, stride(X_Nd),
            *W_Epd.stride(),
            BLOCK=config.block, BLOCK_D=config.step, PRECISION=tiles.dot_precision(X_Nd.dtype),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    programs = min(N, 2 * tiles.sm_count(X_Nd.device))
    arguments = (out, lists.starts[-1:], N, p, out.stride(0))
    launch(clear_kernel, programs, *arguments, BLOCK=1024, num_warps=4)
    return out


def sums_of_tokens(X_Nf: Tensor, rows_Mk: Tensor, end: Tensor, weight_Mk: Tensor | None) -> Tensor:
    """See :func:`flash_clipping.ops.segments.sums_of_tokens`."""
    X_Nf = tiles.with_unit_stride(X_Nf)
    (tokens, k), F = rows_Mk.shape, X_Nf.shape[1]
    weights = rows_Mk if weight_Mk is None else weight_Mk.contiguous()
    out = torch.empty((tokens, F), dtype=sum_dtype(X_Nf, weight_Mk), device=X_Nf.device)
    block = min(1024, tiles.next_power_of_2(F))
    launch(
        tokens_kernel, tokens * tiles.cdiv(F, block),
        X_Nf, rows_Mk, end, weights, out, k, F, stride(X_Nf),
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
