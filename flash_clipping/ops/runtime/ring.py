"""A ring of stages in shared memory, for kernels on Hopper: one warp loads ahead of others that
multiply.

Where the same warps load and multiply, every operand of every tile begins with an empty pipeline,
and the tensor cores wait while sums are rounded or added up. Here one warp loads from tile to tile
into the ring. Two or three groups of four warps multiply, each 64 of a tile's rows, and what one
does with a product it does while others multiply, or while its next one is under way.

A *step* is what is loaded at one time; it has a stage of the ring until all groups have released
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
    """Until the stage of a step may be loaded anew."""
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
# The sum and the product that is to be added to it are both in registers: in shared memory, which
# tensor cores read all the time, a sum would take longer the shorter the products are. So a tile
# has 192 x 128 elements, and three groups of warps multiply, each 64 rows. While one of them adds
# its product to the sum, the others multiply: each begins a step after the one before (``leads``).

ROWS = gl.constexpr(tiles.SUM_TILE[0])
COLUMNS = gl.constexpr(tiles.SUM_TILE[1])
GROUPS = gl.constexpr(3)
"""Of four warps, which multiply ``HALF`` rows each."""
K = gl.constexpr(16)
"""Positions that tensor cores multiply in one instruction."""


@gluon.jit
def barriers_of_sums(STAGES: gl.constexpr):
    """``full`` and ``empty``; and ``leads``, for each group that it may begin a tile."""
    leads = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(GROUPS):
        mbarrier.init(leads.index(group), 1)
    full, empty = barriers(STAGES, GROUPS)
    return full, empty, leads


@gluon.jit
def take_turn(step, steps, turn, leads, STAGES: gl.constexpr, WHICH: gl.constexpr):
    """Begin a tile of so many steps: a group of warps waits for the one before it.

    Not in a tile of fewer steps than the ring has stages: there a group could be ahead by more
    than one tile.

    Returns:
        The step at which this group lets the next one begin, -1 for none; and the next turn.
    """
    in_turn = steps >= STAGES
    if in_turn & (WHICH > 0):
        mbarrier.wait(leads.index(WHICH), turn & 1)
        turn += 1
    return gl.where(in_turn & (WHICH < GROUPS - 1), step, -1), turn


@gluon.jit
def _multiply(
    step, product, goes_on, ring,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, WHICH: gl.constexpr,
    AT: gl.constexpr, LENGTH: gl.constexpr,
):  # fmt: skip
    """Begin to add ``gᵀ a`` over ``LENGTH`` positions of a step, from ``AT`` on, to a product, or
    to begin one unless it ``goes_on``. ``SPLIT``: g is the sum of two."""
    A_tiles, G_tiles, rest_tiles, _, _ = ring
    stage = step % STAGES
    place = GROUPS * stage + WHICH
    a = A_tiles.index(stage).reshape([BLOCK_T, COLUMNS]).slice(AT, LENGTH)
    g = G_tiles.index(place).reshape([BLOCK_T, HALF]).slice(AT, LENGTH).permute((1, 0))
    product = warpgroup_mma(g, a, product, use_acc=goes_on, is_async=True)
    if SPLIT:
        rest = rest_tiles.index(place).reshape([BLOCK_T, HALF]).slice(AT, LENGTH).permute((1, 0))
        product = warpgroup_mma(rest, a, product, is_async=True)
    return product


@gluon.jit
def _product(
    step, end, few, product, signal, leads, ring,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, SPLIT: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """``gᵀ a`` over the steps up to ``end``, but over ``PROMOTE`` of them at most. ``product``: one
    that is no longer needed; its registers are taken, and not cleared."""
    full, empty = ring[3], ring[4]
    first = step
    # No minimum of these: the compiler would keep what comes of it in a register of each thread.
    until = step + PROMOTE
    whole = end - (few > 0)
    while (step < whole) & (step < until):
        wait_loaded(step, full, STAGES)
        product = _multiply(
            step, product, step > first, ring, BLOCK_T, STAGES, SPLIT, WHICH, 0, BLOCK_T
        )
        if step == signal:
            mbarrier.arrive(leads.index((WHICH + 1) % GROUPS))
        product = warpgroup_mma_wait(2 if SPLIT else 1, deps=[product])
        if step > first:
            release(step - 1, empty, STAGES)
        step += 1
    if (step < end) & (step < until):
        wait_loaded(step, full, STAGES)
        for part in gl.static_range(BLOCK_T // K - 1):
            if few > K * part:
                begun = _multiply(
                    step, product, (step > first) | (part > 0), ring,
                    BLOCK_T, STAGES, SPLIT, WHICH, K * part, K,
                )  # fmt: skip
                product = warpgroup_mma_wait(0, deps=[begun])
        if step == signal:
            mbarrier.arrive(leads.index((WHICH + 1) % GROUPS))
        if step > first:
            release(step - 1, empty, STAGES)
        step += 1
    product = warpgroup_mma_wait(0, deps=[product])
    release(step - 1, empty, STAGES)
    return step, product


@gluon.jit
def no_sums():
    """A sum, and a product, to begin with."""
    return gl.zeros([HALF, COLUMNS], gl.float32, MMA), gl.zeros([HALF, COLUMNS], gl.float32, MMA)


@gluon.jit
def add_products(
    step, end, few, coef, total, product, signal, leads, ring,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, SPLIT: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """The products of steps up to ``end`` times their coefficient, added up in fp32.

    Tensor cores truncate what they add up, so they add up ``PROMOTE`` steps at most. ``few``: how
    many positions the last step has, where these are at least ``K`` fewer than ``BLOCK_T``; else 0.
    """
    while step < end:
        step, product = _product(
            step, end, few, product, signal, leads, ring, BLOCK_T, STAGES, PROMOTE, SPLIT, WHICH
        )
        if coef != 0:  # of a dropped sample nothing, whatever its product is
            total += coef * product
    return step, total, product


@gluon.jit
def store_sums(
    out_ptr, total, p0, d0, p, d, row_stride, column_stride, WHICH: gl.constexpr
):  # fmt: skip
    """This group's rows of a tile of ``[p, d]``."""
    rows = p0 + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, MMA))
    columns = d0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
    place = rows[:, None].to(gl.int64) * row_stride + columns[None, :].to(gl.int64) * column_stride
    gl.store(out_ptr + place, total, mask=(rows < p)[:, None] & (columns < d)[None, :])
