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

from flash_clipping.ops.runtime.tiles import tile_in_groups

load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # to 3.7

BLOCK = gl.constexpr(128)
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


@gluon.jit
def place_of(tile, tiles_p, tiles_d, GROUP: gl.constexpr):
    """First row and column of a tile; those that are at work at one time share what they read."""
    row, column = tile_in_groups(tile, tiles_p, tiles_d, GROUP)
    return row * BLOCK, column * BLOCK


@gluon.jit
def product_of(
    step, product, ring,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, WHICH: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """Start a step's ``gᵀ a``, and wait for the one before it. ``SPLIT``: g is the sum of two."""
    A_tiles, G_tiles, rest_tiles, full, _ = ring
    stage = step % STAGES
    wait_loaded(step, full, STAGES)
    g = G_tiles.index(2 * stage + WHICH).reshape([BLOCK_T, HALF]).permute((1, 0))
    a = A_tiles.index(stage).reshape([BLOCK_T, BLOCK])
    product = warpgroup_mma(g, a, product, use_acc=ADD, is_async=True)
    if SPLIT:
        rest = rest_tiles.index(2 * stage + WHICH).reshape([BLOCK_T, HALF]).permute((1, 0))
        product = warpgroup_mma(rest, a, product, use_acc=True, is_async=True)
    return warpgroup_mma_wait(2 if SPLIT else 1, deps=[product])


@gluon.jit
def add_products(
    step, end, coef, total, before, before_coef, ring,
    BLOCK_T: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, SPLIT: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """The products of steps up to ``end`` times their coefficient, added up in fp32.

    Tensor cores truncate what they add up, so they add up ``PROMOTE`` steps at most. ``before`` is
    the product that is still to be added to the total, and ``before_coef`` its coefficient.
    """
    while step < end:
        product = product_of(
            step, gl.zeros_like(before), ring, BLOCK_T, STAGES, SPLIT, WHICH, False
        )
        # The tensor cores are at work; now what they did before. Of a dropped sample nothing,
        # whatever its product is.
        if before_coef != 0:
            total += before_coef * before
        before_coef = coef
        last = gl.minimum(step + PROMOTE, end) - 1
        while step < last:
            step += 1
            product = product_of(step, product, ring, BLOCK_T, STAGES, SPLIT, WHICH, True)
            release(step - 1, ring[4], STAGES)
        before = warpgroup_mma_wait(0, deps=[product])
        release(step, ring[4], STAGES)
        step += 1
    return step, total, before, before_coef


@gluon.jit
def no_sums():
    """``total``, ``before`` and ``before_coef`` of :func:`add_products`, to begin with."""
    total = gl.zeros([HALF, BLOCK], gl.float32, MMA)
    before = gl.zeros([HALF, BLOCK], gl.float32, MMA)
    return total, before, gl.to_tensor(0.0)


@gluon.jit
def store_half(out_ptr, total, p0, d0, p, d, WHICH: gl.constexpr):
    """This half of a tile of ``[p, d]``."""
    row = p0 + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, MMA))
    column = d0 + gl.arange(0, BLOCK, gl.SliceLayout(0, MMA))
    place = out_ptr + row[:, None].to(gl.int64) * d + column[None, :]
    gl.store(place, total, mask=(row < p)[:, None] & (column < d)[None, :])
