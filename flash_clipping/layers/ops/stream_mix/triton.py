"""Kernels for mixing residual streams: one pass over everything, forward and backward.

n streams (``STREAMS``: with room up to a power of 2), D features, ``COLUMNS`` of them at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.tiles import launch, load_rows, store_rows

COLUMNS = 1024
"""Eight for each thread, of all streams, so that sums over streams stay in one thread."""


@triton.jit
def _stream_mix_kernel(
    x_ptr, y_ptr, post_ptr, comb_ptr, out_ptr,
    D, blocks, from_stride, to_stride,
    N_STREAMS: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of one position's columns, of all streams."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    stream = tl.arange(0, STREAMS)
    in_streams, in_width = stream < N_STREAMS, column < D
    of_x = row * N_STREAMS + stream
    x = load_rows(x_ptr, of_x, D, column, in_streams, in_width).to(tl.float32)
    y = tl.load(y_ptr + row * D + column, mask=in_width, other=0.0).to(tl.float32)
    for j in tl.static_range(N_STREAMS):
        of_j = comb_ptr + row * (N_STREAMS * N_STREAMS) + stream * from_stride + j * to_stride
        weight = tl.load(of_j, mask=in_streams, other=0.0).to(tl.float32)
        post = tl.load(post_ptr + row * N_STREAMS + j).to(tl.float32)
        out = tl.sum(x * weight[:, None], 0) + post * y
        at = out_ptr + (row * N_STREAMS + j) * D + column
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=in_width)


@triton.jit
def _stream_mix_grad_kernel(
    x_ptr, y_ptr, post_ptr, comb_ptr, grad_ptr, dx_ptr, dy_ptr, dpost_ptr, dcomb_ptr,
    D, from_stride, to_stride,
    N_STREAMS: tl.constexpr, STREAMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One position. Sums over features stay in a thread until the last of them."""
    row = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, STREAMS)
    in_streams = stream < N_STREAMS
    PER_THREAD: tl.constexpr = min(8, COLUMNS)
    THREADS: tl.constexpr = COLUMNS // PER_THREAD
    dcomb = tl.zeros((STREAMS, STREAMS, THREADS), tl.float32)  # from, to
    dpost = tl.zeros((STREAMS, THREADS), tl.float32)
    of_comb = comb_ptr + row * (N_STREAMS * N_STREAMS) + stream * from_stride
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        in_width = column < D
        of_x = row * N_STREAMS + stream
        x = load_rows(x_ptr, of_x, D, column, in_streams, in_width).to(tl.float32)
        y = tl.load(y_ptr + row * D + column, mask=in_width, other=0.0).to(tl.float32)
        dx = tl.zeros((STREAMS, COLUMNS), tl.float32)
        dy = tl.zeros((COLUMNS,), tl.float32)
        for j in tl.static_range(N_STREAMS):
            of_grad = grad_ptr + (row * N_STREAMS + j) * D + column
            grad = tl.load(of_grad, mask=in_width, other=0.0).to(tl.float32)
            weight = tl.load(of_comb + j * to_stride, mask=in_streams, other=0.0).to(tl.float32)
            post = tl.load(post_ptr + row * N_STREAMS + j).to(tl.float32)
            dx += weight[:, None] * grad[None, :]
            dy += post * grad
            of_weight = tl.reshape(x * grad[None, :], (STREAMS, THREADS, PER_THREAD))
            of_weight = tl.sum(of_weight, 2)[:, None, :]
            dcomb += tl.where((stream == j)[None, :, None], of_weight, 0.0)
            of_post = tl.sum(tl.reshape(y * grad, (THREADS, PER_THREAD)), 1)[None, :]
            dpost += tl.where((stream == j)[:, None], of_post, 0.0)
        store_rows(dx_ptr, of_x, D, column, dx, in_streams, in_width)
        tl.store(dy_ptr + row * D + column, dy.to(dy_ptr.dtype.element_ty), mask=in_width)
    tl.store(dpost_ptr + row * N_STREAMS + stream, tl.sum(dpost, 1), mask=in_streams)
    at = stream[:, None] * from_stride + stream[None, :] * to_stride
    at = dcomb_ptr + row * (N_STREAMS * N_STREAMS) + at
    tl.store(at, tl.sum(dcomb, 2), mask=in_streams[:, None] & in_streams[None, :])


def stream_mix(
    x_BSnD: Tensor, y_BSD: Tensor, post_BSn: Tensor, comb_BSnn: Tensor, transposed: bool
) -> Tensor:
    B, S, n, D = x_BSnD.shape
    x = x_BSnD.contiguous()
    out = torch.empty_like(x)
    columns = columns_at_once(D)
    blocks = tiles.cdiv(D, columns)
    launch(
        _stream_mix_kernel, B * S * blocks,
        x, y_BSD.contiguous(), post_BSn.contiguous(), comb_BSnn.contiguous(), out, D, blocks,
        *_strides(n, transposed),
        N_STREAMS=n, STREAMS=tiles.next_power_of_2(n), COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    return out


def stream_mix_backward(
    x_BSnD: Tensor,
    y_BSD: Tensor,
    post_BSn: Tensor,
    comb_BSnn: Tensor,
    grad_BSnD: Tensor,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, S, n, D = x_BSnD.shape
    x, y = x_BSnD.contiguous(), y_BSD.contiguous()
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    dpost_BSn = x.new_empty((B, S, n), dtype=torch.float32)
    dcomb_BSnn = x.new_empty((B, S, n, n), dtype=torch.float32)
    most = COLUMNS if n <= 4 else COLUMNS // 2  # registers
    launch(
        _stream_mix_grad_kernel, B * S,
        x, y, post_BSn.contiguous(), comb_BSnn.contiguous(), grad_BSnD.contiguous(), dx, dy,
        dpost_BSn, dcomb_BSnn, D, *_strides(n, transposed),
        N_STREAMS=n, STREAMS=tiles.next_power_of_2(n), COLUMNS=min(most, columns_at_once(D)),
        num_warps=4,
    )  # fmt: skip
    return dx, dy, dpost_BSn, dcomb_BSnn


def _strides(n: int, transposed: bool) -> tuple[int, int]:
    """Strides of ``comb`` along the stream that is read and the stream that is written."""
    return (n, 1) if transposed else (1, n)


def columns_at_once(D: int) -> int:
    """Of what only moves memory."""
    return min(COLUMNS, tiles.next_power_of_2(D))
