"""``nn.Linear``, ``transformers``' ``Conv1D`` and linear layers of other libraries that multiply in
fp8, or keep weights in fewer bits: ``g_b = G_b^T A_b``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
    register_family,
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
    def fits(self, layer: Any) -> bool:
        return not has_quantized_weight(layer)

    def works_by_position(self, layer: Any) -> bool:
        return True

    def can_be_traced(self, layer: Any) -> bool:
        return True

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        weight, bias = weight_and_bias(layer)
        if is_autocasting():
            x, weight, bias = autocast_operands(x, weight, bias)  # type: ignore[assignment]
        return F.linear(x, weight, bias), (x, weight)  # type: ignore[arg-type]

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x, weight = saved
        return linear_backward(x, weight, grad_output, needs)


@register_rule("transformers.pytorch_utils.Conv1D")
class TransposedLinearRule(LinearRule):
    """GPT-2's ``Conv1D``, whose weight is ``d x p``."""

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x, weight, bias = autocast_operands(x, *weight_and_bias(layer))  # type: ignore[assignment]
        return F.linear(x, weight.mT, bias), (x, weight)  # type: ignore[union-attr]

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x, weight = saved
        return transposed_backward(x, weight, grad_output, needs)


@register_rule("torchao.float8.float8_linear.Float8Linear")
class Float8LinearRule(LinearRule):
    """torchao's training in fp8 by its recipe ``rowwise_with_gw_hp``: output and input gradient are
    products of rounded rows, with a scale for each, and the weight's gradient is one of rows as
    they are. Other recipes are refused when the model is wrapped."""

    def can_be_traced(self, layer: Any) -> bool:
        return False

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if is_autocasting():
            (x,) = autocast_operands(x)  # type: ignore[assignment]
        return type(layer).forward(layer, x), (x, layer.weight)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        from torchao.float8.float8_training_tensor import GemmInputRole

        without_input = GradRequest((False,), needs.params, needs.backend)
        _, factors = super().backward(layer, saved, grad_output, without_input)
        if not needs.input:
            return None, factors
        config, (_, weight) = layer.config, saved
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        rows = _in_fp8(layer, rows, config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT)
        cast = config.cast_config_weight_for_grad_input
        weight = _in_fp8(layer, weight.t(), cast, GemmInputRole.WEIGHT).t()
        return torch.mm(rows, weight).reshape(*grad_output.shape[:-1], -1), factors


def _in_fp8(layer: Any, x: Tensor, cast: Any, role: Any) -> Tensor:
    """The tensor as an operand of torchao's product in fp8, or as it is, by this configuration."""
    from torchao.float8.config import ScalingType
    from torchao.float8.float8_scaling_utils import (
        get_maybe_axiswise_dim,
        hp_tensor_to_float8_dynamic,
    )

    if cast.scaling_type is ScalingType.DISABLED:
        return x
    found: Tensor = hp_tensor_to_float8_dynamic(
        x,
        cast.target_dtype,
        layer.linear_mm_config,
        gemm_input_role=role,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(-1, cast.scaling_granularity),
        round_scales_to_power_of_2=layer.config.round_scales_to_power_of_2,
    )
    return found


@register_family(lambda layer: isinstance(layer, nn.Linear) and has_quantized_weight(layer))
class QuantizedLinearRule(Rule):
    """A linear layer whose frozen weight is kept in fewer bits: its bias is all that is trained.

    The layer's own forward runs under autograd, with the bias as a constant. The rule stands behind
    it, where the bias's gradient is that of the output.
    """

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        bias = layer._parameters["bias"]
        layer._parameters["bias"] = bias.detach()
        try:
            output = type(layer).forward(layer, *args, **kwargs)
        finally:
            layer._parameters["bias"] = bias
        return tapped(output)

    def works_by_position(self, layer: Any) -> bool:
        return True

    def forward(self, layer: Any, y: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        return y.clone(), ()

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        return grad_output, {"bias": DenseGrad(SumGrad(as_BTd(grad_output)).dense())}
