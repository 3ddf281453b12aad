"""Reference for hyper-connections: the formulas, in fp32 (float64 for float64).

B samples, S positions, n streams, D features, K = n·D, m = n² + 2n logits. The forward is made of
differentiable operations: a compiler takes it as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator

Parameters: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""``phi_mK``, ``alpha_3``, ``bias_m`` and ``gamma_nD``."""


class Settings(NamedTuple):
    """Settings that are not learnt.

    Attributes:
        norm_eps: added to the mean square of a position.
        hc_eps: added to ``pre``, and to the entries and the sums that Sinkhorn's algorithm divides.
        iterations: how often it normalises rows and then columns.
    """

    norm_eps: float = 1e-6
    hc_eps: float = 1e-6
    iterations: int = 20


def hyper_connections(x_BSnD: Tensor, params: Parameters, settings: Settings) -> tuple[Tensor, ...]:
    """``h, post, comb, inv, mix``; as the public function of the folder."""
    wide = accumulator(x_BSnD)
    x, phi, alpha, bias, gamma = (tensor.to(wide) for tensor in (x_BSnD, *params))
    inv_BS = (x.square().mean((2, 3)) + settings.norm_eps).rsqrt()
    mix_BSm = (x * gamma).flatten(2) @ phi.mT
    h_BSD, post, comb = _of_products(settings, x, mix_BSm, inv_BS, alpha, bias)
    return h_BSD.to(x_BSnD.dtype), post, comb, inv_BS, mix_BSm


def hyper_connections_backward(
    x_BSnD: Tensor,
    params: Parameters,
    settings: Settings,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    input_grad: bool,
    matrix_grad: bool,
) -> tuple[Any, ...]:
    """``dx``, per-sample ``dphi`` and ``dgamma``, rows of ``dalpha``, ``dbias`` and ``dmix``: by
    autograd, with an ``alpha`` and a ``bias`` for every position, up to the product."""
    wide = accumulator(x_BSnD)
    x, phi, alpha, bias, gamma, *upstream = (t.to(wide) for t in (x_BSnD, *params, *grads))
    B, S, n, D = x.shape
    inv_BS, mix_BSm = saved
    rows = x, mix_BSm, inv_BS, alpha.expand(B, S, -1), bias.expand(B, S, -1)
    leaves = [row.detach().requires_grad_() for row in rows]
    with torch.enable_grad():
        outputs = _of_products(settings, *leaves)
    dx, dmix_BSm, dinv_BS, *of_rows = torch.autograd.grad(outputs, leaves, upstream)
    dphi_BmK = dgamma_BnD = None
    # The gradient of the mean square is 2 x / K, and that of inv with respect to it -inv³ / 2.
    of_square_BS = -inv_BS.pow(3) * dinv_BS / (n * D)
    dx = dx + (dmix_BSm @ phi).view_as(x) * gamma + of_square_BS[..., None, None] * x
    if matrix_grad:
        dw_BmK = dmix_BSm.mT @ x.flatten(2)
        dphi_BmK = dw_BmK * gamma.flatten()
        dgamma_BnD = (dw_BmK * phi).sum(1).unflatten(1, (n, D))
    return dx.to(x_BSnD.dtype) if input_grad else None, dphi_BmK, dgamma_BnD, *of_rows, dmix_BSm


def _of_products(
    settings: Settings, x: Tensor, mix_BSm: Tensor, inv_BS: Tensor, alpha: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``h``, ``post`` and ``comb``. ``alpha``, ``[..., 3]``, and ``bias``, ``[..., m]``."""
    n = x.shape[2]
    sizes = n, n, n * n
    each = [
        a.expand(*alpha.shape[:-1], size) for a, size in zip(alpha.split(1, -1), sizes, strict=True)
    ]
    logits_BSm = mix_BSm * inv_BS.unsqueeze(-1) * torch.cat(each, -1) + bias
    pre, post, res = logits_BSm.split(sizes, -1)
    h_BSD = ((torch.sigmoid(pre) + settings.hc_eps).unsqueeze(-1) * x).sum(2)
    comb = res.unflatten(-1, (n, n)).softmax(-1) + settings.hc_eps
    for step in range(1, 2 * settings.iterations):  # columns in odd steps, rows in even ones
        comb = comb / (comb.sum(-2 if step % 2 else -1, keepdim=True) + settings.hc_eps)
    return h_BSD, 2 * torch.sigmoid(post), comb
