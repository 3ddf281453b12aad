"""PEFT's LoRA of stacked experts (``target_parameters``): the low ranks, never their product.

E experts, r rank, d input features, p output features. PEFT keeps A as ``[E·r, d]``, the ranks of
an expert together, and B as ``[p, r·E]``, the experts of a rank together. It forms ``W_e + s B_e
A_e`` in every forward. Here rows go through A and B separately, and the gradients of these are
products over the rows of a segment, of r columns or rows.

A module may be wrapped several times, once for each of its parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from flash_clipping.hugging_face.experts import (
    ExpertsRule,
    are_experts,
    arithmetic_of,
    names_of,
)
from flash_clipping.layers.routed_rows import Described, LowRank, RoutedRows
from flash_clipping.rules.registry import register_family


def _is_wrapper(layer: nn.Module) -> bool:
    """Whether this is PEFT's; without importing it, which takes seconds."""
    kind = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    return kind is not None and type(layer) is kind


def _unwrapped(layer: Any) -> tuple[list[tuple[str, Any]], str, Any]:
    """Wrappers from the outside in, each with its path from the first; and the path of what they
    wrap, and that itself."""
    wrappers, prefix = [], ""
    while _is_wrapper(layer):
        wrappers.append((prefix, layer))
        layer, prefix = layer.base_layer, f"{prefix}base_layer."
    return wrappers, prefix, layer


def are_wrapped_experts(layer: nn.Module) -> bool:
    """Whether these are experts with low ranks beside some of their matrices."""
    if not _is_wrapper(layer):
        return False
    wrappers, _, experts = _unwrapped(layer)
    if not are_experts(experts):
        return False
    names = [wrapper.parameter_name for _, wrapper in wrappers]
    matrices = [name for name in names_of(experts) if getattr(experts, name).dim() == 3]
    return len(set(names)) == len(names) and set(names) <= set(matrices)


def _active(wrapper: Any) -> list[str]:
    """Adapters that a wrapper computes with."""
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _A_as_parameter(x: Tensor) -> Tensor:
    """``[..., E, r, d]`` as ``[..., E·r, d]``."""
    return x.flatten(-3, -2)


def _B_as_parameter(x: Tensor) -> Tensor:
    """``[..., E, p, r]`` as ``[..., p, r·E]``."""
    return x.movedim(-3, -1).flatten(-2)


def _low_rank_matrices(A: Tensor, B: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """``[E, r, d]`` and ``[E, p, r]`` of the parameters."""
    return A.unflatten(0, (experts, -1)), B.unflatten(1, (-1, experts)).movedim(-1, 0).contiguous()


@register_family(are_wrapped_experts)
class PeftExpertsRule(ExpertsRule):
    """Stands for the outermost wrapper and all that is below it."""

    def parts(self, layer: Any) -> Mapping[str, nn.Module]:
        return {path: module for path, module in layer.named_modules() if path}

    def described(self, layer: Any) -> Described:
        wrappers, prefix, experts = _unwrapped(layer)
        tensors, _, count, _ = super().described(experts)
        base, low_ranks = len(tensors), []
        arranged: dict[str, Callable[[Tensor], Tensor]] = {}
        for path, wrapper in wrappers:
            for adapter in _active(wrapper):
                tensors += [wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight]
                A_name, B_name = (f"{path}{kind}.{adapter}.weight" for kind in ("lora_A", "lora_B"))
                arranged |= {A_name: _A_as_parameter, B_name: _B_as_parameter}
                scale = wrapper.scaling[adapter]
                low_ranks.append((wrapper.parameter_name, scale, A_name, (B_name,)))

        def arithmetic(params: Sequence[Tensor]) -> RoutedRows:
            added: dict[str, list[LowRank]] = {}
            of_adapters = iter(params[base:])
            for of, scale, A_name, B_names in low_ranks:
                A_Erd, B_Epr = _low_rank_matrices(next(of_adapters), next(of_adapters), count)
                low_rank = LowRank(A_Erd, (B_Epr,), scale, A_name, B_names)
                added.setdefault(of, []).append(low_rank)
            return arithmetic_of(experts, params[:base], prefix, added)

        return Described(tensors, arithmetic, count, arranged)
