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
from flash_clipping.ops.runtime.launches import launch
from flash_clipping.ops.runtime.upload import to_device
from flash_clipping.randomness import Draw

WARPS = 4
BLOCKS = 128
"""ChaCha20's blocks that a program computes at a time: one in each thread."""
ROUNDS = 4
"""How many times it does."""
MOST = 256
"""Tensors of a launch: a program looks for its own among all of them."""
_HEADER = 9
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
def _key_words(key_ptr, i: tl.constexpr):
    """Two words of the key, of the table's number ``i``."""
    both = tl.load(key_ptr + i)
    return both.to(tl.uint32), (both >> 32).to(tl.uint32)


@triton.jit
def words(key_ptr, counter, n0, n1, n2):
    """The 16 words of each counter's block (RFC 8439, 2.3). Only the counter is a vector: the rest
    of the first round is computed once for all blocks of a thread."""
    k0, k1 = _key_words(key_ptr, 0)
    k2, k3 = _key_words(key_ptr, 1)
    k4, k5 = _key_words(key_ptr, 2)
    k6, k7 = _key_words(key_ptr, 3)
    c0 = tl.full((), 0x61707865, tl.uint32)
    c1 = tl.full((), 0x3320646E, tl.uint32)
    c2 = tl.full((), 0x79622D32, tl.uint32)
    c3 = tl.full((), 0x6B206574, tl.uint32)
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15 = _two_rounds(
        c0, c1, c2, c3, k0, k1, k2, k3, k4, k5, k6, k7, counter, n0, n1, n2
    )
    for _ in range(9):
        s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15 = _two_rounds(
            s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15
        )
    w0, w1, w2, w3 = _sum(s0, c0), _sum(s1, c1), _sum(s2, c2), _sum(s3, c3)
    w4, w5, w6, w7 = _sum(s4, k0), _sum(s5, k1), _sum(s6, k2), _sum(s7, k3)
    w8, w9, w10, w11 = _sum(s8, k4), _sum(s9, k5), _sum(s10, k6), _sum(s11, k7)
    w12, w13, w14, w15 = _sum(s12, counter), _sum(s13, n0), _sum(s14, n1), _sum(s15, n2)
    return w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15


@triton.jit
def _normals(key_ptr, counter, n0, n1, n2):
    """Eight normals for each counter, side by side."""
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = words(
        key_ptr, counter, n0, n1, n2
    )
    z0, z1 = normal_pair(w0, w1, w2, w3)
    z2, z3 = normal_pair(w4, w5, w6, w7)
    z4, z5 = normal_pair(w8, w9, w10, w11)
    z6, z7 = normal_pair(w12, w13, w14, w15)
    even = tl.interleave(tl.interleave(z0, z4), tl.interleave(z2, z6))
    odd = tl.interleave(tl.interleave(z1, z5), tl.interleave(z3, z7))
    return tl.interleave(even, odd)


