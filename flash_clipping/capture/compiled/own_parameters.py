"""Parameters that a module uses in a forward of its own, on wires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping.capture.compiled.wiring import Meta, Seen
from flash_clipping.factors import Dense, Factor


class PerSampleParameter(torch.autograd.Function):
    """A parameter for each sample, ``[B, *parameter]``, whose wire gets the gradients."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, wire: Tensor) -> Tensor:
        return param.detach().expand(wire.shape)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        return None, G


class OwnWiring:
    """One parameter that a module uses in a forward of its own: its gradients, sample by sample."""

    def __init__(self, name: str):
        self.name = name

    @staticmethod
    def meta(param: Tensor, seen: Seen) -> Meta:
        return (seen.x_shape[0], *param.shape), param.dtype

    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        return {self.name: Dense(grads[0])}
