"""Manifold-constrained hyper-connections: what a layer reads of n streams, and how they go on.

B samples, S positions, n streams, D features, K = n·D, m = n² + 2n logits: n of ``pre``, n of
``post``, then n×n of ``comb``, row by row.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flash_clipping.errors import InvalidValue
from flash_clipping.layers.ops import check_streams
from flash_clipping.layers.ops.hyper_connections import reference
from flash_clipping.layers.ops.hyper_connections.reference import Parameters, Settings as Settings
from flash_clipping.ops.runtime import backend as backends

STREAMS = range(2, 9)
"""How many streams there may be."""

DEFAULT = Settings()


class Connections(NamedTuple):
    """Results of :func:`hyper_connections`.

    Attributes:
        h_BSD: what the layer reads, in the dtype of the streams.
        post_BSn: how much of what the layer writes each stream gets.
        comb_BSnn: how the streams mix, a doubly stochastic matrix.
        inv_BS: one over the root of a position's mean square, for backward.
        mix_BSm: the product with ``phi``, for backward.

    All but the first in fp32 (float64 for float64).
    """

    h_BSD: Tensor
    post_BSn: Tensor
    comb_BSnn: Tensor
    inv_BS: Tensor
    mix_BSm: Tensor


class Gradients(NamedTuple):
    """Gradients of the inputs of :func:`hyper_connections`; those of parameters for each sample.

    Attributes:
        x_BSnD: in the dtype of ``x``; None if not asked for.
        phi_BmK: of every sample; None if not asked for, as the next.
        gamma_BnD: of every sample.
        alpha_BS3, bias_BSm: a row for every position; a sample's gradient is their sum.
        mix_BSm: of the product ``x·gamma`` with ``phi``: with ``x·gamma``, ``phi_BmK`` once more.

    All but the first in fp32 (float64 for float64).
    """

    x_BSnD: Tensor | None
    phi_BmK: Tensor | None
    gamma_BnD: Tensor | None
    alpha_BS3: Tensor
    bias_BSm: Tensor
    mix_BSm: Tensor


def hyper_connections(
    x_BSnD: Tensor,
    phi_mK: Tensor,
    alpha_3: Tensor,
    bias_m: Tensor,
    gamma_nD: Tensor,
    settings: Settings = DEFAULT,
    *,
    backend: str = "auto",
) -> Connections:
    """Equations 7 and 8 of arXiv 2512.24880, for every position alone.

    With ``inv = rsqrt(mean(x²) + norm_eps)`` over the streams and features of a position, and
    ``t = flat(x·gamma) phiᵀ · inv``::

        pre  = sigmoid(alpha₀ t[:n] + bias[:n]) + hc_eps
        post = 2 sigmoid(alpha₁ t[n:2n] + bias[n:2n])
        comb = sinkhorn(alpha₂ t[2n:] + bias[2n:])      as n×n, row by row
        h    = Σ_n pre_n x_n

    The mean square is that of ``x`` itself, without ``gamma``. Sinkhorn's algorithm begins with the
    softmax of every row, plus ``hc_eps``; then columns, and after that rows and columns in turn,
    are divided by ``hc_eps`` plus their sum. Columns come last: they add up to one, and rows do as
    far as the iterations have come.

    Args:
        x_BSnD: streams, in any floating dtype.
        phi_mK, alpha_3, bias_m, gamma_nD: parameters, on the device of ``x``. They are used in
            fp32 (float64 for float64).
        settings: what is not learnt.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises:
        ValueError: shapes, devices or settings that do not fit.

    Guarantees:
        Bitwise equal from run to run. No wait for the device. A position's results depend on that
        position alone.
    """
    params = _checked(x_BSnD, phi_mK, alpha_3, bias_m, gamma_nD, settings)
    results = backends.run(reference.hyper_connections, backend, x_BSnD, x_BSnD, params, settings)
    return Connections(*results)


def hyper_connections_backward(
    x_BSnD: Tensor,
    phi_mK: Tensor,
    alpha_3: Tensor,
    bias_m: Tensor,
    gamma_nD: Tensor,
    inv_BS: Tensor,
    mix_BSm: Tensor,
    dh_BSD: Tensor,
    dpost_BSn: Tensor,
    dcomb_BSnn: Tensor,
    settings: Settings = DEFAULT,
    *,
    input_grad: bool,
    matrix_grad: bool,
    backend: str = "auto",
) -> Gradients:
    """Gradients of :func:`hyper_connections`, those of parameters for every single sample.

    ``phi`` and ``gamma`` enter only as ``w = phi·gamma``, so that one product gives both: with
    ``P_b = dmix_bᵀ flat(x_b)``, the gradient of ``w``, ``dphi_b = P_b·gamma`` and
    ``dgamma_b = Σ_m P_b·phi``.

    Args:
        inv_BS, mix_BSm: what forward returned.
        dh_BSD, dpost_BSn, dcomb_BSnn: gradients of its results.
        input_grad, matrix_grad: whether those of ``x``, and of ``phi`` and ``gamma``, are wanted.

    Other arguments, errors and guarantees are those of :func:`hyper_connections`. A sample's
    gradients depend on that sample alone.
    """
    params = _checked(x_BSnD, phi_mK, alpha_3, bias_m, gamma_nD, settings)
    saved, grads = (inv_BS, mix_BSm), (dh_BSD, dpost_BSn, dcomb_BSnn)
    check_streams(x_BSnD, STREAMS, inv_BS=inv_BS, mix_BSm=mix_BSm)
    check_streams(x_BSnD, STREAMS, dh_BSD=dh_BSD, dpost_BSn=dpost_BSn, dcomb_BSnn=dcomb_BSnn)
    run = reference.hyper_connections_backward
    return Gradients(
        *backends.run(
            run, backend, x_BSnD, x_BSnD, params, settings, saved, grads, input_grad, matrix_grad
        )
    )


def _checked(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor, settings: Settings
) -> Parameters:
    """The parameters, if all shapes, devices and settings fit."""
    check_streams(x, STREAMS, phi_mK=phi, alpha_3=alpha, bias_m=bias, gamma_nD=gamma)
    checked_settings(settings)
    return phi, alpha, bias, gamma


def checked_settings(settings: Settings) -> Settings:
    if settings.iterations < 1 or not (settings.norm_eps > 0 and settings.hc_eps > 0):
        raise InvalidValue(
            f"FC302 hyper-connections: found {settings}; expected at least one iteration, and "
            "norm_eps and hc_eps above 0."
        )
    return settings
