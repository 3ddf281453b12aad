"""Kernel for row scaling: one pass over one or two tensors. Reads nothing of dropped samples."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def _scale_block(
    x_ptr,
    coef_ptr,
    out_ptr,
    block,
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
    column_blocks = tl.cdiv(F, COLUMNS)
    row_blocks = tl.cdiv(T, ROWS)
    b = (block // (column_blocks * row_blocks)).to(tl.int64)
    rest = block % (column_blocks * row_blocks)
    rows = (rest // column_blocks) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    columns = (rest % column_blocks) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < T) & (columns < F)
    coef = tl.load(coef_ptr + b).to(tl.float32)
    kept = (rows < tl.where(coef != 0, T, 0)) & (columns < F)  # of a dropped sample, no rows
    x = tl.load(x_ptr + b * x_stride_b + rows * x_stride_t + columns, mask=kept, other=0.0)
    if not KEEP:
        x = (x.to(tl.float32) * coef).to(x.dtype)
    tl.store(out_ptr + b * out_stride_b + rows * out_stride_t + columns, x, mask=inside)


@triton.jit
def _row_scale_kernel(
    coef_ptr,
    x_ptr,
    x_out_ptr,
    x_T,
    x_F,
    x_stride_b,
    x_stride_t,
    x_out_stride_b,
    x_out_stride_t,
    x_blocks,
    y_ptr,
    y_out_ptr,
    y_T,
    y_F,
    y_stride_b,
    y_stride_t,
    y_out_stride_b,
    y_out_stride_t,
    X_ROWS: tl.constexpr,
    X_COLUMNS: tl.constexpr,
    Y_ROWS: tl.constexpr,
    Y_COLUMNS: tl.constexpr,
    BOTH: tl.constexpr,
):
    """Scale ``x``; with ``BOTH`` also copy ``y`` with its dropped samples set to zero."""
    pid = tl.program_id(0)
    if not BOTH or pid < x_blocks:
        _scale_block(
            x_ptr,
            coef_ptr,
            x_out_ptr,
            pid,
            x_T,
            x_F,
            x_stride_b,
            x_stride_t,
            x_out_stride_b,
            x_out_stride_t,
            False,
            X_ROWS,
            X_COLUMNS,
        )
    else:
        _scale_block(
            y_ptr,
            coef_ptr,
            y_out_ptr,
            pid - x_blocks,
            y_T,
            y_F,
            y_stride_b,
            y_stride_t,
            y_out_stride_b,
            y_out_stride_t,
            True,
            Y_ROWS,
            Y_COLUMNS,
        )


class _Layout:
    """A tensor and its fresh copy as ``[B, T, F]`` with contiguous rows, cut into blocks."""

    def __init__(self, x: Tensor) -> None:
        if not x[0].is_contiguous() and (x.stride(-1) != 1 or x.dim() > 3):
            x = x.contiguous()
        self.x, self.out = x, torch.empty_like(x)
        if x[0].is_contiguous() and self.out[0].is_contiguous():
            self.T, self.F = 1, x[0].numel()
            self.strides = (x.stride(0), 0, self.out.stride(0), 0)
        else:
            self.T, self.F = x.shape[1:]
            self.strides = (x.stride(0), x.stride(1), self.out.stride(0), self.out.stride(1))
        self.columns = min(BLOCK, triton.next_power_of_2(self.F))
        self.rows = min(BLOCK // self.columns, triton.next_power_of_2(self.T))
        self.blocks = (
            x.shape[0] * triton.cdiv(self.T, self.rows) * triton.cdiv(self.F, self.columns)
        )


def _launch(x: _Layout, y: _Layout | None, coef_B: Tensor) -> None:
    other = x if y is None else y
    _row_scale_kernel[(x.blocks + (0 if y is None else y.blocks),)](
        coef_B.contiguous(),
        x.x,
        x.out,
        x.T,
        x.F,
        *x.strides,
        x.blocks,
        other.x,
        other.out,
        other.T,
        other.F,
        *other.strides,
        X_ROWS=x.rows,
        X_COLUMNS=x.columns,
        Y_ROWS=other.rows,
        Y_COLUMNS=other.columns,
        BOTH=y is not None,
        num_warps=8,
    )


def row_scale(x: Tensor, coef_B: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.row_scale.row_scale`."""
    layout = _Layout(x)
    _launch(layout, None, coef_B)
    return layout.out


def scale_and_clean(x: Tensor, y: Tensor, coef_B: Tensor) -> tuple[Tensor, Tensor]:
    """``coef_b · x_b``, and a copy of ``y`` whose dropped samples are zero, in one launch."""
    x_layout, y_layout = _Layout(x), _Layout(y)
    _launch(x_layout, y_layout, coef_B)
    return x_layout.out, y_layout.out
