"""``nn.Linear`` and ``transformers``' ``Conv1D``: ``g_b = G_b^T A_b``."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat import is_autocasting
from flash_clipping.factors import DenseGrad, LinearGrad, SumGrad
from flash_clipping.ops.runtime.tables import on_16_bytes
from flash_clipping.rules.registry import (
    GradRequest,
    Grads,
    Rule,
    as_BTd,
    autocast_operands,
    kinds_of,
    register_rule,
    weight_and_bias,
)

#: Linear layers, and types of weights, that are kept in fewer bits.
_QUANTIZED = {
    "bitsandbytes.nn.modules.Linear4bit",
    "bitsandbytes.nn.modules.Linear8bitLt",
    "torchao.utils.TorchAOBaseTensor",
}


def has_quantized_weight(layer: nn.Module) -> bool:
    """Whether products with the layer's weight are its library's own, which no rule can call."""
    return not _QUANTIZED.isdisjoint(kinds_of(layer, layer._parameters.get("weight")))


def linear_backward(x: Tensor, weight: Tensor, G: Tensor, needs: GradRequest) -> Grads:
    """The gradient of ``A`` in ``Y = A W^T + b``, and factors of ``weight`` and ``bias``:
    ``g_b = G_b^T A_b``.

    Any number of axes between the batch and the features counts as positions.
    """
    if needs.traced:
        # Keys get theirs transposed. One copy in the graph, which the product needs as well, is in
        # place of one for every kernel that reads it.
        G = G.contiguous()
    grad_input = G @ weight if needs.inputs[0] else None
    if "weight" not in needs.params:
        return grad_input, {"bias": DenseGrad(SumGrad(as_BTd(G)).dense())}
    G_BTp = as_BTd(G) if needs.traced else on_16_bytes(G)
    outer = LinearGrad(as_BTd(x), G_BTp)
    if "bias" not in needs.params:
        return grad_input, {"weight": outer}
    # The bias is added up later, as the weight's factor holds G anyway.
    return grad_input, {"weight": outer, "bias": SumGrad(G_BTp)}


def transposed_backward(x: Tensor, weight: Tensor, G: Tensor, needs: GradRequest) -> Grads:
    """:func:`linear_backward` for ``Y = A W + b``."""
    grad_input, factors = linear_backward(x, weight.mT, G, needs)
    outer = factors.get("weight")
    if isinstance(outer, LinearGrad):
        factors = {**factors, "weight": LinearGrad(outer.G_BTp, outer.A_BTd)}
    return grad_input, factors


@register_rule(nn.Linear)
class LinearRule(Rule):
    def fits(self, layer: nn.Linear) -> bool:
        return not has_quantized_weight(layer)

    def works_by_position(self, layer: nn.Linear) -> bool:
        return True

    def can_be_traced(self, layer: nn.Linear) -> bool:
        return True

    def forward(self, layer: nn.Linear, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        weight, bias = weight_and_bias(layer)
        if is_autocasting():
            x, weight, bias = autocast_operands(x, weight, bias)
        return F.linear(x, weight, bias), (x, weight)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x, weight = saved
        return linear_backward(x, weight, grad_output, needs)


@register_rule("transformers.pytorch_utils.Conv1D")
class TransposedLinearRule(LinearRule):
    """GPT-2's ``Conv1D``, whose weight is ``d x p``."""

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x, weight, bias = autocast_operands(x, *weight_and_bias(layer))
        return F.linear(x, weight.mT, bias), (x, weight)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x, weight = saved
        return transposed_backward(x, weight, grad_output, needs)
