"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: linear maps over unfolded patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat import is_autocasting, padding_of
from flash_clipping.factors import ConvolutionGrad, DenseGrad, PerSampleGrad, SumGrad
from flash_clipping.rules.registry import (
    GradRequest,
    Grads,
    Rule,
    UnsupportedLayer,
    autocast_operands,
    register_rule,
    weight_and_bias,
)

#: Stride, padding, dilation and groups of a convolution.
Kernel: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int], int]


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel) -> Tensor:
    stride, padding, dilation, groups = kernel
    none = [0] * len(stride)
    return torch.convolution(x, weight, bias, stride, padding, dilation, False, none, groups)


def convolution_backward(
    x: Tensor, weight: Tensor, G: Tensor, needs: GradRequest, kernel: Kernel
) -> Grads:
    """The gradient of the input as the kernel reads it, and factors of ``weight`` and ``bias``."""
    stride, padding, dilation, groups = kernel
    grad_input = None
    if needs.inputs[0]:
        grad_input = torch.ops.aten.convolution_backward(
            *(G, x, weight, None, stride, padding, dilation),
            *(False, [0] * len(stride), groups, [True, False, False]),
        )[0]
    factors: dict[str, PerSampleGrad] = {}
    if "weight" in needs.params:
        factors["weight"] = ConvolutionGrad(x, G, weight, stride, padding, dilation, groups)
    if "bias" in needs.params:
        factors["bias"] = DenseGrad(SumGrad(G.flatten(2).mT).dense())
    return grad_input, factors


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvolutionRule(Rule):
    """Stride, dilation, groups and every padding mode; the input must have its batch axis."""

    def can_be_traced(self, layer: Any) -> bool:
        return True

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        weight, bias = weight_and_bias(layer)
        if x.ndim != weight.ndim:
            raise UnsupportedLayer(
                f"FC203 a {type(layer).__name__} without a batch axis has no samples: expected an "
                f"input of {weight.dim()} dimensions, found shape {tuple(x.shape)}. Add the batch "
                "axis, x.unsqueeze(0).",
                "x = x.unsqueeze(0)",
            )
        if is_autocasting():
            x, weight, bias = autocast_operands(x, weight, bias)
        read, kernel = padded(layer, x)
        return convolution(read, weight, bias, kernel), (x, weight)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x, weight = saved
        read, kernel = padded(layer, x)
        grad_input, factors = convolution_backward(read, weight, grad_output, needs, kernel)
        if needs.input and read is not x:
            grad_input = _padding_backward(layer, x, grad_input)
        return grad_input, factors


def own_padding(layer: Any) -> tuple[int, ...]:
    """What is added by an operator of its own, as ``F.pad`` takes it."""
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return ()
    sides = tuple(padding_of(layer))
    return sides if any(sides) else ()


def kernel_of(layer: Any) -> Kernel:
    """The kernel of such a layer, with the zeros that it adds itself on both sides of each axis."""
    padding: Sequence[int] = [0] * len(layer.stride)
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        padding = layer.padding  # whatever it was set to since
    return layer.stride, padding, layer.dilation, layer.groups


def padded(layer: Any, x: Tensor) -> tuple[Tensor, Kernel]:
    """The layer's input as the kernel reads it, and the kernel."""
    if sides := own_padding(layer):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, sides, mode=mode)
    return x, kernel_of(layer)


def _padding_backward(layer: Any, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of padding ``x``: what was copied gets that of its copies as well."""
    sides = own_padding(layer)
    if layer.padding_mode == "zeros":
        return F.pad(grad, [-side for side in sides])
    for n in range(len(sides) // 2):  # from the last axis on
        size = x.shape[-1 - n]
        places = torch.arange(size, device=x.device, dtype=torch.float32).view(1, 1, size)
        places = F.pad(places, sides[2 * n : 2 * n + 2], mode=layer.padding_mode).flatten().long()
        shape = list(grad.shape)
        shape[-1 - n] = size
        grad = grad.new_zeros(shape).index_add(-1 - n, places, grad)
    return grad
