"""``nn.Linear`` and ``transformers``' ``Conv1D``: ``g_b = G_b^T A_b``."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping.factors import DenseGrad, LinearGrad, SumGrad
from flash_clipping.ops.runtime.backend import is_autocasting
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

#: Linear layers, and types of weights, that are kept in fewer bits (:mod:`.quantized`).
_QUANTIZED = {
    "bitsandbytes.nn.modules.Linear4bit",
    "bitsandbytes.nn.modules.Linear8bitLt",
    "torchao.utils.TorchAOBaseTensor",
}


def has_quantized_weight(layer: nn.Module) -> bool:
    """Whether products with the layer's weight are its library's own, which no rule can call."""
    return not _QUANTIZED.isdisjoint(kinds_of(layer, layer._parameters.get("weight")))


@register_rule(nn.Linear)
class LinearRule(Rule):
    """Any number of axes between the batch and the features counts as positions."""

    #: Whether the weight is ``d x p``: ``Y = A W + b`` and ``g_b = A_b^T G_b``.
    transposed = False

    def fits(self, layer: Any) -> bool:
        return not has_quantized_weight(layer)

    def works_by_position(self, layer: Any) -> bool:
        return True

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        weight, bias = weight_and_bias(layer)
        if is_autocasting():
            x, weight, bias = autocast_operands(x, weight, bias)  # type: ignore[assignment]
        assert weight is not None
        return F.linear(x, weight.mT if self.transposed else weight, bias), (x, weight)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x, weight = saved
        grad_input, wanted = None, needs.params
        if needs.input:
            grad_input = grad_output @ (weight.mT if self.transposed else weight)
        if "weight" not in wanted:
            return grad_input, {"bias": DenseGrad(SumGrad(as_BTd(grad_output)).dense())}
        A_BTd, G_BTp = as_BTd(x), on_16_bytes(grad_output)
        outer = LinearGrad(G_BTp, A_BTd) if self.transposed else LinearGrad(A_BTd, G_BTp)
        if "bias" not in wanted:
            return grad_input, {"weight": outer}
        # The bias is added up later, as the weight's factor holds G anyway.
        return grad_input, {"weight": outer, "bias": SumGrad(G_BTp)}


@register_rule("transformers.pytorch_utils.Conv1D")
class TransposedLinearRule(LinearRule):
    """GPT-2's ``Conv1D``."""

    transposed = True
