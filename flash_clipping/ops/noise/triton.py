"""Noise drawn in registers: each sum is read once and each noisy mean written once."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch
from flash_clipping.ops.runtime.upload import to_device

_KEY = 0x9E3779B97F4A7C15
WARPS = 4
BLOCK_BYTES = 2 * 16 * 32 * WARPS
"""Of the elements for which a program draws at a time: two moves of 16 bytes for a thread."""
BLOCKS = {2: 4, 4: 2}
"""How many such blocks a program walks over, by the size of an element: a power of 2, so that
their numbers have one upper part (:func:`_number_of`)."""
MOST = 256
"""Tensors of a launch: a program looks for its own among all of them."""
_SQRT_2_LN_2 = math.sqrt(2 * math.log(2))


@triton.jit
def _multiply(x, FACTOR: tl.constexpr):
    """Lower and upper word of a product, by one instruction."""
    return tl.inline_asm_elementwise(
        "{.reg .b64 p; mul.wide.u32 p, $2, $3; mov.b64 {$0, $1}, p;}",
        "=r,=r,r,r",
        [x, tl.full(x.shape, FACTOR, tl.uint32)],
        dtype=(tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _words(seed, c0, c1, c2, c3, FAST: tl.constexpr):
    """Four random words of a counter, by Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel
    random numbers: as easy as 1, 2, 3", 2011). Only ``c0`` differs between threads.

    ``tl.philox`` multiplies twice for a product, and in every thread what is the same for all: of
    the four products of the first two rounds two, and the other two are the same for all counters
    with one ``c0`` (the compiler sees that).
    """
    if not FAST:
        zeros = tl.zeros_like(c0)
        return tl.philox(seed, c0, zeros + c1, zeros + c2, zeros + c3)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    low0, high0 = _multiply(c0, 0xD2511F53)
    product = c2.to(tl.uint64) * 0xCD9E8D57
    s0 = (product >> 32).to(tl.uint32) ^ c1 ^ k0
    s1 = product.to(tl.uint32)
    s2 = high0 ^ c3 ^ k1
    k0 += 0x9E3779B9
    k1 += 0xBB67AE85
    product = s0.to(tl.uint64) * 0xD2511F53
    low1, high1 = _multiply(s2, 0xCD9E8D57)
    c0, c1 = high1 ^ s1 ^ k0, low1
    c2 = (product >> 32).to(tl.uint32) ^ low0 ^ k1
    c3 = tl.zeros_like(c0) + product.to(tl.uint32)
    for _ in tl.static_range(8):
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
        low0, high0 = _multiply(c0, 0xD2511F53)
        low1, high1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


@triton.jit
def _pair(u, v, scale, FAST: tl.constexpr):
    """Two independent normals times ``scale / sqrt(2 ln 2)`` from two random words, by Box and
    Muller's method.

    All 32 bits of one decide the radius, so that it reaches 6.7 standard deviations; 23 of the
    other the angle. With ``FAST`` by the device's own functions: errors of 2^-22 or so, which the
    root makes up to 6e-4 of a radius near 0.
    """
    uniform = u.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 2^-32, 2^-33
    turn = ((v >> 9) | 0x3F800000).to(tl.float32, bitcast=True)  # from 1 to 2
    angle = turn * 6.283185307179586 - 9.42477796076938
    if FAST:
        # An approximate logarithm may be above 0 near 1. In one piece, so that the absolute value
        # is part of the root's instruction.
        root = tl.inline_asm_elementwise(
            "{.reg .f32 x; lg2.approx.ftz.f32 x, $1; abs.f32 x, x; sqrt.approx.ftz.f32 $0, x;}",
            "=f,f",
            [uniform],
            tl.float32,
            is_pure=True,
            pack=1,
        )
        cos = tl.inline_asm_elementwise(
            "cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1
        )
        sin = tl.inline_asm_elementwise(
            "sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1
        )
    else:
        root = tl.sqrt(tl.abs(tl.log2(uniform)))
        cos, sin = tl.cos(angle), tl.sin(angle)
    radius = root * scale
    return radius * cos, radius * sin


@triton.jit
def _normals(seed, c0, c1, c2, c3, scale, CALLS: tl.constexpr, FAST: tl.constexpr):
    """Four normals for each ``c0``, side by side, or eight, of ``c2`` and ``c2 + 1``."""
    u0, u1, u2, u3 = _words(seed, c0, c1, c2, c3, FAST)
    n0, n1 = _pair(u0, u1, scale, FAST)
    n2, n3 = _pair(u2, u3, scale, FAST)
    if CALLS == 2:
        u0, u1, u2, u3 = _words(seed, c0, c1, c2 + 1, c3, FAST)
        n4, n5 = _pair(u0, u1, scale, FAST)
        n6, n7 = _pair(u2, u3, scale, FAST)
        n0, n1 = tl.interleave(n0, n4), tl.interleave(n1, n5)
        n2, n3 = tl.interleave(n2, n6), tl.interleave(n3, n7)
    return tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))


@triton.jit
def _load(ptr, index, left, WHOLE: tl.constexpr, WORDS: tl.constexpr):
    """In fp32."""
    if WORDS:  # of two bfloat16, each the upper half of its fp32: 2 instructions, not 3
        WORDS_OF_ALL: tl.constexpr = index.shape[0] // 2
        words = tl.load(ptr.to(tl.pointer_type(tl.uint32)) + tl.arange(0, WORDS_OF_ALL))
        even = (words << 16).to(tl.float32, bitcast=True)
        odd = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.interleave(even, odd)
    if WHOLE:  # without a mask, many elements are moved at a time
        return tl.load(ptr + index).to(tl.float32)
    return tl.load(ptr + index, mask=index < left, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, index, left, value, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(ptr + index, value)
    else:
        tl.store(ptr + index, value, mask=index < left)


@triton.jit
def _noisy_block(
    summed_ptr,
    out_ptr,
    left,
    low,
    scale,
    inverse,
    seed,
    offset,
    high,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block whose number has these high and low parts; see :func:`_number_of`."""
    # The counter: a thread of a block, the generator's offset, which keeps calls apart, and which
    # of a thread's counters it is: one for four elements.
    THREADS: tl.constexpr = BLOCK * DTYPE.primitive_bitwidth // 256
    HALF: tl.constexpr = BLOCK // 2
    CALLS: tl.constexpr = HALF // THREADS // 4
    c0 = low * THREADS + tl.arange(0, THREADS).to(tl.uint32)
    c1 = (offset & 0xFFFFFFFF).to(tl.uint32)
    c3 = (offset >> 32).to(tl.uint32)
    c2 = high * (2 * CALLS)
    WORDS: tl.constexpr = WHOLE and ALIGNED and DTYPE.is_bf16()
    index = tl.arange(0, HALF)
    # Both loads first: neither is moved before a store, which might write what it reads.
    first = _load(summed_ptr, index, left, WHOLE, WORDS)
    second = _load(summed_ptr + HALF, index, left - HALF, WHOLE, WORDS)
    noise = _normals(seed, c0, c1, c2, c3, scale, CALLS, FAST)
    _store(out_ptr, index, left, (first * inverse + noise).to(OUT_DTYPE), WHOLE)
    noise = _normals(seed, c0, c1, c2 + CALLS, c3, scale, CALLS, FAST)
    _store(out_ptr, HALF + index, left, (second * inverse + noise).to(OUT_DTYPE), WHOLE)


