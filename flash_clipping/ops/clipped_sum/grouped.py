"""Kernel for the clipped sums of many small layers in one launch.

B samples, T positions, d input features, p output features.

A product that takes the device ten microseconds takes the host longer than that to launch. Here a
table names the operands of all such layers and every program computes one tile of one of them. The
coefficient is applied to the fp32 product of each sample, so nothing is scaled in memory, nothing
is rounded twice, and the rows of a dropped sample are never looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch
from flash_clipping.ops.runtime.shapes import Memo
from flash_clipping.ops.runtime.upload import to_device

_COLUMNS = 10  # of the table


@triton.jit
def _operand(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.cast(address, tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _width(value, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    # The compiler vectorizes loads only where it knows that rows are multiples of 16 bytes.
    if ALIGNED:
        EACH: tl.constexpr = 128 // DTYPE.primitive_bitwidth
        value = tl.multiple_of(value, EACH)
    return value


@triton.jit
def _grouped_product_kernel(
    table_ptr,
    coef_ptr,
    layers,
    count,
    B,
    T,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    LAYERS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    index = tl.arange(0, LAYERS)
    first = tl.load(table_ptr + index * COLUMNS + 9, mask=index < layers, other=1 << 40)
    for tile in range(tl.program_id(0), count, tl.num_programs(0)):
        # The layer whose range of tiles holds this one.
        layer = tl.sum(tl.where(first <= tile, 1, 0), 0) - 1
        row = table_ptr + layer * COLUMNS
        G_ptr = _operand(tl.load(row), DTYPE, ALIGNED)
        G_stride_b = _width(tl.load(row + 1), DTYPE, ALIGNED)
        G_stride_t = _width(tl.load(row + 2), DTYPE, ALIGNED)
        p = _width(tl.load(row + 3), DTYPE, ALIGNED).to(tl.int32)
        A_ptr = _operand(tl.load(row + 4), DTYPE, ALIGNED)
        A_stride_b = _width(tl.load(row + 5), DTYPE, ALIGNED)
        A_stride_t = _width(tl.load(row + 6), DTYPE, ALIGNED)
        d = _width(tl.load(row + 7), DTYPE, ALIGNED).to(tl.int32)
        out_ptr = _operand(tl.load(row + 8), tl.float32, True)
        place = tile - tl.load(row + 9).to(tl.int32)
        tiles_d = tl.cdiv(d, BLOCK)
        rows = (place // tiles_d) * BLOCK + tl.arange(0, BLOCK)
        columns = (place % tiles_d) * BLOCK + tl.arange(0, BLOCK)
        steps = tl.cdiv(T, BLOCK_T)
        total = tl.zeros((BLOCK, BLOCK), tl.float32)
        product = tl.zeros((BLOCK, BLOCK), tl.float32)
        for step in range(0, B * steps):
            b = step // steps
            coef = tl.load(coef_ptr + b)
            t = (step % steps) * BLOCK_T + tl.arange(0, BLOCK_T)
            read = t < tl.where(coef == 0, 0, T)
            G = tl.load(
                G_ptr + b * G_stride_b + t[None, :] * G_stride_t + rows[:, None],
                mask=read[None, :] & (rows[:, None] < p),
                other=0.0,
            )
            A = tl.load(
                A_ptr + b * A_stride_b + t[:, None] * A_stride_t + columns[None, :],
                mask=read[:, None] & (columns[None, :] < d),
                other=0.0,
            )
            product = tl.dot(G, A, product, input_precision=PRECISION)
            if step % steps == steps - 1:
                total += coef * product
                product = tl.zeros((BLOCK, BLOCK), tl.float32)
        tl.store(
            out_ptr + rows[:, None].to(tl.int64) * d + columns[None, :],
            total,
            mask=(rows[:, None] < p) & (columns[None, :] < d),
        )


def _room(p: int, d: int) -> int:
    """Elements that a result takes, so that the next one begins on a 16-byte boundary too."""
    return tiles.cdiv(p * d, 4) * 4


class _Table:
    """Operands of one launch: pairs ``(A_BTd, G_BTp)`` of one B, one T and one dtype. Without
    addresses it serves every step of the same layout."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], block: int) -> None:
        self.aligned, self.count, self.copied = True, 0, False
        self.held: list[Tensor] = []  # until the kernel has been launched
        self.rows = array("q")
        for A, G in pairs:
            A_read, A_row, A_aligned = tiles.table_row(A)
            G_read, G_row, G_aligned = tiles.table_row(G)
            self.copied = self.copied or A_read is not A or G_read is not G
            self.held += (A_read, G_read)
            self.aligned = self.aligned and A_aligned and G_aligned
            self.rows.extend((*G_row, *A_row, 0, self.count))
            self.count += tiles.cdiv(G_row[3], block) * tiles.cdiv(A_row[3], block)
        #: Results by shape, which lie side by side, and where each begins.
        self.members: dict[tuple[int, int], list[int]] = {}
        for i, (A, G) in enumerate(pairs):
            self.members.setdefault((G.shape[2], A.shape[2]), []).append(i)
        self.starts = [0] * len(pairs)
        self.room = 0
        for (p, d), members in self.members.items():
            for i in members:
                self.starts[i] = self.room
                self.room += _room(p, d)

    def read(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take the addresses of operands of the layout that the table was made for."""
        self.rows[::_COLUMNS] = array("q", [G.data_ptr() for _, G in pairs])
        self.rows[4::_COLUMNS] = array("q", [A.data_ptr() for A, _ in pairs])

    def write_to(self, addresses: Sequence[int]) -> None:
        """Where the results go."""
        self.rows[8::_COLUMNS] = array("q", addresses)


def grouped_products(
    pairs: Sequence[tuple[Tensor, Tensor]],
    coef_B: Tensor,
    *,
    block: int = 128,
    memo: Memo | None = None,
) -> list[Tensor]:
    """``Σ_b coef_b G_bᵀ A_b`` in fp32 for pairs ``(A_BTd, G_BTp)`` of one B, T and dtype."""
    A_BTd, _ = pairs[0]
    table: _Table | None = memo.get("table") if memo is not None else None
    if table is None:
        table = _Table(pairs, block)
    else:
        table.read(pairs)
    # One buffer for all results: few calls make all views of it.
    buffer = torch.empty(table.room, dtype=torch.float32, device=A_BTd.device)
    address, each = buffer.data_ptr(), buffer.element_size()
    table.write_to([address + each * start for start in table.starts])
    _launch(table, A_BTd, coef_B, block=block)
    if memo is not None and not table.copied:
        memo["table"] = table
    outs: dict[int, Tensor] = {}
    for (p, d), members in table.members.items():
        first, room = table.starts[members[0]], _room(p, d)
        alike = buffer[first : first + len(members) * room].view(len(members), room)
        outs.update(zip(members, alike[:, : p * d].view(len(members), p, d).unbind(0), strict=True))
    return [outs[i] for i in range(len(pairs))]


def _launch(table: _Table, A_BTd: Tensor, coef_B: Tensor, *, block: int) -> None:
    B, T, _ = A_BTd.shape
    device, dtype = A_BTd.device, A_BTd.dtype
    layers = len(table.starts)
    launch(
        _grouped_product_kernel,
        table.count,
        to_device(table.rows, device, torch.int64),
        coef_B.contiguous(),
        layers,
        table.count,
        B,
        T,
        DTYPE=tiles.TL_DTYPE[dtype],
        ALIGNED=table.aligned,
        LAYERS=tiles.next_power_of_2(layers),
        COLUMNS=_COLUMNS,
        BLOCK=block,
        BLOCK_T=32 if dtype == torch.float32 else 64,
        PRECISION=tiles.dot_precision(dtype),
        num_warps=8,
        num_stages=3,
    )
    table.held = []
