"""Kernel for sums over positions: a table names the tensors, so that one launch serves all.

B samples, T positions, n elements, P tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import tiles_triton as tiles
from flash_clipping.ops.upload import to_device

BLOCK = 128
ROWS = 32
_COLUMNS = 3  # of the table: address, stride of samples, stride of positions


@triton.jit
def _row_sums_kernel(
    table_ptr,
    out_ptr,
    P,
    T,
    n,
    blocks,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``BLOCK`` elements of one sample of one tensor; the output is ``[B, P, n]``."""
    pid = tl.program_id(0)
    block = pid % blocks
    vector = pid // blocks  # b * P + tensor
    row = table_ptr + vector % P * COLUMNS
    x_ptr = tl.load(row).to(tl.pointer_type(DTYPE))
    x_ptr += (vector // P).to(tl.int64) * tl.load(row + 1)
    stride_t = tl.load(row + 2)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, T, ROWS):
        t = first + tl.arange(0, ROWS)
        x = tl.load(
            x_ptr + t.to(tl.int64)[:, None] * stride_t + columns[None, :],
            mask=(t < T)[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(x.to(tl.float32), 0)
    tl.store(out_ptr + vector.to(tl.int64) * n + columns, total, mask=inside)


def row_sums(rows: Sequence[Tensor]) -> Tensor:
    """See :func:`flash_clipping.ops.row_sum.row_sums`."""
    rows = [tiles.with_unit_stride(x) for x in rows]
    B, T, n = rows[0].shape
    table: list[int] = []
    for x in rows:
        stride_b, stride_t, _ = x.stride()
        table += (x.data_ptr(), stride_b, stride_t)
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
        COLUMNS=_COLUMNS,
        BLOCK=BLOCK,
        ROWS=ROWS,
        num_warps=4,
    )
    return out
