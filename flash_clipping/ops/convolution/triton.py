"""Kernels for convolutions: per-sample gradients as matrix products whose operand is never written.

B samples, O output channels, C input channels of one group, K offsets of the kernel, T output
positions, N = K·C elements of what one output channel sees.

``dW_b[o, (k, c)] = Σ_t G[b, o, t] · x[b, c, window(t, k)]``. A program owns a tile of ``dW`` and
walks over the positions of some samples, one after the other; where in ``x`` an offset of a window
lies is computed on the way, from strides. What it does with a sample's tile is the mode:

* ``norm``: it is squared and summed;
* ``store``: it is rounded and kept, and what was kept is squared and summed;
* ``sum``: it is added up, times the sample's coefficient.

The loop that forms the tile is the same in all modes, and so are its blocks (:func:`config_for`):
the numbers that ``sum`` releases are those that ``norm`` has measured, to the last bit. That is why
these norms are not in doubt (:mod:`flash_clipping.ops.error_bounds`).

A model has many convolutions and few kernels: no number of a shape is compiled in. What a kernel
gains by knowing of it are constants: which axis lies together in memory, and whether it can be read
16 bytes at a time (``X_WHOLE``, ``G_WHOLE``).

Elements of ``dW`` are in the order (o, k, c), so that all columns of a tile are at one offset of
the window if C is a multiple of its width: then an address is a part of the position's and a part
of the channel's, and whether it is inside the image depends on the position alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.convolution.geometry import Geometry, InThree, in_three
from flash_clipping.ops.outer.triton import weighted_sum
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.tiles import jit, launch, multiple_of, sum_by_warp


@jit
def _convolution_kernel(
    x_ptr, G_ptr, coef_ptr, out_ptr, parts_ptr,
    B, T, C, O, K,  # noqa: E741
    x_stride_b, x_stride_c, x_stride_d, x_stride_h, x_stride_w, G_stride_b, G_stride_o, G_stride_t,
    depth, height, width, out_height, out_width, kernel_height, kernel_width,
    stride_d, stride_h, stride_w, padding_d, padding_h, padding_w,
    dilation_d, dilation_h, dilation_w,
    each, tiles_o, tiles_n, groups,
    MODE: tl.constexpr, ONE_OFFSET: tl.constexpr, DEPTH: tl.constexpr, FLAT: tl.constexpr,
    X_CHANNELS_LAST: tl.constexpr, G_CHANNELS_LAST: tl.constexpr, X_WHOLE: tl.constexpr,
    G_WHOLE: tl.constexpr, WIDE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, PROMOTE: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if ONE_OFFSET:
        C = multiple_of(C, BLOCK_N)
    if X_WHOLE:
        x_stride_b = multiple_of(x_stride_b, 8)
        if X_CHANNELS_LAST:
            x_stride_d = multiple_of(x_stride_d, 8)
            x_stride_h = multiple_of(x_stride_h, 8)
            x_stride_w = multiple_of(x_stride_w, 8)
            x_stride_c = 1
            C = multiple_of(C, 8)
        else:
            x_stride_c = multiple_of(x_stride_c, 8)
            x_stride_w = 1
            T = multiple_of(T, 8)
    if G_WHOLE:
        G_stride_b = multiple_of(G_stride_b, 8)
        if G_CHANNELS_LAST:
            G_stride_t = multiple_of(G_stride_t, 8)
            G_stride_o = 1
            O = multiple_of(O, 8)  # noqa: E741
        else:
            G_stride_o = multiple_of(G_stride_o, 8)
            G_stride_t = 1
            T = multiple_of(T, 8)

    # Tiles of the same samples are at work at one time, so that these come from memory once.
    count = groups * tiles_o * tiles_n
    tile = tl.program_id(0) % count
    chunk = tl.program_id(0) // count
    n0 = (tile % tiles_n) * BLOCK_N
    o0 = (tile // tiles_n % tiles_o) * BLOCK_O
    group = (tile // tiles_n // tiles_o).to(tl.int64)
    first = chunk * each
    samples = min(B - first, each)
    N = K * C

    o = o0 + tl.arange(0, BLOCK_O)
    n = n0 + tl.arange(0, BLOCK_N)
    # A tile at one offset has only columns that exist: C is a multiple of its width.
    k = n0 // C if ONE_OFFSET else n // C
    c = n - k * C
    from_w = (k % kernel_width) * dilation_w - padding_w
    from_h = (k // kernel_width % kernel_height) * dilation_h - padding_h
    if DEPTH:
        from_d = (k // kernel_width // kernel_height) * dilation_d - padding_d
    G_ptr += group * O * G_stride_o
    x_ptr += group * C * x_stride_c
    c_at, o_at = c, o
    if WIDE:
        c_at, o_at = c.to(tl.int64), o.to(tl.int64)
    if X_CHANNELS_LAST:
        columns, in_columns = (c_at * x_stride_c)[None, :], (n < N)[None, :]
    else:
        columns, in_columns = (c_at * x_stride_c)[:, None], (n < N)[:, None]
    if not ONE_OFFSET:
        if X_CHANNELS_LAST:
            from_w, from_h = from_w[None, :], from_h[None, :]
        else:
            from_w, from_h = from_w[:, None], from_h[:, None]
        if DEPTH:
            from_d = from_d[None, :] if X_CHANNELS_LAST else from_d[:, None]

    steps = tl.cdiv(T, BLOCK_T)
    product = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    if PROMOTE > 0:
        rounded = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    if MODE == "sum":
        total = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    for step in range(0, samples * steps):
        b = (first + step // steps).to(tl.int64)
        part = step % steps
        t = part * BLOCK_T + tl.arange(0, BLOCK_T)

        # G, [o, t] in registers.
        t_at = t.to(tl.int64) if WIDE else t
        G_b = G_ptr + b * G_stride_b
        if G_CHANNELS_LAST:
            G_at = (t_at * G_stride_t)[:, None] + (o_at * G_stride_o)[None, :]
            g = tl.load(G_b + G_at, mask=(t < T)[:, None] & (o < O)[None, :], other=0.0)
            g = tl.trans(g)
        else:
            G_at = (o_at * G_stride_o)[:, None] + (t_at * G_stride_t)[None, :]
            g = tl.load(G_b + G_at, mask=(o < O)[:, None] & (t < T)[None, :], other=0.0)

        # Where the window of every position begins, and x at these tile's offsets: [t, n].
        to = tl.expand_dims(t, 1 if X_CHANNELS_LAST else 0)
        inside = to < T
        if FLAT:
            x_at = (to.to(tl.int64) if WIDE else to) * x_stride_w
        else:
            if DEPTH:
                d = to // (out_width * out_height) * stride_d + from_d
                inside = inside & (d >= 0) & (d < depth)
                h = to // out_width % out_height * stride_h + from_h
            else:
                h = to // out_width * stride_h + from_h
            w = to % out_width * stride_w + from_w
            inside = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            if WIDE:
                h, w = h.to(tl.int64), w.to(tl.int64)
            x_at = h * x_stride_h + w * x_stride_w
            if DEPTH:
                x_at += (d.to(tl.int64) if WIDE else d) * x_stride_d
        mask = inside if ONE_OFFSET else inside & in_columns
        x = tl.load(x_ptr + b * x_stride_b + (x_at + columns), mask=mask, other=0.0)
        if not X_CHANNELS_LAST:
            x = tl.trans(x)

        product = tl.dot(g, x, product, input_precision=PRECISION)
        last = part == steps - 1
        # See gram/triton.py: the accumulator of the tensor cores truncates.
        if PROMOTE > 0:  # noqa: SIM102
            if (part % PROMOTE == PROMOTE - 1) | last:
                rounded += product
                product = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
        if last:
            done = rounded if PROMOTE > 0 else product
            if MODE == "sum":
                coef = tl.load(coef_ptr + b).to(tl.float32)
                total += tl.where(coef == 0, 0.0, coef * done)
            else:
                if MODE == "store":
                    kept = done.to(out_ptr.dtype.element_ty)
                    row = (b * groups + group) * O + o
                    at = row[:, None] * N + n[None, :]
                    tl.store(out_ptr + at, kept, mask=(o < O)[:, None] & (n < N)[None, :])
                    done = kept.to(tl.float32)
                parts = (b * count + tile) * PARTS + tl.arange(0, PARTS)
                tl.store(parts_ptr + parts, sum_by_warp(done * done, BLOCK_O, PARTS))
            if PROMOTE > 0:
                rounded = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
            product = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    if MODE == "sum":
        row = (chunk.to(tl.int64) * groups + group) * O + o
        at = row[:, None] * N + n[None, :]
        tl.store(out_ptr + at, total, mask=(o < O)[:, None] & (n < N)[None, :])


@dataclass(frozen=True)
class Config:
    """A launch's parameters. ``programs``: on one multiprocessor, about."""

    block_o: int = 64
    block_n: int = 64
    block_t: int = 64
    promote: int = 0
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 6


