"""Tables of operands: what a launch that serves many layers walks over.

Layers differ in their addresses, strides and widths only. A table names these, a row for each, and
goes to the device as one copy. Where programs are shared out between rows, the last column says
which is the first of each (:func:`flash_clipping.ops.runtime.tiles.row_of` finds the row).
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.runtime.backend import is_interpreting, is_triton_available, resolve
from flash_clipping.ops.runtime.shapes import ALIGNMENT
from flash_clipping.ops.runtime.upload import to_device

WORTH_A_COPY = 1 << 22
"""Elements from which on an operand that no descriptor can address is copied: with fewer, what
descriptors save is about what the launch of a copy takes the host."""


class Table:
    """Rows of integers. Without addresses it serves every step of the same layout.

    Attributes:
        numbers: all rows, one after the other.
        held: what was copied for it, until the kernel has been launched.
        copied: whether anything was, so that the table serves this step only.
        aligned: whether descriptors can serve every operand.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.numbers = array("q")
        self.held: list[Tensor] = []
        self.copied = False
        self.aligned = True

    def describe(self, x_BTf: Tensor) -> tuple[int, int, int, int]:
        """What goes into a row for an operand: address, strides of samples and positions, and
        width. Its features must lie together; where they do not, these are a copy's."""
        read, row, aligned = operand_row(x_BTf)
        self.hold(x_BTf, read)
        self.aligned = self.aligned and aligned
        return row

    def hold(self, given: Tensor, read: Tensor) -> None:
        """Keep what is read in place of what was given, if that is another tensor."""
        if read is not given:
            self.copied = True
            self.held.append(read)

    def set_column(self, column: int, values: Sequence[int]) -> None:
        """Write one number into every row."""
        self.numbers[column :: self.columns] = array("q", values)

    def on(self, device: torch.device) -> Tensor:
        """The numbers, int64, on a device; never waits for it."""
        return to_device(self.numbers, device, torch.int64, repeats=True)


def operand_row(x_BTf: Tensor) -> tuple[Tensor, tuple[int, int, int, int], bool]:
    """An operand whose features lie together (else a copy); its address, strides of samples and
    positions, and width; and whether a descriptor can serve it: rows on 16 bytes, and apart. The
    width may be any (:func:`is_whole`)."""
    stride_b, stride_t, stride_f = x_BTf.stride()
    width = x_BTf.shape[2]
    if stride_f != 1 and width != 1:
        x_BTf = x_BTf.contiguous()
        stride_b, stride_t, _ = x_BTf.stride()
    address = x_BTf.data_ptr()
    bytes_apart = (stride_b | stride_t) * x_BTf.element_size()
    aligned = (address | bytes_apart) % ALIGNMENT == 0 and stride_t > 0 and width > 0
    return x_BTf, (address, stride_b, stride_t, width), aligned


def is_whole(width: int, itemsize: int) -> bool:
    """Whether a row is a multiple of 16 bytes: what loads and stores by address must know to move
    so many at a time under a mask. A descriptor need not know."""
    return width * itemsize % ALIGNMENT == 0


def on_16_bytes(x: Tensor) -> Tensor:
    """``[B, ..., f]`` as ``[B, T, f]``, in rows that descriptors can address: a copy of what is
    large and lies otherwise (a vocabulary of 50257 in 16 bits), where kernels have descriptors.
    Without, rows of such a width are read element by element anyway. What is between rows nobody
    reads."""
    x_BTf = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
    if x_BTf.numel() < WORTH_A_COPY:  # nearly all that come here
        # Copied once where features do not lie together, rather than by every kernel.
        return x_BTf if x_BTf.stride(2) == 1 else x_BTf.contiguous()
    stride_b, stride_t, _ = x_BTf.stride()
    lies_well = (stride_b | stride_t) * x_BTf.element_size() % ALIGNMENT == 0
    if lies_well or not _has_descriptors(x_BTf):
        return x_BTf
    B, T, width = x_BTf.shape
    each = ALIGNMENT // x_BTf.element_size()
    rows_BTf = x_BTf.new_empty((B, T, -(-width // each) * each))[..., :width]
    return rows_BTf.copy_(x_BTf)


def _has_descriptors(x: Tensor) -> bool:
    """Whether kernels will read this tensor, and can do it through descriptors."""
    on_kernels = (x.is_cuda or is_interpreting()) and is_triton_available()
    if not on_kernels or resolve("auto", x) != "triton":
        return False
    from flash_clipping.ops.runtime.tiles import has_tma  # imports Triton, which may not be there

    return has_tma(x.device)


def firsts_of(programs: Sequence[int]) -> tuple[list[int], int]:
    """The first program of every row, from how many each has; and how many there are."""
    *firsts, count = itertools.accumulate(programs, initial=0)
    return firsts, count
