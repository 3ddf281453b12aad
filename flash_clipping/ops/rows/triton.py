"""Kernels for rows. Scaling reads nothing of dropped samples. A table names the tensors whose
positions are summed, so that one launch does all.

B samples, T positions, n elements of one tensor and N of all, P tensors; for rows that may not be
finite: N rows, F elements of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.shapes import LaunchCache, Normalized
from flash_clipping.ops.runtime.tables import Table, firsts_of
from flash_clipping.ops.runtime.tiles import jit, launch, row_of

TILE = 4096
"""Elements that a program reads at one time: some rows, or a part of one."""
_INFINITY = tl.constexpr(float("inf"))


def finite_rows(x: Tensor, lost_N: Tensor, in_place: bool) -> Tensor:
    x = x.contiguous()
    out = x if in_place else torch.empty_like(x)
    N, F = len(x), x.shape[1:].numel()
    block = min(TILE, tiles.next_power_of_2(F))
    rows = TILE // block
    launch(
        finite_rows_kernel, tiles.cdiv(N, rows),
        x, out, lost_N, N, F,
        IN_PLACE=in_place, ROWS=rows, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def finite_rows_kernel(
    x_ptr, out_ptr, lost_ptr,
    N, F,
    IN_PLACE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows; a wide row is read a second time, from the cache, to be copied."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (n < N)[:, None]
    at = n.to(tl.int64)[:, None] * F
    bad = tl.zeros((ROWS, BLOCK), tl.int32)
    for first in range(0, F, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + at + columns, mask=inside & (columns < F), other=0.0)
        # Of NaN this is false as well.
        bad |= tl.where(tl.abs(x.to(tl.float32)) < _INFINITY, 0, 1)
    is_lost = tl.max(bad, 1) > 0
    tl.store(lost_ptr + n, tl.full((ROWS,), 1, tl.uint8), mask=is_lost & (n < N))
    if IN_PLACE:
        if tl.max(tl.max(bad, 1), 0) > 0:
            for first in range(0, F, BLOCK):
                columns = first + tl.arange(0, BLOCK)[None, :]
                zeros = tl.zeros((ROWS, BLOCK), out_ptr.dtype.element_ty)
                within = inside & is_lost[:, None] & (columns < F)
                tl.store(out_ptr + at + columns, zeros, mask=within)
    else:
        for first in range(0, F, BLOCK):
            columns = first + tl.arange(0, BLOCK)[None, :]
            within = inside & (columns < F)
            # A lost row is not read again: 0 * inf would be NaN.
            x = tl.load(x_ptr + at + columns, mask=within & (is_lost[:, None] == 0), other=0.0)
            tl.store(out_ptr + at + columns, x, mask=within)


SCALED = 2048
"""Elements that a program scales."""


@triton.jit
def _row_scale_kernel(x_ptr, coef_ptr, out_ptr, size, BLOCK: tl.constexpr):
    blocks = tl.cdiv(size, BLOCK)
    b = tl.program_id(0) // blocks
    coef = tl.load(coef_ptr + b).to(tl.float32)
    start = b.to(tl.int64) * size
    columns = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.where(coef != 0, size, 0)  # of a dropped sample, nothing
    x = tl.load(x_ptr + start + columns, mask=columns < kept, other=0.0)
    tl.store(out_ptr + start + columns, x.to(tl.float32) * coef, mask=columns < size)


def row_scale(x: Tensor, coef_B: Tensor) -> Tensor:
    coef_B, x = coef_B.contiguous(), x.contiguous()
    out = torch.empty_like(x, dtype=torch.float32)
    B = coef_B.shape[0]
    size = x.numel() // B
    launch(
        _row_scale_kernel, B * tiles.cdiv(size, SCALED),
        x, coef_B, out, size,
        BLOCK=SCALED,
        num_warps=4,
    )  # fmt: skip
    return out


BLOCK = 128
ROWS = 32
FEWEST = 64
"""Tensors, and blocks of one, that a kernel is compiled for at least: many tables, few kernels."""
# Of the table: address and strides of the rows, then of x, then mean and rstd; elements, where
# they begin in the output, and the first of the blocks.
_COLUMNS = 11


@triton.jit
def _block_sum(
    row, b, T, columns, inside, DTYPE: tl.constexpr, X_DTYPE: tl.constexpr, ROWS: tl.constexpr
):
    """Some columns of one sample of one tensor; times x̂ if ``X_DTYPE`` is given."""
    rows_ptr = tl.load(row).to(tl.pointer_type(DTYPE)) + b * tl.load(row + 1)
    stride_t = tl.load(row + 2)
    if X_DTYPE is not None:
        x_ptr = tl.load(row + 3).to(tl.pointer_type(X_DTYPE)) + b * tl.load(row + 4)
        x_stride_t = tl.load(row + 5)
        mean_ptr = tl.load(row + 6).to(tl.pointer_type(tl.float32)) + b * T
        rstd_ptr = tl.load(row + 7).to(tl.pointer_type(tl.float32)) + b * T
    total = tl.zeros_like(columns).to(tl.float32)
    for first in range(0, T, ROWS):
        t = first + tl.arange(0, ROWS)
        valid = (t < T)[:, None] & inside[None, :]
        at = t.to(tl.int64)[:, None]
        values = tl.load(rows_ptr + at * stride_t + columns[None, :], mask=valid, other=0.0)
        values = values.to(tl.float32)
        if X_DTYPE is not None:
            x = tl.load(x_ptr + at * x_stride_t + columns[None, :], mask=valid, other=0.0)
            mean = tl.load(mean_ptr + t, mask=t < T, other=0.0)
            rstd = tl.load(rstd_ptr + t, mask=t < T, other=0.0)
            values *= tl.where(valid, (x.to(tl.float32) - mean[:, None]) * rstd[:, None], 0.0)
        total += tl.sum(values, 0)
    return total


@jit
def _row_sums_kernel(
    table_ptr, sums_ptr, squares_ptr,
    tensors, T, N, blocks, widest,
    DTYPE: tl.constexpr, X_DTYPE: tl.constexpr, TENSORS: tl.constexpr, WIDEST: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """``BLOCK`` elements of one sample of one tensor, and their part of its norm. Every tensor has
    room for ``widest`` parts in ``squares``, ``[B, P, widest]``."""
    pid = tl.program_id(0)
    block = pid % blocks
    b = (pid // blocks).to(tl.int64)
    tensor = row_of(table_ptr, tensors, block, COLUMNS, TENSORS)
    row = table_ptr + tensor * COLUMNS
    n = tl.load(row + 8).to(tl.int32)
    part = block - tl.load(row + 10).to(tl.int32)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    if tl.load(row + 3) == 0:
        total = _block_sum(row, b, T, columns, inside, DTYPE, None, ROWS)
    else:
        total = _block_sum(row, b, T, columns, inside, DTYPE, X_DTYPE, ROWS)
    tl.store(sums_ptr + b * N + tl.load(row + 9) + columns, total, mask=inside)
    squares = squares_ptr + (b * tensors + tensor) * widest
    tl.store(squares + part, tl.sum(total * total, 0))
    if (part + 1) * BLOCK >= n:
        # The last block sees to the room that a narrower tensor leaves.
        rest = tl.arange(0, WIDEST)
        tl.store(squares + rest, 0.0, mask=(rest > part) & (rest < widest))


class _Sums(Table):
    """The table of one launch."""

    def __init__(self, rows: Sequence[Tensor], normalized: Sequence[Normalized | None]) -> None:
        super().__init__(_COLUMNS)
        self.sizes = [x.shape[2] for x in rows]
        self.blocks = [max(1, tiles.cdiv(n, BLOCK)) for n in self.sizes]
        self.x_dtype = next((x_hat.x_BTn.dtype for x_hat in normalized if x_hat is not None), None)
        *starts, _ = itertools.accumulate(self.sizes, initial=0)
        firsts, self.count = firsts_of(self.blocks)
        for x, x_hat, *places in zip(rows, normalized, self.sizes, starts, firsts, strict=True):
            self.numbers.extend(self.describe(x)[:3])
            if x_hat is None:
                self.numbers.extend((0,) * 5)
            else:
                self.numbers.extend(self.describe(x_hat.x_BTn)[:3])
                for statistic in x_hat[1:]:
                    read = statistic.float().contiguous()
                    self.hold(statistic, read)
                    self.numbers.append(read.data_ptr())
            self.numbers.extend(places)

    def read(self, rows: Sequence[Tensor], normalized: Sequence[Normalized | None]) -> None:
        """Take the addresses of operands of the layout that the table was made for."""
        self.set_column(0, [x.data_ptr() for x in rows])
        if self.x_dtype is None:
            return
        for place, column in enumerate((3, 6, 7)):
            addresses = [0 if x_hat is None else x_hat[place].data_ptr() for x_hat in normalized]
            self.set_column(column, addresses)


def row_sums(
    rows: Sequence[Tensor], normalized: Sequence[Normalized | None], memo: LaunchCache | None = None
) -> tuple[Tensor, Tensor]:
    first = rows[0]
    B, T, _ = first.shape
    memo = {} if memo is None else memo
    table: _Sums | None = memo.get("table")
    if table is None:
        table = _Sums(rows, normalized)
        if not table.copied:
            memo["table"] = table
    else:
        table.read(rows, normalized)
    tensors, N, blocks, widest = len(rows), sum(table.sizes), table.count, max(table.blocks)
    device = first.device
    sums_BN = torch.empty((B, N), dtype=torch.float32, device=device)
    squares_BPw = torch.empty((B, tensors, widest), dtype=torch.float32, device=device)
    launch(
        _row_sums_kernel, B * blocks,
        table.on(device), sums_BN, squares_BPw, tensors, T, N, blocks, widest,
        DTYPE=tiles.TL_DTYPE[first.dtype],
        X_DTYPE=tiles.TL_DTYPE[table.x_dtype or first.dtype],
        TENSORS=max(FEWEST, tiles.next_power_of_2(tensors)),
        WIDEST=max(FEWEST, tiles.next_power_of_2(widest)),
        COLUMNS=_COLUMNS, BLOCK=BLOCK, ROWS=ROWS,
        num_warps=4,
    )  # fmt: skip
    table.held = []
    return sums_BN, squares_BPw.sum(2).T
