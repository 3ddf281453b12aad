"""Kernel for depthwise convolutions: every output channel sees one channel of its input.

B samples, O output channels, K offsets of the kernel, T output positions.

``dW_b[o, k] = Σ_t G[b, o, t] · x[b, c(o), window(t, k)]``: nothing for tensor cores to do. A
program owns some channels and offsets of one sample, reads its part of G once and ``x`` once for
every offset, and adds up in fp32. What it leaves is small, so it is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.convolution.geometry import Geometry, flat_positions, in_three
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch


@triton.jit
def _depthwise_kernel(
    x_ptr, G_ptr, out_ptr,
    T, O, K, of_each,  # noqa: E741
    x_stride_b, x_stride_c, x_stride_d, x_stride_h, x_stride_w, G_stride_b, G_stride_o, G_stride_t,
    depth, height, width, out_height, out_width, kernel_height, kernel_width,
    stride_d, stride_h, stride_w, padding_d, padding_h, padding_w,
    dilation_d, dilation_h, dilation_w,
    blocks_o, blocks_k,
    CHANNELS_LAST: tl.constexpr, WIDE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Axes of a tile: offsets, then channels and positions, those that lie together last."""
    block = tl.program_id(0) % (blocks_o * blocks_k)
    b = (tl.program_id(0) // (blocks_o * blocks_k)).to(tl.int64)
    T_AXIS: tl.constexpr = 1 if CHANNELS_LAST else 2
    O_AXIS: tl.constexpr = 3 - T_AXIS
    k_K = block % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    o_O = block // blocks_k * BLOCK_O + tl.arange(0, BLOCK_O)
    k = k_K[:, None, None]
    o = tl.expand_dims(tl.expand_dims(o_O, 0), T_AXIS)
    c = o // of_each
    if WIDE:
        o, c = o.to(tl.int64), c.to(tl.int64)
    from_w = k % kernel_width * dilation_w - padding_w
    from_h = k // kernel_width % kernel_height * dilation_h - padding_h
    from_d = k // kernel_width // kernel_height * dilation_d - padding_d
    G_at_o = G_ptr + b * G_stride_b + o * G_stride_o
    x_at_c = x_ptr + b * x_stride_b + c * x_stride_c
    if CHANNELS_LAST:
        total = tl.zeros((BLOCK_K, BLOCK_T, BLOCK_O), tl.float32)
    else:
        total = tl.zeros((BLOCK_K, BLOCK_O, BLOCK_T), tl.float32)
    for first in range(0, T, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        t = tl.expand_dims(tl.expand_dims(t, 0), O_AXIS)
        d = t // (out_width * out_height) * stride_d + from_d
        h = t // out_width % out_height * stride_h + from_h
        w = t % out_width * stride_w + from_w
        exists = (t < T) & (o < O)
        inside = (d >= 0) & (d < depth) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        if WIDE:
            t, d, h, w = t.to(tl.int64), d.to(tl.int64), h.to(tl.int64), w.to(tl.int64)
        g = tl.load(G_at_o + t * G_stride_t, mask=exists, other=0.0)
        x_at = x_at_c + (d * x_stride_d + h * x_stride_h + w * x_stride_w)
        x = tl.load(x_at, mask=inside & exists & (k < K), other=0.0)
        total += g.to(tl.float32) * x.to(tl.float32)
    sums = tl.sum(total, T_AXIS)
    at = (b * O + o_O)[None, :] * K + k_K[:, None]
    tl.store(out_ptr + at, sums, mask=(o_O < O)[None, :] & (k_K < K)[:, None])


def depthwise_grads(x: Tensor, G: Tensor, geometry: Geometry) -> Tensor:
    """Per-sample gradients ``[B, O, 1, *kernel]`` in fp32."""
    G = flat_positions(G)
    B, O, T = G.shape  # noqa: E741
    three = in_three(geometry, x)
    K = three.offsets
    channels_last = three.channels_last
    block_k = min(8, tiles.next_power_of_2(K))
    if channels_last:
        block_o = min(64, tiles.next_power_of_2(O))
        block_t = min(512 // block_o, tiles.next_power_of_2(T))
    else:
        block_t = min(128, tiles.next_power_of_2(T))
        block_o = min(512 // block_t, tiles.next_power_of_2(O))
    blocks_o, blocks_k = tiles.cdiv(O, block_o), tiles.cdiv(K, block_k)
    grads = torch.empty((B, O, 1, *geometry.kernel), dtype=torch.float32, device=x.device)
    launch(
        _depthwise_kernel, B * blocks_o * blocks_k,
        x, G, grads, T, O, K, O // geometry.groups,
        *three.x_strides, *G.stride(), *three.x_sizes, *three.out_sizes[1:], *three.kernel[1:],
        *three.stride, *three.padding, *three.dilation,
        blocks_o, blocks_k,
        CHANNELS_LAST=channels_last, WIDE=three.is_wide, BLOCK_O=block_o, BLOCK_K=block_k,
        BLOCK_T=block_t,
        num_warps=4,
    )  # fmt: skip
    return grads
