"""Kernel for gram norms: one launch over the tiles of many layers.

B samples, T positions, d input features, p output features, L layers that read one input.

A tile of ``A Aᵀ`` and the same tile of ``G Gᵀ`` are held in registers, multiplied and summed; only
tiles on and below the diagonal are computed, and those on it read their rows once.

Tensor cores truncate what they add up (:func:`flash_clipping.ops.error_bounds.gram_doubt`), so
after every ``PROMOTE`` steps the accumulator is added to one that rounds, and starts again at zero.
Each tile leaves four sums: of the squared norm, of the squares of both matrices' entries, and of
the spread.

Layers differ in their addresses and widths only, so a table in device memory names them and one
persistent grid walks over the tiles of all: no partly filled last wave for each layer, and one
launch where small layers would be bound by launches.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.error_bounds import FLOOR, gram_doubt
from flash_clipping.ops.gram.tiles import RING, Config, sample_of, tile_of
from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.shapes import Group, LaunchCache, SqnormBlock
from flash_clipping.ops.runtime.tables import is_whole, operand_row, to_device
from flash_clipping.ops.runtime.tiles import has_gluon, jit, launch, sum_by_warp

ROW_FLOOR = tl.constexpr(FLOOR)


@triton.jit
def _operand_tile(
    X_ptr,
    stride_t, T, F, i0, j0,
    BLOCK: tl.constexpr, BLOCK_F: tl.constexpr, PROMOTE: tl.constexpr, TMA: tl.constexpr,
    DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows ``i0..`` against rows ``j0..`` of one sample's ``X Xᵀ``; rows beyond T are zero."""
    if TMA:
        rows = tl.make_tensor_descriptor(X_ptr, [T, F], [stride_t, 1], [BLOCK, BLOCK_F])
    else:
        i = i0 + tl.arange(0, BLOCK)
        j = j0 + tl.arange(0, BLOCK)
        i_ptr = X_ptr + i.to(tl.int64)[:, None] * stride_t
        j_ptr = X_ptr + j.to(tl.int64)[:, None] * stride_t
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(0, tl.cdiv(F, BLOCK_F)):
        f = step * BLOCK_F
        if TMA:
            x = rows.load([i0, f])
        else:
            k = (f + tl.arange(0, BLOCK_F))[None, :]
            x = tl.load(i_ptr + k, mask=(i < T)[:, None] & (k < F), other=0.0)
        if DIAGONAL:
            y = x
        elif TMA:
            y = rows.load([j0, f])
        else:
            y = tl.load(j_ptr + k, mask=(j < T)[:, None] & (k < F), other=0.0)
        product = tl.dot(x, tl.trans(y), product, input_precision=PRECISION)
        if step % PROMOTE == PROMOTE - 1:
            total += product
            product = tl.zeros((BLOCK, BLOCK), tl.float32)
    return total + product


