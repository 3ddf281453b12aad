"""Noise drawn in registers: each sum is read once and each noisy mean written once.

The words and the normals of ``reference.py``, made in fp32 (``box_muller.py``) by one thread for
the eight elements of a block.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.noise.box_muller import normal_pair
from flash_clipping.ops.noise.reference import PER_BLOCK, cells
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.tables import firsts_of, to_device
from flash_clipping.ops.runtime.tiles import launch
from flash_clipping.randomness import Draw

WARPS = 4
BLOCKS = 128
"""ChaCha's blocks that a program computes at a time: one in each thread."""
PARTS = 16
"""How often it does, at most: what a program begins with is worth as much as two of them."""
PROGRAMS = 25_000
"""How many there are, at least, before a program has several parts: else some multiprocessors end
before others."""
MOST = 256
"""Tensors of a launch: a program looks for its own among all of them."""
_HEADER = 11
_MOST_CELLS: tl.constexpr = tl.constexpr(cells(torch.float32))


@triton.jit
def _sum(x, y):
    """Modulo 2^32, on purpose: Triton's debug mode takes it for a mistake otherwise."""
    return tl.add(x, y, sanitize_overflow=False)


@triton.jit
def _rotated(x, BITS: tl.constexpr):
    return (x << BITS) | (x >> (32 - BITS))


@triton.jit
def _quarter_round(a, b, c, d):
    """RFC 8439, 2.1."""
    a = _sum(a, b)
    d = _rotated(d ^ a, 16)
    c = _sum(c, d)
    b = _rotated(b ^ c, 12)
    a = _sum(a, b)
    d = _rotated(d ^ a, 8)
    c = _sum(c, d)
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _two_rounds(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15):
    """RFC 8439, 2.3: columns, then diagonals."""
    s0, s4, s8, s12 = _quarter_round(s0, s4, s8, s12)
    s1, s5, s9, s13 = _quarter_round(s1, s5, s9, s13)
    s2, s6, s10, s14 = _quarter_round(s2, s6, s10, s14)
    s3, s7, s11, s15 = _quarter_round(s3, s7, s11, s15)
    s0, s5, s10, s15 = _quarter_round(s0, s5, s10, s15)
    s1, s6, s11, s12 = _quarter_round(s1, s6, s11, s12)
    s2, s7, s8, s13 = _quarter_round(s2, s7, s8, s13)
    s3, s4, s9, s14 = _quarter_round(s3, s4, s9, s14)
    return s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15


@triton.jit
def _two_words(key_ptr):
    both = tl.load(key_ptr)
    return both.to(tl.uint32), (both >> 32).to(tl.uint32)


@triton.jit
def key_words(key_ptr):
    """The eight words of a key."""
    k0, k1 = _two_words(key_ptr)
    k2, k3 = _two_words(key_ptr + 1)
    k4, k5 = _two_words(key_ptr + 2)
    k6, k7 = _two_words(key_ptr + 3)
    return k0, k1, k2, k3, k4, k5, k6, k7


