"""Shared by both kernels for gram norms: a program's tile, a sample's address, a launch's
parameters.

B samples, T positions, F features of one operand.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from flash_clipping.ops.runtime.tiles import operand


@dataclass(frozen=True)
class Config:
    """A launch's parameters."""

    block: int = 128
    block_f: int = 64
    promote: int = 4
    num_warps: int = 8
    num_stages: int = 4
    tma: bool = True


RING = Config(num_stages=6)
"""That of :mod:`flash_clipping.ops.gram.hopper`, of whose warps these multiply. Six stages are what
shared memory holds; 4 and 5 lose up to 0.05 of cuBLAS' rate at eight of nine shapes."""


@triton.jit
def sample_of(row, b, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """Address of one sample, stride of its rows and their width, from a row of the table."""
    X_ptr, stride_b, stride_t, F = operand(row, DTYPE, ALIGNED, WHOLE)
    return X_ptr + b * stride_b, stride_t, F


@triton.jit
def triangle(index):
    """Row and column of an entry of a triangle whose rows have 1, 2, 3, ... entries."""
    row = ((tl.sqrt(1.0 + 8.0 * index.to(tl.float32)) - 1.0) * 0.5).to(tl.int32)
    row -= (row * (row + 1) // 2 > index).to(tl.int32)  # the root is rounded
    row += ((row + 1) * (row + 2) // 2 <= index).to(tl.int32)
    return row, index - row * (row + 1) // 2


@triton.jit
def tile_of(slot, rows, GROUP: tl.constexpr):
    """Row and column of a tile. ``GROUP`` rows are walked together, column by column: programs at
    work at one time share what they read."""
    row, _ = triangle(slot)
    first = row // GROUP * GROUP
    height = min(GROUP, rows - first)
    within = slot - first * (first + 1) // 2
    if within < first * height:  # left of the group's own triangle
        i = first + within % height
        j = within // height
    else:
        i, j = triangle(within - first * height)
        i += first
        j += first
    return i, j
