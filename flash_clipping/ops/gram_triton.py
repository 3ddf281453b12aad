"""Kernel for gram norms: one launch over the tiles of many layers.

B samples, T positions, d input features, p output features, L layers that read one input.

A tile of ``A Aᵀ`` is multiplied with the same tile of ``G Gᵀ`` and summed. The lower triangle of
``[T, T]`` is covered by *wide* tiles of 128 rows and 256 columns (twice the columns need 3/4 of
the traffic per product, and traffic between the L2 cache and shared memory is what bounds this
kernel) and by *diagonal* tiles of 128 by 128, which read their rows only once:

    row 0   D
    row 1   W W
    row 2   W W D
    row 3   W W W W

Two wide tiles do not fit in the registers, so that of ``A Aᵀ`` waits in a scratch tile of its
program, which never leaves the L2 cache. Where the grid is only as wide as high (``WIDTH`` 1) both
stay in registers.

Layers differ in their addresses and widths only, so a table in device memory names them and one
persistent grid walks over the tiles of all: no partly filled last wave for each layer, and one
launch where small layers would be bound by launches.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import tiles_triton as tiles
from flash_clipping.ops.shapes import Group, GroupSqnorms

_TL_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_INPUT_COLUMNS = 6  # of the table: address, strides, width, first layer, layers
_LAYER_COLUMNS = 4  # address, strides, width


@triton.jit
def _operand_tile(
    X_ptr,
    stride_t,
    T,
    F,
    i0,
    j0,
    DIAGONAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows ``i0..`` against rows ``j0..`` of one sample's ``X Xᵀ``; rows beyond T are zero."""
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    if TMA:
        rows = tl.make_tensor_descriptor(X_ptr, [T, F], [stride_t, 1], [ROWS, BLOCK_F])
        if DIAGONAL:
            for f in range(0, F, BLOCK_F):
                x = rows.load([i0, f])
                product = tl.dot(x, tl.trans(x), product, input_precision=PRECISION)
        else:
            columns = tl.make_tensor_descriptor(X_ptr, [T, F], [stride_t, 1], [COLUMNS, BLOCK_F])
            for f in range(0, F, BLOCK_F):
                x = rows.load([i0, f])
                y = columns.load([j0, f])
                product = tl.dot(x, tl.trans(y), product, input_precision=PRECISION)
    else:
        i = i0 + tl.arange(0, ROWS)
        j = j0 + tl.arange(0, COLUMNS)
        i_ptr = X_ptr + i.to(tl.int64)[:, None] * stride_t
        j_ptr = X_ptr + j.to(tl.int64)[:, None] * stride_t
        for f in range(0, F, BLOCK_F):
            k = (f + tl.arange(0, BLOCK_F))[None, :]
            x = tl.load(i_ptr + k, mask=(i < T)[:, None] & (k < F), other=0.0)
            if DIAGONAL:
                product = tl.dot(x, tl.trans(x), product, input_precision=PRECISION)
            else:
                y = tl.load(j_ptr + k, mask=(j < T)[:, None] & (k < F), other=0.0)
                product = tl.dot(x, tl.trans(y), product, input_precision=PRECISION)
    return product