@triton.jit
def _noisy_part(
    summed_ptr, out_ptr,
    left, block, n1, n2,
    table_ptr,
    OUT_DTYPE: tl.constexpr, WHOLE: tl.constexpr, GRID: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The elements of some blocks, from this one on; ``left``: how many elements there are."""
    index = tl.arange(0, 8 * BLOCKS)
    if WHOLE:  # without a mask, many elements are moved at a time
        summed = tl.load(summed_ptr + index).to(tl.float32)
    else:
        summed = tl.load(summed_ptr + index, mask=index < left, other=0.0).to(tl.float32)
    std = tl.load(table_ptr).to(tl.float64, bitcast=True).to(tl.float32)
    inverse = tl.load(table_ptr + 1).to(tl.float64, bitcast=True).to(tl.float32)
    counter = _sum(block.to(tl.uint32), tl.arange(0, BLOCKS).to(tl.uint32))
    n0 = tl.load(table_ptr + 4).to(tl.uint32)
    noisy = summed + std * _normals(table_ptr + 5, counter, n0, n1, n2)
    if GRID:
        grid = tl.load(table_ptr + 2).to(tl.float64, bitcast=True).to(tl.float32)
        cell = noisy * tl.load(table_ptr + 3).to(tl.float64, bitcast=True).to(tl.float32)
        cell = tl.where(cell > _MOST_CELLS, _MOST_CELLS, cell)
        cell = tl.where(cell < -_MOST_CELLS, -_MOST_CELLS, cell)
        # Beside a number whose neighbours are integers, sums are rounded to these.
        noisy = ((cell + 12582912.0) - 12582912.0) * grid
    noisy = (noisy * inverse).to(OUT_DTYPE)
    if WHOLE:
        tl.store(out_ptr + index, noisy)
    else:
        tl.store(out_ptr + index, noisy, mask=index < left)


@triton.jit
def _noisy_means_kernel(
    table_ptr,
    DTYPE: tl.constexpr, OUT_DTYPE: tl.constexpr, TENSORS: tl.constexpr, ALIGNED: tl.constexpr,
    GRID: tl.constexpr, BLOCKS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """The table: noise's standard deviation, one over the divisor, the grid and one over it; the
    draw's number and the key; then columns with an entry for every tensor: its first program,
    addresses of its sum and its result, its elements, the nonce's other two words."""
    PART: tl.constexpr = 8 * BLOCKS
    pid = tl.program_id(0)
    firsts = tl.load(table_ptr + 9 + tl.arange(0, TENSORS))
    row = table_ptr + 8 + tl.sum((firsts <= pid).to(tl.int32), 0)
    start = (pid - tl.load(row)) * ROUNDS * PART
    summed_ptr = tl.load(row + TENSORS).to(tl.pointer_type(DTYPE)) + start
    out_ptr = tl.load(row + 2 * TENSORS).to(tl.pointer_type(OUT_DTYPE)) + start
    left = tl.minimum(tl.load(row + 3 * TENSORS) - start, ROUNDS * PART).to(tl.int32)
    n1 = tl.load(row + 4 * TENSORS).to(tl.uint32)
    n2 = tl.load(row + 5 * TENSORS).to(tl.uint32)
    if ALIGNED:
        summed_ptr = tl.multiple_of(summed_ptr, 16)
        out_ptr = tl.multiple_of(out_ptr, 16)
    block = start // 8
    if left == ROUNDS * PART:
        for i in range(ROUNDS):
            part = (summed_ptr + i * PART, out_ptr + i * PART, PART, block + i * BLOCKS)
            _noisy_part(*part, n1, n2, table_ptr, OUT_DTYPE, True, GRID, BLOCKS)
    else:
        for i in range(tl.cdiv(left, PART)):
            part = (summed_ptr + i * PART, out_ptr + i * PART, left - i * PART, block + i * BLOCKS)
            _noisy_part(*part, n1, n2, table_ptr, OUT_DTYPE, False, GRID, BLOCKS)


def noisy_means(
    sums: Sequence[Tensor],
    std: float,
    divisor: float,
    draw: Draw,
    numbers: Sequence[tuple[int, int]],
    grid: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """``(sum + std * normal) / divisor`` of contiguous tensors that are not empty."""
    if len(sums) > MOST:
        options = grid, dtype
        first = noisy_means(sums[:MOST], std, divisor, draw, numbers[:MOST], *options)
        return first + noisy_means(sums[MOST:], std, divisor, draw, numbers[MOST:], *options)
    outs = [torch.empty_like(summed, dtype=dtype) for summed in sums]
    width = tiles.next_power_of_2(len(sums))
    table = array("q", bytes(8 * (_HEADER + 6 * width)))
    scales = struct.pack("4d", std, 1.0 / divisor, grid, 1.0 / grid if grid else 0.0)
    table[:4] = array("q", scales)
    table[4] = draw.number
    table[5:_HEADER] = array("q", struct.unpack("<4q", draw.key))
    sizes = [summed.numel() for summed in sums]
    firsts, programs = [], 0
    for size in sizes:
        firsts.append(programs)
        programs += tiles.cdiv(size, ROUNDS * BLOCKS * PER_BLOCK)
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
        BLOCKS=BLOCKS, ROUNDS=ROUNDS,
        num_warps=WARPS,
    )  # fmt: skip
    return outs
