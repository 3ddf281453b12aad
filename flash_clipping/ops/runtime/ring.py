"""A ring of stages in shared memory, for kernels on Hopper: one warp loads ahead of others that
multiply.

Where the same warps load and multiply, every operand of every tile begins with an empty pipeline,
and the tensor cores wait while sums are rounded or added up. Here one warp loads from tile to tile
into the ring. Two groups of four warps multiply, each half of a tile's rows, and what they do with
a product they do while the next one is under way.

A *step* is what is loaded at one time; it has a stage of the ring until both halves have released
it. ``full`` and ``empty`` are a barrier for each stage.

This is written in Gluon, Triton's lower language, which is still experimental and has no
interpreter: a GPU tests it. :data:`~flash_clipping.ops.runtime.launches.LAST_WITH_GLUON` says up to
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

BLOCK = gl.constexpr(tiles.RING_TILE[0])
"""Side of a tile."""
HALF = gl.constexpr(64)
"""Rows of a tile that one group of warps multiplies."""
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """``full`` and ``empty``: the first is met by a load, the second by both halves."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    fence_async_shared()
    return full, empty


@gluon.jit
def wait_loaded(step, full, STAGES: gl.constexpr):
    """Until a step's operands are there."""
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)


@gluon.jit
def wait_released(step, empty, STAGES: gl.constexpr):
    """Until the stage of a step may be loaded anew."""
    mbarrier.wait(empty.index(step % STAGES), step // STAGES & 1 ^ 1)


@gluon.jit
def release(step, empty, STAGES: gl.constexpr):
    """This half of the rows needs a step's stage no more."""
    mbarrier.arrive(empty.index(step % STAGES))


# -- sums of weighted products ---------------------------------------------------------------------
#
# The larger a tile is, the less often operands are read. One of 128 x 256 fills half of the
# registers with a product, so not all of the sum has room beside it: the left half of its columns
# is in registers, the right half in shared memory. While one half of the rows adds its product to
# the sum the other one multiplies: it begins some steps later (``lead`` is a barrier for that).
#
# What bounds it is shared memory: what tensor cores read, what loads write and, for each product,
# half of the sum. So it is slower the shorter the products are.

WIDE = gl.constexpr(tiles.RING_TILE[1])
"""Columns of a tile of sums."""
AHEAD = gl.constexpr(2)
"""Steps by which the first half of the rows is ahead of the second."""
WIDE_MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
SUMS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Of sums in shared memory: eight rows, which a warp moves at one time, are in different banks."""
IN_ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
"""Of sums on their way out: a warp stores 32 neighbours."""


@gluon.jit
def room_for_sums():
    """The right halves of both sums, and ``lead``."""
    sums = gl.allocate_shared_memory(gl.float32, [2, HALF, WIDE // 2], SUMS)
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(lead, 1)
    return sums, lead


@gluon.jit
def place_of(tile, p, d, GROUP: gl.constexpr):
    """First row and column of a tile; those that are at work at one time share what they read."""
    row, column = tile_in_groups(tile, gl.cdiv(p, BLOCK), gl.cdiv(d, WIDE), GROUP)
    return row * BLOCK, column * WIDE


@gluon.jit
def take_turn(step, steps, turn, lead, STAGES: gl.constexpr, WHICH: gl.constexpr):
    """Begin a tile of so many steps: the second half of the rows waits for the first.

    Not in a tile of fewer steps than the ring has stages: there the first half could be ahead by
    more than one tile.

    Returns:
        The step at which the first half lets the second in, -1 for none; and the next turn.
    """
    in_turn = steps >= STAGES
    if in_turn & (WHICH == 1):
        mbarrier.wait(lead, turn & 1)
        turn += 1
    return gl.where(in_turn & (WHICH == 0), step + AHEAD - 1, -1), turn


@gluon.jit
def _product(
    step, end, signal, lead, ring,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """``gᵀ a`` over the steps up to ``end``. ``SPLIT``: g is the sum of two."""
    A_tiles, G_tiles, rest_tiles, full, empty = ring
    product = gl.zeros([HALF, WIDE], gl.float32, WIDE_MMA)
    first = step
    while step < end:
        stage = step % STAGES
        wait_loaded(step, full, STAGES)
        g = G_tiles.index(2 * stage + WHICH).reshape([BLOCK_T, HALF]).permute((1, 0))
        a = A_tiles.index(stage).reshape([BLOCK_T, WIDE])
        product = warpgroup_mma(g, a, product, use_acc=step > first, is_async=True)
        if SPLIT:
            rest = rest_tiles.index(2 * stage + WHICH).reshape([BLOCK_T, HALF]).permute((1, 0))
            product = warpgroup_mma(rest, a, product, is_async=True)
        if step == signal:
            mbarrier.arrive(lead)
        product = warpgroup_mma_wait(2 if SPLIT else 1, deps=[product])
        if step > first:
            release(step - 1, empty, STAGES)
        step += 1
    product = warpgroup_mma_wait(0, deps=[product])
    release(step - 1, empty, STAGES)
    return step, product


@gluon.jit
def _sides(x):
    """The left and the right half of the columns; each thread keeps what it has."""
    return x.reshape([HALF, 2, WIDE // 2]).permute((0, 2, 1)).split()


@gluon.jit
def no_sums(right):
    """The left half of a sum, to begin with; zeros in the right one."""
    left, zeros = _sides(gl.zeros([HALF, WIDE], gl.float32, WIDE_MMA))
    right.store(zeros)
    return left


@gluon.jit
def add_products(
    step, end, coef, left, right, signal, lead, ring,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, SPLIT: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """The products of steps up to ``end`` times their coefficient, added up in fp32.

    Tensor cores truncate what they add up, so they add up ``PROMOTE`` steps at most.
    """
    while step < end:
        until = gl.minimum(step + PROMOTE, end)
        step, product = _product(step, until, signal, lead, ring, BLOCK_T, STAGES, SPLIT, WHICH)
        if coef != 0:  # of a dropped sample nothing, whatever its product is
            of_left, of_right = _sides(product)
            left += coef * of_left
            right.store(right.load(of_right.type.layout) + coef * of_right)
    return step, left


@gluon.jit
def _store_side(out_ptr, side, p0, d0, p, d, WHICH: gl.constexpr):
    rows = p0 + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, IN_ROWS))
    columns = d0 + gl.arange(0, WIDE // 2, gl.SliceLayout(0, IN_ROWS))
    place = out_ptr + rows[:, None].to(gl.int64) * d + columns[None, :]
    gl.store(place, side.load(IN_ROWS), mask=(rows < p)[:, None] & (columns < d)[None, :])


@gluon.jit
def store_half(out_ptr, left, right, p0, d0, p, d, WHICH: gl.constexpr):
    """This half of the rows of a tile of ``[p, d]``."""
    _store_side(out_ptr, right, p0, d0 + WIDE // 2, p, d, WHICH)
    right.store(left)
    _store_side(out_ptr, right, p0, d0, p, d, WHICH)
