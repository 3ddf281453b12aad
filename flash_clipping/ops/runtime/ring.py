"""A ring of stages in shared memory, for kernels on Hopper: one warp loads ahead of others that
multiply.

Where the same warps load and multiply, every operand of every tile begins with an empty pipeline,
and the tensor cores wait while sums are rounded or added up. Here one warp loads from tile to tile
into the ring. Two or three groups of four warps multiply, each 64 of a tile's rows, and what one
does with a product it does while others multiply, or while its next one is under way.

A *step* is what is loaded at one time; it has a stage of the ring until all groups have released
it. ``full`` and ``empty`` are a barrier for each stage.

This is written in Gluon, Triton's lower language, which is still experimental and has no
interpreter: a GPU tests it. :data:`~flash_clipping.ops.runtime.tiles.LAST_WITH_GLUON` says up to
which version of Triton it is used.
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

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.tiles import tile_in_groups

load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # to 3.7

BLOCK = gl.constexpr(128)
"""Side of a tile."""
HALF = gl.constexpr(64)
"""Rows of a tile that one group of warps multiplies."""
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def barriers(STAGES: gl.constexpr, GROUPS: gl.constexpr = 2):
    """``full`` and ``empty``: the first is met by a load, the second by all groups of warps."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), GROUPS)
    fence_async_shared()
    return full, empty


@gluon.jit
def wait_loaded(step, full, STAGES: gl.constexpr):
    """Until a step's operands are there."""
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)


