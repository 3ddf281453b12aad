"""The two operands of a kernel for segments, how it is launched, and sums of runs of rows.

N sorted rows, M runs, d input features, p output features, f features of one operand. An operand
may lie unsorted, with the place of every sorted row beside it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.launches import launch
from flash_clipping.ops.segments.work import Rows


@dataclass(frozen=True)
class Config:
    """A launch's parameters, open to benchmarks.

    Attributes:
        block: rows, or features, of a tile; ``block_d``: input features, where they differ.
        step: rows, or features, that are multiplied at one time.
    """

    block: int = 128
    step: int = 64
    num_warps: int = 8
    num_stages: int = 3
    block_d: int = 128


class Operands(NamedTuple):
    """What every kernel is told of its two operands.

    Attributes:
        A, G: of one dtype, as one product takes them; features lie next to each other.
        A_places, G_places: of sorted rows; anything where rows are sorted.
        A_gathered, G_gathered: whether they are not.
        rows: N.
    """

    A: Tensor
    G: Tensor
    A_places: Tensor
    G_places: Tensor
    A_gathered: bool
    G_gathered: bool
    rows: int

    @property
    def d(self) -> int:
        return self.A.shape[1]

    @property
    def p(self) -> int:
        return self.G.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.A.dtype

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first four arguments of a kernel."""
        return self.A, self.G, self.A_places, self.G_places

    def sizes(self) -> tuple[int, int, int, int]:
        """Features of both, and how far apart their rows are."""
        return self.d, self.p, stride(self.A), stride(self.G)

    def options(self) -> dict[str, Any]:
        return {"A_GATHERED": self.A_gathered, "G_GATHERED": self.G_gathered}

    def in_order(self) -> Operands:
        """Put in order, for kernels that read a row many times."""
        A = self.A[self.A_places] if self.A_gathered else self.A
        G = self.G[self.G_places] if self.G_gathered else self.G
        return operands_of(Rows(A), Rows(G))


def operands_of(A_Nd: Rows, G_Np: Rows) -> Operands:
    dtype = torch.promote_types(A_Nd.X.dtype, G_Np.X.dtype)
    A, G = (tiles.with_unit_stride(rows.X.to(dtype)) for rows in (A_Nd, G_Np))
    A_gathered, G_gathered = (rows.places_N is not None for rows in (A_Nd, G_Np))
    A_places = A if A_Nd.places_N is None else A_Nd.places_N
    G_places = G if G_Np.places_N is None else G_Np.places_N
    return Operands(A, G, A_places, G_places, A_gathered, G_gathered, A_Nd.size)


def stride(X: Tensor) -> int:
    """From one row to the next."""
    return X.stride(0) if X.shape[0] > 1 else X.shape[1]


@triton.jit
def places(rows_ptr, n, inside, stride, GATHERED: tl.constexpr):
    """Where sorted rows begin in an operand."""
    if GATHERED:
        n = tl.load(rows_ptr + n, mask=inside, other=0)
    return n.to(tl.int64) * stride


def row_sums(X_Nf: Tensor, begin_M: Tensor, end_M: Tensor) -> Tensor:
    """``[M, f]`` in fp32: rows from ``begin`` to ``end`` added up."""
    X_Nf = tiles.with_unit_stride(X_Nf)
    runs, F = len(begin_M), X_Nf.shape[1]
    out = torch.empty((runs, F), dtype=torch.float32, device=X_Nf.device)
    block = min(128, tiles.next_power_of_2(F))
    programs = runs * tiles.cdiv(F, block)
    if programs:
        arguments = (X_Nf, begin_M, end_M, out, F, stride(X_Nf))
        launch(row_sums_kernel, programs, *arguments, ROWS=32, BLOCK=block, num_warps=4)
    return out


def of_segments(parts_Mf: Tensor, firsts: Tensor) -> Tensor:
    """What blocks have left, added up for every segment in order."""
    return row_sums(parts_Mf, firsts[:-1], firsts[1:])


@triton.jit
def row_sums_kernel(
    X_ptr, begin_ptr, end_ptr, out_ptr, F, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """``Σ x_n`` over a run of rows, some columns of it."""
    parts = tl.cdiv(F, BLOCK)
    run = tl.program_id(0) // parts
    columns = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(end_ptr + run)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.load(begin_ptr + run), end, ROWS):
        n = first + tl.arange(0, ROWS)
        at = n.to(tl.int64)[:, None] * stride + columns[None, :]
        x = tl.load(X_ptr + at, mask=(n < end)[:, None] & (columns < F)[None, :], other=0.0)
        total += tl.sum(x.to(tl.float32), 0)
    tl.store(out_ptr + run.to(tl.int64) * F + columns, total, mask=columns < F)
