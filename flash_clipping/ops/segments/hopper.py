"""Clipped sums of groups on Hopper, by :mod:`flash_clipping.ops.runtime.ring`.

M blocks of 32 rows, E groups, B samples, d input features, p output features.

Rows come in blocks, of a segment or of a group (``triton.blocks_kernel`` fills the last one with
zeros); how many of these there are is read on the device.

Where segments are short, applying a coefficient to each one's product takes longer than the product
itself. There rows come multiplied by their coefficients, as two bf16 numbers that add up to
``coef · g`` within 2⁻¹⁷ of it, which the certificate covers
(:mod:`flash_clipping.ops.error_bounds`); both are multiplied, and a group is one long segment.
"""

# mypy: disable-error-code="name-defined"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flash_clipping.ops.runtime.ring import (
    BLOCK,
    HALF,
    WIDE,
    add_products,
    barriers,
    load_async,
    no_sums,
    place_of,
    room_for_sums,
    store_half,
    take_turn,
    wait_released,
)

ROWS = gl.constexpr(32)
"""Rows of a block, which is loaded at one time."""
STAGES = gl.constexpr(6)
SPLIT_STAGES = gl.constexpr(4)
PROMOTE = gl.constexpr(32)
"""Blocks after which a segment's product is added to the sum."""
GROUP = gl.constexpr(8)


@gluon.constexpr_function
def _stages(split):
    return SPLIT_STAGES if split else STAGES


@gluon.jit
def _place(item, group_ptr, p, d):
    """Group of an item, and first row and column of its tile."""
    count = gl.cdiv(p, BLOCK) * gl.cdiv(d, WIDE)
    group = gl.load(group_ptr + item // count).to(gl.int32)
    p0, d0 = place_of(item % count, p, d, GROUP)
    return group, p0, d0


@gluon.jit
def _load(operands, lists, grid, ring, DTYPE: gl.constexpr, SPLIT: gl.constexpr):
    """One warp: the operands of every block of every tile of this program."""
    STAGES: gl.constexpr = _stages(SPLIT)
    A_ptr, G_ptr, rest_ptr, A_width, G_width = operands
    firsts_ptr, group_ptr = lists
    items, B, M, d, p = grid
    A_tiles, G_tiles, rest_tiles, full, empty = ring
    size: gl.constexpr = ROWS * (BLOCK + SPLIT * BLOCK + WIDE) * (DTYPE.primitive_bitwidth // 8)
    A = tma.make_tensor_descriptor(
        A_ptr, [M * ROWS, d], [A_width, 1], [ROWS, WIDE], A_tiles.type.layout
    )
    G = tma.make_tensor_descriptor(
        G_ptr, [M * ROWS, p], [G_width, 1], [ROWS, HALF], G_tiles.type.layout
    )
    if SPLIT:
        rest = tma.make_tensor_descriptor(
            rest_ptr, [M * ROWS, p], [G_width, 1], [ROWS, HALF], G_tiles.type.layout
        )
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group, p0, d0 = _place(item, group_ptr, p, d)
        first = gl.load(firsts_ptr + group * B)
        last = gl.load(firsts_ptr + (group + 1) * B)
        for block in range(first, last):
            stage = step % STAGES
            loaded = full.index(stage)
            wait_released(step, empty, STAGES)
            mbarrier.expect(loaded, size)
            row = block * ROWS
            load_async(G, [row, p0], loaded, G_tiles.index(2 * stage))
            load_async(G, [row, p0 + HALF], loaded, G_tiles.index(2 * stage + 1))
            if SPLIT:
                load_async(rest, [row, p0], loaded, rest_tiles.index(2 * stage))
                load_async(rest, [row, p0 + HALF], loaded, rest_tiles.index(2 * stage + 1))
            load_async(A, [row, d0], loaded, A_tiles.index(stage))
            step += 1


@gluon.jit
def _multiply(
    coef_ptr, out_ptr, lists, grid, ring, sums, lead, SPLIT: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """Four warps: one half of the rows of every tile of this program."""
    firsts_ptr, group_ptr = lists
    items, B, M, d, p = grid
    right = sums.index(WHICH)
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group, p0, d0 = _place(item, group_ptr, p, d)
        first = gl.load(firsts_ptr + group * B)
        steps = gl.load(firsts_ptr + (group + 1) * B) - first
        signal, turn = take_turn(step, steps, turn, lead, _stages(SPLIT), WHICH)
        left = no_sums(right)
        for b in range(B):
            coef = 1.0 if SPLIT else gl.load(coef_ptr + b)
            last = gl.load(firsts_ptr + group * B + b + 1)
            end = step + last - first
            first = last
            step, left = add_products(
                step, end, coef, left, right, signal, lead, ring,
                ROWS, _stages(SPLIT), PROMOTE, SPLIT, WHICH,
            )  # fmt: skip
        store_half(out_ptr + group.to(gl.int64) * p * d, left, right, p0, d0, p, d, WHICH)


@gluon.jit(do_not_specialize=["items", "B", "M"])
def grouped_sums_ring_kernel(
    A_ptr, G_ptr, rest_ptr, coef_ptr, out_ptr, firsts_ptr, group_ptr,
    items, B, M, d, p, A_width, G_width,
    DTYPE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """``triton.grouped_sums_kernel`` for operands of one 16-bit ``DTYPE`` in blocks. With ``SPLIT``
    rows are multiplied by their coefficients, and B is 1. Launched with ``num_warps=4``."""
    STAGES: gl.constexpr = _stages(SPLIT)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 2)
    A_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDE], layout)
    G_tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, ROWS, HALF], layout)
    if SPLIT:
        rest_tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, ROWS, HALF], layout)
    else:
        rest_tiles = G_tiles
    sums, lead = room_for_sums()
    full, empty = barriers(STAGES)
    ring = (A_tiles, G_tiles, rest_tiles, full, empty)
    grid = (items, B, M, d, p)
    operands = (A_ptr, G_ptr, rest_ptr, A_width, G_width)
    lists = (firsts_ptr, group_ptr)
    gl.warp_specialize(
        [
            (_multiply, (coef_ptr, out_ptr, lists, grid, ring, sums, lead, SPLIT, 0)),
            (_multiply, (coef_ptr, out_ptr, lists, grid, ring, sums, lead, SPLIT, 1)),
            (_load, (operands, lists, grid, ring, DTYPE, SPLIT)),
        ],
        [4, 1],  # warps of the second and third, and registers of each of their threads
        [240, 24],
    )
