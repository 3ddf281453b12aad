"""Clipped sums on Hopper: the tiles of :mod:`flash_clipping.ops.clipped_sum.triton`, twice as wide,
by :mod:`flash_clipping.ops.runtime.ring`.

B samples, T positions, d input features, p output features.
"""

# mypy: disable-error-code="name-defined"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flash_clipping.ops import clipped_sum
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
    wait_loaded,
    wait_released,
)
from flash_clipping.ops.runtime.tiles import operand

COLUMNS = gl.constexpr(clipped_sum.COLUMNS)
BLOCK_T = gl.constexpr(32)
"""Positions of a step."""
STAGES = gl.constexpr(6)
PROMOTE = gl.constexpr(32)
"""Steps after which a sample's product is added to the sum: tensor cores truncate."""
GROUP = gl.constexpr(8)


@gluon.jit
def _layer(table_ptr, layer, layers, count):
    """A layer's row of the table, its first tile, and the first of the next layer."""
    row = table_ptr + layer * COLUMNS
    first = gl.load(row + COLUMNS - 1).to(gl.int32)
    end = count
    if layer + 1 < layers:
        end = gl.load(row + 2 * COLUMNS - 1).to(gl.int32)
    return row, first, end


@gluon.jit
def _load(table_ptr, grid, ring, DTYPE: gl.constexpr):
    """One warp loads the operands of every step; positions past a sample's last are zero."""
    layers, count, B, T = grid
    A_tiles, G_tiles, _, full, empty = ring
    size: gl.constexpr = BLOCK_T * (BLOCK + WIDE) * (DTYPE.primitive_bitwidth // 8)
    step = 0
    item = gl.program_id(0)
    for layer in range(layers):
        row, first, end = _layer(table_ptr, layer, layers, count)
        if item < end:
            G_ptr, G_stride_b, G_stride_t, p = operand(row, DTYPE, True, False)
            A_ptr, A_stride_b, A_stride_t, d = operand(row + 4, DTYPE, True, False)
            # The descriptors are made where those of the layer before were: no load may still read
            # them.
            for at in range(gl.maximum(step - STAGES, 0), step):
                wait_loaded(at, full, STAGES)
            A = tma.make_tensor_descriptor(
                A_ptr, [B, T, d], [A_stride_b, A_stride_t, 1],
                [1, BLOCK_T, WIDE], A_tiles.type.layout,
            )  # fmt: skip
            G = tma.make_tensor_descriptor(
                G_ptr, [B, T, p], [G_stride_b, G_stride_t, 1],
                [1, BLOCK_T, HALF], G_tiles.type.layout,
            )  # fmt: skip
            while item < end:
                p0, d0 = place_of(item - first, p, d, GROUP)
                for b in range(B):
                    for t in range(0, T, BLOCK_T):
                        stage = step % STAGES
                        loaded = full.index(stage)
                        wait_released(step, empty, STAGES)
                        mbarrier.expect(loaded, size)
                        load_async(G, [b, t, p0], loaded, G_tiles.index(2 * stage))
                        load_async(G, [b, t, p0 + HALF], loaded, G_tiles.index(2 * stage + 1))
                        load_async(A, [b, t, d0], loaded, A_tiles.index(stage))
                        step += 1
                item += gl.num_programs(0)


@gluon.jit
def _multiply(table_ptr, coef_ptr, grid, ring, sums, lead, WHICH: gl.constexpr):
    """Four warps: one half of the rows of every tile of this program."""
    layers, count, B, T = grid
    steps = gl.cdiv(T, BLOCK_T)
    right = sums.index(WHICH)
    step = 0
    turn = 0
    item = gl.program_id(0)
    for layer in range(layers):
        row, first, end = _layer(table_ptr, layer, layers, count)
        while item < end:
            p = gl.load(row + 3).to(gl.int32)
            d = gl.load(row + 7).to(gl.int32)
            p0, d0 = place_of(item - first, p, d, GROUP)
            signal, turn = take_turn(step, B * steps, turn, lead, STAGES, WHICH)
            left = no_sums(right)
            for b in range(B):
                coef = gl.load(coef_ptr + b)
                step, left = add_products(
                    step, step + steps, coef, left, right, signal, lead, ring,
                    BLOCK_T, STAGES, PROMOTE, False, WHICH,
                )  # fmt: skip
            out_ptr = gl.load(row + 8).to(gl.pointer_type(gl.float32))
            store_half(out_ptr, left, right, p0, d0, p, d, WHICH)
            item += gl.num_programs(0)


@gluon.jit(do_not_specialize=["layers", "count", "B", "T"])
def _clipped_sums_ring_kernel(table_ptr, coef_ptr, layers, count, B, T, DTYPE: gl.constexpr):
    """``triton._clipped_sums_kernel`` for operands of one 16-bit ``DTYPE`` in rows on 16 bytes.
    Launched with ``num_warps=4``."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 3)
    A_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_T, WIDE], layout)
    G_tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 1, BLOCK_T, HALF], layout)
    sums, lead = room_for_sums()
    full, empty = barriers(STAGES)
    ring = (A_tiles, G_tiles, G_tiles, full, empty)
    grid = (layers, count, B, T)
    gl.warp_specialize(
        [
            (_multiply, (table_ptr, coef_ptr, grid, ring, sums, lead, 0)),
            (_multiply, (table_ptr, coef_ptr, grid, ring, sums, lead, 1)),
            (_load, (table_ptr, grid, ring, DTYPE)),
        ],
        [4, 1],  # warps of the second and third, and registers of each of their threads
        [240, 24],
    )
