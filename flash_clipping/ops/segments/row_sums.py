"""Sums of runs of rows.

N rows, M runs, f features.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch
from flash_clipping.ops.segments.operands import stride
from flash_clipping.ops.segments.work import Lists

SUMMED = 256
"""Rows that one program adds up."""


def segment_sums(X_Nf: Tensor, lists: Lists) -> Tensor:
    """See :func:`flash_clipping.ops.segments.segment_sums`."""
    blocks = lists.blocks(SUMMED)
    return of_segments(row_sums(X_Nf, blocks.begin_M, blocks.end_M), blocks.firsts)


def row_sums(X_Nf: Tensor, begin_M: Tensor, end_M: Tensor) -> Tensor:
    """``[M, f]`` in fp32: rows from ``begin`` to ``end`` added up."""
    X_Nf = tiles.with_unit_stride(X_Nf)
    runs, F = len(begin_M), X_Nf.shape[1]
    out = torch.empty((runs, F), dtype=torch.float32, device=X_Nf.device)
    block = min(128, tiles.next_power_of_2(F))
    programs = runs * tiles.cdiv(F, block)
    if programs:
        arguments = (X_Nf, begin_M, end_M, out, F, stride(X_Nf))
        launch(row_sums_kernel, programs, *arguments, ROWS=32, BLOCK=block, num_warps=4)
    return out


def of_segments(parts_Mf: Tensor, firsts: Tensor) -> Tensor:
    """What blocks have left, added up for every segment in order."""
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
