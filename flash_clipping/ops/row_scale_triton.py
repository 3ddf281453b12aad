"""Kernels for row scaling: one pass over one or two tensors. Reads nothing of dropped samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import tiles_triton as tiles
from flash_clipping.ops.launch_triton import launch
from flash_clipping.ops.upload import to_device

BLOCK = 2048


@triton.jit
def _scale_block(x_ptr, coef_ptr, out_ptr, block, size, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(size, BLOCK)
    b = block // blocks
    coef = tl.load(coef_ptr + b).to(tl.float32)
    start = b.to(tl.int64) * size
    columns = (block % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.where(coef != 0, size, 0)  # of a dropped sample, nothing
    x = tl.load(x_ptr + start + columns, mask=columns < kept, other=0.0)
    if not KEEP:
        x = (x.to(tl.float32) * coef).to(x.dtype)
    tl.store(out_ptr + start + columns, x, mask=columns < size)


@triton.jit
def _contiguous_kernel(
    coef_ptr,
    x_ptr,
    x_out_ptr,
    x_size,
    x_programs,
    y_ptr,
    y_out_ptr,
    y_size,
    BOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scale ``x``; with ``BOTH`` also copy ``y`` with its dropped samples set to zero."""
    pid = tl.program_id(0)
    if not BOTH or pid < x_programs:
        _scale_block(x_ptr, coef_ptr, x_out_ptr, pid, x_size, False, BLOCK)
    else:
        _scale_block(y_ptr, coef_ptr, y_out_ptr, pid - x_programs, y_size, True, BLOCK)


@triton.jit
def _strided_kernel(
    coef_ptr,
    x_ptr,
    out_ptr,
    T,
    F,
    x_stride_b,
    x_stride_t,
    out_stride_b,
    out_stride_t,
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    pid = tl.program_id(0)
    column_blocks = tl.cdiv(F, COLUMNS)
    row_blocks = tl.cdiv(T, ROWS)
    b = (pid // (column_blocks * row_blocks)).to(tl.int64)
    rest = pid % (column_blocks * row_blocks)
    rows = (rest // column_blocks) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    columns = (rest % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    coef = tl.load(coef_ptr + b).to(tl.float32)
    kept = (rows < tl.where(coef != 0, T, 0)) & (columns < F)
    x = tl.load(x_ptr + b * x_stride_b + rows * x_stride_t + columns, mask=kept, other=0.0)
    if not KEEP:
        x = (x.to(tl.float32) * coef).to(x.dtype)
    inside = (rows < T) & (columns < F)
    tl.store(out_ptr + b * out_stride_b + rows * out_stride_t + columns, x, mask=inside)


def row_scale(x: Tensor, coef_B: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.row_scale.row_scale`."""
    coef_B = coef_B.contiguous()
    if not x.is_contiguous():
        if x.dim() == 3 and x.stride(2) == 1:
            return _scale_strided(x, coef_B, keep=False)
        x = x.contiguous()
    out = torch.empty_like(x)
    B = coef_B.shape[0]
    size = x.numel() // B
    programs = B * tiles.cdiv(size, BLOCK)
    launch(
        _contiguous_kernel,
        programs,
        coef_B,
        x,
        out,
        size,
        programs,
        x,
        out,
        size,
        BOTH=False,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def _many_kernel(
    table_ptr,
    coef_ptr,
    tensors,
    DTYPE: tl.constexpr,
    TENSORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """:func:`_contiguous_kernel` for tensors named by a table; the blocks of all in one grid."""
    pid = tl.program_id(0)
    index = tl.arange(0, TENSORS)
    firsts = tl.load(table_ptr + index * COLUMNS + 3, mask=index < tensors, other=1 << 40)
    row = table_ptr + (tl.sum(tl.where(firsts <= pid, 1, 0), 0) - 1) * COLUMNS
    x_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(DTYPE)), 16)
    out_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(DTYPE)), 16)
    size = tl.multiple_of(tl.load(row + 2), 8).to(tl.int32)
    block = pid - tl.load(row + 3).to(tl.int32)
    _scale_block(x_ptr, coef_ptr, out_ptr, block, size, False, BLOCK)


def row_scale_many(xs: Sequence[Tensor], coef_B: Tensor) -> list[Tensor]:
    """:func:`row_scale` of several tensors by the same coefficients, in one launch."""
    first = xs[0]
    B = coef_B.shape[0]
    sizes = [x.numel() // B for x in xs]
    plain = all([size % 8 == 0 and size < 2**31 for size in sizes]) and tiles.lie_plainly(xs)
    if len(xs) == 1 or not plain:
        return [row_scale(x, coef_B) for x in xs]
    outs = [torch.empty_like(x) for x in xs]
    each = [B * tiles.cdiv(size, BLOCK) for size in sizes]
    table, programs = tiles.table_of_copies(xs, outs, sizes, each)
    launch(
        _many_kernel,
        programs,
        to_device(table, first.device, torch.int64),
        coef_B.contiguous(),
        len(xs),
        DTYPE=tiles.TL_DTYPE[first.dtype],
        TENSORS=tiles.next_power_of_2(len(xs)),
        COLUMNS=tiles.COPY_COLUMNS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return outs


def scale_and_clean(x: Tensor, y: Tensor, coef_B: Tensor) -> tuple[Tensor, Tensor]:
    """``coef_b · x_b``, and a copy of ``y`` whose dropped samples are zero, in one launch."""
    coef_B = coef_B.contiguous()
    if not (x.is_contiguous() and y.is_contiguous()):
        y = y if y.dim() == 3 and y.stride(2) == 1 else y.contiguous()
        return row_scale(x, coef_B), _scale_strided(y, coef_B, keep=True)
    x_out, y_out = torch.empty_like(x), torch.empty_like(y)
    B = coef_B.shape[0]
    x_size, y_size = x.numel() // B, y.numel() // B
    x_programs = B * tiles.cdiv(x_size, BLOCK)
    launch(
        _contiguous_kernel,
        x_programs + B * tiles.cdiv(y_size, BLOCK),
        coef_B,
        x,
        x_out,
        x_size,
        x_programs,
        y,
        y_out,
        y_size,
        BOTH=True,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return x_out, y_out


def _scale_strided(x_BTF: Tensor, coef_B: Tensor, *, keep: bool) -> Tensor:
    """Rows contiguous, samples and positions anywhere; the copy keeps the order of the axes."""
    out = torch.empty_like(x_BTF)
    B, T, F = x_BTF.shape
    columns = min(BLOCK, tiles.next_power_of_2(F))
    rows = min(BLOCK // columns, tiles.next_power_of_2(T))
    launch(
        _strided_kernel,
        B * tiles.cdiv(T, rows) * tiles.cdiv(F, columns),
        coef_B,
        x_BTF,
        out,
        T,
        F,
        *x_BTF.stride()[:2],
        *out.stride()[:2],
        KEEP=keep,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return out
