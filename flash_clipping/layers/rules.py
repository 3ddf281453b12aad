"""Layers of :mod:`flash_clipping.layers`, each with its own arithmetic both ways.

B samples, S or T positions, N = B·T, n streams, D or d features, K = n·D, m = n² + 2n logits,
L experts of a position, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrize

from flash_clipping.factors import (
    DenseGrad,
    LinearGrad,
    PerSampleGrad,
    SumGrad,
    accumulation_dtype,
)
from flash_clipping.layers.factors import BUFFER, ScaledEmbeddingGrad, factors_of
from flash_clipping.layers.hyper_connections import HyperConnections
from flash_clipping.layers.mixture_of_experts import MixtureOfExperts
from flash_clipping.layers.ops.hyper_connections import (
    hyper_connections,
    hyper_connections_backward,
)
from flash_clipping.layers.product_key_experts import ExpertTables
from flash_clipping.layers.routed_rows import gradients
from flash_clipping.rules.registry import (
    GradRequest,
    Grads,
    Rule,
    UnsupportedLayer,
    as_BTd,
    register_rule,
)


@register_rule(HyperConnections)
class HyperConnectionsRule(Rule):
    """``dphi_b = dmix_bᵀ flat(x_b·gamma)``: a linear map with as few outputs as there are logits.

    The per-sample gradients of ``phi`` and ``gamma`` come from one product, which the kernel that
    computes the input's gradient forms while it holds ``x`` anyway. With more positions than logits
    that of ``phi`` is smaller than its operands, and kept; with fewer, these are.
    """

    def works_by_position(self, layer: Any) -> bool:
        return True

    def forward(self, layer: Any, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        params = (layer.phi, layer.alpha, layer.bias, layer.gamma)
        x_BSnD = layer.positions(x)
        result = hyper_connections(x_BSnD, *params, layer.settings, backend=layer.backend)
        outputs = (result.h_BSD, result.post_BSn, result.comb_BSnn)
        saved = (x, *params, result.inv_BS, result.mix_BSm)
        return tuple(layer.like(x, output) for output in outputs), saved

    def backward(self, layer: Any, saved: Any, grad_output: Any, needs: GradRequest) -> Grads:
        x, phi, alpha, bias, gamma, inv_BS, mix_BSm = saved
        x_BSnD = layer.positions(x)
        B, S, n, D = x_BSnD.shape
        dh, dpost, dcomb = grad_output
        upstream = dh.reshape(B, S, D), dpost.reshape(B, S, n), dcomb.reshape(B, S, n, n)
        grads = hyper_connections_backward(
            *(x_BSnD, phi, alpha, bias, gamma, inv_BS, mix_BSm, *upstream),
            layer.settings,
            input_grad=needs.input,
            matrix_grad=not needs.params.isdisjoint(("phi", "gamma")),
            backend=needs.backend,
        )
        factors: dict[str, PerSampleGrad] = {
            "alpha": SumGrad(grads.alpha_BS3),
            "bias": SumGrad(grads.bias_BSm),
        }
        if grads.phi_BmK is not None and grads.gamma_BnD is not None:
            factors["gamma"] = DenseGrad(grads.gamma_BnD)
            factors["phi"] = DenseGrad(grads.phi_BmK)
            if "phi" in needs.params and grads.phi_BmK.shape[1] > S:
                wide = accumulation_dtype(x.dtype)
                scaled_BSnD = x_BSnD.to(wide) * gamma.to(wide)
                factors["phi"] = LinearGrad(scaled_BSnD.flatten(2), grads.mix_BSm)
        dx = None if grads.x_BSnD is None else grads.x_BSnD.view_as(x)
        return dx, {name: factors[name] for name in needs.params}


@register_rule(MixtureOfExperts)
class MixtureOfExpertsRule(Rule):
    """The layer's own arithmetic both ways, and factors in the place of sums over all rows."""

    folds = True  # tokens [B·T, d], as blocks of transformers hand them on
    takes_samples = True
    allows_computed = True  # a frozen base that is kept in fewer bits, beside LoRA

    def works_by_position(self, layer: Any) -> bool:
        return True

    def forward(
        self, layer: Any, x: Tensor, expert_ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, tuple[Any, ...]]:
        computed = layer.parametrizations if parametrize.is_parametrized(layer) else {}
        for name, of in computed.items():
            if any(param.requires_grad for param in of.parameters()):
                raise UnsupportedLayer(
                    f"its {name} is computed by torch.nn.utils.parametrize from trainable "
                    "parameters, which have no per-sample gradients there; expected a frozen base. "
                    "Freeze it (LoRA beside it, rank=, is trained).",
                    f"{{layer}}.parametrizations.{name}.requires_grad_(False)",
                )
        try:
            output: tuple[Tensor, tuple[Any, ...]] = layer.compute(x, expert_ids, weights)
        except ValueError as error:
            raise UnsupportedLayer(str(error)) from error
        return output

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x_wanted, _, weights_wanted = needs.inputs
        grad_x, grad_weights, found = gradients(
            layer.arithmetic, saved, grad_output, needs.params, x_wanted, weights_wanted
        )
        return (grad_x, None, grad_weights), factors_of(found)


