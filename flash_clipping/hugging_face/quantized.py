"""Linear layers of torchao and bitsandbytes that multiply in fp8, or keep weights in fewer bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from torch import Tensor, nn

from flash_clipping._compat import is_autocasting
from flash_clipping.errors import FlashClippingError, NotServed, module_at
from flash_clipping.rules.linear import LinearRule
from flash_clipping.rules.registry import (
    GradRequest,
    Grads,
    autocast_operands,
    kinds_of,
    register_rule,
)

_FLOAT8 = "torchao.float8.float8_linear.Float8Linear"
_ONE_SCALE = (
    "by one scale for the rows of all samples: each is rounded by the largest of the others, which "
    "no clipping can bound; expected a scale for each row"
)


@register_rule("torchao.float8.float8_linear.Float8Linear")
class Float8LinearRule(LinearRule):
    """torchao's training in fp8 by its recipe ``rowwise_with_gw_hp``: output and input gradient are
    products of rounded rows, with a scale for each, and the weight's gradient is one of rows as
    they are. Other recipes are refused when the model is wrapped."""

    def can_be_traced(self, layer: Any) -> bool:
        return False

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if is_autocasting():
            (x,) = autocast_operands(x)
        return type(layer).forward(layer, x), (x, layer.weight)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        without_input = GradRequest((False,), needs.params, needs.backend)
        _, factors = super().backward(layer, saved, grad_output, without_input)
        if not needs.input:
            return None, factors
        config, products, (_, weight) = layer.config, layer.linear_mm_config, saved
        # As torchao's forward, which reads these settings alone, with operands of the backward.
        products = products._replace(output=products.grad_input)
        settings = SimpleNamespace(
            cast_config_input=config.cast_config_grad_output,
            cast_config_weight=config.cast_config_weight_for_grad_input,
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )
        product = matmul_with_hp_or_float8_args.apply
        return product(grad_output, weight, products, settings), factors


def refuse_rounding(path: str, module: nn.Module) -> None:
    """Refuse layers of others that round rows of a batch together, or lose gradients."""
    where, names = f"{path or 'the model'} ({type(module).__name__})", kinds_of(module)
    layer: Any = module
    if _FLOAT8 in names:
        rows = ["cast_config_input", "cast_config_grad_output"]
        of_weight = [f"{name}_for_grad_weight" for name in rows] * layer.weight.requires_grad
        for name in (*rows, *of_weight):
            cast = getattr(layer.config, name)
            scaling = cast.scaling_granularity.value
            if cast.scaling_type.value != "disabled" and (
                name in of_weight or scaling != "axiswise"
            ):
                raise NotServed(
                    f"FC902 {where}: found {name} with {scaling} scaling, {_ONE_SCALE}, and "
                    "gradients of weights that are not rounded. Convert the model again, from "
                    "nn.Linear:\n"
                    "    convert_to_float8_training(model, "
                    'config=Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"))'
                )
    weight: Any = module._parameters.get("weight")
    rounding = getattr(weight, "act_quant_kwargs", None)  # of what torchao's multiplies it by
    granularity = type(getattr(rounding, "granularity", None)).__name__
    if granularity == "PerTensor" and getattr(weight, "act_quant_scale", None) is None:
        raise NotServed(
            f"FC902 {where}: found activations that are rounded with granularity={granularity}, "
            f"{_ONE_SCALE}. Quantize the model again, from nn.Linear:\n"
            "    quantize_(model, Int8DynamicActivationInt8WeightConfig(granularity=PerRow()))"
        )
    if "bitsandbytes.nn.modules.Linear4bit" in names and weight.device.type == "cpu":
        state = getattr(weight, "quant_state", None)
        if layer.support_avx512bf16_for_cpu or getattr(state, "packing_format_for_cpu", False):
            raise NotServed(
                f"FC901 {where}: found 4 bits on a CPU with AVX512-BF16; expected a GPU, or the "
                "order of training. The first call in evaluation mode puts the weight into an "
                "order that has no gradients. Load the model again, and before it is called:\n"
                "    for m in model.modules(): m.support_avx512bf16_for_cpu = False"
            )
    if "bitsandbytes.nn.modules.Linear8bitLt" not in names:
        return
    if layer.weight.requires_grad:
        raise NotServed(
            f"FC903 {where}: found a weight that is trained; expected a frozen one: gradients of "
            "weights are rounded to 8 bits by columns, over all samples. Train adapters (LoRA):\n"
            f"    {module_at(path)}.weight.requires_grad_(False)"
        )
    if layer.state.threshold > 0:
        raise NotServed(
            f"FC904 {where}: found llm_int8_threshold={layer.state.threshold}: a column is "
            "computed in more bits where any sample of the batch has a value above it; expected 0. "
            "Load the model with llm_int8_threshold=0.0 in BitsAndBytesConfig, or:\n"
            f"    {module_at(path)}.state.threshold = 0.0"
        )


def rounds_by_scale(root: nn.Module) -> str:
    """The path of a layer whose backward rounds gradients so much that a factor (one over the size
    of the batch) changes what they are; "" without one."""
    for path, module in root.named_modules():
        if _FLOAT8 in kinds_of(module):
            config: Any = module.config
            if config.cast_config_grad_output.scaling_type.value != "disabled":
                return f"{path or 'the model'} ({type(module).__name__})"
    return ""


def refuse_mean(path: str) -> NoReturn:
    """Refuse a loss that is divided by the size of the batch, before this layer's backward."""
    raise FlashClippingError(
        f"FC905 {path}: found a loss that is a mean over the batch; expected each sample's own: "
        "the layer rounds gradients to fp8, and those of a mean otherwise in every batch. Call the "
        "criterion that make_private returns, or add losses up:\n"
        '    make_private(loss_reduction="sum", ...); losses.sum().backward()'
    )
