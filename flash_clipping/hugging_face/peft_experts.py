"""PEFT's LoRA of stacked experts (``target_parameters``): the low ranks, never their product.

E experts, r rank, d input features, p output features. PEFT keeps A as ``[E·r, d]``, the ranks of
an expert together, and B as ``[p, r·E]``, the experts of a rank together. It forms ``W_e + s B_e
A_e`` in every forward. Here rows go through A and B separately, and the gradients of these are
products over the rows of a segment, of r columns or rows.

A module may be wrapped several times, once for each of its parameters.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flash_clipping.hugging_face.experts import (
    ExpertsRule,
    are_experts,
    arithmetic_of,
    difference,
    names_of,
)
from flash_clipping.layers.routed_rows import Described, LowRank, RoutedRows
from flash_clipping.rules.registry import UnsupportedLayer, register_family


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
    """Adapters that a wrapper computes with.

    Raises:
        UnsupportedLayer: one is trainable that it does not compute with.
    """
    used, state = [name for name in wrapper.active_adapters if name in wrapper.lora_A], "not active"
    if wrapper.disable_adapters or wrapper.merged:
        used, state = [], "disabled" if wrapper.disable_adapters else "merged"
    for name in wrapper.lora_A:
        params = [param for low in _pair(wrapper, name) for param in low.parameters()]
        if name not in used and any(param.requires_grad for param in params):
            raise UnsupportedLayer(
                f"FC121 adapter {name!r} of {wrapper.parameter_name} is trainable and {state}, so "
                "that no sample reaches it. Activate it (model.set_adapter, unmerge_adapter)."
            )
    return used


def _pair(wrapper: Any, adapter: str) -> tuple[Any, Any]:
    """The modules that hold A and B."""
    return wrapper.lora_A[adapter], wrapper.lora_B[adapter]


def _A_as_parameter(x: Tensor) -> Tensor:
    """``[..., E, r, d]`` as ``[..., E·r, d]``."""
    return x.flatten(-3, -2)


def _B_as_parameter(x: Tensor) -> Tensor:
    """``[..., E, p, r]`` as ``[..., p, r·E]``."""
    return x.movedim(-3, -1).flatten(-2)


def _low_rank_matrices(A: Tensor, B: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """``[E, r, d]`` and ``[E, p, r]`` of the parameters."""
    return A.unflatten(0, (experts, -1)), B.unflatten(1, (-1, experts)).movedim(-1, 0).contiguous()


def _waves(rows: int, columns: int, step: float, like: Tensor) -> Tensor:
    """Values of no pattern, without a draw from the user's generators."""
    numbers = torch.arange(rows * columns, device=like.device, dtype=torch.float64)
    return (numbers * step).sin().view(rows, columns).to(like.dtype)


def _check_layout(wrapper: Any, adapter: str) -> None:
    """Compare PEFT's own product with that of the matrices as they are taken here: on other values,
    as B is 0 at first, and for few features, as the product has as many elements as the experts.

    Raises:
        UnsupportedLayer: they differ.
    """
    A, B = (module.weight for module in _pair(wrapper, adapter))
    probes = _waves(len(A), 3, 0.7, A), _waves(4, B.shape[1], 1.7, A)
    stand_in = copy.copy(wrapper)
    of_stand_in = dict(wrapper._modules)
    for name, probe in zip(("lora_A", "lora_B"), probes, strict=True):
        holder: Any = nn.Module()
        holder.weight = nn.Parameter(probe, requires_grad=False)
        of_stand_in[name] = nn.ModuleDict({adapter: holder})
    stand_in.__dict__["_modules"] = of_stand_in
    experts = wrapper.get_base_layer()
    with torch.no_grad(), torch.autocast(A.device.type, enabled=False):
        own = stand_in.get_delta_weight(adapter)
        A_Erd, B_Epr = _low_rank_matrices(*probes, experts.num_experts)
        ruled = B_Epr.double() @ A_Erd.double() * wrapper.scaling[adapter]
        ruled = ruled.mT if experts.is_transposed else ruled
    shape = f"shape {tuple(own.shape)} in the place of {tuple(ruled.shape)}"
    # Either of the two may be in low precision.
    narrow = min(own.dtype, A.dtype, key=lambda dtype: dtype.itemsize)
    if found := difference(own, ruled, narrow) if own.shape == ruled.shape else shape:
        raise UnsupportedLayer(
            f"FC122 PEFT adds something else to {wrapper.parameter_name} than the product of its "
            f"low ranks as this version of flash_clipping knows it ({found}). Use LoRA on linear "
            "layers (target_modules)."
        )


@register_family(are_wrapped_experts)
class PeftExpertsRule(ExpertsRule):
    """Stands for the outermost wrapper and all that is below it."""

    def __init__(self) -> None:
        super().__init__()
        #: Adapters whose layout was found right, by their wrapper.
        self._layouts: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()

    def parts(self, layer: Any) -> Mapping[str, nn.Module]:
        wrappers, prefix, experts = _unwrapped(layer)
        found: dict[str, nn.Module] = {}
        for path, wrapper in wrappers:
            if path:
                found[path.removesuffix(".")] = wrapper
            for adapter in wrapper.lora_A:
                A, B = _pair(wrapper, adapter)
                found |= {f"{path}lora_A.{adapter}": A, f"{path}lora_B.{adapter}": B}
        return {**found, prefix.removesuffix("."): experts}

    def described(self, layer: Any) -> Described:
        wrappers, prefix, experts = _unwrapped(layer)
        tensors, _, count, _ = super().described(experts)
        base, low_ranks = len(tensors), []
        arranged: dict[str, Callable[[Tensor], Tensor]] = {}
        for path, wrapper in wrappers:
            known = self._layouts.setdefault(wrapper, set())
            for adapter in _active(wrapper):
                if adapter not in known:
                    _check_layout(wrapper, adapter)
                    known.add(adapter)
                tensors += [module.weight for module in _pair(wrapper, adapter)]
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
