"""Experts of ``transformers`` that have a forward of their own, and none of its implementations.

* DBRX keeps the matrices of all experts end to end, gate and up apart.
* Llama 4 sends every token to all experts, times 0 where one was not chosen.
* JetMoE multiplies rows that are sorted by expert, and its router knows whose they are.
* Switch and NLLB-MoE have a list of ordinary layers (:func:`is_list_of_experts`), and a capacity.

B samples, T positions, M = B·T tokens, k choices, N rows, E experts, d and f features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.factors import PerSampleGrad
from flash_clipping.layers.routed_rows import (
    Gradients,
    Projection,
    RoutedRows,
    SideBySide,
    gated,
    routing,
)
from flash_clipping.rules.experts import ExpertsRule, factors_of
from flash_clipping.rules.registry import (
    GradRequest,
    Rule,
    UnsupportedLayer,
    autocast_operands,
    full_name,
    register_family,
    register_rule,
    register_scope,
)

_MODELS = "transformers.models."
_DBRX = f"{_MODELS}dbrx.modeling_dbrx.DbrxExperts"
_LLAMA4 = f"{_MODELS}llama4.modeling_llama4.Llama4TextExperts"
_JETMOE = f"{_MODELS}jetmoe.modeling_jetmoe.JetMoe"
_SWITCH = f"{_MODELS}switch_transformers.modeling_switch_transformers.SwitchTransformers"
_NLLB = f"{_MODELS}nllb_moe.modeling_nllb_moe.NllbMoe"


def _has(name: str, *params: str) -> Callable[[nn.Module], bool]:
    """Whether a layer is of the type with this full name and has no parameters but these: those of
    an activation function would get no gradient."""

    def belongs(layer: nn.Module) -> bool:
        named = full_name(type(layer)) == name
        return named and {name for name, _ in layer.named_parameters()} == {*params}

    return belongs


@register_family(_has(_DBRX, "mlp.w1", "mlp.v1", "mlp.w2"))
class DbrxExpertsRule(ExpertsRule):
    """Matrices ``[E·f, d]``; the last is multiplied from the other side."""

    def parts(self, layer: Any) -> Mapping[str, nn.Module]:
        return {"mlp": layer.mlp}

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hidden_BTd, *routes = args
        return tapped(hidden_BTd.flatten(0, 1), *routes, **kwargs).view_as(hidden_BTd)

    def own_output(self, layer: Any, *inputs: Tensor) -> Tensor:
        return super().own_output(layer, *inputs).flatten(0, 1)

    def tensors(self, layer: Any, beside: Any) -> list[Tensor]:
        return [layer.mlp.w1, layer.mlp.v1, layer.mlp.w2]

    def arithmetic(self, layer: Any, params: Sequence[Tensor], beside: Any) -> RoutedRows:
        # As many as there are: a process may have some of the experts.
        gate, up, down = (param.unflatten(0, (-1, layer.ffn_hidden_size)) for param in params)
        first = SideBySide([Projection(gate, "mlp.w1"), Projection(up, "mlp.v1")])
        second = Projection(down.mT, "mlp.w2", transposed=True)
        return RoutedRows(first, second, gated(layer.mlp.activation_fn))


@register_family(_has(_LLAMA4, "gate_up_proj", "down_proj"))
class Llama4ExpertsRule(ExpertsRule):
    """Reads all tokens for the first expert, then all for the second; the rule puts what the
    experts read of one token together."""

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        (rows,) = args
        by_token = _swapped(rows, layer.num_experts, -1)
        return _swapped(tapped(by_token), -1, layer.num_experts)

    def works_by_position(self, layer: Any) -> bool:
        return False  # the place of a row tells its expert

    def routed(self, layer: Any, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (rows_BNd,) = inputs
        B, N, _ = rows_BNd.shape
        experts = torch.arange(layer.num_experts, device=rows_BNd.device)
        chosen_BN1 = experts.repeat(N // layer.num_experts).expand(B, N).unsqueeze(2)
        return rows_BNd, chosen_BN1, rows_BNd.new_ones(B, N, 1)

    def own_output(self, layer: Any, *inputs: Tensor) -> Tensor:
        (rows_BNd,) = inputs
        rows = _swapped(rows_BNd.flatten(0, 1), -1, layer.num_experts)
        return _swapped(type(layer).forward(layer, rows), layer.num_experts, -1)

    def tensors(self, layer: Any, beside: Any) -> list[Tensor]:
        return [layer.gate_up_proj, layer.down_proj]

    def arithmetic(self, layer: Any, params: Sequence[Tensor], beside: Any) -> RoutedRows:
        gate_up, down = params
        first = Projection(gate_up.mT, "gate_up_proj", transposed=True)
        second = Projection(down.mT, "down_proj", transposed=True)
        return RoutedRows(first, second, gated(layer.act_fn))


def _swapped(rows_Nd: Tensor, outer: int, inner: int) -> Tensor:
    """Rows that lie as ``[outer, inner]``, laid as ``[inner, outer]``."""
    return rows_Nd.unflatten(0, (outer, inner)).transpose(0, 1).flatten(0, 1)


#: What JetMoE's last router returned: which of the rows of tokens, in the order of their experts,
#: and how many each expert reads.
_sorted_rows: ContextVar[tuple[Tensor, list[int]] | None] = ContextVar("sorted_rows", default=None)


@register_scope(f"{_JETMOE}TopKGating")
@contextmanager
def _notes_its_output(router: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
    yield lambda output: _sorted_rows.set((output[0], output[3]))


@register_rule(f"{_JETMOE}ParallelExperts")
class JetMoeExpertsRule(Rule):
    """Takes its rows token by token, and returns them sorted by expert, as the layer reads them."""

    folds = True

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        rows_Nd, sizes = args
        found = _sorted_rows.get()
        if found is None or found[1] is not sizes or len(found[0]) != len(rows_Nd):
            raise UnsupportedLayer(
                "found rows that are not those its router put in order last; expected the "
                "router's expert_size as the second argument, and as many rows"
            )
        order_N = found[0]
        counts = torch.tensor(sizes, device=rows_Nd.device)
        experts = torch.arange(len(sizes), device=rows_Nd.device)
        sorted_N = experts.repeat_interleave(counts, output_size=len(rows_Nd))
        chosen_N = torch.empty_like(order_N).index_copy_(0, order_N, sorted_N)
        by_token = torch.empty_like(rows_Nd).index_copy(0, order_N, rows_Nd)
        return tapped(by_token, chosen_N).index_select(0, order_N)

    def forward(self, layer: Any, *inputs: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        rows_BNd, chosen_BN = inputs
        segments = routing(chosen_BN, layer.num_experts)
        operands: Any = autocast_operands(rows_BNd.flatten(0, 1), layer.weight)
        rows, weight = operands
        sorted_Np = Projection(weight, "weight").forward(segments.rows(rows).sorted(), segments)
        output = segments.unsorted(sorted_Np).unflatten(0, chosen_BN.shape)
        return output, (rows, weight, segments, rows_BNd.dtype)

    def backward(
        self, layer: Any, saved: tuple[Any, ...], grad_output: Tensor, needs: GradRequest
    ) -> tuple[tuple[Tensor | None, ...], Mapping[str, PerSampleGrad]]:
        rows, weight, segments, dtype = saved
        found = Gradients(segments, needs.params)
        x, g = segments.rows(rows), segments.rows(grad_output.flatten(0, 1))
        grad = Projection(weight, "weight").backward(x, g, found, needs.input)
        if grad is not None:
            grad = segments.unsorted(grad).to(dtype).unflatten(0, grad_output.shape[:2])
        return (grad, None), factors_of(found)


def is_list_of_experts(module: nn.Module) -> bool:
    """Whether this calls ordinary layers on rows that it picks from its first argument, tokens
    ``[M, d]``, by an index."""
    return full_name(type(module)) in (f"{_SWITCH}Experts", f"{_NLLB}Experts")


@register_scope(f"{_SWITCH}Top1Router", f"{_NLLB}Top2Router")
@contextmanager
def _no_token_is_dropped(
    router: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """A full expert drops tokens of a sample because of other samples' tokens, which no clipping
    bounds: no expert may be able to be full."""
    tokens, capacity = hidden_states.shape[:-1].numel(), router.expert_capacity
    if torch.is_grad_enabled() and (capacity is None or capacity < tokens):
        raise UnsupportedLayer(
            f"found an expert capacity of {capacity} for {tokens} tokens: where an expert is full, "
            "tokens of one sample are dropped because of another's, which no clipping bounds. "
            "Expected room for every token",
            "{layer}.expert_capacity = 2**31",
        )
    yield
