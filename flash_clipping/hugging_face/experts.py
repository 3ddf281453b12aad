"""Experts of a mixture as ``transformers`` has them: all matrices of a kind in one parameter.

B samples, T positions, M = B·T tokens, k choices of each, N = M·k rows, E experts, d features;
u features after the first projection and f before the second.

A token's row is sent to each expert that was chosen for it. Rows of one expert and one sample are a
segment (:mod:`flash_clipping.ops.segments`), and the gradients of both projections are products
over the rows of a segment. Between the projections stands a gate without parameters, which autograd
differentiates.

Some have a forward of their own, and none of the implementations of ``transformers``:

* DBRX keeps the matrices of all experts end to end, gate and up apart.
* Llama 4 sends every token to all experts, times 0 where one was not chosen.
* JetMoE multiplies rows that are sorted by expert, and its router knows whose they are.
* Switch and NLLB-MoE have a list of ordinary layers, and a capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from flash_clipping._compat import gate_of_experts
from flash_clipping.capture.around import around
from flash_clipping.capture.declared_rows import DeclaredRows, declare, declared
from flash_clipping.capture.tap import RefusedByRule, Tap
from flash_clipping.layers.routed_rows import (
    Described,
    Gradients,
    LowRank,
    Projection,
    RoutedRows,
    RoutedRule,
    gated,
    routing,
)
from flash_clipping.ops.segments import grouped_linear
from flash_clipping.rules.registry import (
    GradRequest,
    Grads,
    Rule,
    UnsupportedLayer,
    autocast_operands,
    register_family,
    register_rule,
)

MARKS = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj")


def are_experts(layer: nn.Module) -> bool:
    """Whether ``transformers`` may run this layer by any of its implementations of experts."""
    if not all(hasattr(layer, mark) for mark in MARKS):
        return False
    if layer.has_gate and gate_of_experts(layer) is None:
        return False
    return _has_only(layer, *names_of(layer))


def _has_only(layer: nn.Module, *params: str) -> bool:
    """Whether these are all of its parameters: those of a gate, or of an activation function, would
    be trained on rows that nothing has put in order."""
    return {name for name, _ in layer.named_parameters()} == {*params}


def names_of(layer: Any) -> tuple[str, ...]:
    """Parameters of the first projection, then of the second: matrices, and biases if any."""
    matrices = ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj")
    kinds = ("", "_bias") if layer.has_bias else ("",)
    return tuple([name + kind for name in matrices for kind in kinds])


def arithmetic_of(
    layer: Any,
    params: Sequence[Tensor],
    prefix: str = "",
    low_ranks: Mapping[str, Sequence[LowRank]] | None = None,
) -> RoutedRows:
    """What experts compute with these tensors for their parameters.

    ``prefix``: stands before their names. ``low_ranks``: what is added to a parameter's matrices.
    """
    names, transposed, half = names_of(layer), layer.is_transposed, len(params) // 2

    def projection(i: int) -> Projection:
        bias, of_bias = (params[i + 1], prefix + names[i + 1]) if layer.has_bias else (None, "")
        matrices = params[i].mT if transposed else params[i]
        added = () if low_ranks is None else low_ranks.get(names[i], ())
        return Projection((matrices,), (prefix + names[i],), bias, of_bias, transposed, added)

    between = gate_of_experts(layer) if layer.has_gate else layer.act_fn
    return RoutedRows(projection(0), projection(half), between)


@register_family(are_experts)
class ExpertsRule(RoutedRule):
    """A rule for every implementation: its own forward takes the place of all of them.

    That such a block computes the same by each of them is shown by the proof before the first step.
    """

    allows_children = True  # an activation function

    def described(self, layer: Any) -> Described:
        tensors = [getattr(layer, name) for name in names_of(layer)]
        return Described(tensors, lambda params: arithmetic_of(layer, params), layer.num_experts)


_MODELS = "transformers.models."
_JETMOE = f"{_MODELS}jetmoe.modeling_jetmoe.JetMoe"
_SWITCH = f"{_MODELS}switch_transformers.modeling_switch_transformers.SwitchTransformers"
_NLLB = f"{_MODELS}nllb_moe.modeling_nllb_moe.NllbMoe"


@register_rule(f"{_MODELS}dbrx.modeling_dbrx.DbrxExperts")
class DbrxExpertsRule(ExpertsRule):
    """Matrices ``[E·f, d]``; the last is multiplied from the other side."""

    def fits(self, layer: Any) -> bool:
        return _has_only(layer, "mlp.w1", "mlp.v1", "mlp.w2")

    def parts(self, layer: Any) -> Mapping[str, nn.Module]:
        return {"mlp": layer.mlp}

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hidden_BTd, *routes = args
        return tapped(hidden_BTd.flatten(0, 1), *routes, **kwargs).view_as(hidden_BTd)

    def described(self, layer: Any) -> Described:
        def arithmetic(params: Sequence[Tensor]) -> RoutedRows:
            # As many as there are: a process may have some of the experts.
            gate, up, down = (param.unflatten(0, (-1, layer.ffn_hidden_size)) for param in params)
            first = Projection((gate, up), ("mlp.w1", "mlp.v1"))
            second = Projection((down.mT,), ("mlp.w2",), transposed=True)
            return RoutedRows(first, second, gated(layer.mlp.activation_fn))

        tensors = [layer.mlp.w1, layer.mlp.v1, layer.mlp.w2]
        return Described(tensors, arithmetic, layer.num_experts)


@register_rule(f"{_MODELS}llama4.modeling_llama4.Llama4TextExperts")
class Llama4ExpertsRule(ExpertsRule):
    """Reads all tokens for the first expert, then all for the second; the rule puts what the
    experts read of one token together."""

    def fits(self, layer: Any) -> bool:
        return _has_only(layer, "gate_up_proj", "down_proj")

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        (rows,) = args
        by_token = _swapped(rows, layer.num_experts, -1)
        return _swapped(tapped(by_token), -1, layer.num_experts)

    def works_by_position(self, layer: Any) -> bool:
        return False  # the place of a row tells its expert

    def routed(self, layer: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        (rows_BNd,) = inputs
        B, N, _ = rows_BNd.shape
        experts = torch.arange(layer.num_experts, device=rows_BNd.device)
        chosen_BN1 = experts.repeat(N // layer.num_experts).expand(B, N).unsqueeze(2)
        return rows_BNd, chosen_BN1, rows_BNd.new_ones(B, N, 1)

    def described(self, layer: Any) -> Described:
        def arithmetic(params: Sequence[Tensor]) -> RoutedRows:
            names = ("gate_up_proj", "down_proj")
            first, second = (
                Projection((param.mT,), (name,), transposed=True)
                for param, name in zip(params, names, strict=True)
            )
            return RoutedRows(first, second, gated(layer.act_fn))

        return Described([layer.gate_up_proj, layer.down_proj], arithmetic, layer.num_experts)


def _swapped(rows_Nd: Tensor, outer: int, inner: int) -> Tensor:
    """Rows that lie as ``[outer, inner]``, laid as ``[inner, outer]``."""
    return torch.unflatten(rows_Nd, 0, (outer, inner)).transpose(0, 1).flatten(0, 1)


#: What JetMoE's last router returned: which of the rows of tokens, in the order of their experts,
#: and how many each expert reads.
_sorted_rows: ContextVar[tuple[Tensor, list[int]] | None] = ContextVar("sorted_rows", default=None)


@around(f"{_JETMOE}TopKGating")
class _NotesItsOutput(Tap):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.original(*args, **kwargs)
        _sorted_rows.set((output[0], output[3]))
        return output


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
                "FC124 found rows that are not those its router put in order last; expected the "
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
        rows, weight = autocast_operands(rows_BNd.flatten(0, 1), layer.weight)
        sorted_Np = grouped_linear(segments.rows(rows).sorted(), weight, segments)
        output = segments.unsorted(sorted_Np).unflatten(0, chosen_BN.shape)
        return output, (rows, weight, segments, rows_BNd.dtype)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        rows, weight, segments, dtype = saved
        found = Gradients(segments, needs.params)
        x, g = segments.rows(rows), segments.rows(grad_output.flatten(0, 1))
        grad = Projection((weight,), ("weight",)).backward(x, g, found, needs.input)
        if grad is not None:
            grad = segments.unsorted(grad).to(dtype).unflatten(0, grad_output.shape[:2])
        return (grad, None), found.factors


class _PickedRows(TorchFunctionMode):
    """Sees which rows of ``tokens [M, d]``, where those of a sample lie together, are picked by an
    index: layers read these until others are."""

    def __init__(self, tokens: Tensor, count: int):
        super().__init__()
        self.tokens, self.count = tokens, count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and args[0] is self.tokens:
            *before, index = args[1] if isinstance(args[1], tuple) else (args[1],)
            is_of_rows = isinstance(index, Tensor) and index.dtype == torch.int64
            is_of_rows = is_of_rows and index.dim() == 1 and before in ([], [None])
            each, rest = divmod(len(self.tokens), self.count)
            # Otherwise layers read rows of which nothing is known, and are refused.
            declare(None if rest or not is_of_rows else DeclaredRows(index // each, self.count))
        return result


@around(f"{_SWITCH}Experts", f"{_NLLB}Experts")
class _PicksRows(Tap):
    """Calls ordinary layers on rows that it picks from its tokens."""

    picks_rows = True

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        session, call = self.session, self.session.current_forward
        count = session.samples() if call is None else call.batch_size
        is_recorded = (
            session.mode.enabled and not session.mode.bypassed and not is_dynamo_compiling()
        )
        if not is_recorded or not count:
            return self.original(hidden_states, *args, **kwargs)
        with declared(None), _PickedRows(hidden_states, count):
            return self.original(hidden_states, *args, **kwargs)


@around(f"{_SWITCH}Top1Router", f"{_NLLB}Top2Router")
class _DropsNoToken(Tap):
    """A full expert drops tokens of a sample because of other samples' tokens, which no clipping
    bounds: no expert may be able to be full."""

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = hidden_states.shape[:-1].numel()
        capacity: Any = self.layer.expert_capacity
        if torch.is_grad_enabled() and (capacity is None or capacity < tokens):
            error = UnsupportedLayer(
                f"FC105 found an expert capacity of {capacity} for {tokens} tokens: where an "
                "expert is full, tokens of one sample are dropped because of another's, which no "
                "clipping bounds. Expected room for every token",
                "{layer}.expert_capacity = 2**31",
            )
            raise RefusedByRule(self.path, error)
        return self.original(hidden_states, *args, **kwargs)
