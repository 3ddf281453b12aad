"""The two operands of a kernel for segments, how it is launched, and sums of runs of rows.

N sorted rows, M runs, d input features, p output features, f features of one operand. An operand
may lie unsorted, with the place of every sorted row beside it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch
from flash_clipping.ops.segments.work import Rows


@dataclass(frozen=True)
class Config:
    """A launch's parameters, open to benchmarks.

    Attributes:
        block: rows, or features, of a tile; ``block_d``: input features, where they differ.
        step: rows, or features, that are multiplied at one time.
    """

    block: int = 128
    step: int = 64
    num_warps: int = 8
    num_stages: int = 3
    block_d: int = 128


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
