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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops import tiles_triton as tiles
from flash_clipping.ops.shapes import Group, GroupSqnorms
from flash_clipping.ops.tiles_triton import sum_by_warp

_TL_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
UNIT = 128
"""Bytes; what the places of a window are counted in."""
WINDOW_WAVES = 4
"""Tiles for each multiprocessor from which on layers of one shape get a launch of their own."""


@triton.jit
def _operand_tile(
    source,
    X_ptr,
    stride_t,
    T,
    F,
    i0,
    j0,
    BLOCK: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PROMOTE: tl.constexpr,
    LOADS: tl.constexpr,
    DIAGONAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows ``i0..`` against rows ``j0..`` of one sample's ``X Xᵀ``; rows beyond T are zero.

    ``LOADS`` is ``"window"`` (``source`` is a descriptor, ``X_ptr`` a place in it),
    ``"descriptor"`` (made here, of ``X_ptr``) or ``"pointer"``.
    """
    if LOADS == "descriptor":
        made = tl.make_tensor_descriptor(X_ptr, [T, F], [stride_t, 1], [BLOCK, BLOCK_F])
    elif LOADS == "pointer":
        i = i0 + tl.arange(0, BLOCK)
        j = j0 + tl.arange(0, BLOCK)
        i_ptr = X_ptr + i.to(tl.int64)[:, None] * stride_t
        j_ptr = X_ptr + j.to(tl.int64)[:, None] * stride_t
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    product = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in range(0, tl.cdiv(F, BLOCK_F)):
        f = step * BLOCK_F
        if LOADS == "window":
            x = source.load([X_ptr, i0, f]).reshape(BLOCK, BLOCK_F)
        elif LOADS == "descriptor":
            x = made.load([i0, f])
        else:
            k = (f + tl.arange(0, BLOCK_F))[None, :]
            x = tl.load(i_ptr + k, mask=(i < T)[:, None] & (k < F), other=0.0)
        if DIAGONAL:
            y = x
        elif LOADS == "window":
            y = source.load([X_ptr, j0, f]).reshape(BLOCK, BLOCK_F)
        elif LOADS == "descriptor":
            y = made.load([j0, f])
        else:
            y = tl.load(j_ptr + k, mask=(j < T)[:, None] & (k < F), other=0.0)
        product = tl.dot(x, tl.trans(y), product, input_precision=PRECISION)
        if step % PROMOTE == PROMOTE - 1:
            total += product
            product = tl.zeros((BLOCK, BLOCK), tl.float32)
    return total + product


@triton.jit
def _sample(row, b, DTYPE: tl.constexpr, LOADS: tl.constexpr, ALIGNED: tl.constexpr):
    """Place of one sample, stride of its rows and their width, from a row of the table."""
    stride_b = tl.load(row + 1)
    stride_t = tl.load(row + 2)
    F = tl.load(row + 3).to(tl.int32)
    if LOADS == "window":
        place = (tl.load(row) + b * stride_b).to(tl.int32)
    else:
        place = tl.load(row).to(tl.pointer_type(DTYPE))
        if ALIGNED:  # what the compiler must know to move 16 bytes at a time
            EACH: tl.constexpr = 128 // DTYPE.primitive_bitwidth
            place = tl.multiple_of(place, 16)
            stride_b = tl.multiple_of(stride_b, EACH)
            stride_t = tl.multiple_of(stride_t, EACH)
            F = tl.multiple_of(F, EACH)
        place += b * stride_b
    return place, stride_t, F


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
    A_source,
    G_source,
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
    LOADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    DIAGONAL: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    A_PRECISION: tl.constexpr,
    G_PRECISION: tl.constexpr,
):
    """One tile of one sample: ``A Aᵀ`` once, then every layer that reads ``A``."""
    row = inputs_ptr + group * 6
    first = tl.load(row + 4)
    layers = tl.load(row + 5)
    A_ptr, A_stride, d = _sample(row, b, A_DTYPE, LOADS, ALIGNED)
    AA = _operand_tile(
        A_source,
        A_ptr,
        A_stride,
        T,
        d,
        i0,
        j0,
        BLOCK,
        BLOCK_F,
        PROMOTE,
        LOADS,
        DIAGONAL,
        A_PRECISION,
    )
    if not DIAGONAL:
        AA *= 2  # a tile below the diagonal stands for the one above it as well
    for layer in range(first, first + layers):
        G_ptr, G_stride, p = _sample(layers_ptr + layer * 4, b, G_DTYPE, LOADS, ALIGNED)
        GG = _operand_tile(
            G_source,
            G_ptr,
            G_stride,
            T,
            p,
            i0,
            j0,
            BLOCK,
            BLOCK_F,
            PROMOTE,
            LOADS,
            DIAGONAL,
            G_PRECISION,
        )
        out = ((layer * B + b) * slots + slot) * PARTS + tl.arange(0, PARTS)
        tl.store(weight_ptr + out, sum_by_warp(AA * GG, BLOCK, PARTS))
        if BIAS:
            tl.store(bias_ptr + out, sum_by_warp(GG, BLOCK, PARTS) * (1.0 if DIAGONAL else 2.0))


@triton.jit
def _gram_kernel(
    A_source,
    G_source,
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
    LOADS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
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
                A_source,
                G_source,
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
                LOADS,
                ALIGNED,
                True,
                PARTS,
                BIAS,
                A_PRECISION,
                G_PRECISION,
            )
        else:
            _group_tile(
                A_source,
                G_source,
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
                LOADS,
                ALIGNED,
                False,
                PARTS,
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
    loads: str = "descriptor"


def config_for(dtype: torch.dtype, loads: str) -> Config:
    """By rule, not by search: few kernels, quick to compile."""
    if dtype == torch.float32:  # three TF32 products of 8 features for one of 16
        return Config(block_f=32, promote=2, num_stages=3, loads=loads)
    if loads == "pointer":
        return Config(block_f=32, promote=32, num_stages=3, loads=loads)
    return Config(loads=loads)


def gram_sqnorms(A_BTd: Tensor, Gs: Sequence[Tensor], bias: bool) -> GroupSqnorms:
    """See :func:`flash_clipping.ops.gram.gram_sqnorms`."""
    return gram_sqnorms_many([(A_BTd, Gs)], bias)[0]


def gram_sqnorms_many(groups: Sequence[Group], bias: bool) -> list[GroupSqnorms]:
    """See :func:`flash_clipping.ops.gram.gram_sqnorms_many`."""
    prepared = [_prepare(A, Gs) for A, Gs in groups]
    results: list[GroupSqnorms | None] = [None] * len(prepared)
    for members, loads, aligned in _batches(prepared):
        # Costly groups first, so that the grid ends on short tiles.
        members.sort(key=lambda index: -_width(prepared[index]))
        batch = [prepared[index] for index in members]
        for index, result in zip(
            members, launch_gram(batch, bias, loads, aligned=aligned), strict=True
        ):
            results[index] = result
    return [result for result in results if result is not None]


def _prepare(A: Tensor, Gs: Sequence[Tensor]) -> Group:
    Gs = [tiles.with_unit_stride(G) for G in Gs]
    if len({G.dtype for G in Gs}) > 1:
        Gs = [G.float() for G in Gs]
    return tiles.with_unit_stride(A), Gs


def _width(group: Group) -> int:
    A, Gs = group
    return A.shape[-1] + sum(G.shape[-1] for G in Gs)


class _Kind(NamedTuple):
    """What the groups of one launch have in common."""

    B: int
    T: int
    A_dtype: torch.dtype
    G_dtype: torch.dtype
    aligned: bool


class _Window(NamedTuple):
    """What groups must have in common to be read through one pair of descriptors."""

    d: int
    A_stride: int
    p: int
    G_stride: int


def _batches(groups: Sequence[Group]) -> list[tuple[list[int], str, bool]]:
    """Indices of the groups of each launch, how it loads, and whether they are aligned."""
    kinds: dict[_Kind, list[int]] = {}
    for index, (A, Gs) in enumerate(groups):
        aligned = tiles.fits_tma(A, *Gs) and all(
            x.shape[-1] * x.element_size() % 16 == 0 for x in (A, *Gs)
        )
        kind = _Kind(A.shape[0], A.shape[1], A.dtype, Gs[0].dtype, aligned)
        kinds.setdefault(kind, []).append(index)
    batches = []
    for kind, members in kinds.items():
        if not (kind.aligned and tiles.has_tma(groups[members[0]][0].device)):
            batches.append((members, "pointer", kind.aligned))
            continue
        windows: dict[_Window | None, list[int]] = {}
        for index in members:
            windows.setdefault(_window(groups[index]), []).append(index)
        rest = windows.pop(None, [])
        for alike in windows.values():
            # A launch of its own must fill the device a few times over.
            rows = triton.cdiv(kind.T, Config.block)
            work = len(alike) * kind.B * rows * (rows + 1) // 2
            if work >= WINDOW_WAVES * tiles.sm_count(groups[alike[0]][0].device):
                batches.append((alike, "window", True))
            else:
                rest += alike
        if rest:
            batches.append((rest, "descriptor", True))
    return batches


def _window(group: Group) -> _Window | None:
    A, Gs = group
    windows = {_Window(A.shape[-1], A.stride(1), G.shape[-1], G.stride(1)) for G in Gs}
    whole = all(
        x.data_ptr() % UNIT == 0 and x.stride(0) * x.element_size() % UNIT == 0 for x in (A, *Gs)
    )
    return windows.pop() if whole and len(windows) == 1 else None


def launch_gram(
    groups: Sequence[Group], bias: bool, loads: str, *, aligned: bool, config: Config | None = None
) -> list[GroupSqnorms]:
    """One launch for groups of equal B, T, dtypes and alignment."""
    A_BTd, Gs = groups[0]
    B, T, _ = A_BTd.shape
    device = A_BTd.device
    config = config or config_for(A_BTd.dtype, loads)
    G_dtype = Gs[0].dtype
    layers = sum(len(Gs) for _, Gs in groups)
    rows = triton.cdiv(T, config.block)
    slots = rows * (rows + 1) // 2
    parts = config.num_warps
    partial = torch.empty((1 + bias, layers, B, slots * parts), dtype=torch.float32, device=device)
    table = _Table(groups, config)
    inputs, outputs = table.to(device)
    grid = min(len(groups) * B * slots, tiles.sm_count(device))

    def launch() -> None:
        _gram_kernel[(grid,)](
            table.A_source,
            table.G_source,
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
            LOADS=config.loads,
            ALIGNED=aligned,
            PARTS=parts,
            BIAS=bias,
            A_PRECISION=tiles.dot_precision(A_BTd.dtype),
            G_PRECISION=tiles.dot_precision(G_dtype),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    if config.loads == "descriptor":
        _with_workspace(launch, device)
    else:
        launch()
    # Rounding can leave a sum that cancels to nothing just below zero; NaN stays NaN.
    sums = partial.sum(-1).clamp_(min=0)
    results: list[GroupSqnorms] = []
    layer = 0
    for _, Gs in groups:
        chunk = slice(layer, layer + len(Gs))
        results.append((sums[0, chunk], sums[1, chunk] if bias else None))
        layer += len(Gs)
    return results


class _Table:
    """Where the operands of each group are: places, strides and widths.

    A place is an address; through a *window* it is a distance in units of ``UNIT`` bytes from the
    lowest address. A window is one descriptor for all inputs of one shape, wherever they lie: its
    outermost dimension advances by one unit. Descriptors made on the device cost a microsecond
    for every tile and operand.
    """

    def __init__(self, groups: Sequence[Group], config: Config) -> None:
        self.inputs: list[int] = []
        self.layers: list[int] = []
        self.A_source: Any = groups[0][0]
        self.G_source: Any = groups[0][1][0]
        A_base = G_base = 0
        A_unit = G_unit = 1
        if config.loads == "window":
            box = [1, config.block, config.block_f]
            self.A_source, A_base, A_unit = _descriptor([A for A, _ in groups], box)
            self.G_source, G_base, G_unit = _descriptor([G for _, Gs in groups for G in Gs], box)
        for A, Gs in groups:
            first = len(self.layers) // 4
            self.inputs += [*_place(A, A_base, A_unit), first, len(Gs)]
            for G in Gs:
                self.layers += _place(G, G_base, G_unit)

    def to(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows of inputs and of layers, on their way to the device; nothing waits for them."""
        table = torch.tensor(self.inputs + self.layers, dtype=torch.int64)
        if device.type != "cpu":
            table = table.pin_memory().to(device, non_blocking=True)
        return table[: len(self.inputs)], table[len(self.inputs) :]


def _place(x: Tensor, base: int, unit: int) -> list[int]:
    stride_b = x.stride(0) if unit == 1 else x.stride(0) * x.element_size() // unit
    return [(x.data_ptr() - base) // unit, stride_b, x.stride(1), x.shape[-1]]


def _descriptor(tensors: Sequence[Tensor], box: list[int]) -> tuple[Any, int, int]:
    """The window over tensors of one shape, the address where it begins, and its unit."""
    lowest = min(tensors, key=Tensor.data_ptr)
    base, each = lowest.data_ptr(), lowest.element_size()
    B, T, F = lowest.shape
    last = max(x.data_ptr() + (B - 1) * x.stride(0) * each for x in tensors)
    units = (last - base) // UNIT
    strides = [UNIT // each, lowest.stride(1), 1]
    source = tiles.descriptor_class()(lowest, [units + 1, T, F], strides, box)
    return source, base, UNIT


def _with_workspace(launch: Callable[[], object], device: torch.device) -> None:
    """Launch a kernel that makes descriptors on the device, which takes memory there.

    Triton asks an allocator of the current context for it. Setting ours in a copy of the context
    leaves the caller's alone.
    """

    def run() -> None:
        triton.set_allocator(
            lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device)
        )
        launch()

    contextvars.copy_context().run(run)
