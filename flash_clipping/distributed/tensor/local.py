"""Tensors as this process has them, without ``DTensor`` and without waiting for later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flash_clipping._compat import is_awaited, local_tensor


def local_of(x: Any) -> Any:
    """This process's part of a ``DTensor``, of the same memory and outside of autograd; any other
    tensor as it is."""
    if not isinstance(x, DTensor):
        return x
    return arrived(local_tensor(x))


def arrived(x: Any) -> Any:
    """A plain tensor where a collective may still be writing: kernels of ours read its memory."""
    return _Arrived.apply(x) if is_awaited(x) else x


class _Arrived(torch.autograd.Function):
    """Its own ``wait()`` leaves autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Tensor:
        found: Tensor = x.wait()
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
