"""Per-sample gradients on Hopper: formed, rounded, kept and squared, by
:mod:`flash_clipping.ops.runtime.ring`.

A sample's gradient is one product, so a group of warps needs one accumulator, of 64 x 256. When it
is complete it is rounded, two columns in a word; it is stored, squared and summed from these 64
registers while the next tile's product is under way.

B samples, T positions, d input features, p output features.
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

from flash_clipping.ops.runtime.ring import (
    BLOCK,
    HALF,
    WIDE,
    WIDE_MMA,
    barriers,
    load_async,
    place_of,
    release,
    wait_loaded,
    wait_released,
)
from flash_clipping.ops.runtime.tiles import sum_by_warp

store_async = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # to 3.7

BLOCK_T = gl.constexpr(64)
STAGES = gl.constexpr(4)
EACH = gl.constexpr(64)
"""Columns that are stored at one time."""
GROUP = gl.constexpr(8)
PARTS = gl.constexpr(8)
"""Squared norms that a tile leaves, one for each warp that multiplies."""


@gluon.jit
def _place(tile, d, p):
    """Sample, first row and first column of a tile."""
    each = gl.cdiv(p, BLOCK) * gl.cdiv(d, WIDE)
    p0, d0 = place_of(tile % each, p, d, BLOCK, WIDE, GROUP)
    return tile // each, p0, d0


@gluon.jit
def _load(operands, sizes, count, ring):
    """One warp loads the operands of every step; positions past a sample's last are zero."""
    A_ptr, G_ptr, A_strides, G_strides = operands
    B, T, d, p = sizes
    A_tiles, G_tiles, full, empty = ring
    A = tma.make_tensor_descriptor(
        A_ptr, [B, T, d], [A_strides[0], A_strides[1], 1],
        [1, BLOCK_T, WIDE], A_tiles.type.layout,
    )  # fmt: skip
    G = tma.make_tensor_descriptor(
        G_ptr, [B, T, p], [G_strides[0], G_strides[1], 1],
        [1, BLOCK_T, HALF], G_tiles.type.layout,
    )  # fmt: skip
    size: gl.constexpr = BLOCK_T * (BLOCK + WIDE) * (A_ptr.dtype.element_ty.primitive_bitwidth // 8)
    step = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        b, p0, d0 = _place(tile, d, p)
        for t in range(0, T, BLOCK_T):
            stage = step % STAGES
            loaded = full.index(stage)
            wait_released(step, empty, STAGES)
            mbarrier.expect(loaded, size)
            load_async(G, [b, t, p0], loaded, G_tiles.index(2 * stage))
            load_async(A, [b, t, d0], loaded, A_tiles.index(stage))
            load_async(G, [b, t, p0 + HALF], loaded, G_tiles.index(2 * stage + 1))
            step += 1


@gluon.jit
def _halves(tile):
    """Left and right columns of a tile."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    return gl.split(tile.reshape([rows, 2, columns // 2]).permute((0, 2, 1)))


@gluon.jit
def _in_pairs(tile, DTYPE: gl.constexpr):
    """A tile rounded, two columns in a word: half of the registers, by half of the instructions."""
    rows: gl.constexpr = tile.shape[0]
    columns: gl.constexpr = tile.shape[1]
    even, odd = gl.split(tile.reshape([rows, columns // 2, 2]))
    name: gl.constexpr = "bf16" if DTYPE.is_bf16() else "f16"
    return gl.inline_asm_elementwise(
        "cvt.rn." + name + "x2.f32 $0, $2, $1;", "=r,r,r", [even, odd],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _squares(pairs, DTYPE: gl.constexpr):
    """The sum of the squares of both numbers of a word."""
    name: gl.constexpr = "bf16" if DTYPE.is_bf16() else "f16"
    even, odd = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32." + name + " $0, low; cvt.f32."
        + name + " $1, high; }", "=r,=r,r", [pairs],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return even * even + odd * odd


@gluon.jit
def _store(out, b, row, column, pairs, buffer):
    """Store some columns; the squares of what is stored."""
    words: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    tma.store_wait(1)  # of this buffer
    buffer._reinterpret(gl.int32, [HALF, EACH // 2], words).store(pairs)
    fence_async_shared()
    store_async(out, [b, row, column], buffer)
    return _squares(pairs, out.dtype)


@gluon.jit
def _keep(out, partial_ptr, kept, tile, place, buffers, WHICH: gl.constexpr):
    """Store half of the rows of a tile, and a part of the squared norm for each warp."""
    b, p0, d0 = place
    row = p0 + WHICH * HALF
    one, other = buffers.index(2 * WHICH), buffers.index(2 * WHICH + 1)
    left, right = _halves(kept)
    first, second = _halves(left)
    third, fourth = _halves(right)
    squares = _store(out, b, row, d0, first, one)
    squares += _store(out, b, row, d0 + EACH, second, other)
    squares += _store(out, b, row, d0 + 2 * EACH, third, one)
    squares += _store(out, b, row, d0 + 3 * EACH, fourth, other)
    sums = sum_by_warp(squares, HALF, PARTS // 2)
    parts = tile * PARTS + WHICH * (PARTS // 2) + gl.arange(0, PARTS // 2, sums.type.layout)
    gl.store(partial_ptr + parts, sums)


@gluon.jit
def _multiply(results, sizes, count, ring, buffers, WHICH: gl.constexpr):
    """Four warps: one half of the rows of every tile of this program."""
    out_ptr, partial_ptr = results
    B, T, d, p = sizes
    A_tiles, G_tiles, full, empty = ring
    stride_b = p.to(gl.int64) * d
    out = tma.make_tensor_descriptor(
        out_ptr, [B, p, d], [stride_b, d, 1], [1, HALF, EACH], buffers.type.layout
    )
    # The tile before, rounded, and where it belongs.
    kept = _in_pairs(gl.zeros([HALF, WIDE], gl.float32, WIDE_MMA), out.dtype)
    before = gl.to_tensor(0)
    place = (before, before, before)
    step = 0
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        product = gl.zeros([HALF, WIDE], gl.float32, WIDE_MMA)
        begin = step
        end = step + gl.cdiv(T, BLOCK_T)
        while step < end:
            stage = step % STAGES
            wait_loaded(step, full, STAGES)
            g = G_tiles.index(2 * stage + WHICH).reshape([BLOCK_T, HALF]).permute((1, 0))
            a = A_tiles.index(stage).reshape([BLOCK_T, WIDE])
            product = warpgroup_mma(g, a, product, is_async=True)
            product = warpgroup_mma_wait(1, deps=[product])
            if step > begin:
                release(step - 1, empty, STAGES)
            elif step > 0:  # the tensor cores are at work; now what they did before
                _keep(out, partial_ptr, kept, before, place, buffers, WHICH)
            step += 1
        before = tile
        place = _place(tile, d, p)
        product = warpgroup_mma_wait(0, deps=[product])
        release(step - 1, empty, STAGES)
        kept = _in_pairs(product, out.dtype)
    _keep(out, partial_ptr, kept, before, place, buffers, WHICH)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        *("B", "T", "d", "p", "A_stride_b", "A_stride_t", "G_stride_b", "G_stride_t", "count"),
    ]
)
def _outer_ring_kernel(
    A_ptr, G_ptr, out_ptr, partial_ptr,
    B, T, d, p, A_stride_b, A_stride_t, G_stride_b, G_stride_t, count,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """``triton._outer_kernel`` for gradients that are kept, of operands of one 16-bit ``DTYPE`` in
    rows on 16 bytes; launched with ``num_warps=4``."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 3)
    A_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, BLOCK_T, WIDE], layout)
    G_tiles = gl.allocate_shared_memory(DTYPE, [2 * STAGES, 1, BLOCK_T, HALF], layout)
    buffers = gl.allocate_shared_memory(DTYPE, [4, 1, HALF, EACH], layout)
    full, empty = barriers(STAGES)
    ring = (A_tiles, G_tiles, full, empty)
    sizes = (B, T, d, p)
    operands = (A_ptr, G_ptr, (A_stride_b, A_stride_t), (G_stride_b, G_stride_t))
    results = (out_ptr, partial_ptr)
    gl.warp_specialize(
        [
            (_multiply, (results, sizes, count, ring, buffers, 0)),
            (_multiply, (results, sizes, count, ring, buffers, 1)),
            (_load, (operands, sizes, count, ring)),
        ],
        [4, 1],  # warps of the second and third, and registers of each of their threads
        [240, 24],
    )