LONG = 2048
"""Positions beyond which the accumulator of 16-bit operands is rounded now and then."""

REGISTERS = 168
"""Of a thread at most where a clipped sum is added up: three programs on a multiprocessor."""


@functools.lru_cache(maxsize=1024)
def config_for(dtype: torch.dtype, T: int, C: int, O: int, tf32: bool = False) -> Config:  # noqa: E741
    """By rule, not by search, and three rules for all 16-bit shapes: few kernels, quick to compile.
    The same for all modes, and so that the compiler for sm_90 spills in none and fits two programs
    or more on a multiprocessor."""
    if dtype == torch.float32:
        return Config(block_t=32, promote=32 if tf32 else 2)
    if C % 64:  # windows' offsets differ within a tile
        return Config(block_n=64 if C % 8 == 0 else 32, promote=16)
    if T > LONG:
        return Config(promote=16)
    return Config(128 if O % 128 == 0 else 64)


FEWEST_CHANNELS = 16
"""Channels of a group from which on laying them side by side is worth it."""


def laid_out(x: Tensor, G: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    if geometry.is_depthwise(x):
        if x.shape[1] < FEWEST_CHANNELS:
            return x, G
        return channels_last(x), channels_last(G)
    if x.element_size() > 2:
        return x, G  # numbers of 32 bits are fetched one by one as they are
    three = in_three(geometry, x.shape, x.stride())
    T = G.shape[2:].numel()
    in_rows = T % (16 // G.element_size()) == 0
    lies_well = three.is_flat and in_rows and T > LONG
    if not lies_well and x.shape[1] // geometry.groups >= FEWEST_CHANNELS:
        x = channels_last(x)
    return x, G if in_rows else channels_last(G)


def convolution_sqnorms(
    x: Tensor, G: Tensor, geometry: Geometry, tf32: bool = False
) -> tuple[Tensor, Tensor | None]:
    if geometry.is_depthwise(x):
        grads = depthwise_grads(*laid_out(x, G, geometry), geometry)
        return torch.linalg.vector_norm(grads.flatten(1), dim=1).square_().unsqueeze(1), None
    parts_Bn, _ = launch_convolution("norm", *laid_out(x, G, geometry), geometry, tf32=tf32)
    return parts_Bn, None


def convolution_grads(
    x: Tensor, G: Tensor, geometry: Geometry, tf32: bool = False
) -> tuple[Tensor, Tensor | None]:
    if geometry.is_depthwise(x):
        return depthwise_grads(*laid_out(x, G, geometry), geometry), None
    parts_Bn, grads = launch_convolution("store", *laid_out(x, G, geometry), geometry, tf32=tf32)
    assert grads is not None
    return geometry.in_order_of_weight(grads), parts_Bn


def convolution_sum(
    x: Tensor, G: Tensor, coef_B: Tensor, geometry: Geometry, tf32: bool = False
) -> Tensor:
    if geometry.is_depthwise(x):
        return weighted_sum(depthwise_grads(*laid_out(x, G, geometry), geometry), coef_B)
    _, sums = launch_convolution("sum", *laid_out(x, G, geometry), geometry, coef_B, tf32=tf32)
    assert sums is not None
    # Adds up and puts into the weight's order at once; PyTorch's own sum would read out of order.
    return weighted_sum(geometry.in_order_of_weight(sums), sums.new_ones(len(sums)))


def launch_convolution(
    mode: str,
    x: Tensor,
    G: Tensor,
    geometry: Geometry,
    coef_B: Tensor | None = None,
    config: Config | None = None,
    tf32: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """One launch. Squared norms in parts ``[B, n]`` (nothing in mode ``"sum"``); and per-sample
    gradients ``[B, O, K·C]`` in G's dtype, or sums over some samples each, ``[chunks, O, K·C]`` in
    fp32."""
    G = G.flatten(2)  # a view in every memory format
    like = (
        mode,
        geometry,
        in_three(geometry, x.shape, x.stride()),
        x.shape[1],
        G.shape,
        G.stride(),
        config,
        tf32,
    )
    programs, size_of_parts, size_of_out, numbers, constants = _planned(*like, x.dtype, x.device)
    parts = x.new_empty(size_of_parts, dtype=torch.float32)
    out: Tensor | None = None
    if size_of_out is not None:
        out = G.new_empty(size_of_out, dtype=G.dtype if mode == "store" else torch.float32)
    launch(
        _convolution_kernel, programs,
        x, G, parts if coef_B is None else coef_B.contiguous(), parts if out is None else out,
        parts, *numbers,
        **constants,
    )  # fmt: skip
    return parts, out


@functools.lru_cache(maxsize=1024)
def _planned(
    mode: str,
    geometry: Geometry,
    three: InThree,
    channels: int,
    G_shape: torch.Size,
    G_strides: tuple[int, ...],
    config: Config | None,
    tf32: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, tuple[int, int], tuple[int, ...] | None, tuple[int, ...], dict[str, Any]]:
    """A launch's programs, the sizes of what it writes, and its arguments but for addresses."""
    B, _, T = G_shape
    C, O, K = channels // geometry.groups, G_shape[1] // geometry.groups, geometry.offsets  # noqa: E741
    config = config or config_for(dtype, T, C, O, tf32)
    x_last, G_last = three.channels_last, G_strides[1] == 1 and T > 1
    flat = three.is_flat and not x_last
    tiles_o, tiles_n = tiles.cdiv(O, config.block_o), tiles.cdiv(K * C, config.block_n)
    count = geometry.groups * tiles_o * tiles_n
    wanted = tiles.cdiv(config.programs * tiles.sm_count(device), count)
    each = tiles.cdiv(B, min(B, wanted))
    chunks = tiles.cdiv(B, each)
    size_of_parts = 0 if mode == "sum" else B, count * config.num_warps
    size_of_out = None
    if mode != "norm":
        size_of_out = B if mode == "store" else chunks, G_shape[1], K * C
    numbers = (
        B, T, C, O, K,
        *three.x_strides, *G_strides, *three.x_sizes, *three.out_sizes[1:], *three.kernel[1:],
        *three.stride, *three.padding, *three.dilation,
        each, tiles_o, tiles_n, geometry.groups,
    )  # fmt: skip
    constants: dict[str, Any] = dict(
        MODE=mode, ONE_OFFSET=C % config.block_n == 0, DEPTH=len(geometry.kernel) == 3, FLAT=flat,
        X_CHANNELS_LAST=x_last, G_CHANNELS_LAST=G_last,
        X_WHOLE=(flat or x_last) and _is_whole(three.x_strides, x_last, C, T),
        G_WHOLE=_is_whole(G_strides, G_last, O, T), WIDE=_is_wide(three, G_shape, G_strides),
        BLOCK_O=config.block_o, BLOCK_N=config.block_n, BLOCK_T=config.block_t,
        PROMOTE=config.promote, PARTS=config.num_warps,
        PRECISION="tf32" if tf32 else tiles.dot_precision(dtype),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if mode == "sum" and tiles.generation(device):  # Triton's other compilers do not know of it
        constants["maxnreg"] = REGISTERS
    return count * chunks, size_of_parts, size_of_out, numbers, constants


def _is_whole(strides: tuple[int, ...], channels_last: bool, channels: int, positions: int) -> bool:
    """Whether numbers lie together along the channels, or the positions, in multiples of 16 bytes.
    ``strides``: of sample, channel and positions."""
    if channels_last:
        return strides[1] == 1 and tiles.in_eights(channels, strides[0], *strides[2:])
    return strides[-1] == 1 and tiles.in_eights(positions, *strides[:2])


def _is_wide(three: InThree, shape_BOT: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether a sample of x or of G spans more elements than 32 bits count."""
    _, O, T = shape_BOT  # noqa: E741
    return three.is_wide or (O - 1) * strides[1] + (T - 1) * strides[2] >= 1 << 31


# Where the positions of a channel lie together, those that a window sees begin on any address, and
# 16-bit numbers of a tile must be fetched one by one. Where channels lie together, a position's are
# fetched 16 bytes at a time. So an operand is laid out again once, as a library does for its own
# kernels: two passes over it, for an operand that is read as often as the window has offsets.
@jit
def _channels_last_kernel(
    x_ptr, out_ptr,
    C, S, stride_b, stride_c, blocks_c, blocks_s,
    C_WHOLE: tl.constexpr, S_WHOLE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    if C_WHOLE:
        C = multiple_of(C, 8)
    if S_WHOLE:
        S = multiple_of(S, 8)
        stride_b = multiple_of(stride_b, 8)
        stride_c = multiple_of(stride_c, 8)
    block = tl.program_id(0) % (blocks_c * blocks_s)
    b = (tl.program_id(0) // (blocks_c * blocks_s)).to(tl.int64)
    c = (block % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    s = (block // blocks_c * BLOCK_S + tl.arange(0, BLOCK_S)).to(tl.int64)
    inside = (c < C)[:, None] & (s < S)[None, :]
    x = tl.load(x_ptr + b * stride_b + c[:, None] * stride_c + s[None, :], mask=inside, other=0.0)
    inside = (s < S)[:, None] & (c < C)[None, :]
    tl.store(out_ptr + b * S * C + s[:, None] * C + c[None, :], tl.trans(x), mask=inside)


LAID_OUT = 64
"""Channels, and positions, that a program lays out."""


def channels_last(x: Tensor) -> Tensor:
    """``[B, C, *positions]`` with a position's channels side by side; a copy where they are not."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x
    if not x[0, 0].is_contiguous():
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    B, C, S = x.shape[0], x.shape[1], x.shape[2:].numel()
    out = x.new_empty((B, *x.shape[2:], C))
    blocks_c, blocks_s = tiles.cdiv(C, LAID_OUT), tiles.cdiv(S, LAID_OUT)
    launch(
        _channels_last_kernel, B * blocks_c * blocks_s,
        x, out, C, S, *x.stride()[:2], blocks_c, blocks_s,
        C_WHOLE=tiles.in_eights(C), S_WHOLE=tiles.in_eights(S, *x.stride()[:2]),
        BLOCK_C=LAID_OUT, BLOCK_S=LAID_OUT,
        num_warps=4,
    )  # fmt: skip
    return out.movedim(-1, 1)


@jit
def _depthwise_kernel(
    x_ptr, G_ptr, out_ptr,
    O, K, of_each,  # noqa: E741
    x_stride_b, x_stride_c, x_stride_d, x_stride_h, x_stride_w, G_stride_b, G_stride_o, G_stride_t,
    depth, height, width, out_depth, out_height, out_width, kernel_height, kernel_width,
    stride_d, stride_h, stride_w, padding_d, padding_h, padding_w,
    dilation_d, dilation_h, dilation_w,
    blocks_o, blocks_k,
    WHOLE: tl.constexpr, WIDE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """``dW_b[o, k] = Σ_t G[b, o, t] · x[b, c(o), window(t, k)]``, added up in fp32: one input
    channel for each output channel leaves nothing for tensor cores to do.

    A program owns some channels and offsets of one sample, and reads its part of G once and ``x``
    once for every offset, row by row: within one, a position is the one before and a stride.
    Axes of a tile: offsets, positions, channels. ``WHOLE``: channels lie together, in eights, and
    an output channel has an input channel of its own.
    """
    if WHOLE:
        O, of_each = multiple_of(O, 8), 1  # noqa: E741
        x_stride_c, G_stride_o = 1, 1
        x_stride_b, G_stride_b = multiple_of(x_stride_b, 8), multiple_of(G_stride_b, 8)
        x_stride_d, x_stride_h = multiple_of(x_stride_d, 8), multiple_of(x_stride_h, 8)
        x_stride_w, G_stride_t = multiple_of(x_stride_w, 8), multiple_of(G_stride_t, 8)
    block = tl.program_id(0) % (blocks_o * blocks_k)
    b = (tl.program_id(0) // (blocks_o * blocks_k)).to(tl.int64)
    k_K = block % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    o_O = block // blocks_k * BLOCK_O + tl.arange(0, BLOCK_O)
    k, o = k_K[:, None, None], o_O[None, None, :]
    c = o // of_each
    if WIDE:
        o, c = o.to(tl.int64), c.to(tl.int64)
    from_w = k % kernel_width * dilation_w - padding_w
    from_h = k // kernel_width % kernel_height * dilation_h - padding_h
    from_d = k // kernel_width // kernel_height * dilation_d - padding_d
    G_ptr += b * G_stride_b
    x_ptr += b * x_stride_b
    total = tl.zeros((BLOCK_K, BLOCK_W, BLOCK_O), tl.float32)
    for row in range(0, out_depth * out_height):
        d = row // out_height * stride_d + from_d
        h = row % out_height * stride_h + from_h
        in_rows = (d >= 0) & (d < depth) & (h >= 0) & (h < height) & (k < K)
        if WIDE:
            d, h = d.to(tl.int64), h.to(tl.int64)
        x_at_row = c * x_stride_c + (d * x_stride_d + h * x_stride_h)
        for first in range(0, out_width, BLOCK_W):
            out_w = (first + tl.arange(0, BLOCK_W))[None, :, None]
            w = out_w * stride_w + from_w
            exists = (out_w < out_width) & (o < O)
            inside = in_rows & (w >= 0) & (w < width)
            t = row * out_width + out_w
            if WIDE:
                t, w = t.to(tl.int64), w.to(tl.int64)
            g = tl.load(G_ptr + (o * G_stride_o + t * G_stride_t), mask=exists, other=0.0)
            x = tl.load(x_ptr + (x_at_row + w * x_stride_w), mask=inside & exists, other=0.0)
            total += g.to(tl.float32) * x.to(tl.float32)
    sums = tl.sum(total, 1)
    at = (b * O + o_O)[None, :] * K + k_K[:, None]
    tl.store(out_ptr + at, sums, mask=(o_O < O)[None, :] & (k_K < K)[:, None])


DEPTHWISE = 64, 8
"""Channels, and positions of a row, of a tile of a depthwise convolution."""


def depthwise_grads(x: Tensor, G: Tensor, geometry: Geometry) -> Tensor:
    """Per-sample gradients ``[B, O, 1, *kernel]`` in fp32."""
    G = G.flatten(2)
    B, O, T = G.shape  # noqa: E741
    three = in_three(geometry, x.shape, x.stride())
    K, of_each = geometry.offsets, O // geometry.groups
    block_o, block_w = DEPTHWISE
    block_k = 4 if K <= 16 else 8
    blocks_o, blocks_k = tiles.cdiv(O, block_o), tiles.cdiv(K, block_k)
    grads = torch.empty((B, O, 1, *geometry.kernel), dtype=torch.float32, device=x.device)
    whole = (
        of_each == 1
        and _is_whole(three.x_strides, True, O, T)
        and _is_whole(G.stride(), True, O, T)
    )
    launch(
        _depthwise_kernel, B * blocks_o * blocks_k,
        x, G, grads, O, K, of_each,
        *three.x_strides, *G.stride(), *three.x_sizes, *three.out_sizes, *three.kernel[1:],
        *three.stride, *three.padding, *three.dilation,
        blocks_o, blocks_k,
        WHOLE=whole, WIDE=_is_wide(three, G.shape, G.stride()), BLOCK_O=block_o,
        BLOCK_K=block_k, BLOCK_W=block_w,
        num_warps=4,
    )  # fmt: skip
    return grads
