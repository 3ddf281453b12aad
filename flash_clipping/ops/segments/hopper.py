"""Clipped sums of groups on Hopper, loaded by one warp and multiplied by others.

M blocks of 32 rows, E groups, B samples, d input features, p output features.

As :mod:`flash_clipping.ops.clipped_sum.hopper`, which has the same parts and says why they are so.
What differs: rows come in blocks, of a segment or of a group (``triton.blocks_kernel`` fills the
last one with zeros), and how many of these there are is read on the device.

Where segments are short, applying a coefficient to each one's product takes longer than the product
itself. There rows come multiplied by their coefficients, as two bf16 numbers that add up to
``coef · g`` within 2⁻¹⁷ of it, which the certificate covers
(:mod:`flash_clipping.ops.certificate`); both are multiplied, and a group is one long segment.

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

_load_async = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # to 3.7

BLOCK = gl.constexpr(128)
ROWS = gl.constexpr(32)
"""Of a block: what is loaded at one time."""
HALF = gl.constexpr(64)
STAGES = gl.constexpr(12)
SPLIT_STAGES = gl.constexpr(8)
PROMOTE = gl.constexpr(32)
"""Blocks after which a segment's product is added to the sum: tensor cores truncate theirs."""
GROUP = gl.constexpr(8)
MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


@gluon.constexpr_function
def _stages(split):
    return SPLIT_STAGES if split else STAGES