@gluon.jit
def wait_released(step, empty, STAGES: gl.constexpr):
    """Until the stage of a step may be loaded again."""
    mbarrier.wait(empty.index(step % STAGES), step // STAGES & 1 ^ 1)


@gluon.jit
def release(step, empty, STAGES: gl.constexpr):
    """This group of warps needs a step's stage no more."""
    mbarrier.arrive(empty.index(step % STAGES))


@gluon.jit
def place_of(
    tile, p, d, ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """First row and column of a tile; those that are at work at one time share what they read."""
    row, column = tile_in_groups(tile, gl.cdiv(p, ROWS), gl.cdiv(d, COLUMNS), GROUP)
    return row * ROWS, column * COLUMNS


# -- sums of weighted products ---------------------------------------------------------------------
#
# Tiles are of two kinds:
#
# * short, 192 x 128, by three groups of warps: sum and product are in registers. While one group
#   adds its product to the sum, the others multiply.
# * long, 128 x 256, by two groups: operands are read less often. A product fills half of the
#   registers, so not all of the sum has room beside it: the left half of its columns is in
#   registers, the right half in shared memory. That is what tensor cores read all the time, so the
#   shorter the products are, the slower this is. The second group begins some steps after the first
#   (``lead`` is a barrier for that): one multiplies while the other adds its product to the sum.

NARROW = gl.constexpr(tiles.SHORT_TILE[1])
"""Columns of a short tile."""
WIDE = gl.constexpr(tiles.LONG_TILE[1])
"""Columns of a long tile."""
AHEAD = gl.constexpr(2)
"""Steps by which the first group of a long tile is ahead of the second."""
WIDE_MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
SUMS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Of sums in shared memory: eight rows, which a warp moves at one time, are in different banks."""
IN_ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
"""Of sums on their way out of shared memory: a warp stores 32 neighbours."""
PROMOTED = gl.constexpr(1024)
"""Positions that tensor cores add up at most, as they truncate."""


@gluon.constexpr_function
def _layout(columns):
    return MMA if columns == NARROW else WIDE_MMA


@gluon.jit
def room_for_sums(GROUPS: gl.constexpr, COLUMNS: gl.constexpr):
    """For each group the right half of its sum, or a row that nobody uses; and ``lead``."""
    rows: gl.constexpr = 1 if COLUMNS == NARROW else HALF
    sums = gl.allocate_shared_memory(gl.float32, [GROUPS, rows, COLUMNS // 2], SUMS)
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(lead, 1)
    return sums, lead


@gluon.jit
def take_turn(step, steps, turn, lead, ring, WHICH: gl.constexpr):
    """Begin a tile of so many steps: if it is long, the second group waits for the first.

    Not in a tile of fewer steps than the ring has stages: there the first could be ahead by more
    than one tile.

    Returns:
        The step at which the first group lets the second in, -1 for none; and the next turn.
    """
    in_turn = (steps >= ring[0].shape[0]) & (ring[0].shape[-1] == WIDE)
    if in_turn & (WHICH == 1):
        mbarrier.wait(lead, turn & 1)
        turn += 1
    return gl.where(in_turn & (WHICH == 0), step + AHEAD - 1, -1), turn


@gluon.jit
def _multiply(
    step, product, signal, lead, ring,
    SPLIT: gl.constexpr, WHICH: gl.constexpr, GOES_ON: gl.constexpr,
):  # fmt: skip
    """Begin to add ``gᵀ a`` over a step to a product, which begins with it unless it ``GOES_ON``.
    ``SPLIT``: g is the sum of two."""
    A_tiles, G_tiles, rest_tiles, full, _ = ring
    STAGES: gl.constexpr = A_tiles.shape[0]
    BLOCK_T: gl.constexpr = A_tiles.shape[-2]
    stage = step % STAGES
    place = G_tiles.shape[0] // STAGES * stage + WHICH
    wait_loaded(step, full, STAGES)
    a = A_tiles.index(stage).reshape([BLOCK_T, A_tiles.shape[-1]])
    g = G_tiles.index(place).reshape([BLOCK_T, HALF]).permute((1, 0))
    product = warpgroup_mma(g, a, product, use_acc=GOES_ON, is_async=True)
    if SPLIT:
        rest = rest_tiles.index(place).reshape([BLOCK_T, HALF]).permute((1, 0))
        product = warpgroup_mma(rest, a, product, is_async=True)
    is_first_of_two: gl.constexpr = (A_tiles.shape[-1] == WIDE) & (WHICH == 0)
    if (step == signal) & is_first_of_two:
        mbarrier.arrive(lead)
    return product


@gluon.jit
def _sides(x):
    """The left and the right half of the columns; each thread keeps what it has."""
    return x.reshape([HALF, 2, WIDE // 2]).permute((0, 2, 1)).split()


@gluon.jit
def no_sums(right):
    """What is in registers of a sum, to begin with; zeros in the right half."""
    COLUMNS: gl.constexpr = 2 * right.shape[1]
    zeros = gl.zeros([HALF, COLUMNS], gl.float32, _layout(COLUMNS))
    if COLUMNS == NARROW:
        return zeros
    else:
        left, of_right = _sides(zeros)
        right.store(of_right)
        return left


@gluon.jit
def add_products(
    step, end, coef, total, right, signal, lead, ring, SPLIT: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """The products of steps up to ``end`` times their coefficient, added up in fp32."""
    empty = ring[4]
    STAGES: gl.constexpr = ring[0].shape[0]
    PROMOTE: gl.constexpr = PROMOTED // ring[0].shape[-2]
    COLUMNS: gl.constexpr = ring[0].shape[-1]
    UNDER_WAY: gl.constexpr = 2 if SPLIT else 1  # multiplications of one step
    while step < end:
        # No minimum of this and the end, which the compiler would keep in registers of each thread.
        until = step + PROMOTE
        # Not cleared before: that would take as long as a step.
        product = gl.zeros([HALF, COLUMNS], gl.float32, _layout(COLUMNS))
        product = warpgroup_mma_wait(
            UNDER_WAY, deps=[_multiply(step, product, signal, lead, ring, SPLIT, WHICH, False)]
        )
        step += 1
        while (step < end) & (step < until):
            product = warpgroup_mma_wait(
                UNDER_WAY, deps=[_multiply(step, product, signal, lead, ring, SPLIT, WHICH, True)]
            )
            release(step - 1, empty, STAGES)
            step += 1
        product = warpgroup_mma_wait(0, deps=[product])
        release(step - 1, empty, STAGES)
        if coef != 0:  # of a dropped sample nothing, whatever its product is
            if COLUMNS == NARROW:
                total += coef * product
            else:
                of_left, of_right = _sides(product)
                total += coef * of_left
                right.store(right.load(of_right.type.layout) + coef * of_right)
    return step, total


@gluon.jit
def _store(out_ptr, sums, p0, d0, p, d, row_stride, column_stride):
    layout: gl.constexpr = sums.type.layout
    rows = p0 + gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
    columns = d0 + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    place = rows[:, None].to(gl.int64) * row_stride + columns[None, :].to(gl.int64) * column_stride
    gl.store(out_ptr + place, sums, mask=(rows < p)[:, None] & (columns < d)[None, :])


@gluon.jit
def store_sums(
    out_ptr, total, right, p0, d0, p, d, row_stride, column_stride, WHICH: gl.constexpr
):  # fmt: skip
    """This group's rows of a tile of ``[p, d]``. ``column_stride`` of a long tile: 1."""
    p0 += WHICH * HALF
    if 2 * right.shape[1] == NARROW:
        _store(out_ptr, total, p0, d0, p, d, row_stride, column_stride)
    else:
        _store(out_ptr, right.load(IN_ROWS), p0, d0 + WIDE // 2, p, d, row_stride, 1)
        right.store(total)
        _store(out_ptr, right.load(IN_ROWS), p0, d0, p, d, row_stride, 1)
