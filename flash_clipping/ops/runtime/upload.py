"""Numbers that the host knows, for the device, without waiting for it."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from flash_clipping.errors import FlashClippingError

_TYPECODES = {torch.int64: "q", torch.float32: "f", torch.float64: "d"}

#: Tables that were copied last, by what they hold, where they are, and the stream that copied them.
_copies: dict[Hashable, Tensor] = {}
_MOST = 64


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
    key = numbers.tobytes(), dtype, device, torch.cuda.current_stream(device).cuda_stream
    copy = _copies.pop(key, None)
    if copy is None:
        copy = torch.frombuffer(numbers, dtype=dtype).pin_memory().to(device, non_blocking=True)
        if len(_copies) >= _MOST:
            _copies.pop(next(iter(_copies)), None)
    _copies[key] = copy  # the last
    return copy


#: Where sources of copies go that CUDA graphs, captured one inside the other, make.
_kept: list[list[Tensor]] = []


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
