"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``: linear maps over unfolded patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat import padding_of
from flash_clipping.factors import Convolution, Dense, Factor, RowSum
from flash_clipping.rules.registry import (
    Needs,
    Rule,
    UnsupportedLayer,
    autocast_operands,
    register_rule,
)


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvolutionRule(Rule):
    """Stride, dilation, groups and every padding mode; the input must have its batch axis."""

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if x.dim() != layer.weight.dim():
            raise UnsupportedLayer(
                f"a {type(layer).__name__} without a batch axis has no samples: expected an input "
                f"of {layer.weight.dim()} dimensions, found shape {tuple(x.shape)}. "
                "Add the batch axis, x.unsqueeze(0).",
                "x = x.unsqueeze(0)",
            )
        x, weight, bias = autocast_operands(x, layer.weight, layer.bias)  # type: ignore[assignment]
        assert weight is not None
        output = torch.convolution(
            self._pad(layer, x),
            weight,
            bias,
            layer.stride,
            self._zero_padding(layer),
            layer.dilation,
            False,
            [0] * len(layer.stride),
            layer.groups,
        )
        return output, (x, weight)

    def backward(
        self, layer: Any, saved: tuple[Any, ...], grad_output: Tensor, needs: Needs
    ) -> tuple[Tensor | None, Mapping[str, Factor]]:
        x, weight = saved
        grad_input = self._input_grad(layer, x, weight, grad_output) if needs.input else None
        factors: dict[str, Factor] = {}
        if "weight" in needs.params:
            factors["weight"] = Convolution(
                self._pad(layer, x),
                grad_output,
                weight,
                layer.stride,
                self._zero_padding(layer),
                layer.dilation,
                layer.groups,
            )
        if "bias" in needs.params:
            factors["bias"] = Dense(RowSum(grad_output.flatten(2).mT).dense())
        return grad_input, factors

    @staticmethod
    def _pads_itself(layer: Any) -> bool:
        """Whether padding is symmetric zeros, which the convolution kernel adds without a copy."""
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)

    def _zero_padding(self, layer: Any) -> list[int]:
        return list(layer.padding) if self._pads_itself(layer) else [0] * len(layer.stride)

    def _pad(self, layer: Any, x: Tensor) -> Tensor:
        if self._pads_itself(layer) or not any(padding := padding_of(layer)):
            return x
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        return F.pad(x, padding, mode=mode)

    def _input_grad(self, layer: Any, x: Tensor, weight: Tensor, grad_output: Tensor) -> Tensor:
        # The padding's own gradient is autograd's to give; only its shape depends on x.
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            padded = self._pad(layer, leaf)
        grad_padded = torch.ops.aten.convolution_backward(
            grad_output,
            padded.detach(),
            weight,
            None,
            layer.stride,
            self._zero_padding(layer),
            layer.dilation,
            False,
            [0] * len(layer.stride),
            layer.groups,
            [True, False, False],
        )[0]
        if padded is leaf:
            return grad_padded
        return torch.autograd.grad(padded, leaf, grad_padded)[0]
