"""Kernel for clipped sums: one launch over the tiles of many layers' results.

B samples, T positions, d input features, p output features.

A program owns a tile of a layer's result and walks over all positions of all samples. What the
tensor cores add up is one sample's product, or a part of it; its coefficient is applied to that in
fp32. So nothing is scaled in memory, one sample's rounding does not depend on another's, and a
dropped sample (coefficient 0) adds nothing even where its operands are not finite. A table names
the operands of all layers: a product that takes the device ten microseconds takes the host longer
than that to launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.clipped_sum import COLUMNS, Kind, Pair, kinds_of, reference
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.backend import full_precision
from flash_clipping.ops.runtime.shapes import LaunchCache
from flash_clipping.ops.runtime.tables import Table, firsts_of, is_whole
from flash_clipping.ops.runtime.tiles import (
    has_gluon,
    jit,
    launch,
    load_tile,
    operand,
    row_of,
    tile_in_groups,
)

BLOCK = 128
"""Side of a tile of the result."""


@jit
def _clipped_sums_kernel(
    table_ptr, coef_ptr,
    layers, count, B, T,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, G_WHOLE: tl.constexpr, A_WHOLE: tl.constexpr,
    TMA: tl.constexpr, LAYERS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, PROMOTE: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    steps = tl.cdiv(T, BLOCK_T)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        row = table_ptr + row_of(table_ptr, layers, item, COLUMNS, LAYERS) * COLUMNS
        G_ptr, G_stride_b, G_stride_t, p = operand(row, DTYPE, ALIGNED, G_WHOLE)
        A_ptr, A_stride_b, A_stride_t, d = operand(row + 4, DTYPE, ALIGNED, A_WHOLE)
        out_ptr = tl.multiple_of(tl.load(row + 8).to(tl.pointer_type(tl.float32)), 16)
        if TMA:
            A = tl.make_tensor_descriptor(
                A_ptr, [B, T, d], [A_stride_b, A_stride_t, 1], [1, BLOCK_T, BLOCK]
            )
            G = tl.make_tensor_descriptor(
                G_ptr, [B, T, p], [G_stride_b, G_stride_t, 1], [1, BLOCK_T, BLOCK]
            )
        else:
            A, G = A_ptr, G_ptr
        tile = item - tl.load(row + COLUMNS - 1).to(tl.int32)
        tile_p, tile_d = tile_in_groups(tile, tl.cdiv(p, BLOCK), tl.cdiv(d, BLOCK), GROUP)
        p0, d0 = tile_p * BLOCK, tile_d * BLOCK
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        for step in range(0, B * steps):
            b = step // steps
            part = step % steps
            t = part * BLOCK_T
            g = load_tile(G, b, t, p0, T, p, G_stride_b, G_stride_t, BLOCK_T, BLOCK, TMA)
            a = load_tile(A, b, t, d0, T, d, A_stride_b, A_stride_t, BLOCK_T, BLOCK, TMA)
            product = tl.dot(tl.trans(g), a, product, input_precision=PRECISION)
            # See gram/triton.py: the accumulator of the tensor cores truncates.
            if (part % PROMOTE == PROMOTE - 1) | (part == steps - 1):
                coef = tl.load(coef_ptr + b).to(tl.float32)
                total += tl.where(coef == 0, 0.0, coef * product)
                product = tl.zeros((BLOCK, BLOCK), tl.float32)
        rows = p0 + tl.arange(0, BLOCK)[:, None]
        columns = d0 + tl.arange(0, BLOCK)[None, :]
        place = out_ptr + rows.to(tl.int64) * d + columns
        tl.store(place, total, mask=(rows < p) & (columns < d))


class Products(Table):
    """The table of one launch, for pairs of one B, T and dtype."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        super().__init__(COLUMNS)
        #: ``(p, d)`` of every result.
        self.shapes = [(G.shape[2], A.shape[2]) for A, G in pairs]
        #: Whether rows of these operands are multiples of 16 bytes as well, in all pairs.
        self.G_whole = all([is_whole(G.shape[2], G.element_size()) for _, G in pairs])
        self.A_whole = all([is_whole(A.shape[2], A.element_size()) for A, _ in pairs])
        for A, G in pairs:
            self.numbers.extend(self.describe(G))
            self.numbers.extend(self.describe(A))
            self.numbers.extend((0, 0))

    def cut(self, tile: tuple[int, int]) -> int:
        """Share out tiles of so many rows and columns, short ones turned where these are fewer; how
        many there are."""
        rows, columns = tile
        counts = [tiles.cdiv(p, rows) * tiles.cdiv(d, columns) for p, d in self.shapes]
        if tile == tiles.SHORT_TILE:
            turned = [tiles.cdiv(d, rows) * tiles.cdiv(p, columns) for p, d in self.shapes]
            counts = list(map(min, counts, turned))
        firsts, count = firsts_of(counts)
        self.set_column(COLUMNS - 1, firsts)
        return count

    def read(self, pairs: Sequence[Pair]) -> None:
        """Take the addresses of operands of the layout that the table was made for."""
        self.set_column(0, [G.data_ptr() for _, G in pairs])
        self.set_column(4, [A.data_ptr() for A, _ in pairs])


