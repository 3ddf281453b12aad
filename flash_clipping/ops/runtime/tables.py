"""Numbers that the host knows, on the device; and tables of operands, which are such numbers.

A launch for many layers walks over a table. Layers differ in their addresses, strides and
widths only. A table names these, a row for each, and goes to the device as one copy. Where programs
are shared out between rows, the last column says which is the first of each
(:func:`flash_clipping.ops.runtime.tiles.row_of` finds the row).
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from flash_clipping.errors import FlashClippingError
from flash_clipping.ops.runtime.backend import is_interpreting, is_triton_available, resolve
from flash_clipping.ops.runtime.shapes import ALIGNMENT

WORTH_A_COPY = 1 << 22
"""Elements from which on an operand that no descriptor can address is copied: with fewer, what
descriptors save is about what the launch of a copy takes the host."""


class Table:
    """Rows of integers. Without addresses it is for every step of the same layout.

    Attributes:
        numbers: all rows, one after the other.
        held: what was copied for it, until the kernel has been launched.
        copied: whether anything was, so that the table is for this step only.
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


# -- from the host to the device, without waiting for it ------------------------------------------

_TYPECODES = {torch.int64: "q", torch.float32: "f", torch.float64: "d"}

#: Where sources of copies go that CUDA graphs, captured one inside the other, make.
_kept: list[list[Tensor]] = []


def to_device(
    values: Sequence[float], device: torch.device, dtype: torch.dtype, *, repeats: bool = False
) -> Tensor:
    """A one-dimensional tensor of the values; int64, float32 or float64.

    ``torch.tensor`` looks at every value separately: three times as slow as an array of bytes. On
    a GPU the copy starts from pinned memory, which PyTorch keeps until it has been made.

    Args:
        repeats: whether the same values are likely to be asked for again, and are no secret: then
            the copy is kept, and nobody may write into it. Steps of one layout mostly get the same
            memory from PyTorch, so that their tables of addresses are equal.

    Raises:
        FlashClippingError: the copy is captured as a part of a CUDA graph, and nobody will keep
            what its replays copy (:func:`sources_kept`).
    """
    if not len(values):
        return torch.empty(0, dtype=dtype, device=device)
    numbers = array(_TYPECODES[dtype], values)
    if device.type == "cpu":
        return torch.frombuffer(numbers, dtype=dtype)
    if is_current_stream_capturing():
        if not _kept:
            raise FlashClippingError(
                "FC701 An operation of flash clipping is being captured as a CUDA graph, whose "
                "replays would read tables that are gone by then. Capture a step with "
                "flash_clipping.GraphedStep."
            )
        pinned = torch.frombuffer(numbers, dtype=dtype).pin_memory()
        _kept[-1].append(pinned)
        return pinned.to(device, non_blocking=True)
    if not repeats:
        return torch.frombuffer(numbers, dtype=dtype).pin_memory().to(device, non_blocking=True)
    # Another stream would have to wait for the copy.
    stream = torch.cuda.current_stream(device).cuda_stream
    return _copy(numbers.tobytes(), device, dtype, stream)


@functools.lru_cache(maxsize=64)
def _copy(numbers: bytes, device: torch.device, dtype: torch.dtype, stream: int) -> Tensor:
    """The copy that was made on this stream of what the table holds."""
    pinned = torch.frombuffer(bytearray(numbers), dtype=dtype).pin_memory()
    return pinned.to(device, non_blocking=True)


@contextmanager
def sources_kept() -> Iterator[list[Tensor]]:
    """The sources of the copies that are captured meanwhile: replays read them, so whoever
    replays must hold them."""
    sources: list[Tensor] = []
    _kept.append(sources)
    try:
        yield sources
    finally:
        _kept.pop()
