"""Clipped sums on Hopper: the tiles of :mod:`flash_clipping.ops.clipped_sum.triton`, loaded by one
warp and multiplied by others.

B samples, T positions, d input features, p output features.

One warp loads ahead of the others into a ring of stages in shared memory. Two groups of four warps
multiply, each half of a tile's rows. What they do with one sample's product, or a part of it
(weight it and add it to the sum), they do while the next one is under way.

Written in Gluon, as :mod:`flash_clipping.ops.gram.hopper` is, and used with the same versions.
"""

# mypy: disable-error-code="name-defined"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_clipping.ops.clipped_sum import table
from flash_clipping.ops.runtime.tiles import operand

_load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # to 3.7

BLOCK = gl.constexpr(table.BLOCK)
COLUMNS = gl.constexpr(table.COLUMNS)
HALF = gl.constexpr(64)
POSITIONS = gl.constexpr(384)
"""Of a tile's operands, in shared memory at one time."""
PROMOTE = gl.constexpr(1024)
"""Positions after which a sample's product is added to the sum: tensor cores truncate theirs."""
GROUP = gl.constexpr(8)
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def _place(tile, tiles_p, tiles_d):
    """Row and column of a tile; those that are at work at one time share what they read."""
    first = tile // (GROUP * tiles_d) * GROUP
    height = gl.minimum(tiles_p - first, GROUP)
    within = tile % (GROUP * tiles_d)
    return (first + within % height) * BLOCK, within // height * BLOCK


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
def _load(table_ptr, grid, ring, DTYPE: gl.constexpr, BLOCK_T: gl.constexpr):
    """One warp: the operands of every step of every tile of this program. Positions past a
    sample's last are zero."""
    STAGES: gl.constexpr = POSITIONS // BLOCK_T
    layers, count, B, T = grid
    A_tiles, G_tiles, full, empty = ring
    size: gl.constexpr = 2 * BLOCK_T * BLOCK * (DTYPE.primitive_bitwidth // 8)
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
                mbarrier.wait(full.index(at % STAGES), at // STAGES & 1)
            A = tma.make_tensor_descriptor(
                A_ptr,
                [B, T, d],
                [A_stride_b, A_stride_t, 1],
                [1, BLOCK_T, BLOCK],
                A_tiles.type.layout,
            )
            G = tma.make_tensor_descriptor(
                G_ptr,
                [B, T, p],
                [G_stride_b, G_stride_t, 1],
                [1, BLOCK_T, HALF],
                G_tiles.type.layout,
            )
            tiles_p, tiles_d = gl.cdiv(p, BLOCK), gl.cdiv(d, BLOCK)
            while item < end:
                p0, d0 = _place(item - first, tiles_p, tiles_d)
                for b in range(B):
                    for t in range(0, T, BLOCK_T):
                        stage = step % STAGES
                        loaded = full.index(stage)
                        mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
                        mbarrier.expect(loaded, size)
                        _load_async(G, [b, t, p0], loaded, G_tiles.index(2 * stage))
                        _load_async(G, [b, t, p0 + HALF], loaded, G_tiles.index(2 * stage + 1))
                        _load_async(A, [b, t, d0], loaded, A_tiles.index(stage))
                        step += 1
                item += gl.num_programs(0)


@gluon.jit
def _step(step, product, ring, BLOCK_T: gl.constexpr, WHICH: gl.constexpr, ADD: gl.constexpr):
    """Start a step's product and wait for the one before it."""
    STAGES: gl.constexpr = POSITIONS // BLOCK_T
    A_tiles, G_tiles, full, _ = ring
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    g = G_tiles.index(2 * stage + WHICH).reshape([BLOCK_T, HALF]).permute((1, 0))
    a = A_tiles.index(stage).reshape([BLOCK_T, BLOCK])
    product = warpgroup_mma(g, a, product, use_acc=ADD, is_async=True)
    return warpgroup_mma_wait(1, deps=[product])


@gluon.jit
def _release(step, ring, BLOCK_T: gl.constexpr):
    """This half of the rows needs a step's stage no more."""
    mbarrier.arrive(ring[3].index(step % (POSITIONS // BLOCK_T)))


@gluon.jit
def _multiply(table_ptr, coef_ptr, grid, ring, BLOCK_T: gl.constexpr, WHICH: gl.constexpr):
    """Four warps: one half of the rows of every tile of this program."""
    layers, count, B, T = grid
    steps = gl.cdiv(T, BLOCK_T)
    step = 0
    item = gl.program_id(0)
    for layer in range(layers):
        row, first, end = _layer(table_ptr, layer, layers, count)
        while item < end:
            p = gl.load(row + 3).to(gl.int32)
            d = gl.load(row + 7).to(gl.int32)
            p0, d0 = _place(item - first, gl.cdiv(p, BLOCK), gl.cdiv(d, BLOCK))
            total = gl.zeros([HALF, BLOCK], gl.float32, MMA)
            before = gl.zeros([HALF, BLOCK], gl.float32, MMA)
            before_coef = gl.to_tensor(0.0)
            for b in range(B):
                coef = gl.load(coef_ptr + b)
                last_step = step + steps
                while step < last_step:
                    product = _step(step, gl.zeros_like(before), ring, BLOCK_T, WHICH, False)
                    # The tensor cores are at work; now what they did before. Of a dropped sample
                    # nothing, whatever its product is.
                    if before_coef != 0:
                        total += before_coef * before
                    before_coef = coef
                    last = gl.minimum(step + PROMOTE // BLOCK_T, last_step) - 1
                    while step < last:
                        step += 1
                        product = _step(step, product, ring, BLOCK_T, WHICH, True)
                        _release(step - 1, ring, BLOCK_T)
                    before = warpgroup_mma_wait(0, deps=[product])
                    _release(step, ring, BLOCK_T)
                    step += 1
            if before_coef != 0:
                total += before_coef * before
            out_ptr = gl.load(row + 8).to(gl.pointer_type(gl.float32))
            at_row = p0 + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, MMA))
            column = d0 + gl.arange(0, BLOCK, gl.SliceLayout(0, MMA))
            place = out_ptr + at_row[:, None].to(gl.int64) * d + column[None, :]
            gl.store(place, total, mask=(at_row < p)[:, None] & (column < d)[None, :])
            item += gl.num_programs(0)


@gluon.jit(do_not_specialize=["layers", "count", "B", "T"])
def _clipped_sums_ring_kernel(
    table_ptr, coef_ptr,
    layers, count, B, T,
    DTYPE: gl.constexpr, BLOCK_T: gl.constexpr,
):  # fmt: skip
    """What ``triton._clipped_sums_kernel`` does, for operands of one 16-bit ``DTYPE`` in rows on 16
    bytes; ``BLOCK_T`` positions in a step. Launched with ``num_warps=4``."""
    STAGES: gl.constexpr = POSITIONS // BLOCK_T
    layout: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 3)
    A_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_T, BLOCK], layout)
    G_tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 1, BLOCK_T, HALF], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    fence_async_shared()
    ring = (A_tiles, G_tiles, full, empty)
    grid = (layers, count, B, T)
    gl.warp_specialize(
        [
            (_multiply, (table_ptr, coef_ptr, grid, ring, BLOCK_T, 0)),
            (_multiply, (table_ptr, coef_ptr, grid, ring, BLOCK_T, 1)),
            (_load, (table_ptr, grid, ring, DTYPE, BLOCK_T)),
        ],
        [4, 1],  # warps of the second and third, and registers of each of their threads
        [240, 24],
    )
