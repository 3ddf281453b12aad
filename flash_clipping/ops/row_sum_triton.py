"""Kernel for sums over positions: a table names the tensors, so that one launch serves all.

B samples, T positions, n elements, P tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import tiles_triton as tiles
from flash_clipping.ops.shapes import Memo, Normalized
from flash_clipping.ops.upload import to_device

BLOCK = 128
ROWS = 32
_COLUMNS = 8  # of the table: address and strides of the rows, then of x, then mean and rstd


@triton.jit
def _row_sums_kernel(
    table_ptr,
    out_ptr,
    P,
    T,
    n,
    blocks,
    DTYPE: tl.constexpr,
    X_DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``BLOCK`` elements of one sample of one tensor; the output is ``[B, P, n]``."""
    pid = tl.program_id(0)
    block = pid % blocks
    vector = pid // blocks  # b * P + tensor
    b = (vector // P).to(tl.int64)
    row = table_ptr + vector % P * COLUMNS
    rows_ptr = tl.load(row).to(tl.pointer_type(DTYPE)) + b * tl.load(row + 1)
    stride_t = tl.load(row + 2)
    if X_DTYPE is not None:
        x_ptr = tl.load(row + 3).to(tl.pointer_type(X_DTYPE)) + b * tl.load(row + 4)
        x_stride_t = tl.load(row + 5)
        mean_ptr = tl.load(row + 6).to(tl.pointer_type(tl.float32)) + b * T
        rstd_ptr = tl.load(row + 7).to(tl.pointer_type(tl.float32)) + b * T
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    total = tl.zeros((BLOCK,), tl.float32)
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
    tl.store(out_ptr + vector.to(tl.int64) * n + columns, total, mask=inside)


def row_sums(
    rows: Sequence[Tensor], normalized: Sequence[Normalized] | None, memo: Memo | None = None
) -> Tensor:
    """See :func:`flash_clipping.ops.row_sum.row_sums`."""
    B, T, n = rows[0].shape
    table: array[int] | None = memo.get("table") if memo is not None else None
    held: list[Tensor] = []  # until the kernel has been launched
    if table is None:
        table, held, copied = _table(rows, normalized)
        if memo is not None and not copied:
            memo["table"] = table
    else:
        table[::_COLUMNS] = array("q", [x.data_ptr() for x in rows])
        for place, column in enumerate((3, 6, 7) if normalized is not None else ()):
            addresses = [x_hat[place].data_ptr() for x_hat in normalized or ()]
            table[column::_COLUMNS] = array("q", addresses)
    out = torch.empty((B, len(rows), n), dtype=torch.float32, device=rows[0].device)
    blocks = tiles.cdiv(n, BLOCK)
    _row_sums_kernel[(B * len(rows) * blocks,)](
        to_device(table, out.device, torch.int64),
        out,
        len(rows),
        T,
        n,
        blocks,
        DTYPE=tiles.TL_DTYPE[rows[0].dtype],
        X_DTYPE=None if normalized is None else tiles.TL_DTYPE[normalized[0].x_BTn.dtype],
        COLUMNS=_COLUMNS,
        BLOCK=BLOCK,
        ROWS=ROWS,
        num_warps=4,
    )
    return out


def _table(
    rows: Sequence[Tensor], normalized: Sequence[Normalized] | None
) -> tuple[array[int], list[Tensor], bool]:
    """The table, the tensors that it names, and whether there are copies among them."""
    given: list[Tensor] = []
    held: list[Tensor] = []
    table = array("q")
    for i, x in enumerate(rows):
        given.append(x)
        x, row, _ = tiles.table_row(x)
        held.append(x)
        table.extend(row[:3])
        if normalized is None:
            table.extend((0,) * 5)
            continue
        given += normalized[i]
        x, row, _ = tiles.table_row(normalized[i].x_BTn)
        mean, rstd = (each.float().contiguous() for each in normalized[i][1:])
        held += (x, mean, rstd)
        table.extend((*row[:3], mean.data_ptr(), rstd.data_ptr()))
    return table, held, any(x is not y for x, y in zip(given, held, strict=True))