@gluon.jit
def _place(item, group_ptr, p, d):
    """Group of an item, and row and column of its tile; those that are at work at one time share
    what they read."""
    tiles_p, tiles_d = gl.cdiv(p, BLOCK), gl.cdiv(d, BLOCK)
    group = gl.load(group_ptr + item // (tiles_p * tiles_d)).to(gl.int32)
    tile = item % (tiles_p * tiles_d)
    first = tile // (GROUP * tiles_d) * GROUP
    height = gl.minimum(tiles_p - first, GROUP)
    within = tile % (GROUP * tiles_d)
    return group, (first + within % height) * BLOCK, within // height * BLOCK


@gluon.jit
def _load(operands, lists, grid, ring, DTYPE: gl.constexpr, SPLIT: gl.constexpr):
    """One warp: the operands of every block of every tile of this program."""
    STAGES: gl.constexpr = _stages(SPLIT)
    A_ptr, G_ptr, rest_ptr, A_width, G_width = operands
    firsts_ptr, group_ptr = lists
    items, B, M, d, p = grid
    A_tiles, G_tiles, rest_tiles, full, empty = ring
    size: gl.constexpr = (3 if SPLIT else 2) * ROWS * BLOCK * (DTYPE.primitive_bitwidth // 8)
    A = tma.make_tensor_descriptor(
        A_ptr, [M * ROWS, d], [A_width, 1], [ROWS, BLOCK], A_tiles.type.layout
    )
    G = tma.make_tensor_descriptor(
        G_ptr, [M * ROWS, p], [G_width, 1], [ROWS, HALF], G_tiles.type.layout
    )
    if SPLIT:
        rest = tma.make_tensor_descriptor(
            rest_ptr, [M * ROWS, p], [G_width, 1], [ROWS, HALF], G_tiles.type.layout
        )
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group, p0, d0 = _place(item, group_ptr, p, d)
        first = gl.load(firsts_ptr + group * B)
        last = gl.load(firsts_ptr + (group + 1) * B)
        for block in range(first, last):
            stage = step % STAGES
            loaded = full.index(stage)
            mbarrier.wait(empty.index(stage), step // STAGES & 1 ^ 1)
            mbarrier.expect(loaded, size)
            row = block * ROWS
            _load_async(G, [row, p0], loaded, G_tiles.index(2 * stage))
            _load_async(G, [row, p0 + HALF], loaded, G_tiles.index(2 * stage + 1))
            if SPLIT:
                _load_async(rest, [row, p0], loaded, rest_tiles.index(2 * stage))
                _load_async(rest, [row, p0 + HALF], loaded, rest_tiles.index(2 * stage + 1))
            _load_async(A, [row, d0], loaded, A_tiles.index(stage))
            step += 1


@gluon.jit
def _step(step, product, ring, SPLIT: gl.constexpr, WHICH: gl.constexpr, ADD: gl.constexpr):
    """Start a block's product and wait for the one before it."""
    STAGES: gl.constexpr = _stages(SPLIT)
    A_tiles, G_tiles, rest_tiles, full, _ = ring
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    a = A_tiles.index(stage)
    g = G_tiles.index(2 * stage + WHICH).permute((1, 0))
    product = warpgroup_mma(g, a, product, use_acc=ADD, is_async=True)
    if SPLIT:
        rest = rest_tiles.index(2 * stage + WHICH).permute((1, 0))
        product = warpgroup_mma(rest, a, product, use_acc=True, is_async=True)
    return warpgroup_mma_wait(2 if SPLIT else 1, deps=[product])


@gluon.jit
def _multiply(
    coef_ptr,
    out_ptr,
    lists,
    grid,
    ring,
    SPLIT: gl.constexpr,
    WHICH: gl.constexpr,
):
    """Four warps: one half of the rows of every tile of this program."""
    STAGES: gl.constexpr = _stages(SPLIT)
    firsts_ptr, group_ptr = lists
    items, B, M, d, p = grid
    empty = ring[4]
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group, p0, d0 = _place(item, group_ptr, p, d)
        total = gl.zeros([HALF, BLOCK], gl.float32, MMA)
        before = gl.zeros([HALF, BLOCK], gl.float32, MMA)
        before_coef = gl.to_tensor(0.0)
        first = gl.load(firsts_ptr + group * B)
        for b in range(B):
            coef = 1.0 if SPLIT else gl.load(coef_ptr + b)
            last = gl.load(firsts_ptr + group * B + b + 1)
            end = step + last - first
            first = last
            while step < end:
                product = _step(step, gl.zeros_like(before), ring, SPLIT, WHICH, False)
                # The tensor cores are at work; now what they did before.
                if before_coef != 0:
                    total += before_coef * before
                before_coef = coef
                part_end = gl.minimum(step + PROMOTE, end) - 1
                while step < part_end:
                    step += 1
                    product = _step(step, product, ring, SPLIT, WHICH, True)
                    mbarrier.arrive(empty.index((step - 1) % STAGES))
                before = warpgroup_mma_wait(0, deps=[product])
                mbarrier.arrive(empty.index(step % STAGES))
                step += 1
        if before_coef != 0:
            total += before_coef * before
        row = p0 + WHICH * HALF + gl.arange(0, HALF, gl.SliceLayout(1, MMA))
        column = d0 + gl.arange(0, BLOCK, gl.SliceLayout(0, MMA))
        place = out_ptr + group.to(gl.int64) * p * d
        place = place + row[:, None].to(gl.int64) * d + column[None, :]
        gl.store(place, total, mask=(row < p)[:, None] & (column < d)[None, :])


@gluon.jit(do_not_specialize=["items", "B", "M"])
def grouped_sums_ring_kernel(
    A_ptr, G_ptr, rest_ptr, coef_ptr, out_ptr, firsts_ptr, group_ptr,
    items, B, M, d, p, A_width, G_width,
    DTYPE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """What ``triton.grouped_sums_kernel`` does, for operands of one 16-bit ``DTYPE`` in blocks;
    with ``SPLIT`` of rows that are multiplied by their coefficients, for which B is 1. Launched
    with ``num_warps=4``."""
    STAGES: gl.constexpr = _stages(SPLIT)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 2)
    A_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, BLOCK], layout)
    G_tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, ROWS, HALF], layout)
    if SPLIT:
        rest_tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, ROWS, HALF], layout)
    else:
        rest_tiles = G_tiles
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    fence_async_shared()
    ring = (A_tiles, G_tiles, rest_tiles, full, empty)
    grid = (items, B, M, d, p)
    operands = (A_ptr, G_ptr, rest_ptr, A_width, G_width)
    lists = (firsts_ptr, group_ptr)
    gl.warp_specialize(
        [
            (_multiply, (coef_ptr, out_ptr, lists, grid, ring, SPLIT, 0)),
            (_multiply, (coef_ptr, out_ptr, lists, grid, ring, SPLIT, 1)),
            (_load, (operands, lists, grid, ring, DTYPE, SPLIT)),
        ],
        [4, 1],  # warps of the second and third, and registers of each of their threads
        [240, 24],
    )