@triton.jit
def _number_of(block, THREADS: tl.constexpr):
    """The upper and lower part of a block's number: the numbers of a launch's threads have the same
    upper 32 bits in as many blocks as the lower part can count."""
    OF_LOW: tl.constexpr = (1 << 32) // THREADS
    return (block // OF_LOW).to(tl.uint32), (block % OF_LOW).to(tl.uint32)


@triton.jit
def _noisy_means_kernel(
    table_ptr,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    TENSORS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The table: noise's standard deviation times ``sqrt(2 ln 2)``, one over the divisor, seed and
    offset, then four columns with an entry for every tensor: its first program,
    addresses of its sum and its result, its elements."""
    pid = tl.program_id(0)
    scale = tl.load(table_ptr).to(tl.float64, bitcast=True).to(tl.float32)
    inverse = tl.load(table_ptr + 1).to(tl.float64, bitcast=True).to(tl.float32)
    seed = tl.load(table_ptr + 2)
    offset = tl.load(table_ptr + 3)
    firsts = tl.load(table_ptr + 4 + tl.arange(0, TENSORS))
    row = table_ptr + 3 + tl.sum((firsts <= pid).to(tl.int32), 0)
    start = (pid - tl.load(row)) * BLOCKS * BLOCK
    summed_ptr = tl.load(row + TENSORS).to(tl.pointer_type(DTYPE)) + start
    out_ptr = tl.load(row + 2 * TENSORS).to(tl.pointer_type(OUT_DTYPE)) + start
    left = tl.minimum(tl.load(row + 3 * TENSORS) - start, BLOCKS * BLOCK).to(tl.int32)
    if ALIGNED:
        summed_ptr = tl.multiple_of(summed_ptr, 16)
        out_ptr = tl.multiple_of(out_ptr, 16)
    THREADS: tl.constexpr = BLOCK * DTYPE.primitive_bitwidth // 256
    high, low = _number_of(pid.to(tl.int64) * BLOCKS, THREADS)
    noise = (scale, inverse, seed, offset, high)
    if left == BLOCKS * BLOCK:
        for i in tl.static_range(BLOCKS):
            block = (summed_ptr + i * BLOCK, out_ptr + i * BLOCK, BLOCK, low + i)
            _noisy_block(*block, *noise, DTYPE, OUT_DTYPE, True, ALIGNED, FAST, BLOCK)
    else:
        for i in range(tl.cdiv(left, BLOCK)):
            block = (summed_ptr + i * BLOCK, out_ptr + i * BLOCK, left - i * BLOCK, low + i)
            _noisy_block(*block, *noise, DTYPE, OUT_DTYPE, False, ALIGNED, FAST, BLOCK)


def noisy_means(
    sums: Sequence[Tensor],
    std: float,
    divisor: float,
    generator: torch.Generator | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """``(sum + N(0, std^2)) / divisor`` with the default generator of the sums' device."""
    assert generator is None
    index = sums[0].device.index or 0
    source = torch.cuda.default_generators[index]
    seed = seed_of(source, index)
    results: list[Tensor] = []
    for start in range(0, len(sums), MOST):
        offset = source.get_offset()
        # CUDA generators count in fours; a launch needs one number that no other has.
        source.set_offset(offset + 4)
        some = sums[start : start + MOST]
        results += draw(some, std, divisor, dtype, seed=seed, offset=offset)
    return results


def seed_of(source: torch.Generator, index: int) -> int:
    """A device's own: ``torch.manual_seed`` gives all devices of a process the same."""
    return source.initial_seed() ^ (index * 0xBF58476D1CE4E5B9)


def _approximates(device: torch.device) -> bool:
    """Whether the device has instructions for logarithm, sine and cosine."""
    return tiles.generation(device) > 0


def draw(
    sums: Sequence[Tensor],
    std: float,
    divisor: float,
    dtype: torch.dtype | None = None,
    *,
    seed: int,
    offset: int,
) -> list[Tensor]:
    """The same from a seed and an offset, for up to :data:`MOST` contiguous tensors of one dtype
    that are not empty; equal seeds and offsets give equal noise."""
    dtype = dtype or sums[0].dtype
    outs = [torch.empty_like(summed, dtype=dtype) for summed in sums]
    width = tiles.next_power_of_2(len(sums))
    table = array("q", bytes(8 * (4 + 4 * width)))
    # A key of its own: PyTorch's kernels use the seed with counters that ours could meet.
    key = (seed ^ _KEY) & 0x7FFFFFFFFFFFFFFF
    scale = std / divisor * _SQRT_2_LN_2
    numbers = struct.unpack("2q", struct.pack("2d", scale, 1.0 / divisor))
    table[:4] = array("q", [*numbers, key, offset])
    sizes = [summed.numel() for summed in sums]
    itemsize = sums[0].element_size()
    block, blocks = BLOCK_BYTES // itemsize, BLOCKS[itemsize]
    firsts, programs = [], 0
    for size in sizes:
        firsts.append(programs)
        programs += tiles.cdiv(size, blocks * block)
    none = [1 << 62] * (width - len(sums))
    addresses = [x.data_ptr() for x in sums], [x.data_ptr() for x in outs]
    for column, values in enumerate((firsts + none, *addresses, sizes)):
        begin = 4 + column * width
        table[begin : begin + len(values)] = array("q", values)
    device = sums[0].device
    launch(
        _noisy_means_kernel,
        programs,
        to_device(table, device, torch.int64),
        DTYPE=tiles.TL_DTYPE[sums[0].dtype],
        OUT_DTYPE=tiles.TL_DTYPE[dtype],
        TENSORS=width,
        ALIGNED=all([address % 16 == 0 for both in addresses for address in both]),
        FAST=_approximates(device),
        BLOCK=block,
        BLOCKS=blocks,
        num_warps=WARPS,
    )
    return outs