@triton.jit
def _sample(row, b, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Address of one sample, stride of its rows and their width, from a row of the table."""
    X_ptr = tl.load(row).to(tl.pointer_type(DTYPE))
    stride_b = tl.load(row + 1)
    stride_t = tl.load(row + 2)
    F = tl.load(row + 3).to(tl.int32)
    if ALIGNED:  # what the compiler must know to move 16 bytes at a time
        EACH: tl.constexpr = 128 // DTYPE.primitive_bitwidth
        X_ptr = tl.multiple_of(X_ptr, 16)
        stride_b = tl.multiple_of(stride_b, EACH)
        stride_t = tl.multiple_of(stride_t, EACH)
        F = tl.multiple_of(F, EACH)
    return X_ptr + b * stride_b, stride_t, F


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of the columns, without moving data between threads."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _quarters(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    left, right = _halves(x, ROWS, COLUMNS)
    first, second = _halves(left, ROWS, COLUMNS // 2)
    third, fourth = _halves(right, ROWS, COLUMNS // 2)
    return first, second, third, fourth


@triton.jit
def _group_tile(
    inputs_ptr,
    layers_ptr,
    weight_ptr,
    bias_ptr,
    scratch_ptr,
    group,
    b,
    slot,
    B,
    T,
    slots,
    i0,
    j0,
    DIAGONAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_F: tl.constexpr,
    A_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIAS: tl.constexpr,
    A_PRECISION: tl.constexpr,
    G_PRECISION: tl.constexpr,
):
    """One tile of one sample: ``A Aᵀ`` once, then every layer that reads ``A``."""
    row = inputs_ptr + group * 6
    first = tl.load(row + 4)
    layers = tl.load(row + 5)
    A_ptr, A_stride, d = _sample(row, b, A_DTYPE, ALIGNED)
    AA = _operand_tile(
        A_ptr,
        A_stride,
        T,
        d,
        i0,
        j0,
        DIAGONAL,
        ROWS,
        COLUMNS,
        BLOCK_F,
        TMA,
        A_PRECISION,
    )
    SPILL: tl.constexpr = COLUMNS > ROWS
    if SPILL:
        QUARTER: tl.constexpr = COLUMNS // 4
        kept = scratch_ptr + tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
        kept += tl.arange(0, ROWS)[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
        tl.debug_barrier()  # the previous tile has been read by every thread
        AA0, AA1, AA2, AA3 = _quarters(AA, ROWS, COLUMNS)
        tl.store(kept, AA0)
        tl.store(kept + ROWS * QUARTER, AA1)
        tl.store(kept + ROWS * QUARTER * 2, AA2)
        tl.store(kept + ROWS * QUARTER * 3, AA3)
        tl.debug_barrier()
    # A tile below the diagonal stands for the one above it as well.
    left = tl.where(j0 == i0, 1.0, 2.0)
    right = tl.where(j0 + ROWS == i0, 1.0, 2.0)
    for layer in range(first, first + layers):
        G_ptr, G_stride, p = _sample(layers_ptr + layer * 4, b, G_DTYPE, ALIGNED)
        GG = _operand_tile(
            G_ptr,
            G_stride,
            T,
            p,
            i0,
            j0,
            DIAGONAL,
            ROWS,
            COLUMNS,
            BLOCK_F,
            TMA,
            G_PRECISION,
        )
        out = (layer * B + b) * slots + slot
        if SPILL:
            # The barriers keep the loads from being issued together: there are no registers
            # for more than a quarter beside the product.
            GG0, GG1, GG2, GG3 = _quarters(GG, ROWS, COLUMNS)
            sums = tl.sum(tl.load(kept) * GG0, 0) * left
            bias_sums = tl.sum(GG0, 0) * left
            tl.debug_barrier()
            sums += tl.sum(tl.load(kept + ROWS * QUARTER) * GG1, 0) * left
            bias_sums += tl.sum(GG1, 0) * left
            tl.debug_barrier()
            sums += tl.sum(tl.load(kept + ROWS * QUARTER * 2) * GG2, 0) * right
            bias_sums += tl.sum(GG2, 0) * right
            tl.debug_barrier()
            sums += tl.sum(tl.load(kept + ROWS * QUARTER * 3) * GG3, 0) * right
            bias_sums += tl.sum(GG3, 0) * right
            tl.store(weight_ptr + out, tl.sum(sums, 0))
            if BIAS:
                tl.store(bias_ptr + out, tl.sum(bias_sums, 0))
        else:
            tl.store(weight_ptr + out, tl.sum(tl.sum(AA * GG, 0), 0) * left)
            if BIAS:
                tl.store(bias_ptr + out, tl.sum(tl.sum(GG, 0), 0) * left)


@triton.jit
def _gram_kernel(
    inputs_ptr,
    layers_ptr,
    weight_ptr,
    bias_ptr,
    scratch_ptr,
    groups,
    B,
    T,
    wide,
    diagonal,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_F: tl.constexpr,
    A_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIAS: tl.constexpr,
    A_PRECISION: tl.constexpr,
    G_PRECISION: tl.constexpr,
):
    """``wide`` and ``diagonal`` tiles of every sample of every group; wide ones first: they last
    longer, and the grid should end on short ones."""
    slots = wide + diagonal
    for item in range(tl.program_id(0), groups * B * wide, tl.num_programs(0)):
        group = (item // (B * wide)).to(tl.int64)
        b = (item // wide % B).to(tl.int64)
        slot = item % wide
        # Tile rows 2m-1 and 2m have m wide tiles each (rows m has m, when tiles are square).
        m = ((1.0 + tl.sqrt(1.0 + (8 // WIDTH) * slot.to(tl.float32))) * 0.5).to(tl.int32)
        m -= (WIDTH * m * (m - 1) // 2 > slot).to(tl.int32)
        m += (WIDTH * m * (m + 1) // 2 <= slot).to(tl.int32)
        within = slot - WIDTH * m * (m - 1) // 2
        if WIDTH == 1:
            i = m
        else:
            i = 2 * m - 1 + within // m
        _group_tile(
            inputs_ptr,
            layers_ptr,
            weight_ptr,
            bias_ptr,
            scratch_ptr,
            group,
            b,
            slot,
            B,
            T,
            slots,
            i * BLOCK,
            within % m * (WIDTH * BLOCK),
            False,
            BLOCK,
            WIDTH * BLOCK,
            BLOCK_F,
            A_DTYPE,
            G_DTYPE,
            TMA,
            ALIGNED,
            BIAS,
            A_PRECISION,
            G_PRECISION,
        )
    for item in range(tl.program_id(0), groups * B * diagonal, tl.num_programs(0)):
        group = (item // (B * diagonal)).to(tl.int64)
        b = (item // diagonal % B).to(tl.int64)
        slot = item % diagonal
        start = slot * (WIDTH * BLOCK)
        _group_tile(
            inputs_ptr,
            layers_ptr,
            weight_ptr,
            bias_ptr,
            scratch_ptr,
            group,
            b,
            slot + wide,
            B,
            T,
            slots,
            start,
            start,
            True,
            BLOCK,
            BLOCK,
            BLOCK_F,
            A_DTYPE,
            G_DTYPE,
            TMA,
            ALIGNED,
            BIAS,
            A_PRECISION,
            G_PRECISION,
        )


@dataclass(frozen=True)
class Config:
    """A launch's parameters, open to benchmarks."""

    block: int = 128
    width: int = 2
    block_f: int = 64
    num_warps: int = 8
    num_stages: int = 4
    tma: bool = True


def config_for(dtype: torch.dtype, T: int, tma: bool) -> Config:
    """By rule, not by search: few kernels, quick to compile."""
    if dtype == torch.float32:
        return Config(block=64, width=1, block_f=32, num_warps=4, num_stages=3)
    if not tma:  # addresses take registers, and older devices have less shared memory
        return Config(width=1, block_f=32, num_stages=3)
    # Up to two tile rows, wide tiles save no traffic.
    return Config(width=1 if T <= 256 else 2)


def gram_sqnorms(A_BTd: Tensor, Gs: Sequence[Tensor], bias: bool) -> GroupSqnorms:
    """See :func:`flash_clipping.ops.gram.gram_sqnorms`."""
    return gram_sqnorms_many([(A_BTd, Gs)], bias)[0]


def gram_sqnorms_many(groups: Sequence[Group], bias: bool) -> list[GroupSqnorms]:
    """See :func:`flash_clipping.ops.gram.gram_sqnorms_many`."""
    prepared = [_prepare(A, Gs) for A, Gs in groups]
    batches: dict[_Kind, list[int]] = {}
    for index, (A, Gs) in enumerate(prepared):
        aligned = tiles.fits_tma(A, *Gs) and all(
            x.shape[-1] * x.element_size() % 16 == 0 for x in (A, *Gs)
        )
        kind = _Kind(A.shape[0], A.shape[1], A.dtype, Gs[0].dtype, aligned)
        batches.setdefault(kind, []).append(index)
    results: list[GroupSqnorms | None] = [None] * len(prepared)
    for kind, members in batches.items():
        # Costly groups first, so that the grid ends on short tiles.
        members.sort(key=lambda index: -_width(prepared[index]))
        outcome = launch_gram([prepared[index] for index in members], bias, aligned=kind.aligned)
        for index, result in zip(members, outcome, strict=True):
            results[index] = result
    return [result for result in results if result is not None]


class _Kind(NamedTuple):
    """What the groups of one launch have in common."""

    B: int
    T: int
    A_dtype: torch.dtype
    G_dtype: torch.dtype
    aligned: bool


def _width(group: Group) -> int:
    A, Gs = group
    return A.shape[-1] + sum(G.shape[-1] for G in Gs)


def _prepare(A: Tensor, Gs: Sequence[Tensor]) -> Group:
    Gs = [tiles.with_unit_stride(G) for G in Gs]
    if len({G.dtype for G in Gs}) > 1:
        Gs = [G.float() for G in Gs]
    return tiles.with_unit_stride(A), Gs


def launch_gram(
    groups: Sequence[Group], bias: bool, *, aligned: bool, config: Config | None = None
) -> list[GroupSqnorms]:
    """One launch for groups of equal B, T, dtypes and alignment."""
    A_BTd, Gs = groups[0]
    B, T, _ = A_BTd.shape
    device = A_BTd.device
    tma = aligned and tiles.has_tma(device)
    config = config or config_for(A_BTd.dtype, T, tma)
    G_dtype = Gs[0].dtype
    layers = sum(len(Gs) for _, Gs in groups)
    rows = triton.cdiv(T, config.block)
    if config.width == 1:
        wide, diagonal = rows * (rows - 1) // 2, rows
    else:
        wide, diagonal = (rows // 2) * ((rows + 1) // 2), (rows + 1) // 2
    slots = wide + diagonal
    partial = torch.empty((1 + bias, layers, B, slots), dtype=torch.float32, device=device)
    inputs, outputs = _table(groups, device)
    grid = min(len(groups) * B * slots, tiles.sm_count(device))
    scratch = partial
    if config.width == 2 and wide > 0:
        scratch = torch.empty((grid, 2 * config.block**2), dtype=torch.float32, device=device)
    with_workspace(
        lambda: _gram_kernel[(grid,)](
            inputs,
            outputs,
            partial[0],
            partial[-1],
            scratch,
            len(groups),
            B,
            T,
            wide,
            diagonal,
            BLOCK=config.block,
            WIDTH=config.width,
            BLOCK_F=config.block_f,
            A_DTYPE=_TL_DTYPE[A_BTd.dtype],
            G_DTYPE=_TL_DTYPE[G_dtype],
            TMA=tma and config.tma,
            ALIGNED=aligned,
            BIAS=bias,
            A_PRECISION=tiles.dot_precision(A_BTd.dtype),
            G_PRECISION=tiles.dot_precision(G_dtype),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        ),
        device,
    )
    # Rounding can leave a sum that cancels to nothing just below zero; NaN stays NaN.
    sums = partial.sum(-1).clamp_(min=0)
    results: list[GroupSqnorms] = []
    layer = 0
    for _, Gs in groups:
        chunk = slice(layer, layer + len(Gs))
        results.append((sums[0, chunk], sums[1, chunk] if bias else None))
        layer += len(Gs)
    return results


def _table(groups: Sequence[Group], device: torch.device) -> tuple[Tensor, Tensor]:
    """Addresses, strides and widths, copied to the device without waiting for it."""
    inputs: list[int] = []
    layers: list[int] = []
    for A, Gs in groups:
        first = len(layers) // _LAYER_COLUMNS
        inputs += [A.data_ptr(), A.stride(0), A.stride(1), A.shape[-1], first, len(Gs)]
        for G in Gs:
            layers += [G.data_ptr(), G.stride(0), G.stride(1), G.shape[-1]]
    table = torch.tensor(inputs + layers, dtype=torch.int64)
    if device.type != "cpu":
        table = table.pin_memory().to(device, non_blocking=True)
    return table[: len(inputs)], table[len(inputs) :]


def with_workspace(launch: object, device: torch.device) -> None:
    """Launch a kernel that makes tensor descriptors on the device, which need memory there.

    Triton asks an allocator of the current context for it. Setting ours in a copy of the context
    leaves the caller's alone.
    """

    def run() -> None:
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)
        )
        launch()  # type: ignore[operator]

    contextvars.copy_context().run(run)
