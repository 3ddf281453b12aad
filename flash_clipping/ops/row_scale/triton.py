"""Kernel for row scaling: one pass over a tensor. Reads nothing of dropped samples."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch

BLOCK = 2048


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
        _row_scale_kernel, B * tiles.cdiv(size, BLOCK),
        x, coef_B, out, size,
        BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip
    return out
