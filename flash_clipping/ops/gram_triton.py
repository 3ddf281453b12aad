"""Kernel for gram norms: one launch over the tiles of many layers.

B samples, T positions, d input features, p output features, L layers that read one input.

A tile of ``A Aᵀ`` and the same tile of ``G Gᵀ`` are held in registers, multiplied and summed; only
tiles on and below the diagonal are computed, and those on it read their rows once.

Tensor cores truncate their fp32 accumulator: it loses up to 1e-7 of its value with every
instruction, always towards zero. Over a feature dimension of 4096 the norm would be 1e-5 too small,
and with it the guarantee; so after every ``PROMOTE`` steps the accumulator is added to one that
rounds, and starts again at zero.

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
    BLOCK: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PROMOTE: tl.constexpr,
    TMA: tl.constexpr,
    DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
def _triangle(index):
    """Row and column of an entry of a triangle whose rows have 1, 2, 3, ... entries."""
    row = ((tl.sqrt(1.0 + 8.0 * index.to(tl.float32)) - 1.0) * 0.5).to(tl.int32)
    row -= (row * (row + 1) // 2 > index).to(tl.int32)  # the root is rounded
    row += ((row + 1) * (row + 2) // 2 <= index).to(tl.int32)
    return row, index - row * (row + 1) // 2


@triton.jit
def _tile(slot, rows, GROUP: tl.constexpr):
    """Row and column of a tile. ``GROUP`` rows are walked together, column by column, so that
    the programs at work at one time share what they read."""
    row, _ = _triangle(slot)
    first = row // GROUP * GROUP
    height = min(GROUP, rows - first)
    within = slot - first * (first + 1) // 2
    if within < first * height:  # left of the group's own triangle
        i = first + within % height
        j = within // height
    else:
        i, j = _triangle(within - first * height)
        i += first
        j += first
    return i, j


@triton.jit
def _group_tile(
    inputs_ptr,
    layers_ptr,
    weight_ptr,
    bias_ptr,
    group,
    b,
    slot,
    slots,
    B,
    T,
    i0,
    j0,
    BLOCK: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PROMOTE: tl.constexpr,
    A_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
    DIAGONAL: tl.constexpr,
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
        A_ptr, A_stride, T, d, i0, j0, BLOCK, BLOCK_F, PROMOTE, TMA, DIAGONAL, A_PRECISION
    )
    if not DIAGONAL:
        AA *= 2  # a tile below the diagonal stands for the one above it as well
    for layer in range(first, first + layers):
        G_ptr, G_stride, p = _sample(layers_ptr + layer * 4, b, G_DTYPE, ALIGNED)
        GG = _operand_tile(
            G_ptr, G_stride, T, p, i0, j0, BLOCK, BLOCK_F, PROMOTE, TMA, DIAGONAL, G_PRECISION
        )
        # Rows are summed here, and the rest outside: no wait for the other warps.
        out = ((layer * B + b) * slots + slot) * BLOCK + tl.arange(0, BLOCK)
        tl.store(weight_ptr + out, tl.sum(AA * GG, 1))
        if BIAS:
            tl.store(bias_ptr + out, tl.sum(GG, 1) * (1.0 if DIAGONAL else 2.0))


@triton.jit
def _gram_kernel(
    inputs_ptr,
    layers_ptr,
    weight_ptr,
    bias_ptr,
    groups,
    B,
    T,
    rows,
    BLOCK: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PROMOTE: tl.constexpr,
    GROUP: tl.constexpr,
    A_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIAS: tl.constexpr,
    A_PRECISION: tl.constexpr,
    G_PRECISION: tl.constexpr,
):
    """Every tile of every sample of every group. The tiles of a sample are at work at one time,
    so that its operands come from memory once."""
    slots = rows * (rows + 1) // 2
    for item in range(tl.program_id(0), groups * B * slots, tl.num_programs(0)):
        slot = item % slots
        b = (item // slots % B).to(tl.int64)
        group = (item // slots // B).to(tl.int64)
        i, j = _tile(slot, rows, GROUP)
        if i == j:
            _group_tile(
                inputs_ptr,
                layers_ptr,
                weight_ptr,
                bias_ptr,
                group,
                b,
                slot,
                slots,
                B,
                T,
                i * BLOCK,
                j * BLOCK,
                BLOCK,
                BLOCK_F,
                PROMOTE,
                A_DTYPE,
                G_DTYPE,
                TMA,
                ALIGNED,
                True,
                BIAS,
                A_PRECISION,
                G_PRECISION,
            )
        else:
            _group_tile(
                inputs_ptr,
                layers_ptr,
                weight_ptr,
                bias_ptr,
                group,
                b,
                slot,
                slots,
                B,
                T,
                i * BLOCK,
                j * BLOCK,
                BLOCK,
                BLOCK_F,
                PROMOTE,
                A_DTYPE,
                G_DTYPE,
                TMA,
                ALIGNED,
                False,
                BIAS,
                A_PRECISION,
                G_PRECISION,
            )


@dataclass(frozen=True)
class Config:
    """A launch's parameters, open to benchmarks."""

    block: int = 128
    block_f: int = 64
    promote: int = 16
    num_warps: int = 8
    num_stages: int = 4
    tma: bool = True


def config_for(dtype: torch.dtype, tma: bool) -> Config:
    """By rule, not by search: few kernels, quick to compile."""
    if dtype == torch.float32:  # three TF32 products of 8 features for one of 16
        return Config(block_f=32, promote=2, num_stages=3)
    return Config() if tma else Config(block_f=32, promote=32, num_stages=3)


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
    config = config or config_for(A_BTd.dtype, tma)
    G_dtype = Gs[0].dtype
    layers = sum(len(Gs) for _, Gs in groups)
    rows = triton.cdiv(T, config.block)
    slots = rows * (rows + 1) // 2
    partial = torch.empty(
        (1 + bias, layers, B, slots * config.block), dtype=torch.float32, device=device
    )
    inputs, outputs = _table(groups, device)
    grid = min(len(groups) * B * slots, tiles.sm_count(device))
    with_workspace(
        lambda: _gram_kernel[(grid,)](
            inputs,
            outputs,
            partial[0],
            partial[-1],
            len(groups),
            B,
            T,
            rows,
            BLOCK=config.block,
            BLOCK_F=config.block_f,
            PROMOTE=config.promote,
            GROUP=8,
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
