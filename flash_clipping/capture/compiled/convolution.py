"""Convolutions on wires."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping._compat import padding_of
from flash_clipping.capture.compiled.wiring import Meta, Seen, Wires, Wiring, operands_of
from flash_clipping.factors import Convolution, Dense, Factor, accumulation_dtype


class _ConvolutionFunction(torch.autograd.Function):
    """A convolution of a padded input; wires get that input, ``G`` and ``Σ_t G``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        of_x: Tensor | None,
        of_G: Tensor | None,
        of_bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = stride, padding, dilation, groups
        ctx.wired = of_x is not None, of_bias is not None
        y = torch.convolution(
            x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups
        )
        return y.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        product, vector = ctx.wired
        dx = torch.ops.aten.convolution_backward(
            G,
            x,
            weight,
            None,
            stride,
            padding,
            dilation,
            False,
            [0] * len(stride),
            groups,
            [True, False, False],
        )[0]
        return (
            dx,
            *(None,) * 6,
            x if product else None,
            G if product else None,
            G.flatten(2).sum(2, dtype=accumulation_dtype(G.dtype)) if vector else None,
        )


class ConvolutionWiring(Wiring):
    """Padding that the convolution does not do itself is done before it, under autograd."""

    @staticmethod
    def _own_padding(layer: Any) -> tuple[int, ...]:
        """What is added by an operator of its own, as ``F.pad`` takes it."""
        by_kernel = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        pads = tuple(padding_of(layer))
        return pads if any(pads) and not by_kernel else ()

    def _zero_padding(self, layer: Any) -> list[int]:
        if self._own_padding(layer) or isinstance(layer.padding, str):
            return [0] * len(layer.stride)
        return list(layer.padding)

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        shape, pads = list(seen.x_shape), self._own_padding(layer)
        for place in range(len(pads) // 2):  # from the last axis on
            shape[len(shape) - 1 - place] += pads[2 * place] + pads[2 * place + 1]
        dtype = seen.y_dtype
        vector = ((seen.y_shape[0], seen.y_shape[1]), accumulation_dtype(dtype))
        return (tuple(shape), dtype), (seen.y_shape, dtype), vector

    def wanted(self, names: Sequence[str]) -> tuple[bool, ...]:
        return "weight" in names, "weight" in names, "bias" in names

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        x, weight, bias = operands_of(x, layer.weight, layer.bias)
        if pads := self._own_padding(layer):
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            x = F.pad(x, pads, mode=mode)
        return _ConvolutionFunction.apply(
            x,
            weight,
            bias,
            list(layer.stride),
            self._zero_padding(layer),
            list(layer.dilation),
            layer.groups,
            *wires,
        )

    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        x, G, vector_Bp = grads
        found: dict[str, Factor] = {}
        if x is not None:
            found["weight"] = Convolution(
                x,
                G,
                layer.weight,
                layer.stride,
                self._zero_padding(layer),
                layer.dilation,
                layer.groups,
            )
        if vector_Bp is not None:
            found["bias"] = Dense(vector_Bp)
        return found
