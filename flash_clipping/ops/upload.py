"""Numbers that the host knows, for the device, without waiting for it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

_TYPECODES = {torch.int64: "q", torch.float32: "f", torch.float64: "d"}


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype) -> Tensor:
    """A one-dimensional tensor of the values; int64, float32 or float64.

    ``torch.tensor`` looks at every value by itself: three times as slow as an array of bytes. On
    a GPU the copy starts from pinned memory, which PyTorch keeps until it has been made.
    """
    if not len(values):
        return torch.empty(0, dtype=dtype, device=device)
    on_host = torch.frombuffer(array(_TYPECODES[dtype], values), dtype=dtype)
    if device.type == "cpu":
        return on_host
    return on_host.pin_memory().to(device, non_blocking=True)
