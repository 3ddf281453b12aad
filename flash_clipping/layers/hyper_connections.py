"""Hyper-connections as a module.

B samples, S positions, n streams, D features, K = n·D, m = n² + 2n logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping._compat import transforms_are_active
from flash_clipping.errors import InvalidValue, check_one_of, checked_number
from flash_clipping.factors import DenseGrad, LinearGrad, PerSampleGrad, SumGrad, accumulation_dtype
from flash_clipping.layers.by_rule import by_rule
from flash_clipping.layers.ops import hyper_connections as ops, stream_mix as mixing
from flash_clipping.layers.ops.hyper_connections import reference as ops_reference
from flash_clipping.layers.ops.stream_mix import reference as mixing_reference
from flash_clipping.ops.runtime.backend import BACKENDS
from flash_clipping.rules.registry import GradRequest, Grads, Rule, register_rule

SHARE_KEPT = 5.0
"""Logit of the diagonal of ``comb`` to begin with: with four streams, 0.98 of each stays."""


class HyperConnections(nn.Module):
    """Manifold-constrained hyper-connections (mHC, arXiv 2512.24880) around one sublayer.

    In place of one residual stream a decoder carries n. A sublayer reads a weighted sum of
    them and writes to each by a weight. A doubly stochastic matrix mixes them.
    All weights depend on the position. A decoder layer has one such module for its attention and
    one for its MLP::

        h, post, comb = self.hc(x)                  # x [B, S, n, D], h [B, S, D]
        y = self.attention(self.norm(h))            # [B, S, D]
        x = self.hc.combine(x, y, post, comb)       # [B, S, n, D]

    Parameters are used in :meth:`forward` only, so in a wrapped model they are trained privately,
    with a rule of their own (:class:`HyperConnectionsRule`). Not wrapped, the module
    is differentiated like any other. Formulas stand at
    :func:`flash_clipping.layers.ops.hyper_connections.hyper_connections`.

    Args:
        dim: features D of a stream.
        streams: n, from 2 to 8.
        iterations: of Sinkhorn's algorithm.
        norm_eps, hc_eps: added to mean squares, and to what becomes ``pre`` and ``comb``.
        transposed: streams mix by ``combᵀ x``, as in ``transformers``' DeepSeek-V4; by ``comb x``
            where False, as in Liger's ``LigerMHC``.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.
        device: of the parameters.

    Attributes:
        phi: ``[n² + 2n, n·D]``; rows of ``pre``, of ``post``, then of ``comb`` row by row.
        alpha: ``[3]``, factors of ``pre``, ``post`` and ``comb``'s logits.
        bias: ``[n² + 2n]``.
        gamma: ``[n, D]``, inside of the product with ``phi`` and not in the mean square.

    Parameters are in fp32, and computed with in fp32 whatever the streams' dtype is. To begin with,
    ``h`` is the mean of the streams, ``post`` is one and ``comb`` nearly the identity: equal
    streams are one ordinary residual stream, and ``alpha`` of 0.01 lets them grow apart.

    Raises:
        ValueError: a size or an epsilon that cannot be.
    """

    def __init__(
        self,
        dim: int,
        streams: int = 4,
        *,
        iterations: int = 20,
        norm_eps: float = 1e-6,
        hc_eps: float = 1e-6,
        transposed: bool = True,
        backend: str = "auto",
        device: torch.device | str | None = None,
    ):
        super().__init__()
        checked_number("dim", dim, "[1, inf)", 64, whole=True)
        checked_number("streams", streams, f"[{ops.STREAMS[0]}, {ops.STREAMS[-1]}]", 4, whole=True)
        check_one_of("backend", backend, BACKENDS)
        self.dim = dim
        self.streams = streams
        self.settings = ops.checked_settings(ops.Settings(norm_eps, hc_eps, iterations))
        self.transposed = transposed
        self.backend = backend
        logits = streams * streams + 2 * streams
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.phi: nn.Parameter = nn.Parameter(torch.empty(logits, streams * dim, **fp32))
        self.alpha: nn.Parameter = nn.Parameter(torch.empty(3, **fp32))
        self.bias: nn.Parameter = nn.Parameter(torch.empty(logits, **fp32))
        self.gamma: nn.Parameter = nn.Parameter(torch.empty(streams, dim, **fp32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        n = self.streams
        nn.init.normal_(self.phi, std=0.02)
        nn.init.constant_(self.alpha, 0.01)
        nn.init.ones_(self.gamma)
        with torch.no_grad():
            self.bias.zero_()
            self.bias[:n] = -math.log(n - 1)  # sigmoid of this is 1 / n
            self.bias[2 * n :].view(n, n).fill_diagonal_(SHARE_KEPT)

    def extra_repr(self) -> str:
        others = f"{self.settings}, transposed={self.transposed}"
        return f"{self.dim}, streams={self.streams}, {others}"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sublayer's input, and the weights with which the streams go on.

        Args:
            x: ``[B, ..., n, D]``, any floating dtype.

        Returns:
            ``h [B, ..., D]`` in the dtype of ``x``, and in fp32 (float64 for float64)
            ``post [B, ..., n]`` and ``comb [B, ..., n, n]``.

        Raises:
            ValueError: a shape that does not fit.
        """
        params = {name: getattr(self, name) for name in ("phi", "alpha", "bias", "gamma")}
        if _is_transformed():
            with torch.autocast(x.device.type, enabled=False):
                h, post, comb, *_ = ops_reference.hyper_connections(
                    self.positions(x), (*params.values(),), self.settings
                )
            return self.like(x, h), self.like(x, post), self.like(x, comb)
        found: tuple[Tensor, Tensor, Tensor] = by_rule(
            HyperConnectionsRule(), self, (x,), params, self.backend
        )
        return found

    def combine(self, x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """The streams after the sublayer, ``[B, ..., n, D]`` in the dtype of ``x``.

        Uses no parameter, so that autograd alone differentiates it in a wrapped model as well.

        Args:
            x: the streams that :meth:`forward` read.
            y: what the sublayer wrote, ``[B, ..., D]``.
            post, comb: what :meth:`forward` returned.

        Raises:
            ValueError: a shape that does not fit.
        """
        x_BSnD = self.positions(x)
        if y.shape != (*x.shape[:-2], self.dim):
            raise InvalidValue(
                f"FC303 HyperConnections.combine: y has shape {tuple(y.shape)}; expected "
                f"{(*x.shape[:-2], self.dim)}, as x has shape {tuple(x.shape)}."
            )
        B, S, n, D = x_BSnD.shape
        inputs = (x_BSnD, y.reshape(B, S, D), post.reshape(B, S, n), comb.reshape(B, S, n, n))
        if _is_transformed():
            with torch.autocast(x.device.type, enabled=False):
                return mixing_reference.stream_mix(*inputs, self.transposed).view(x.shape)
        mixed: Tensor = by_rule(_Mix(x.shape), self, inputs, {}, self.backend)
        return mixed

    def positions(self, x: Tensor) -> Tensor:
        """``x`` as ``[B, S, n, D]``."""
        if x.dim() < 3 or x.shape[-2:] != (self.streams, self.dim):
            raise InvalidValue(
                f"FC303 HyperConnections: x has shape {tuple(x.shape)}; expected [B, ..., "
                f"{self.streams}, {self.dim}]. Make streams of hidden states [B, S, D] with "
                f"hidden.unsqueeze(-2).expand(-1, -1, {self.streams}, -1)."
            )
        if x.dim() == 3:
            return x.unsqueeze(1)
        return x if x.dim() == 4 else x.flatten(1, -3)

    @staticmethod
    def like(x: Tensor, result: Tensor) -> Tensor:
        """A result ``[B, S, ...]`` with the axes of positions that ``x`` has."""
        return result if x.dim() == 4 else result.reshape(*x.shape[:-2], *result.shape[2:])


def _is_transformed() -> bool:
    """Whether a compiler or a transform of ``torch.func`` looks at the operations themselves."""
    return torch.compiler.is_compiling() or transforms_are_active()


@register_rule(HyperConnections)
class HyperConnectionsRule(Rule):
    """``dphi_b = dmix_bᵀ flat(x_b·gamma)``: a linear map with as few outputs as there are logits.

    The per-sample gradients of ``phi`` and ``gamma`` come from one product, which the kernel that
    computes the input's gradient forms while it holds ``x`` anyway. With more positions than logits
    that of ``phi`` is smaller than its operands, and kept; with fewer, these are.
    """

    def works_by_position(self, layer: HyperConnections) -> bool:
        return True

    def forward(self, layer: Any, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        params = (layer.phi, layer.alpha, layer.bias, layer.gamma)
        x_BSnD = layer.positions(x)
        result = ops.hyper_connections(x_BSnD, *params, layer.settings, backend=layer.backend)
        outputs = (result.h_BSD, result.post_BSn, result.comb_BSnn)
        saved = (x, *params, result.inv_BS, result.mix_BSm)
        return tuple(layer.like(x, output) for output in outputs), saved

    def backward(self, layer: Any, saved: Any, grad_output: Any, needs: GradRequest) -> Grads:
        x, phi, alpha, bias, gamma, inv_BS, mix_BSm = saved
        x_BSnD = layer.positions(x)
        B, S, n, D = x_BSnD.shape
        dh, dpost, dcomb = grad_output
        upstream = dh.reshape(B, S, D), dpost.reshape(B, S, n), dcomb.reshape(B, S, n, n)
        grads = ops.hyper_connections_backward(
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


@dataclass
class _Mix(Rule):
    """The streams after the sublayer, of this shape, in one pass forward and one backward."""

    shape: torch.Size

    def forward(self, layer: Any, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, y, post, comb = inputs
        options: dict[str, Any] = {"transposed": layer.transposed, "backend": layer.backend}
        return mixing.stream_mix(x, y, post, comb, **options).view(self.shape), inputs

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        grads = mixing.stream_mix_backward(
            *(*saved, grad_output.reshape(saved[0].shape)),
            transposed=layer.transposed,
            backend=needs.backend,
        )
        return tuple(grad.to(x.dtype) for grad, x in zip(grads, saved, strict=True)), {}