@register_rule(ExpertTables)
class ExpertTablesRule(Rule):
    """Keeps input, output gradient and L numbers of every position, never L rows of a table: rows
    are looked up for some positions at a time, and again in backward."""

    def works_by_position(self, layer: Any) -> bool:
        return True

    def forward(
        self, layer: Any, x: Tensor, indices: Tensor, weights: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        chosen, none = layer.experts_of(indices)
        down_Ed, up_Ed = layer.down, layer.up
        x_Nd, chosen_NL, none_NL, weights_NL = map(_rows, (x, chosen, none, weights))
        before_NL = _products(down_Ed, chosen_NL, none_NL, x_Nd).masked_fill(none_NL, 0)
        unit_NL = layer.act(before_NL) * weights_NL.masked_fill(none_NL, 0)
        y = _sums(up_Ed, chosen_NL, none_NL, unit_NL, x.dtype).view(x.shape)
        return y, (x, chosen, none, weights, before_NL, down_Ed, up_Ed)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x, chosen, none, weights, before_NL, down_Ed, up_Ed = saved
        grad_Nd, chosen_NL, none_NL, weights_NL = map(_rows, (grad_output, chosen, none, weights))
        with torch.enable_grad():
            leaf_NL = before_NL.detach().requires_grad_()
            act_NL = layer.act(leaf_NL)
        grad_unit_NL = _products(up_Ed, chosen_NL, none_NL, grad_Nd)
        of_act_NL = (grad_unit_NL * weights_NL).to(act_NL.dtype)
        (grad_before_NL,) = torch.autograd.grad(act_NL, leaf_NL, of_act_NL)
        # Of no expert: its weight may be anything. The factors do not read its scale.
        grad_before_NL = grad_before_NL.masked_fill(none_NL, 0)
        act_NL = act_NL.detach()
        grads: list[Tensor | None] = [None, None, None]
        if needs.inputs[0]:
            grad_x_Nd = _sums(down_Ed, chosen_NL, none_NL, grad_before_NL, x.dtype)
            grads[0] = grad_x_Nd.view(x.shape)
        if needs.inputs[2]:
            of_weights_NL = (grad_unit_NL * act_NL).masked_fill(none_NL, 0)
            grads[2] = of_weights_NL.to(weights.dtype).view(weights.shape)
        ids_BTL = as_BTd(chosen.masked_fill(none, -1))
        factors: dict[str, PerSampleGrad] = {}
        for name, scale_NL, rows in (
            ("down", grad_before_NL, x),
            ("up", act_NL * weights_NL, grad_output),
        ):
            if name in needs.params:
                scale_BTL = scale_NL.view(ids_BTL.shape)
                factors[name] = ScaledEmbeddingGrad(ids_BTL, scale_BTL, as_BTd(rows), len(down_Ed))
        return tuple(grads), factors


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _looked_up(
    table_Ed: Tensor, chosen_NL: Tensor, none_NL: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Rows ``[n, L, d]`` of a table for some positions at a time, by shapes alone; zeros in the
    place of no expert."""
    (N, L), d = chosen_NL.shape, table_Ed.shape[1]
    step = max(1, BUFFER // max(1, L * d))
    for start in range(0, max(1, N), step):  # at least once, for no position if there is none
        n = slice(start, start + step)
        yield n, F.embedding(chosen_NL[n], table_Ed).masked_fill(none_NL[n].unsqueeze(2), 0)


def _products(table_Ed: Tensor, chosen_NL: Tensor, none_NL: Tensor, x_Nd: Tensor) -> Tensor:
    """Products ``[N, L]`` of the rows chosen for each position and what stands there."""
    pieces = _looked_up(table_Ed, chosen_NL, none_NL)
    return torch.cat([(rows_nLd * x_Nd[n].unsqueeze(1)).sum(2) for n, rows_nLd in pieces])


def _sums(
    table_Ed: Tensor, chosen_NL: Tensor, none_NL: Tensor, scale_NL: Tensor, dtype: torch.dtype
) -> Tensor:
    """Sums ``[N, d]`` of the rows chosen for each position, times these numbers."""
    pieces = _looked_up(table_Ed, chosen_NL, none_NL)
    return torch.cat(
        [(rows_nLd * scale_NL[n].unsqueeze(2)).sum(1).to(dtype) for n, rows_nLd in pieces]
    )
