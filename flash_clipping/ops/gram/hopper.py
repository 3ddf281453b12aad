"""Gram norms on Hopper: the tiles of :mod:`flash_clipping.ops.gram.triton`, by
:mod:`flash_clipping.ops.runtime.ring`.

B samples, T positions, F features of one operand.

Both matrices' tiles are finished one after the other: what the certificate needs of ``G Gᵀ`` is its
squares. Squared norms were seen to be off by up to 8e-7.
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

from flash_clipping.ops.error_bounds import FLOOR
from flash_clipping.ops.gram.tiles import RING, sample_of, tile_of
from flash_clipping.ops.runtime.ring import (
    BLOCK,
    HALF,
    MMA,
    barriers,
    load_async,
    release,
    wait_loaded,
    wait_released,
)
from flash_clipping.ops.runtime.tiles import sum_by_warp

BLOCK_F = gl.constexpr(RING.block_f)  # 128 bytes: a row of a swizzled tile
STAGES = gl.constexpr(RING.num_stages)
PROMOTE = gl.constexpr(RING.promote)
GROUP = gl.constexpr(8)
PARTS = gl.constexpr(RING.num_warps)
ROW_SUMS = gl.constexpr(gl.SliceLayout(1, MMA.value))
ROW_FLOOR = gl.constexpr(FLOOR)


@gluon.jit
def _item(item, inputs_ptr, B, rows):
    """Row of the table of an item's input, first layer, layers, sample, tile, its row and column;
    in the order of ``triton._gram_kernel``."""
    slots = rows * (rows + 1) // 2
    slot = item % slots
    b = (item // slots % B).to(gl.int64)
    row = inputs_ptr + (item // slots // B).to(gl.int64) * 6
    i, j = tile_of(slot, rows, GROUP)
    return row, gl.load(row + 4), gl.load(row + 5), b, slot, i, j


@gluon.jit
def _load_operand(row, b, T, i, j, step, steps_before, ring, DTYPE: gl.constexpr):
    """All features of a tile's rows and columns, as steps from ``step`` on; how many they are."""
    tiles, full, empty = ring
    X_ptr, stride_t, F = sample_of(row, b, DTYPE, True, False)
    # The descriptor is made where the one of two operands ago was: no load may still read that. Of
    # its steps, those whose stage was loaded again have ended: a stage is emptied after its load.
    for at in range(gl.maximum(step - STAGES, 0), step - steps_before):
        wait_loaded(at, full, STAGES)
    X = tma.make_tensor_descriptor(
        X_ptr, [T, F], [stride_t, 1], [BLOCK, BLOCK_F], tiles.type.layout
    )
    size: gl.constexpr = BLOCK * BLOCK_F * (DTYPE.primitive_bitwidth // 8)
    steps = gl.cdiv(F, BLOCK_F)
    for k in range(steps):
        at = step + k
        stage = at % STAGES
        loaded = full.index(stage)
        wait_released(at, empty, STAGES)
        if i == j:
            mbarrier.expect(loaded, size)
        else:
            mbarrier.expect(loaded, 2 * size)
            load_async(X, [i * BLOCK, k * BLOCK_F], loaded, tiles.index(STAGES + stage))
        load_async(X, [j * BLOCK, k * BLOCK_F], loaded, tiles.index(stage))
    return steps


@gluon.jit
def _load(table, grid, T, ring, DTYPE: gl.constexpr):
    """One warp: every operand of every tile of this program."""
    inputs_ptr, layers_ptr = table
    items, B, rows = grid
    step = 0
    steps = 0
    operands = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, first, layers, b, _, i, j = _item(item, inputs_ptr, B, rows)
        for layer in range(first - 1, first + layers):
            if layer >= first:
                row = layers_ptr + layer * 4
            if operands % 2 == 0:  # each call makes its descriptors in a place of its own
                steps = _load_operand(row, b, T, i, j, step, steps, ring, DTYPE)
            else:
                steps = _load_operand(row, b, T, i, j, step, steps, ring, DTYPE)
            step += steps
            operands += 1


@gluon.jit
def _step(at, product, ring, across, WHICH: gl.constexpr, ADD: gl.constexpr):
    """Start a step's product and wait for the one before it; ``across``: stages between a tile's
    columns and its rows."""
    tiles, full, _ = ring
    stage = at % STAGES
    wait_loaded(at, full, STAGES)
    x = tiles.index(across + stage).slice(WHICH * HALF, HALF)
    y = tiles.index(stage).permute((1, 0))
    product = warpgroup_mma(x, y, product, use_acc=ADD, is_async=True)
    return warpgroup_mma_wait(1, deps=[product])


@gluon.jit
def _tile(step, width, ring, across, WHICH: gl.constexpr):
    """This half of a tile of an operand's ``X Xᵀ``, and the step after its last."""
    total = gl.zeros([HALF, BLOCK], gl.float32, MMA)
    end = step + gl.cdiv(width, BLOCK_F)
    while step < end:
        product = _step(step, gl.zeros_like(total), ring, across, WHICH, False)
        last = gl.minimum(step + PROMOTE, end) - 1
        while step < last:
            step += 1
            product = _step(step, product, ring, across, WHICH, True)
            release(step - 1, ring[2], STAGES)
        product = warpgroup_mma_wait(0, deps=[product])
        release(step, ring[2], STAGES)
        step += 1
        total += product  # meanwhile the other half's warps multiply
    return total, step


@gluon.jit
def _squared_rows(tile, width, WHICH: gl.constexpr):
    """The entries of this half of a tile that lie on its diagonal, enlarged by the floor."""
    row = gl.arange(0, HALF, ROW_SUMS) + WHICH * HALF
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, MMA))
    squares = gl.sum(gl.where(row[:, None] == column[None, :], tile, 0.0), 1)
    return squares + width.to(gl.float32) * ROW_FLOOR


