"""Clipped sums on Hopper: the tiles of :mod:`flash_clipping.ops.clipped_sum.triton`, by
:mod:`flash_clipping.ops.runtime.ring`.

B samples, T positions, d input features, p output features. Short tiles of a layer may be *turned*,
rows for columns, where these are fewer.
"""

# mypy: disable-error-code="name-defined"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from flash_clipping.ops import clipped_sum
from flash_clipping.ops.runtime.ring import (
    HALF,
    NARROW,
    add_products,
    barriers,
    load_async,
    no_sums,
    place_of,
    room_for_sums,
    store_sums,
    take_turn,
    wait_loaded,
    wait_released,
)
from flash_clipping.ops.runtime.tiles import operand

ENTRIES = gl.constexpr(clipped_sum.COLUMNS)
"""Of a row of the table."""
GROUP = gl.constexpr(8)


@gluon.jit
def _layer(table_ptr, layer, layers, count):
    """A layer's row of the table, its first tile, and the first of the next layer."""
    row = table_ptr + layer * ENTRIES
    first = gl.load(row + ENTRIES - 1).to(gl.int32)
    end = count
    if layer + 1 < layers:
        end = gl.load(row + 2 * ENTRIES - 1).to(gl.int32)
    return row, first, end


@gluon.jit
def _sides(row, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Entries of a layer's row for what makes the rows of its tiles, and for what makes columns;
    whether these are turned."""
    p = gl.load(row + 3).to(gl.int32)
    d = gl.load(row + 7).to(gl.int32)
    turned = gl.cdiv(d, ROWS) * gl.cdiv(p, COLUMNS) < gl.cdiv(p, ROWS) * gl.cdiv(d, COLUMNS)
    turned &= COLUMNS == NARROW
    return row + gl.where(turned, 4, 0), row + gl.where(turned, 0, 4), turned


@gluon.jit
def _load(table_ptr, grid, ring):
    """One warp loads the operands of every step; positions past a sample's last are zero."""
    layers, count, B, T = grid
    A_tiles, G_tiles, full, empty = ring[0], ring[1], ring[3], ring[4]
    DTYPE: gl.constexpr = A_tiles.dtype
    STAGES: gl.constexpr = A_tiles.shape[0]
    BLOCK_T: gl.constexpr = A_tiles.shape[-2]
    COLUMNS: gl.constexpr = A_tiles.shape[-1]
    GROUPS: gl.constexpr = G_tiles.shape[0] // STAGES
    ROWS: gl.constexpr = GROUPS * HALF
    size: gl.constexpr = BLOCK_T * (ROWS + COLUMNS) * (DTYPE.primitive_bitwidth // 8)
    step = 0
    item = gl.program_id(0)
    for layer in range(layers):
        row, first, end = _layer(table_ptr, layer, layers, count)
        if item < end:
            of_rows, of_columns, _ = _sides(row, ROWS, COLUMNS)
            G_ptr, G_stride_b, G_stride_t, p = operand(of_rows, DTYPE, True, False)
            A_ptr, A_stride_b, A_stride_t, d = operand(of_columns, DTYPE, True, False)
            # The descriptors are made where those of the layer before were: no load may still read
            # them.
            for at in range(gl.maximum(step - STAGES, 0), step):
                wait_loaded(at, full, STAGES)
            A = tma.make_tensor_descriptor(
                A_ptr, [B, T, d], [A_stride_b, A_stride_t, 1],
                [1, BLOCK_T, COLUMNS], A_tiles.type.layout,
            )  # fmt: skip
            G = tma.make_tensor_descriptor(
                G_ptr, [B, T, p], [G_stride_b, G_stride_t, 1],
                [1, BLOCK_T, HALF], G_tiles.type.layout,
            )  # fmt: skip
            while item < end:
                p0, d0 = place_of(item - first, p, d, ROWS, COLUMNS, GROUP)
                for b in range(B):
                    for t in range(0, T, BLOCK_T):
                        stage = step % STAGES
                        loaded = full.index(stage)
                        wait_released(step, empty, STAGES)
                        mbarrier.expect(loaded, size)
                        load_async(A, [b, t, d0], loaded, A_tiles.index(stage))
                        for group in gl.static_range(GROUPS):
                            g = G_tiles.index(GROUPS * stage + group)
                            load_async(G, [b, t, p0 + group * HALF], loaded, g)
                        step += 1
                item += gl.num_programs(0)


@gluon.jit
def _multiply(table_ptr, coef_ptr, grid, ring, sums, lead, WHICH: gl.constexpr):
    """Four warps: 64 of the rows of every tile of this program."""
    A_tiles, G_tiles = ring[0], ring[1]
    BLOCK_T: gl.constexpr = A_tiles.shape[-2]
    COLUMNS: gl.constexpr = A_tiles.shape[-1]
    ROWS: gl.constexpr = G_tiles.shape[0] // A_tiles.shape[0] * HALF
    layers, count, B, T = grid
    steps = gl.cdiv(T, BLOCK_T)
    right = sums.index(WHICH)
    step = 0
    turn = 0
    item = gl.program_id(0)
    for layer in range(layers):
        row, first, end = _layer(table_ptr, layer, layers, count)
        while item < end:
            signal, turn = take_turn(step, B * steps, turn, lead, ring, WHICH)
            total = no_sums(right)
            following = gl.load(coef_ptr)
            for b in range(B):
                coef = following
                # Loaded a sample ahead: none waits for its own.
                following = gl.load(coef_ptr + gl.minimum(b + 1, B - 1))
                step, total = add_products(
                    step, step + steps, coef, total, right, signal, lead, ring, False, WHICH
                )
            of_rows, of_columns, turned = _sides(row, ROWS, COLUMNS)
            p = gl.load(of_rows + 3).to(gl.int32)
            d = gl.load(of_columns + 3).to(gl.int32)
            p0, d0 = place_of(item - first, p, d, ROWS, COLUMNS, GROUP)
            out_ptr = gl.load(row + 8).to(gl.pointer_type(gl.float32))
            strides = gl.where(turned, 1, d), gl.where(turned, p, 1)
            store_sums(out_ptr, total, right, p0, d0, p, d, strides[0], strides[1], WHICH)
            item += gl.num_programs(0)


@gluon.jit(do_not_specialize=["layers", "count", "B", "T"])
def _clipped_sums_ring_kernel(
    table_ptr, coef_ptr, layers, count, B, T,
    DTYPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """``triton._clipped_sums_kernel`` for operands of one 16-bit ``DTYPE`` in rows on 16 bytes.
    Launched with ``num_warps=4``."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 3)
    GROUPS: gl.constexpr = ROWS // HALF
    A_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_T, COLUMNS], layout)
    G_tiles = gl.allocate_shared_memory(DTYPE, [GROUPS * STAGES, 1, BLOCK_T, HALF], layout)
    sums, lead = room_for_sums(GROUPS, COLUMNS)
    full, empty = barriers(STAGES, GROUPS)
    ring = (A_tiles, G_tiles, G_tiles, full, empty)
    grid = (layers, count, B, T)
    # Beside each list: warps of its second and further parts, and registers of their threads.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (table_ptr, coef_ptr, grid, ring, sums, lead, 0)),
                (_multiply, (table_ptr, coef_ptr, grid, ring, sums, lead, 1)),
                (_load, (table_ptr, grid, ring)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (table_ptr, coef_ptr, grid, ring, sums, lead, 0)),
                (_multiply, (table_ptr, coef_ptr, grid, ring, sums, lead, 1)),
                (_multiply, (table_ptr, coef_ptr, grid, ring, sums, lead, 2)),
                (_load, (table_ptr, grid, ring)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
