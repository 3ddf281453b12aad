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
    HALF,
    add_products,
    barriers,
    load_async,
    no_sums,
    place_of,
    room_for_sums,
    store_sums,
    take_turn,
    wait_released,
)

BLOCK = gl.constexpr(32)
"""Rows of a block, which is loaded at one time."""
GROUP = gl.constexpr(8)


@gluon.jit
def _place(item, group_ptr, p, d, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Group of an item, and first row and column of its tile."""
    count = gl.cdiv(p, ROWS) * gl.cdiv(d, COLUMNS)
    group = gl.load(group_ptr + item // count).to(gl.int32)
    p0, d0 = place_of(item % count, p, d, ROWS, COLUMNS, GROUP)
    return group, p0, d0


@gluon.jit
def _load(operands, lists, grid, ring, SPLIT: gl.constexpr):
    """One warp: the operands of every block of every tile of this program."""
    A_ptr, G_ptr, rest_ptr, A_width, G_width = operands
    firsts_ptr, group_ptr = lists
    items, B, M, d, p = grid
    A_tiles, G_tiles, rest_tiles, full, empty = ring
    STAGES: gl.constexpr = A_tiles.shape[0]
    COLUMNS: gl.constexpr = A_tiles.shape[-1]
    GROUPS: gl.constexpr = G_tiles.shape[0] // STAGES
    ROWS: gl.constexpr = GROUPS * HALF
    each: gl.constexpr = A_tiles.dtype.primitive_bitwidth // 8
    size: gl.constexpr = BLOCK * (ROWS + SPLIT * ROWS + COLUMNS) * each
    A = tma.make_tensor_descriptor(
        A_ptr, [M * BLOCK, d], [A_width, 1], [BLOCK, COLUMNS], A_tiles.type.layout
    )
    G = tma.make_tensor_descriptor(
        G_ptr, [M * BLOCK, p], [G_width, 1], [BLOCK, HALF], G_tiles.type.layout
    )
    if SPLIT:
        rest = tma.make_tensor_descriptor(
            rest_ptr, [M * BLOCK, p], [G_width, 1], [BLOCK, HALF], G_tiles.type.layout
        )
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group, p0, d0 = _place(item, group_ptr, p, d, ROWS, COLUMNS)
        first = gl.load(firsts_ptr + group * B)
        last = gl.load(firsts_ptr + (group + 1) * B)
        for block in range(first, last):
            stage = step % STAGES
            loaded = full.index(stage)
            wait_released(step, empty, STAGES)
            mbarrier.expect(loaded, size)
            row = block * BLOCK
            load_async(A, [row, d0], loaded, A_tiles.index(stage))
            for part in gl.static_range(GROUPS):
                place = GROUPS * stage + part
                load_async(G, [row, p0 + part * HALF], loaded, G_tiles.index(place))
                if SPLIT:
                    load_async(rest, [row, p0 + part * HALF], loaded, rest_tiles.index(place))
            step += 1


@gluon.jit
def _multiply(
    coef_ptr, out_ptr, lists, grid, ring, sums, lead, SPLIT: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """Four warps: 64 of the rows of every tile of this program."""
    COLUMNS: gl.constexpr = ring[0].shape[-1]
    ROWS: gl.constexpr = ring[1].shape[0] // ring[0].shape[0] * HALF
    firsts_ptr, group_ptr = lists
    items, B, M, d, p = grid
    right = sums.index(WHICH)
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group, p0, d0 = _place(item, group_ptr, p, d, ROWS, COLUMNS)
        first = gl.load(firsts_ptr + group * B)
        steps = gl.load(firsts_ptr + (group + 1) * B) - first
        signal, turn = take_turn(step, steps, turn, lead, ring, WHICH)
        total = no_sums(right)
        # Loaded a segment ahead: none waits for its own.
        last = gl.load(firsts_ptr + group * B + 1)
        following = gl.load(coef_ptr)
        for b in range(B):
            coef = 1.0 if SPLIT else following
            end = step + last - first
            first = last
            ahead = gl.minimum(b + 1, B - 1)
            last = gl.load(firsts_ptr + group * B + ahead + 1)
            following = gl.load(coef_ptr + ahead)
            step, total = add_products(
                step, end, coef, total, right, signal, lead, ring, SPLIT, WHICH
            )
        of_group = out_ptr + group.to(gl.int64) * p * d
        store_sums(of_group, total, right, p0, d0, p, d, d, 1, WHICH)


@gluon.jit(do_not_specialize=["items", "B", "M"])
def grouped_sums_ring_kernel(
    A_ptr, G_ptr, rest_ptr, coef_ptr, out_ptr, firsts_ptr, group_ptr,
    items, B, M, d, p, A_width, G_width,
    DTYPE: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """``triton.grouped_sums_kernel`` for operands of one 16-bit ``DTYPE`` in blocks. With ``SPLIT``
    rows are multiplied by their coefficients, and B is 1. Launched with ``num_warps=4``."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 2)
    GROUPS: gl.constexpr = ROWS // HALF
    A_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, COLUMNS], layout)
    G_tiles = gl.allocate_shared_memory(DTYPE, [GROUPS * STAGES, BLOCK, HALF], layout)
    if SPLIT:
        rest_tiles = gl.allocate_shared_memory(DTYPE, [GROUPS * STAGES, BLOCK, HALF], layout)
    else:
        rest_tiles = G_tiles
    sums, lead = room_for_sums(GROUPS, COLUMNS)
    full, empty = barriers(STAGES, GROUPS)
    ring = (A_tiles, G_tiles, rest_tiles, full, empty)
    grid = (items, B, M, d, p)
    operands = (A_ptr, G_ptr, rest_ptr, A_width, G_width)
    lists = (firsts_ptr, group_ptr)
    # Beside each list: warps of its second and further parts, and registers of their threads.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (coef_ptr, out_ptr, lists, grid, ring, sums, lead, SPLIT, 0)),
                (_multiply, (coef_ptr, out_ptr, lists, grid, ring, sums, lead, SPLIT, 1)),
                (_load, (operands, lists, grid, ring, SPLIT)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (coef_ptr, out_ptr, lists, grid, ring, sums, lead, SPLIT, 0)),
                (_multiply, (coef_ptr, out_ptr, lists, grid, ring, sums, lead, SPLIT, 1)),
                (_multiply, (coef_ptr, out_ptr, lists, grid, ring, sums, lead, SPLIT, 2)),
                (_load, (operands, lists, grid, ring, SPLIT)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
