"""Experts of a mixture as ``transformers`` has them: all matrices of a kind in one parameter.

M tokens, k choices of each, N = M·k rows, E experts, d features, f features between.

A token's row is sent to each expert that was chosen for it. Rows of one expert and one sample are a
segment (:mod:`flash_clipping.ops.segments`), and the gradients of both projections are products
over the rows of a segment. Between the projections stands a gate without parameters, which autograd
differentiates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from flash_clipping._compat import gate_of_experts
from flash_clipping.factors import Dense, Factor, SegmentedOuter
from flash_clipping.ops.segments import Segments, grouped_linear, segment_sums
from flash_clipping.rules.registry import (
    Needs,
    Rule,
    UnsupportedLayer,
    autocast_operands,
    register_family,
)

#: Relative difference between an expert block's own output and the rule's at which it is refused.
DIFFERENT = {torch.float64: 1e-9, torch.float32: 1e-3}
DIFFERENT_LOW = 5e-2

MARKS = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj")


def are_experts(layer: nn.Module) -> bool:
    """Whether ``transformers`` may run this layer by any of its implementations of experts."""
    if not all(hasattr(layer, mark) for mark in MARKS):
        return False
    if layer.has_gate and gate_of_experts(layer) is None:
        return False
    # All of its parameters: those of a gate would be trained on rows that nothing has put in order.
    return {name for name, _ in layer.named_parameters()} == set(_names(layer))


def _names(layer: Any) -> tuple[str, ...]:
    """Parameters of the first projection, then of the second: matrices, and biases if any."""
    first = "gate_up_proj" if layer.has_gate else "up_proj"
    kinds = ("", "_bias") if layer.has_bias else ("",)
    return tuple(name + kind for name in (first, "down_proj") for kind in kinds)


def _gated(layer: Any, up_N2f: Tensor) -> Tensor:
    """What stands between the projections, ``[N, f]``."""
    gate = gate_of_experts(layer) if layer.has_gate else layer.act_fn
    gated: Tensor = gate(up_N2f)
    return gated


def _compare(layer: Any, own_Md: Tensor, ruled_Md: Tensor) -> None:
    """An expert block's own output, of whatever implementation, and the rule's."""
    own_Md, ruled_Md = own_Md.double(), ruled_Md.double()
    error = float(torch.dist(own_Md, ruled_Md) / own_Md.norm().clamp(min=1e-300))
    if not error <= DIFFERENT.get(layer.down_proj.dtype, DIFFERENT_LOW):
        raise UnsupportedLayer(
            "its attributes are those of experts that transformers can run by any of its "
            f"implementations, but they compute something else (relative difference {error:.1e}). "
            "Give it a rule of its own (flash_clipping.register_rule), or freeze its parameters."
        )


@register_family(are_experts)
class ExpertsRule(Rule):
    """Serves every implementation alike, as its own forward takes the place of all of them.

    Of a token the input is saved once, however many experts read it, and of the rest what the first
    projection gave. What such a block computes is checked when it runs for the first time.
    """

    allows_children = True  # an activation function
    folds = True

    def __init__(self) -> None:
        self._checked: WeakSet[nn.Module] = WeakSet()

    def works_by_position(self, layer: Any) -> bool:
        return True

    def forward(
        self, layer: Any, hidden_BTd: Tensor, chosen_BTk: Tensor, weight_BTk: Tensor
    ) -> tuple[Tensor, tuple[Any, ...]]:
        output_BTd, saved = self._forward(layer, hidden_BTd, chosen_BTk, weight_BTk)
        if layer not in self._checked:
            tokens = (x.flatten(0, 1) for x in (hidden_BTd, chosen_BTk, weight_BTk))
            with torch.no_grad():
                own_Md = type(layer).forward(layer, *tokens)
            if torch.isfinite(own_Md).all():  # else the next batch may tell
                _compare(layer, own_Md, output_BTd.flatten(0, 1))
                self._checked.add(layer)
        return output_BTd, saved

    def _forward(
        self, layer: Any, hidden_BTd: Tensor, chosen_BTk: Tensor, weight_BTk: Tensor
    ) -> tuple[Tensor, tuple[Any, ...]]:
        (B, T, d), k = hidden_BTd.shape, chosen_BTk.shape[-1]
        sample_N = torch.arange(B, device=hidden_BTd.device).repeat_interleave(T * k)
        segments = Segments(sample_N, B, chosen_BTk.reshape(-1).long(), layer.num_experts)
        named = [getattr(layer, name) for name in _names(layer)]
        operands: Any = autocast_operands(hidden_BTd.reshape(-1, d), *named)
        hidden_Md, *params = operands
        half = len(params) // 2
        up_N2f = self._project(layer, hidden_Md[segments.order_N // k], params[:half], segments)
        y_Nd = self._project(layer, _gated(layer, up_N2f), params[half:], segments)
        weight_N1 = weight_BTk.reshape(-1, 1)[segments.order_N]
        # A row of no expert has no output, and its weight may be anything.
        y_Nd = (y_Nd * weight_N1).masked_fill(~segments.inside_N.unsqueeze(1), 0)
        y_BTd = segments.unsorted(y_Nd).view(B, T, k, -1).sum(2).to(hidden_BTd.dtype)
        return y_BTd, (hidden_Md, up_N2f, weight_BTk, segments, hidden_BTd.dtype, *params)

    @staticmethod
    def _project(layer: Any, x_Nd: Tensor, params: Any, segments: Segments) -> Tensor:
        matrices = params[0].mT if layer.is_transposed else params[0]
        y_Np = grouped_linear(x_Nd, matrices, segments)
        if layer.has_bias:
            y_Np = y_Np + params[1][segments.group_N]
        return y_Np

    def backward(
        self, layer: Any, saved: tuple[Any, ...], grad_output: Tensor, needs: Needs
    ) -> tuple[tuple[Tensor | None, ...], Mapping[str, Factor]]:
        hidden_Md, up_N2f, weight_BTk, segments, dtype, *params = saved
        half = len(params) // 2
        first, second = params[0], params[half]
        if not layer.is_transposed:
            first, second = first.mT, second.mT
        B, T, k = weight_BTk.shape
        order_N, inside_N1 = segments.order_N, segments.inside_N.unsqueeze(1)
        grad_Nd = grad_output.reshape(B * T, -1)[order_N // k].masked_fill(~inside_N1, 0)
        weight_N1 = weight_BTk.reshape(-1, 1)[order_N]
        with torch.enable_grad():
            up = up_N2f.detach().requires_grad_()
            between_Nf = _gated(layer, up)
        grad_y_Nd = (grad_Nd * weight_N1).to(up_N2f.dtype)
        grad_between_Nf = grouped_linear(grad_y_Nd, second, segments)
        (grad_up_N2f,) = torch.autograd.grad(between_Nf, up, grad_between_Nf)
        between_Nf = between_Nf.detach()
        grads: list[Tensor | None] = [None, None, None]
        if needs.inputs[0]:
            grad_hidden_Nd = segments.unsorted(grouped_linear(grad_up_N2f, first, segments))
            grads[0] = grad_hidden_Nd.view(B, T, k, -1).sum(2).to(dtype)
        if needs.inputs[2]:
            y_Nd = self._project(layer, between_Nf, params[half:], segments)
            of_weight_N1 = (grad_Nd * y_Nd).sum(1, keepdim=True, dtype=weight_BTk.dtype)
            grads[2] = segments.unsorted(of_weight_N1).view(B, T, k)
        factors: dict[str, Factor] = {}
        operands = (hidden_Md[order_N // k], grad_up_N2f), (between_Nf, grad_y_Nd)
        names = _names(layer)
        for i, (A_Nd, G_Np) in enumerate(operands):
            name = names[i * len(names) // 2]
            if name in needs.params:
                A, G = (G_Np, A_Nd) if layer.is_transposed else (A_Nd, G_Np)
                factors[name] = SegmentedOuter(A, G, segments)
            if f"{name}_bias" in needs.params:
                sums = segment_sums(G_Np, segments).unflatten(0, (segments.groups, B))
                factors[f"{name}_bias"] = Dense(sums.transpose(0, 1))
        return tuple(grads), factors
