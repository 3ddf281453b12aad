"""Kernels for normalisation layers: everything that ``x`` and ``G`` give, in one pass over both.

B samples, T positions, d features; C channels, S positions, g groups.
"""

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.norm_layer import reference
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.tiles import jit, launch, load_rows, multiple_of, store_rows

MAX_WIDTH = 16384
"""The widest row that a program holds in registers."""
PROGRAMS_PER_SM = 8
ELEMENTS = 2048, 8192
"""Read at a time, up to a width of 2048 and above: one row of 4096 at a time is 15 % slower."""
MIN_ROWS = 16, 64
"""Rows of a chunk for the same: its two fp32 sums add 8 or 2 % of traffic."""
STAGES = 3
"""Loads run two steps ahead."""


@jit
def _norm_kernel(
    x_ptr, G_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, vectors_ptr,
    T, d, x_stride_b, x_stride_t, G_stride_b, G_stride_t, rows_per_chunk, chunks,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WEIGHT_GRAD: tl.constexpr,
    BIAS_GRAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of rows of one sample; sums over rows stay in registers until its end. Pointers of
    what the layer does not have, or nobody wants, are None."""
    if WHOLE:
        d = multiple_of(d, 8)
        x_stride_b, x_stride_t = multiple_of(x_stride_b, 8), multiple_of(x_stride_t, 8)
        G_stride_b, G_stride_t = multiple_of(G_stride_b, 8), multiple_of(G_stride_t, 8)
    HAS_MEAN: tl.constexpr = mean_ptr is not None
    HAS_WEIGHT: tl.constexpr = weight_ptr is not None
    INPUT_GRAD: tl.constexpr = dx_ptr is not None
    pid = tl.program_id(0)
    b = (pid // chunks).to(tl.int64)
    first = (pid % chunks) * rows_per_chunk
    last = min(first + rows_per_chunk, T)
    columns = tl.arange(0, WIDTH)
    in_width = columns < d
    w_sum = tl.zeros((WIDTH,), tl.float32)
    b_sum = tl.zeros((WIDTH,), tl.float32)
    if HAS_WEIGHT and INPUT_GRAD:
        weight = tl.load(weight_ptr + columns, mask=in_width, other=0.0).to(tl.float32)
    for row in tl.range(first, last, ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        in_chunk = rows < last
        t = rows.to(tl.int64)
        G_b = G_ptr + b * G_stride_b
        G = load_rows(G_b, t, G_stride_t, columns, in_chunk, in_width).to(tl.float32)
        if BIAS_GRAD:
            b_sum += tl.sum(G, 0)
        if INPUT_GRAD or WEIGHT_GRAD:
            x_b = x_ptr + b * x_stride_b
            x = load_rows(x_b, t, x_stride_t, columns, in_chunk, in_width).to(tl.float32)
            rstd = tl.load(rstd_ptr + b * T + t, mask=in_chunk, other=0.0).to(tl.float32)
            if HAS_MEAN:
                mean = tl.load(mean_ptr + b * T + t, mask=in_chunk, other=0.0).to(tl.float32)
                x_hat = (x - mean[:, None]) * rstd[:, None]
            else:
                x_hat = x * rstd[:, None]
            if WEIGHT_GRAD:
                w_sum += tl.sum(G * x_hat, 0)
            if INPUT_GRAD:
                g = G
                if HAS_WEIGHT:
                    g = G * weight[None, :]
                inner = g - x_hat * (tl.sum(g * x_hat, 1) / d)[:, None]
                if HAS_MEAN:
                    inner -= (tl.sum(g, 1) / d)[:, None]
                dx = inner * rstd[:, None]
                store_rows(dx_ptr, b * T + t, d, columns, dx, in_chunk, in_width)
    vector = pid.to(tl.int64)
    if WEIGHT_GRAD:
        tl.store(vectors_ptr + vector * d + columns, w_sum, mask=in_width)
        vector += tl.num_programs(0)
    if BIAS_GRAD:
        tl.store(vectors_ptr + vector * d + columns, b_sum, mask=in_width)


def norm_backward(
    x_BTd: Tensor,
    G_BTd: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight_d: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor]:
    B, T, d = x_BTd.shape
    if d > MAX_WIDTH:
        return reference.norm_backward(x_BTd, G_BTd, mean, rstd, weight_d, wanted)
    input_grad, weight_grad, bias_grad = wanted
    x_BTd, G_BTd = tiles.with_unit_stride(x_BTd), tiles.with_unit_stride(G_BTd)
    width, rows, rows_per_chunk, chunks, warps = _split(B, T, d, x_BTd.device)
    vectors_PBnd = torch.empty(
        (weight_grad + bias_grad, B, chunks, d), dtype=torch.float32, device=x_BTd.device
    )
    dx_BTd = torch.empty_like(x_BTd, memory_format=torch.contiguous_format) if input_grad else None
    launch(
        _norm_kernel, B * chunks,
        x_BTd, G_BTd, None if mean is None else mean.contiguous(), rstd.contiguous(),
        None if weight_d is None else weight_d.contiguous(), dx_BTd, vectors_PBnd, T, d,
        *x_BTd.stride()[:2], *G_BTd.stride()[:2], rows_per_chunk, chunks,
        WHOLE=tiles.in_eights(d, *x_BTd.stride()[:2], *G_BTd.stride()[:2]),
        ROWS=rows, WIDTH=width, WEIGHT_GRAD=weight_grad, BIAS_GRAD=bias_grad, STAGES=STAGES,
        num_warps=warps,
    )  # fmt: skip
    return dx_BTd, vectors_PBnd


@functools.lru_cache(maxsize=1024)
def _split(B: int, T: int, d: int, device: torch.device) -> tuple[int, int, int, int, int]:
    """Padded width, rows at a time, rows of a chunk, chunks of a sample, and warps."""
    width = tiles.next_power_of_2(d)
    rows = max(1, min(ELEMENTS[d > 2048] // width, tiles.next_power_of_2(T)))
    chunks_wanted = tiles.cdiv(PROGRAMS_PER_SM * tiles.sm_count(device), B)
    least = max(tiles.cdiv(T, chunks_wanted), MIN_ROWS[d > 2048])
    rows_per_chunk = tiles.cdiv(least, rows) * rows
    warps = max(1, min(16, rows * width // 512))
    return width, rows, rows_per_chunk, tiles.cdiv(T, rows_per_chunk), warps


CHANNELS = POSITIONS = 64
"""Of a group norm's tile: 128 bytes of 16-bit numbers along either axis."""


@jit
def _group_norm_kernel(
    x_ptr, G_ptr, mean_ptr, rstd_ptr, w_ptr, b_ptr,
    C, S, x_stride_b, x_stride_c, x_stride_s, G_stride_b, G_stride_c, G_stride_s, groups,
    channel_blocks,
    X_TOGETHER: tl.constexpr, G_TOGETHER: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """``..._TOGETHER``: the axis along which numbers lie in eights, "C" or "S", or ""."""
    if X_TOGETHER == "C" or G_TOGETHER == "C":
        C = multiple_of(C, 8)
    if X_TOGETHER == "S" or G_TOGETHER == "S":
        S = multiple_of(S, 8)
    if X_TOGETHER == "C":
        x_stride_b, x_stride_c = multiple_of(x_stride_b, 8), 1
        x_stride_s = multiple_of(x_stride_s, 8)
    elif X_TOGETHER == "S":
        x_stride_b, x_stride_s = multiple_of(x_stride_b, 8), 1
        x_stride_c = multiple_of(x_stride_c, 8)
    if G_TOGETHER == "C":
        G_stride_b, G_stride_c = multiple_of(G_stride_b, 8), 1
        G_stride_s = multiple_of(G_stride_s, 8)
    elif G_TOGETHER == "S":
        G_stride_b, G_stride_s = multiple_of(G_stride_b, 8), 1
        G_stride_c = multiple_of(G_stride_c, 8)
    pid = tl.program_id(0)
    b = (pid // channel_blocks).to(tl.int64)
    c = (pid % channel_blocks) * CHANNELS + tl.arange(0, CHANNELS)
    in_channels = c < C
    group = b * groups + c // (C // groups)
    mean = tl.load(mean_ptr + group, mask=in_channels, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + group, mask=in_channels, other=0.0).to(tl.float32)
    w_sum = tl.zeros((CHANNELS, POSITIONS), tl.float32)
    b_sum = tl.zeros((CHANNELS, POSITIONS), tl.float32)
    wide_c = c.to(tl.int64)[:, None]
    for first in range(0, S, POSITIONS):
        s = first + tl.arange(0, POSITIONS)
        inside = in_channels[:, None] & (s < S)[None, :]
        wide_s = s.to(tl.int64)[None, :]
        x_at = x_ptr + b * x_stride_b + (wide_c * x_stride_c + wide_s * x_stride_s)
        x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        G_at = G_ptr + b * G_stride_b + (wide_c * G_stride_c + wide_s * G_stride_s)
        G = tl.load(G_at, mask=inside, other=0.0).to(tl.float32)
        w_sum += G * ((x - mean[:, None]) * rstd[:, None])
        b_sum += G
    tl.store(w_ptr + b * C + c, tl.sum(w_sum, 1), mask=in_channels)
    tl.store(b_ptr + b * C + c, tl.sum(b_sum, 1), mask=in_channels)


def group_norm_grads(
    x_BCS: Tensor, G_BCS: Tensor, mean_Bg: Tensor, rstd_Bg: Tensor
) -> tuple[Tensor, Tensor]:
    B, C, S = x_BCS.shape
    channel_blocks = tiles.cdiv(C, CHANNELS)
    w_BC = torch.empty((B, C), dtype=torch.float32, device=x_BCS.device)
    b_BC = torch.empty_like(w_BC)
    launch(
        _group_norm_kernel, B * channel_blocks,
        x_BCS, G_BCS, mean_Bg.contiguous(), rstd_Bg.contiguous(), w_BC, b_BC, C, S, *x_BCS.stride(),
        *G_BCS.stride(), mean_Bg.shape[1], channel_blocks,
        X_TOGETHER=_together(x_BCS.shape, x_BCS.stride()),
        G_TOGETHER=_together(G_BCS.shape, G_BCS.stride()), CHANNELS=CHANNELS, POSITIONS=POSITIONS,
        num_warps=4,
    )  # fmt: skip
    return w_BC, b_BC


@functools.lru_cache(maxsize=1024)
def _together(shape: torch.Size, strides: tuple[int, int, int]) -> str:
    """The axis of ``[B, C, S]`` along which eight numbers lie together wherever a kernel looks."""
    b, c, s = strides
    if c == 1 and shape[2] > 1 and tiles.in_eights(b, s, shape[1]):
        return "C"
    return "S" if s == 1 and tiles.in_eights(b, c, shape[2]) else ""
