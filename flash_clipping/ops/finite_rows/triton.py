"""Kernel for rows that are not finite: finds them, and writes zeros. N rows, F elements of one."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch

TILE = 4096
"""Elements that a program reads at one time: some rows, or a part of one."""
_INFINITY = tl.constexpr(float("inf"))


def finite_rows(x: Tensor, lost_N: Tensor, in_place: bool) -> Tensor:
    """See :func:`flash_clipping.ops.finite_rows.finite_rows`."""
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
