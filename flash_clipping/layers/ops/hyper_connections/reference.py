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
    pre, post, res = _logits(mix_BSm, inv_BS, alpha, bias, x.shape[2])
    pre, post = torch.sigmoid(pre) + settings.hc_eps, 2 * torch.sigmoid(post)
    h_BSD = (pre.unsqueeze(-1) * x).sum(2).to(x_BSnD.dtype)
    return h_BSD, post, sinkhorn(res, settings.hc_eps, settings.iterations)[-1], inv_BS, mix_BSm


def hyper_connections_backward(
    x_BSnD: Tensor,
    params: Parameters,
    settings: Settings,
    saved: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    input_grad: bool,
    matrix_grad: bool,
) -> tuple[Any, ...]:
    """``dx``, per-sample ``dphi`` and ``dgamma``, rows of ``dalpha``, ``dbias`` and ``dmix``."""
    (inv_BS, mix_BSm), (dh, dpost_BSn, dcomb_BSnn) = saved, grads
    wide = accumulator(x_BSnD)
    x, phi, alpha, bias, gamma, dh = (tensor.to(wide) for tensor in (x_BSnD, *params, dh))
    n, D = x.shape[2:]
    pre, post, res = _logits(mix_BSm, inv_BS, alpha, bias, n)
    pre, post = torch.sigmoid(pre), torch.sigmoid(post)
    dpre = (x * dh.unsqueeze(2)).sum(3)
    dlogits_BSm = torch.cat(
        [
            dpre * pre * (1 - pre),
            2 * dpost_BSn * post * (1 - post),
            sinkhorn_backward(res, dcomb_BSnn, settings.hc_eps, settings.iterations).flatten(2),
        ],
        dim=2,
    )
    t_BSm = mix_BSm * inv_BS.unsqueeze(-1)
    each = (dlogits_BSm * t_BSm).split([n, n, n * n], 2)
    dalpha_BS3 = torch.stack([section.sum(2) for section in each], 2)
    dt_BSm = dlogits_BSm * _by_logit(alpha, n)
    dmix_BSm = dt_BSm * inv_BS.unsqueeze(-1)
    dx = dphi_BmK = dgamma_BnD = None
    if input_grad:
        # The gradient of the mean square is 2 x / K, and that of inv with respect to it -inv³ / 2.
        dinv_BS = (dt_BSm * mix_BSm).sum(2)
        of_square_BS = -inv_BS.pow(3) * dinv_BS / (n * D)
        of_product = (dmix_BSm @ phi).view_as(x) * gamma
        of_h = (pre + settings.hc_eps).unsqueeze(-1) * dh.unsqueeze(2)
        dx = (of_h + of_product + of_square_BS[..., None, None] * x).to(x_BSnD.dtype)
    if matrix_grad:
        dw_BmK = dmix_BSm.mT @ x.flatten(2)
        dphi_BmK = dw_BmK * gamma.flatten()
        dgamma_BnD = (dw_BmK * phi).sum(1).unflatten(1, (n, D))
    return dx, dphi_BmK, dgamma_BnD, dalpha_BS3, dlogits_BSm, dmix_BSm


def sinkhorn(logits_BSnn: Tensor, eps: float, iterations: int) -> list[Tensor]:
    """Every matrix on the way to a doubly stochastic one, beginning with the softmax of rows."""
    matrices = [logits_BSnn.softmax(-1) + eps]
    for step in range(1, 2 * iterations):
        matrix = matrices[-1]
        matrices.append(matrix / (matrix.sum(_axis(step), keepdim=True) + eps))
    return matrices


def sinkhorn_backward(
    logits_BSnn: Tensor, dcomb_BSnn: Tensor, eps: float, iterations: int
) -> Tensor:
    """Gradient of the logits. Each step is ``after = before / d`` with ``d = Σ before + eps``, so
    ``dbefore = (dafter - Σ dafter·after) / d``, the sums along the axis that was normalised."""
    matrices, grad = sinkhorn(logits_BSnn, eps, iterations), dcomb_BSnn
    for step in range(2 * iterations - 1, 0, -1):
        before, after = matrices[step - 1], matrices[step]
        axis = _axis(step)
        divisor = before.sum(axis, keepdim=True) + eps
        grad = (grad - (grad * after).sum(axis, keepdim=True)) / divisor
    softmax = matrices[0] - eps
    return softmax * (grad - (grad * softmax).sum(-1, keepdim=True))


def _axis(step: int) -> int:
    """Columns are normalised in odd steps, rows in even ones."""
    return -2 if step % 2 else -1


def _logits(
    mix_BSm: Tensor, inv_BS: Tensor, alpha_3: Tensor, bias_m: Tensor, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of ``pre``, of ``post``, and of ``comb`` as matrices."""
    logits_BSm = mix_BSm * inv_BS.unsqueeze(-1) * _by_logit(alpha_3, n) + bias_m
    pre, post, res = logits_BSm.split([n, n, n * n], -1)
    return pre, post, res.unflatten(-1, (n, n))


def _by_logit(alpha_3: Tensor, n: int) -> Tensor:
    """The factor of every logit, ``[m]``."""
    return torch.cat([alpha_3[:1].expand(n), alpha_3[1:2].expand(n), alpha_3[2:].expand(n * n)])