@triton.jit
def words(key, counter, n0, n1, n2, ROUNDS: tl.constexpr):
    """The 16 words of each counter's block (RFC 8439, 2.3, there with 20 rounds). Only the counter
    is a vector: the rest of the first round is computed once for all blocks of a program."""
    k0, k1, k2, k3, k4, k5, k6, k7 = key
    c0 = tl.full((), 0x61707865, tl.uint32)
    c1 = tl.full((), 0x3320646E, tl.uint32)
    c2 = tl.full((), 0x79622D32, tl.uint32)
    c3 = tl.full((), 0x6B206574, tl.uint32)
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15 = _two_rounds(
        c0, c1, c2, c3, k0, k1, k2, k3, k4, k5, k6, k7, counter, n0, n1, n2
    )
    # With 12 rounds all of them stand side by side: 8 % less time on an H100, for 2 s of compiling.
    # With 20 it would be 5 s.
    TURNS: tl.constexpr = 5 if ROUNDS == 12 else 1
    for _ in range((ROUNDS // 2 - 1) // TURNS):
        for _ in tl.static_range(TURNS):
            s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15 = _two_rounds(
                s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15
            )
    w0, w1, w2, w3 = _sum(s0, c0), _sum(s1, c1), _sum(s2, c2), _sum(s3, c3)
    w4, w5, w6, w7 = _sum(s4, k0), _sum(s5, k1), _sum(s6, k2), _sum(s7, k3)
    w8, w9, w10, w11 = _sum(s8, k4), _sum(s9, k5), _sum(s10, k6), _sum(s11, k7)
    w12, w13, w14, w15 = _sum(s12, counter), _sum(s13, n0), _sum(s14, n1), _sum(s15, n2)
    return w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15


@triton.jit
def _mean(summed, std, inverse, scales_ptr, a0, a1, a2, a3, b0, b1, b2, b3, GRID: tl.constexpr):
    """Noisy means of four elements for each counter, side by side, of eight words."""
    r0, t0, t1 = normal_pair(a0, a1, a2, a3, std)
    r2, t2, t3 = normal_pair(b0, b1, b2, b3, std)
    radius = tl.interleave(r0, r2)
    turn = tl.interleave(tl.interleave(t0, t2), tl.interleave(t1, t3))
    # One rounding, said so: else the compiler makes one of it where no element moves between
    # threads, which depends on addresses, and the same draw would be other bits.
    noisy = tl.fma(tl.interleave(radius, radius), turn, summed.to(tl.float32))
    if GRID:
        grid = tl.load(scales_ptr + 2).to(tl.float64, bitcast=True).to(tl.float32)
        cell = noisy * tl.load(scales_ptr + 3).to(tl.float64, bitcast=True).to(tl.float32)
        cell = tl.where(cell > _MOST_CELLS, _MOST_CELLS, cell)
        cell = tl.where(cell < -_MOST_CELLS, -_MOST_CELLS, cell)
        # Beside a number whose neighbours are integers, sums are rounded to these.
        noisy = ((cell + 12582912.0) - 12582912.0) * grid
    return noisy * inverse


@triton.jit
def _noisy_part(
    summed_ptr, out_ptr,
    left, counter,
    holds, std, inverse, scales_ptr,
    key, n0, n1, n2,
    OUT_DTYPE: tl.constexpr, WHOLE: tl.constexpr, GRID: tl.constexpr, BLOCKS: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """The elements of some blocks; ``left``: how many elements there are.

    A thread has both halves of its block's eight elements in registers as they are moved, 16 bytes
    of fp32 at a time: no element goes to another thread.
    """
    within = tl.arange(0, 4 * BLOCKS)
    low = within // 4 * 8 + within % 4
    high = low + 4
    if WHOLE:  # without a mask, many elements are moved at a time
        summed_low = tl.load(summed_ptr + low)
        summed_high = tl.load(summed_ptr + high)
    else:
        summed_low = tl.load(summed_ptr + low, mask=low < left, other=0.0)
        summed_high = tl.load(summed_ptr + high, mask=high < left, other=0.0)
    summed_low = tl.where(holds, summed_low, 0.0)  # no product: of NaN, too
    summed_high = tl.where(holds, summed_high, 0.0)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = words(
        key, counter, n0, n1, n2, ROUNDS
    )
    scales = std, inverse, scales_ptr
    mean_low = _mean(summed_low, *scales, w0, w1, w2, w3, w4, w5, w6, w7, GRID).to(OUT_DTYPE)
    mean_high = _mean(summed_high, *scales, w8, w9, w10, w11, w12, w13, w14, w15, GRID).to(
        OUT_DTYPE
    )
    if WHOLE:
        tl.store(out_ptr + low, mean_low)
        tl.store(out_ptr + high, mean_high)
    else:
        tl.store(out_ptr + low, mean_low, mask=low < left)
        tl.store(out_ptr + high, mean_high, mask=high < left)


@triton.jit
def _noisy_means_kernel(
    table_ptr,
    DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr, TENSORS: tl.constexpr, ALIGNED: tl.constexpr,
    GRID: tl.constexpr, BLOCKS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """The table: noise's standard deviation, one over the divisor, the grid and one over it; the
    draw's number and the key; how many elements a program has; the address of the gate, 0 without
    one; then columns with an entry for every
    tensor: its first program, addresses of its sum and its result, its elements, the nonce's other
    two words."""
    PART: tl.constexpr = 8 * BLOCKS
    pid = tl.program_id(0)
    size = tl.load(table_ptr + 9)
    firsts = tl.load(table_ptr + 11 + tl.arange(0, TENSORS))
    row = table_ptr + 10 + tl.sum((firsts <= pid).to(tl.int32), 0)
    start = (pid - tl.load(row)) * size
    summed_ptr = tl.load(row + TENSORS).to(tl.pointer_type(DTYPE)) + start
    out_ptr = tl.load(row + 2 * TENSORS).to(tl.pointer_type(OUT_DTYPE)) + start
    left = tl.minimum(tl.load(row + 3 * TENSORS) - start, size).to(tl.int32)
    if ALIGNED:
        summed_ptr = tl.multiple_of(summed_ptr, 16)
        out_ptr = tl.multiple_of(out_ptr, 16)
    # What all parts have in common is loaded once.
    std = tl.load(table_ptr).to(tl.float64, bitcast=True).to(tl.float32)
    inverse = tl.load(table_ptr + 1).to(tl.float64, bitcast=True).to(tl.float32)
    n0 = tl.load(table_ptr + 4).to(tl.uint32)
    n1 = tl.load(row + 4 * TENSORS).to(tl.uint32)
    n2 = tl.load(row + 5 * TENSORS).to(tl.uint32)
    gate = tl.load(table_ptr + 10)
    holds = tl.load(gate.to(tl.pointer_type(tl.int8)), mask=gate != 0, other=1) != 0
    common = (holds, std, inverse, table_ptr, key_words(table_ptr + 5), n0, n1, n2)
    counter = _sum((start // 8).to(tl.uint32), tl.arange(0, BLOCKS).to(tl.uint32))
    for _ in range(left // PART):
        _noisy_part(
            summed_ptr, out_ptr, PART, counter, *common, OUT_DTYPE, True, GRID, BLOCKS, ROUNDS
        )
        summed_ptr += PART
        out_ptr += PART
        counter = _sum(counter, BLOCKS)
    left %= PART
    if left > 0:
        _noisy_part(
            summed_ptr, out_ptr, left, counter, *common, OUT_DTYPE, False, GRID, BLOCKS, ROUNDS
        )


def noisy_means(
    sums: Sequence[Tensor],
    std: float,
    divisor: float,
    draw: Draw,
    numbers: Sequence[tuple[int, int]],
    grid: float,
    dtype: torch.dtype,
    gate: Tensor | None = None,
) -> list[Tensor]:
    """``(sum + std * normal) / divisor`` of contiguous tensors that are not empty; of zeros, where
    ``gate`` is false."""
    if len(sums) > MOST:
        first, rest = slice(MOST), slice(MOST, None)
        parts = [(sums[part], std, divisor, draw, numbers[part]) for part in (first, rest)]
        return [mean for part in parts for mean in noisy_means(*part, grid, dtype, gate)]
    outs = [torch.empty_like(summed, dtype=dtype) for summed in sums]
    width = tiles.next_power_of_2(len(sums))
    table = array("q", bytes(8 * (_HEADER + 6 * width)))
    scales = struct.pack("4d", std, 1.0 / divisor, grid, 1.0 / grid if grid else 0.0)
    table[:4] = array("q", scales)
    table[4] = draw.number
    table[5:9] = array("q", struct.unpack("<4q", draw.key))
    sizes = [summed.numel() for summed in sums]
    part = BLOCKS * PER_BLOCK
    table[9] = of_program = part * min(PARTS, max(1, sum(sizes) // (part * PROGRAMS)))
    table[10] = 0 if gate is None else gate.data_ptr()
    firsts, programs = firsts_of([tiles.cdiv(size, of_program) for size in sizes])
    none = [1 << 62] * (width - len(sums))
    addresses = [x.data_ptr() for x in sums], [x.data_ptr() for x in outs]
    # As the draw itself has them, which checks that they fit.
    _, second, third = zip(*(draw.nonce(*number) for number in numbers), strict=True)
    for column, values in enumerate((firsts + none, *addresses, sizes, second, third)):
        begin = _HEADER + column * width
        table[begin : begin + len(values)] = array("q", values)
    launch(
        _noisy_means_kernel, programs,
        to_device(table, sums[0].device, torch.int64),
        DTYPE=tiles.TL_DTYPE[sums[0].dtype], OUT_DTYPE=tiles.TL_DTYPE[dtype], TENSORS=width,
        ALIGNED=all([address % 16 == 0 for both in addresses for address in both]), GRID=grid > 0,
        BLOCKS=BLOCKS, ROUNDS=draw.rounds,
        num_warps=WARPS,
    )  # fmt: skip
    return outs