MOST_ROWS = 64
"""Samples of one position up to which a program takes a step for each of them; for more, one
product of a library, in fp32. A classifier of 512 samples took the kernel 0.6 ms on an H200."""

FEWEST = 16
"""Rows of a table that a kernel is compiled for at least: many tables, few kernels."""

MOST_SHORT = 384
"""Positions of a sample up to which tiles are short ones, in which adding its product takes less
(benchmarks/lab/NOTES.md)."""

FEWEST_STEPS = 48
"""Steps of 32 positions from which on they are: they take longer to store."""


def ring_constants(B: int, T: int) -> dict[str, int]:
    """Of the kernel for Hopper, for B samples of T positions."""
    steps = tiles.cdiv(T, 32)
    if T > MOST_SHORT or B * steps < FEWEST_STEPS:
        (rows, columns), positions, stages = tiles.LONG_TILE, 32, 6
    elif steps % 2:  # of steps of 64, half of the last would be empty
        (rows, columns), positions, stages = tiles.SHORT_TILE, 32, 11
    else:
        (rows, columns), positions, stages = tiles.SHORT_TILE, 64, 5
    return dict(ROWS=rows, COLUMNS=columns, BLOCK_T=positions, STAGES=stages)


def constants_for(dtype: torch.dtype, tma: bool) -> dict[str, Any]:
    """By rule, not by search: few kernels, quick to compile."""
    usual = dict(TMA=tma, num_warps=8)
    if dtype == torch.float32:
        return dict(usual, BLOCK_T=32, PROMOTE=2, num_stages=3)
    return dict(usual, BLOCK_T=64, PROMOTE=16, num_stages=4 if tma else 3)


def clipped_sums_many(
    pairs: Sequence[Pair], coef_B: Tensor, memo: LaunchCache | None = None
) -> list[Tensor]:
    sums: dict[int, Tensor] = {}
    memo = {} if memo is None else memo
    kinds: dict[Kind, list[int]] | None = memo.get("kinds")
    if kinds is None:
        kinds = memo["kinds"] = kinds_of(pairs)
    for kind, members in kinds.items():
        alike = [pairs[i] for i in members]
        if kind.T == 1 and kind.small and kind.B > MOST_ROWS:
            with full_precision(coef_B.device):
                products = reference.clipped_sums_many(alike, coef_B)
            sums.update(zip(members, products, strict=True))
            continue
        work: Products | None = memo.get(kind)
        if kind.A_dtype != kind.G_dtype:
            dtype = torch.promote_types(kind.A_dtype, kind.G_dtype)
            alike = [(A.to(dtype), G.to(dtype)) for A, G in alike]
            kind = kind._replace(A_dtype=dtype, G_dtype=dtype)
            work = Products(alike)
        elif work is None:
            work = Products(alike)
            if not work.copied:
                memo[kind] = work
        else:
            work.read(alike)
        sums.update(zip(members, launch_clipped_sums(work, kind, coef_B), strict=True))
    return [sums[i] for i in range(len(pairs))]


def launch_clipped_sums(
    work: Products, kind: Kind, coef_B: Tensor, constants: dict[str, Any] | None = None
) -> list[Tensor]:
    """One launch for products of one kind: ``[p, d]`` of every pair, in fp32. ``constants``: for
    tests, those of the kernel that any GPU runs."""
    device, dtype = coef_B.device, kind.A_dtype
    tma = work.aligned and tiles.has_tma(device)
    on_hopper = tma and dtype != torch.float32 and tiles.is_hopper(device) and has_gluon()
    ring = constants is None and on_hopper
    results = [torch.empty(shape, dtype=torch.float32, device=device) for shape in work.shapes]
    work.set_column(8, [result.data_ptr() for result in results])
    layers = len(results)
    tile = ring_constants(kind.B, kind.T) if ring else dict(ROWS=BLOCK, COLUMNS=BLOCK)
    count = work.cut((tile["ROWS"], tile["COLUMNS"]))
    arguments = (work.on(device), coef_B.contiguous(), layers, count, kind.B, kind.T)
    if ring:
        from flash_clipping.ops.clipped_sum.hopper import _clipped_sums_ring_kernel

        launch(
            _clipped_sums_ring_kernel, min(count, tiles.sm_count(device)), *arguments,
            DTYPE=tiles.TL_DTYPE[dtype], workspace=True, num_warps=4, **tile,
        )  # fmt: skip
    else:
        # A descriptor takes as long to make as the tile of a small layer, and this no longer than a
        # program takes to start.
        constants = constants or constants_for(dtype, tma and not kind.small)
        programs = count if kind.small else min(count, tiles.sm_count(device))
        launch(
            _clipped_sums_kernel, programs, *arguments,
            DTYPE=tiles.TL_DTYPE[dtype], ALIGNED=work.aligned,
            G_WHOLE=work.aligned and work.G_whole, A_WHOLE=work.aligned and work.A_whole,
            LAYERS=max(FEWEST, tiles.next_power_of_2(layers)), COLUMNS=COLUMNS, BLOCK=BLOCK,
            GROUP=8, PRECISION=tiles.dot_precision(dtype), workspace=constants["TMA"], **constants,
        )  # fmt: skip
    work.held = []
    return results
