"""Clipped sums on Hopper: the tiles of :mod:`flash_clipping.ops.clipped_sum.triton`, twice as wide,
by :mod:`flash_clipping.ops.runtime.ring`.

B samples, T positions, d input features, p output features.

Tensor cores take their operands from the second-level cache faster the larger the tile is. A tile
of 128 × 256 fills half of the registers with one sample's product, so the sum over samples has no
room beside it. It lies in shared memory: each thread adds its part of a product to what it left
there, so nobody waits for anybody.
"""

# mypy: disable-error-code="name-defined"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_clipping.ops.clipped_sum import table
from flash_clipping.ops.runtime.ring import (
    BLOCK,
    HALF,
    barriers,
    load_async,
    release,
    wait_loaded,
    wait_released,
)
from flash_clipping.ops.runtime.tiles import operand, tile_in_groups

COLUMNS = gl.constexpr(table.COLUMNS)
WIDTH = gl.constexpr(table.WIDE)
BLOCK_T = gl.constexpr(64)
"""Positions of a step."""
STAGES = gl.constexpr(3)
PROMOTE = gl.constexpr(16)
"""Steps after which a sample's product is added to the sum: tensor cores truncate what they add
up."""
GROUP = gl.constexpr(8)
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, table.WIDE, 16]))
IN_TURN = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Eight rows, which a warp moves at one time, on all banks."""
IN_ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))


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
def _place(tile, p, d):
    """First row and column of a tile; those that are at work at one time share what they read."""
    row, column = tile_in_groups(tile, gl.cdiv(p, BLOCK), gl.cdiv(d, WIDTH), GROUP)
    return row * BLOCK, column * WIDTH


@gluon.jit
def _load(table_ptr, grid, ring, DTYPE: gl.constexpr):
    """One warp loads the operands of every step; positions past a sample's last are zero."""
    layers, count, B, T = grid
    A_tiles, G_tiles, full, empty = ring
    size: gl.constexpr = BLOCK_T * (BLOCK + WIDTH) * (DTYPE.primitive_bitwidth // 8)
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
                [1, BLOCK_T, WIDTH], A_tiles.type.layout,
            )  # fmt: skip
            G = tma.make_tensor_descriptor(
                G_ptr, [B, T, p], [G_stride_b, G_stride_t, 1],
                [1, BLOCK_T, HALF], G_tiles.type.layout,
            )  # fmt: skip
            while item < end:
                p0, d0 = _place(item - first, p, d)
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
def _product(step, end, ring, WHICH: gl.constexpr):
    """``gᵀ a`` over the steps up to ``end``."""
    A_tiles, G_tiles, full, empty = ring
    product = gl.zeros([HALF, WIDTH], gl.float32, MMA)
    first = step
    while step < end:
        stage = step % STAGES
        wait_loaded(step, full, STAGES)
        g = G_tiles.index(2 * stage + WHICH).reshape([BLOCK_T, HALF]).permute((1, 0))
        a = A_tiles.index(stage).reshape([BLOCK_T, WIDTH])
        product = warpgroup_mma(g, a, product, is_async=True)
        product = warpgroup_mma_wait(1, deps=[product])
        if step > first:
            release(step - 1, empty, STAGES)
        step += 1
    product = warpgroup_mma_wait(0, deps=[product])
    release(step - 1, empty, STAGES)
    return step, product


@gluon.jit
def _split(x):
    return x.reshape([HALF, 2, WIDTH // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _multiply(table_ptr, coef_ptr, grid, ring, sums, WHICH: gl.constexpr):
    """Four warps: one half of the rows of every tile of this program."""
    layers, count, B, T = grid
    steps = gl.cdiv(T, BLOCK_T)
    total = sums.index(WHICH)
    step = 0
    item = gl.program_id(0)
    for layer in range(layers):
        row, first, end = _layer(table_ptr, layer, layers, count)
        while item < end:
            p = gl.load(row + 3).to(gl.int32)
            d = gl.load(row + 7).to(gl.int32)
            p0, d0 = _place(item - first, p, d)
            left, right = _split(gl.zeros([HALF, WIDTH], gl.float32, MMA))
            total.store(right)
            for b in range(B):
                coef = gl.load(coef_ptr + b)
                last = step + steps
                while step < last:
                    step, product = _product(step, gl.minimum(step + PROMOTE, last), ring, WHICH)
                    if coef != 0:  # of a dropped sample nothing, whatever its product is
                        l, r = _split(product)
                        left += coef * l
                        total.store(total.load(right.type.layout) + coef * r)
            out_ptr = gl.load(row + 8).to(gl.pointer_type(gl.float32))
            for side in gl.static_range(2):
                if side == 1:
                    total.store(left)
                half = total.load(IN_ROWS)
                rows = p0 + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, IN_ROWS))
                columns = d0 + (1 - side) * 128 + gl.arange(0, 128, gl.SliceLayout(0, IN_ROWS))
                place = out_ptr + rows[:, None].to(gl.int64) * d + columns[None, :]
                kept = (rows < p)[:, None] & (columns < d)[None, :]
                gl.store(place, half, mask=kept)
            item += gl.num_programs(0)


@gluon.jit(do_not_specialize=["layers", "count", "B", "T"])
def _clipped_sums_ring_kernel(table_ptr, coef_ptr, layers, count, B, T, DTYPE: gl.constexpr):
    """``triton._clipped_sums_kernel`` for operands of one 16-bit ``DTYPE`` in rows on 16 bytes.
    Launched with ``num_warps=4``."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 3)
    A_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_T, WIDTH], layout)
    G_tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 1, BLOCK_T, HALF], layout)
    sums = gl.allocate_shared_memory(gl.float32, [2, HALF, WIDTH // 2], IN_TURN)
    full, empty = barriers(STAGES)
    ring = (A_tiles, G_tiles, full, empty)
    grid = (layers, count, B, T)
    gl.warp_specialize(
        [
            (_multiply, (table_ptr, coef_ptr, grid, ring, sums, 0)),
            (_multiply, (table_ptr, coef_ptr, grid, ring, sums, 1)),
            (_load, (table_ptr, grid, ring, DTYPE)),
        ],
        [4, 1],  # warps of the second and third, and registers of each of their threads
        [240, 24],
    )
