"""What a layer leaves through its wires, and what all kinds of layers share.

Shape suffixes: ``B`` samples, ``n`` elements of a vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_clipping.factors import Factor, accumulation_dtype

#: Shape and dtype of a wire.
Meta: TypeAlias = tuple[tuple[int, ...], torch.dtype]

#: The wires of one call of a layer, in the order of its wiring; None for what nobody needs.
Wires: TypeAlias = Sequence[Tensor | None]

#: What a layer's call reads, or computes with: rows that are samples; what is the same for all
#: samples; its own parameters, in a forward of its own; or nothing of it is trained.
Kind: TypeAlias = Literal["samples", "same for all", "own", "unused"]


class Seen(NamedTuple):
    """Input and output of one call of a layer, with the batch in front.

    What is the same for all samples has the batch in front of its own axes. Of a layer with a
    forward of its own, there is the batch alone.
    """

    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    y_shape: tuple[int, ...]
    y_dtype: torch.dtype
    kind: Kind = "samples"
    #: Why this call can have no wires.
    why: str = ""


class Wiring(ABC):
    """What one type of layer leaves through its wires."""

    #: Whether it computes along the last axes only, and so takes any number of axes before.
    any_axes = False

    def serves(self, layer: Any) -> bool:
        """Whether layers with these settings are wired."""
        return True

    @abstractmethod
    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        """All wires that such a layer may have; also traced, with sizes that are symbols."""

    @abstractmethod
    def wanted(self, names: Sequence[str]) -> tuple[bool, ...]:
        """Which of them are needed where these parameters are trainable."""

    @abstractmethod
    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        """The layer's output. Traced: PyTorch's operators only, which Inductor fuses."""

    @abstractmethod
    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        """A factor for every parameter that is trainable, from the gradients of the wires."""


def sum_rows(x: Tensor) -> Tensor:
    """``[B, ..., n]`` added up over all axes between, ``[B, n]``."""
    dtype = accumulation_dtype(x.dtype)
    return x.flatten(1, -2).sum(1, dtype=dtype) if x.dim() > 2 else x.to(dtype)


def detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def operands_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, Any, Any]:
    """Operands as autocast would cast them, so that those that are multiplied are those that are
    handed out. Parameters are cut off: their gradients are left at the end of the pass."""
    weight, bias, kind = weight.detach(), detached(bias), x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return x, weight, bias


def normalization_input(x: Tensor) -> Tensor:
    """As the rules have it: autocast computes normalizations in float32 on CUDA."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64:
        return x.float()
    return x
