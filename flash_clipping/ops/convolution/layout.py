"""Kernel that lays channels side by side: ``[B, C, positions]`` to ``[B, positions, C]``.

Where the positions of a channel lie together, those that a window sees begin on any address, and
16-bit numbers of a tile must be fetched one by one. Where channels lie together, a position's are
fetched 16 bytes at a time. So an operand is laid out anew once, as a library does for its own
kernels: two passes over it, for an operand that is read as often as the window has offsets.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch


@triton.jit
def _channels_last_kernel(
    x_ptr, out_ptr,
    C, S, stride_b, stride_c, blocks_c, blocks_s,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) % (blocks_c * blocks_s)
    b = (tl.program_id(0) // (blocks_c * blocks_s)).to(tl.int64)
    c = (block % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    s = (block // blocks_c * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    inside = (c < C)[:, None] & (s < S)[None, :]
    x = tl.load(x_ptr + b * stride_b + c[:, None] * stride_c + s[None, :], mask=inside, other=0.0)
    inside = (s < S)[:, None] & (c < C)[None, :]
    tl.store(out_ptr + b * S * C + s[:, None] * C + c[None, :], tl.trans(x), mask=inside)


def channels_last(x: Tensor) -> Tensor:
    """The same ``[B, C, *positions]`` with the channels of a position side by side; a copy where
    they are not."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x
    if not x[0, 0].is_contiguous():
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    B, C, S = x.shape[0], x.shape[1], x.shape[2:].numel()
    out = x.new_empty((B, *x.shape[2:], C))
    block_c = min(64, tiles.next_power_of_2(C))
    block_s = min(64, max(16, tiles.next_power_of_2(S)))
    blocks_c, blocks_s = tiles.cdiv(C, block_c), tiles.cdiv(S, block_s)
    launch(
        _channels_last_kernel, B * blocks_c * blocks_s,
        x, out, C, S, *x.stride()[:2], blocks_c, blocks_s,
        BLOCK_C=block_c, BLOCK_S=block_s,
        num_warps=4,
    )  # fmt: skip
    return out.movedim(-1, 1)