@triton.jit
def _group_tile(
    inputs_ptr, layers_ptr, sums_ptr,
    group, b, slot, slots, B, T, i0, j0, plane,
    BLOCK: tl.constexpr, BLOCK_F: tl.constexpr, PROMOTE: tl.constexpr, A_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
    DIAGONAL: tl.constexpr, PARTS: tl.constexpr, A_PRECISION: tl.constexpr,
    G_PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one sample: ``A Aᵀ`` once, then every layer that reads ``A``. Tiles on the
    diagonal leave their part of the spread as well."""
    row = inputs_ptr + group * 6
    first = tl.load(row + 4)
    layers = tl.load(row + 5)
    A_ptr, A_stride, d = sample_of(row, b, A_DTYPE, ALIGNED, WHOLE)
    AA = _operand_tile(
        A_ptr, A_stride, T, d, i0, j0,
        BLOCK, BLOCK_F, PROMOTE, TMA, DIAGONAL, A_PRECISION,
    )  # fmt: skip
    TIMES: tl.constexpr = 1 if DIAGONAL else 2  # below it, for the tile above it as well
    AA_sq = sum_by_warp(AA * AA, BLOCK, PARTS) * TIMES
    if DIAGONAL:
        on_diagonal = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
        A_sq = tl.sum(tl.where(on_diagonal, AA, 0.0), 1) + d * ROW_FLOOR
    for layer in range(first, first + layers):
        G_ptr, G_stride, p = sample_of(layers_ptr + layer * 4, b, G_DTYPE, ALIGNED, WHOLE)
        GG = _operand_tile(
            G_ptr, G_stride, T, p, i0, j0,
            BLOCK, BLOCK_F, PROMOTE, TMA, DIAGONAL, G_PRECISION,
        )  # fmt: skip
        out = sums_ptr + ((layer * B + b) * slots + slot) * PARTS + tl.arange(0, PARTS)
        tl.store(out, sum_by_warp(AA * GG, BLOCK, PARTS) * TIMES)
        tl.store(out + plane, AA_sq)
        tl.store(out + 2 * plane, sum_by_warp(GG * GG, BLOCK, PARTS) * TIMES)
        if DIAGONAL:
            G_sq = tl.sum(tl.where(on_diagonal, GG, 0.0), 1) + p * ROW_FLOOR
            parts = tl.reshape(tl.sqrt(A_sq * G_sq), (PARTS, BLOCK // PARTS))
            tl.store(out + 3 * plane, tl.sum(parts, 1))
        else:
            tl.store(out + 3 * plane, tl.zeros((PARTS,), tl.float32))


@jit
def _gram_kernel(
    inputs_ptr, layers_ptr, sums_ptr,
    groups, B, T, rows, plane,
    BLOCK: tl.constexpr, BLOCK_F: tl.constexpr, PROMOTE: tl.constexpr, GROUP: tl.constexpr,
    A_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr, PARTS: tl.constexpr, A_PRECISION: tl.constexpr, G_PRECISION: tl.constexpr,
):  # fmt: skip
    """Every tile of every sample of every group; a sample's tiles are at work at one time, so that
    its operands come from memory once."""
    slots = rows * (rows + 1) // 2
    for item in range(tl.program_id(0), groups * B * slots, tl.num_programs(0)):
        slot = item % slots
        b = (item // slots % B).to(tl.int64)
        group = (item // slots // B).to(tl.int64)
        i, j = tile_of(slot, rows, GROUP)
        if i == j:
            _group_tile(
                inputs_ptr, layers_ptr, sums_ptr, group, b, slot, slots, B, T,
                i * BLOCK, j * BLOCK, plane,
                BLOCK, BLOCK_F, PROMOTE, A_DTYPE, G_DTYPE, TMA, ALIGNED, WHOLE, True, PARTS,
                A_PRECISION, G_PRECISION,
            )  # fmt: skip
        else:
            _group_tile(
                inputs_ptr, layers_ptr, sums_ptr, group, b, slot, slots, B, T,
                i * BLOCK, j * BLOCK, plane,
                BLOCK, BLOCK_F, PROMOTE, A_DTYPE, G_DTYPE, TMA, ALIGNED, WHOLE, False, PARTS,
                A_PRECISION, G_PRECISION,
            )  # fmt: skip


# -- a launch and its table ------------------------------------------------------------------------

SLICE = 4096
SLICE_IN_INPUTS = 8
"""Features of an output gradient that one program walks over for a tile: so many, or so many times
those of the input, whose tile every slice computes again. A vocabulary's would keep a few programs
at work long after all others are done."""


def launches_of(groups: Sequence[Group]) -> list[Launch]:
    """A launch for all groups of one kind."""
    rows = [Rows(A, Gs) for A, Gs in groups]
    kinds: dict[Kind, list[int]] = {}
    for index, each in enumerate(rows):
        kinds.setdefault(each.kind, []).append(index)
    # Costly groups first, so that the grid ends on short tiles.
    ordered = [sorted(members, key=lambda i: -rows[i].width) for members in kinds.values()]
    return [Launch(members, [rows[i] for i in members]) for members in ordered]


class Kind(NamedTuple):
    """What the groups of one launch share. ``aligned``: descriptors can serve all operands;
    ``whole``: where there are none, rows are multiples of 16 bytes as well."""

    B: int
    T: int
    A_dtype: torch.dtype
    G_dtype: torch.dtype
    aligned: bool
    whole: bool
    device: torch.device


class Rows:
    """A group's rows of the table. Layers of very many features are cut into slices, each with an
    input of its own; the squared norm is the sum of those of the slices."""

    def __init__(self, A: Tensor, Gs: Sequence[Tensor]) -> None:
        given = [A, *Gs]
        if any([G.dtype != Gs[0].dtype for G in Gs]):
            Gs = [G.float() for G in Gs]
        A, self.input, aligned = operand_row(A)
        self.held = [A]  # until the kernel has been launched
        widest = max(SLICE, SLICE_IN_INPUTS * A.shape[2])
        #: Every slice: its layer, where it begins in bytes, strides and width.
        self.places: list[tuple[int, int, int, int, int]] = []
        for layer, G in enumerate(Gs):
            G, (_, stride_b, stride_t, width), G_aligned = operand_row(G)
            self.held.append(G)
            aligned = aligned and G_aligned
            count = tiles.cdiv(width, widest)
            each = tiles.cdiv(width, 64 * count) * 64 if count > 1 else max(1, width)
            for start in range(0, max(1, width), each):
                offset = start * G.element_size()
                place = (layer, offset, stride_b, stride_t, min(each, width - start))
                self.places.append(place)
        self.shared_out = len(self.places) > len(Gs)
        widths = [place[-1] for place in self.places]
        self.widest = max(A.shape[2], *widths)
        self.width = A.shape[2] + (max(widths) if self.shared_out else sum(widths))
        self.copied = any([x is not y for x, y in zip(given, self.held, strict=True)])
        whole = aligned and not tiles.has_tma(A.device)
        whole = whole and all([is_whole(n, Gs[0].element_size()) for n in widths])
        whole = whole and is_whole(A.shape[2], A.element_size())
        B, T, _ = A.shape
        self.kind = Kind(B, T, A.dtype, Gs[0].dtype, aligned, whole, A.device)


class Launch:
    """Groups of one kind and their table: rows of six for inputs, then rows of four for layers."""

    def __init__(self, members: Sequence[int], groups: Sequence[Rows]) -> None:
        self.kind = groups[0].kind
        self.copied = any([group.copied for group in groups])
        #: The most features of an operand.
        self.widest = max([group.widest for group in groups])
        self.held = [x for group in groups for x in group.held]  # until the kernel is launched
        #: Whose row it is: of an input its group, of a layer group, layer and offset in bytes.
        self.inputs: list[int] = []
        self.layers: list[tuple[int, int, int]] = []
        inputs: list[int] = []
        layers: list[int] = []
        for index, group in zip(members, groups, strict=True):
            first = len(self.layers)
            for layer, offset, *rest in group.places:
                self.layers.append((index, layer, offset))
                layers += (group.held[1 + layer].data_ptr() + offset, *rest)
            each = 1 if group.shared_out else len(group.places)
            for place in range(first, len(self.layers), each):
                self.inputs.append(index)
                inputs += (*group.input, place, each)
        self.table = array("q", inputs + layers)
        slices = Counter((index, layer) for index, layer, _ in self.layers)
        #: The layers, slices put together.
        self.order = list(slices)
        #: The table's rows for layers, in runs: how many, and whether they are slices of one layer.
        self.runs: list[tuple[int, bool]] = []
        for count in slices.values():
            if count == 1 and self.runs and not self.runs[-1][1]:
                self.runs[-1] = self.runs[-1][0] + 1, False
            else:
                self.runs.append((count, count > 1))

    def read(self, groups: Sequence[Group]) -> None:
        """Take the addresses of operands of the layout that the table was made for."""
        addresses = [groups[index][0].data_ptr() for index in self.inputs]
        self.table[: 6 * len(addresses) : 6] = array("q", addresses)
        addresses = [groups[i][1][layer].data_ptr() + offset for i, layer, offset in self.layers]
        self.table[6 * len(self.inputs) :: 4] = array("q", addresses)

    def of_layers(self, sq_RB: Tensor) -> Tensor:
        """Squared norms of the table's rows for layers -> of the layers, in their order."""
        if not any([sliced for _, sliced in self.runs]):
            return sq_RB
        parts = zip(sq_RB.split([rows for rows, _ in self.runs]), self.runs, strict=True)
        return torch.cat([part.sum(0, keepdim=True) if run[1] else part for part, run in parts])


@functools.cache
def config_for(dtype: torch.dtype, tma: bool) -> Config:
    """By rule, not by search: few kernels, quick to compile."""
    if dtype == torch.float32:  # three TF32 products of 8 features for one of 16
        return Config(block_f=32, promote=2, num_stages=3, tma=tma)
    return Config() if tma else Config(block_f=32, promote=8, num_stages=3, tma=False)


def gram_blocks(groups: Sequence[Group], memo: LaunchCache | None = None) -> list[SqnormBlock]:
    """See :func:`flash_clipping.ops.gram.gram_blocks`: as they come, a block for every launch."""
    memo = {} if memo is None else memo
    launches: list[Launch] | None = memo.get("launches")
    if launches is None:
        launches = launches_of(groups)
        if not any([work.copied for work in launches]):
            memo["launches"] = launches
    else:
        for work in launches:
            work.read(groups)
    # Slices of one layer give orthogonal parts of its gradient: squares add up.
    return [SqnormBlock(work.order, *map(work.of_layers, launch_gram(work))) for work in launches]


def launch_gram(work: Launch, config: Config | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """One launch for groups of one kind: squared norms, what rounding may hide of them, and squared
    spreads, ``[R, B]`` each, by the table's rows."""
    B, T, A_dtype, G_dtype, aligned, whole, device = work.kind
    wider = torch.promote_types(A_dtype, G_dtype)
    if config is None:
        tma = aligned and tiles.has_tma(device)
        ring = tma and A_dtype == G_dtype != torch.float32 and tiles.is_hopper(device)
        config = RING if ring and has_gluon() else config_for(wider, tma)
    table = to_device(work.table, device, torch.int64, repeats=True)
    groups, layers = len(work.inputs), len(work.layers)
    rows = tiles.cdiv(T, config.block)
    slots = rows * (rows + 1) // 2
    parts = config.num_warps
    partial = torch.empty((4, layers, B, slots * parts), dtype=torch.float32, device=device)
    plane = layers * B * slots * parts  # one for each kind of sum
    arguments = (table, table[6 * groups :], partial, groups, B, T, rows, plane)
    programs = min(groups * B * slots, tiles.sm_count(device))
    if config is RING:
        from flash_clipping.ops.gram.hopper import _gram_ring_kernel  # not every Triton can

        launch(
            _gram_ring_kernel, programs, *arguments,
            DTYPE=tiles.TL_DTYPE[A_dtype],
            workspace=True, num_warps=4,
        )  # fmt: skip
    else:
        launch(
            _gram_kernel, programs, *arguments,
            BLOCK=config.block, BLOCK_F=config.block_f, PROMOTE=config.promote, GROUP=8,
            A_DTYPE=tiles.TL_DTYPE[A_dtype], G_DTYPE=tiles.TL_DTYPE[G_dtype], TMA=config.tma,
            ALIGNED=aligned, WHOLE=whole, PARTS=parts, A_PRECISION=tiles.dot_precision(A_dtype),
            G_PRECISION=tiles.dot_precision(G_dtype),
            workspace=config.tma, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    work.held = []
    sq_RB, AA_sq_RB, GG_sq_RB, spread_RB = partial.sum(-1)
    spread_sq_RB = spread_RB.square_()
    promoted = config.promote * config.block_f
    doubt_RB = gram_doubt(
        spread_sq_RB, AA_sq_RB, GG_sq_RB,
        T=T, promoted=promoted, sums=tiles.cdiv(work.widest, promoted),
        dtype=wider,
    )  # fmt: skip
    return sq_RB, doubt_RB, spread_sq_RB
