"""Hyper-connections: a product over positions, and sums over them.

B samples, S positions, n streams, D features, K = n·D, m = n² + 2n logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flash_clipping.factors import DenseGrad, LinearGrad, PerSampleGrad, SumGrad, accumulation_dtype
from flash_clipping.layers import HyperConnections
from flash_clipping.layers.ops.hyper_connections import (
    hyper_connections,
    hyper_connections_backward,
)
from flash_clipping.rules.registry import GradRequest, Grads, Rule, register_rule


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
