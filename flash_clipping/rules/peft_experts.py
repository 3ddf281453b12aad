"""PEFT's LoRA of stacked experts (``target_parameters``): the low ranks, never their product.

E experts, r rank, d input features, p output features. PEFT keeps A as ``[E·r, d]``, the ranks of
an expert together, and B as ``[p, r·E]``, the experts of a rank together. It forms ``W_e + s B_e
A_e`` in every forward. Here rows go through A and B by themselves, and the gradients of these are
products over the rows of a segment, of r columns or rows.

A module may be wrapped several times, once for each of its parameters.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flash_clipping.factors import PerSampleGrad, RearrangedGrad
from flash_clipping.layers.routed_rows import Gradients, LowRank, RoutedRows
from flash_clipping.rules.experts import (
    ExpertsRule,
    are_experts,
    arithmetic_of,
    difference,
    factors_of,
    names_of,
)
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


@dataclass(frozen=True)
class _Adapter:
    """Low ranks that a forward computes with.

    Attributes:
        path: of the wrapper, from the outermost one.
        wrapper: the wrapper.
        name: of the adapter.
        scale: of the product.
    """

    path: str
    wrapper: Any
    name: str
    scale: float

    @property
    def A_name(self) -> str:
        return f"{self.path}lora_A.{self.name}.weight"

    @property
    def B_name(self) -> str:
        return f"{self.path}lora_B.{self.name}.weight"


def _active(wrapper: Any) -> list[str]:
    """Adapters that a wrapper computes with.

    Raises:
        UnsupportedLayer: one is trainable that it does not compute with.
    """
    used = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if wrapper.disable_adapters or wrapper.merged:
        used = []
    for name in wrapper.lora_A:
        if name not in used and any(
            param.requires_grad for low in _pair(wrapper, name) for param in low.parameters()
        ):
            state = "disabled" if wrapper.disable_adapters else "merged"
            state = state if wrapper.disable_adapters or wrapper.merged else "not active"
            raise UnsupportedLayer(
                f"adapter {name!r} of {wrapper.parameter_name} is trainable and {state}, so that "
                "no sample reaches it. Activate it (model.set_adapter, unmerge_adapter), or freeze "
                "it."
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
            f"PEFT adds something else to {wrapper.parameter_name} than the product of its low "
            f"ranks as this version of flash_clipping knows it ({found}). "
            "Use LoRA on the model's linear layers (target_modules), or freeze these adapters."
        )


@register_family(are_wrapped_experts)
class PeftExpertsRule(ExpertsRule):
    """Stands for the outermost wrapper and all that is below it."""

    def __init__(self) -> None:
        super().__init__()
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

    def experts(self, layer: Any) -> Any:
        return layer.get_base_layer()

    def beside(self, layer: Any) -> tuple[_Adapter, ...]:
        """As they are now: backward may come when others are active."""
        found = []
        for path, wrapper in _unwrapped(layer)[0]:
            known = self._layouts.setdefault(wrapper, set())
            for name in _active(wrapper):
                if name not in known:
                    _check_layout(wrapper, name)
                    known.add(name)
                found.append(_Adapter(path, wrapper, name, wrapper.scaling[name]))
        return tuple(found)

    def tensors(self, layer: Any, beside: Sequence[_Adapter]) -> list[Tensor]:
        tensors = super().tensors(self.experts(layer), None)
        for it in beside:
            tensors += [module.weight for module in _pair(it.wrapper, it.name)]
        return tensors

    def arithmetic(
        self, layer: Any, params: Sequence[Tensor], beside: Sequence[_Adapter]
    ) -> RoutedRows:
        _, prefix, experts = _unwrapped(layer)
        base = len(names_of(experts))
        low_ranks: dict[str, list[LowRank]] = {}
        for i, it in enumerate(beside):
            A, B = params[base + 2 * i : base + 2 * i + 2]
            A_Erd, B_Epr = _low_rank_matrices(A, B, experts.num_experts)
            low_rank = LowRank(A_Erd, (B_Epr,), it.scale, it.A_name, (it.B_name,))
            low_ranks.setdefault(it.wrapper.parameter_name, []).append(low_rank)
        return arithmetic_of(experts, params[:base], prefix, low_ranks)

    def factors(self, found: Gradients, beside: Sequence[_Adapter]) -> dict[str, PerSampleGrad]:
        factors = factors_of(found)
        for it in beside:
            for name, arrange in ((it.A_name, _A_as_parameter), (it.B_name, _B_as_parameter)):
                if name in factors:
                    factors[name] = RearrangedGrad(factors[name], arrange)
        return factors