@gluon.jit
def _store(out_ptr, sums, times, WHICH: gl.constexpr):
    """This half's sums of a tile, one for each warp."""
    by_warp = sum_by_warp(sums[:, None], HALF, PARTS // 2) * times
    gl.store(
        out_ptr + WHICH * (PARTS // 2) + gl.arange(0, PARTS // 2, by_warp.type.layout), by_warp
    )


@gluon.jit
def _multiply(table, grid, results, ring, WHICH: gl.constexpr):
    """Four warps: one half of the rows of every tile of this program."""
    inputs_ptr, layers_ptr = table
    items, B, rows = grid
    sums_ptr, plane = results
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row, first, layers, b, slot, i, j = _item(item, inputs_ptr, B, rows)
        across = gl.where(i == j, 0, STAGES)
        times = gl.where(i == j, 1.0, 2.0)  # below the diagonal, for the tile above it as well
        d = gl.load(row + 3).to(gl.int32)
        AA, step = _tile(step, d, ring, across, WHICH)
        AA_sq = gl.sum(AA * AA, 1)
        A_sq = _squared_rows(AA, d, WHICH)
        for layer in range(first, first + layers):
            p = gl.load(layers_ptr + layer * 4 + 3).to(gl.int32)
            GG, step = _tile(step, p, ring, across, WHICH)
            out_ptr = sums_ptr + ((layer * B + b) * (rows * (rows + 1) // 2) + slot) * PARTS
            _store(out_ptr, gl.sum(AA * GG, 1), times, WHICH)
            _store(out_ptr + plane, AA_sq, times, WHICH)
            _store(out_ptr + 2 * plane, gl.sum(GG * GG, 1), times, WHICH)
            spread = gl.zeros_like(A_sq)
            if i == j:
                spread = gl.sqrt(A_sq * _squared_rows(GG, p, WHICH))
            _store(out_ptr + 3 * plane, spread, 1.0, WHICH)


# Sizes are not compiled in: there is nothing to gain, and where it knows that all tiles lie on the
# diagonal, Triton 3.6 fails.
@gluon.jit(do_not_specialize=["groups", "B", "T", "rows", "plane"])
def _gram_ring_kernel(
    inputs_ptr, layers_ptr, sums_ptr,
    groups, B, T, rows, plane,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """``triton._gram_kernel`` for operands of one 16-bit ``DTYPE`` that have features, in rows on
    16 bytes; launched with ``num_warps=4``, it leaves ``PARTS`` sums a tile."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 2)
    tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, BLOCK, BLOCK_F], layout)
    full, empty = barriers(STAGES)
    ring = (tiles, full, empty)
    table = (inputs_ptr, layers_ptr)
    grid = (groups * B * (rows * (rows + 1) // 2), B, rows)
    results = (sums_ptr, plane)
    gl.warp_specialize(
        [
            (_multiply, (table, grid, results, ring, 0)),
            (_multiply, (table, grid, results, ring, 1)),
            (_load, (table, grid, T, ring, DTYPE)),
        ],
        [4, 1],  # warps of the second and third, and registers of each of their threads
        [240, 24],
    )
