"""What of a parameter a stand-in's value is, where that is little more than the parameter itself.

``weight.T``, ``1.0 + weight.float()``, ``weight[:, None, None]``, ``weight * 0.5``: the gradient of
the parameter is that of such a value, laid out as the parameter is, times a number. So a factor of
the one is a factor of the other. Anything else (a weight that is standardised, a product of two
parameters) has no origin, and its gradients are formed sample by sample.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_clipping.factors import accumulation_dtype

_CASTS = {"to", "type", "type_as", "float", "double", "half", "bfloat16"}
#: Functions after which all elements are still there, in their order, if their number is the same.
_RESHAPES = {"view", "reshape", "unsqueeze", "squeeze", "flatten", "contiguous", "clone"}
_TRANSPOSES = {"__get__T", "__get__mT", "t"}


@dataclass(frozen=True)
class AffineView:
    """A value is ``scale · leaf + constant``, in whatever dtype and layout.

    Attributes:
        leaf: the stand-in for the parameter.
        scale: a number, or a tensor of one element.
        transposed: the rows of a matrix are its columns.
    """

    leaf: Tensor
    scale: float | Tensor = 1.0
    transposed: bool = False

    @property
    def is_scaled(self) -> bool:
        return isinstance(self.scale, Tensor) or self.scale != 1.0

    def matched(self, x: Tensor) -> Tensor:
        """Cast where one of the tensor and the parameter is float64: sums are like the latter."""
        dtype = accumulation_dtype(self.leaf.dtype)
        return x.to(dtype) if torch.float64 in (x.dtype, dtype) else x

    def scaled(self, G: Tensor) -> Tensor:
        """An output gradient, times what the parameter was multiplied by."""
        G = self.matched(G)
        return G * self.scale if self.is_scaled else G

    def grads(self, grads_B: Tensor) -> Tensor:
        """Per-sample gradients of the value ``[B, *value]`` as those of the parameter."""
        B, shape = len(grads_B), self.leaf.shape
        if self.transposed:
            grads_B = grads_B.reshape(B, shape[1], shape[0]).mT
        return self.scaled(grads_B).reshape(B, *shape)

    def turned(self) -> AffineView:
        """That of the transpose."""
        return replace(self, transposed=not self.transposed)

    def is_parameter(self, value: Tensor) -> bool:
        """Whether a gradient of the value is the parameter's as it is."""
        return not (self.is_scaled or self.transposed) and value.shape == self.leaf.shape

    def is_whole(self, value: Tensor) -> bool:
        """Whether the value has the parameter's axes, or these exchanged."""
        shape = self.leaf.shape
        return value.shape == (shape[::-1] if self.transposed else shape)


def origin_of(
    name: str, leaves: list[Any], named: bool, before: Tensor, origin: AffineView, value: Tensor
) -> AffineView | None:
    """The origin of a floating ``value``, which the function ``name`` made of ``leaves``.

    Args:
        leaves: its arguments; one of them stands in for a parameter, all others are constants.
        named: some were given by name, in whatever order.
        before: the value of the one.
        origin: the origin of that.

    Returns:
        ``None`` if the function does more than keep it.
    """
    if name in _CASTS:
        return origin if value.shape == before.shape else None
    if name in _TRANSPOSES:
        return origin.turned() if value.dim() == 2 and origin.is_whole(before) else None
    if name in _RESHAPES or (name == "__getitem__" and _only_adds_axes(leaves[1:])):
        kept = value.dtype == before.dtype and _without_ones(value) == _without_ones(before)
        return origin if kept else None
    if named or len(leaves) != 2 or value.shape != before.shape:
        return None
    constants = [leaf for leaf in leaves if not hasattr(leaf, "leaves")]
    other, first = constants[0], constants[0] is leaves[1]
    if not isinstance(other, int | float | Tensor):
        return None
    if name == "add" or (name == "sub" and first):
        return origin
    if name == "sub" or name in ("__rsub__", "rsub"):
        return _times(origin, -1.0)
    if name in ("mul", "multiply"):
        return _times(origin, other)
    if name in ("div", "true_divide") and first and not isinstance(other, Tensor) and other:
        return _times(origin, 1.0 / other)
    return None


def _times(origin: AffineView, number: float | Tensor) -> AffineView | None:
    if isinstance(number, Tensor):
        if number.numel() != 1:
            return None
        # A copy: a buffer may have changed when backward needs it.
        number = number.detach().clone().reshape(())
    return replace(origin, scale=number * origin.scale)


def _only_adds_axes(index: list[Any]) -> bool:
    """Whether an index keeps the order; what it leaves out, the number of elements tells."""
    return all(part is None or part is Ellipsis or isinstance(part, slice) for part in index)


def _without_ones(x: Tensor) -> list[int]:
    return [size for size in x.shape if size != 1]
