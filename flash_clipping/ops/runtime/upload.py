"""Numbers that the host knows, for the device, without waiting for it."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from flash_clipping.errors import FlashClippingError

_TYPECODES = {torch.int64: "q", torch.float32: "f", torch.float64: "d"}

#: Where sources of copies go that CUDA graphs, captured one inside the other, make.
_kept: list[list[Tensor]] = []


def to_device(
    values: Sequence[float], device: torch.device, dtype: torch.dtype, *, repeats: bool = False
) -> Tensor:
    """A one-dimensional tensor of the values; int64, float32 or float64.

    ``torch.tensor`` looks at every value by itself: three times as slow as an array of bytes. On
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
                "An operation of flash clipping is being captured as a CUDA graph, whose replays "
                "would read tables that are gone by then. Capture a step with "
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
