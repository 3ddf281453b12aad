"""Reference for normalisation layers, a few samples at a time.

With ``g = G · weight``, ``x̂ = (x - mean) · rstd`` and ``⟨·⟩`` the mean over the features of a row:
``dx = rstd · (g - ⟨g⟩ - x̂ ⟨g·x̂⟩)``. RMSNorm subtracts no mean: there ``x̂ = x · rstd`` and ``⟨g⟩``
is absent. PyTorch's own kernel gives LayerNorm's ``dx`` in one pass where all dtypes are one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator

BUFFER = 2**16
"""About how many elements a temporary holds (one sample at least): few enough for a cache."""


def norm_backward(
    x_BTd: Tensor,
    G_BTd: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight_d: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor]:
    """``dx``, and the wanted ones of ``Σ_t G·x̂`` and ``Σ_t G``, in that order, ``[0 to 2, B, n,
    d]``: in ``n`` parts for a kernel's convenience, here in one. ``wanted``: gradients of input,
    weight and bias."""
    input_grad, weight_grad, bias_grad = wanted
    B, T, d = x_BTd.shape
    mean_BT1, rstd_BT1 = None if mean is None else mean.reshape(B, T, 1), rstd.reshape(B, T, 1)
    dx_BTd = native_BTd = None
    if input_grad and mean_BT1 is not None and _native_serves(x_BTd, G_BTd, mean, rstd, weight_d):
        statistics = mean_BT1.contiguous(), rstd_BT1.contiguous()
        native_BTd = torch.ops.aten.native_layer_norm_backward(
            G_BTd, x_BTd, (d,), *statistics, weight_d, None, [True, False, False]
        )[0]
    elif input_grad:
        dx_BTd = torch.empty(x_BTd.shape, dtype=x_BTd.dtype, device=x_BTd.device)
    dtype = accumulator(x_BTd)
    vectors_PBd = x_BTd.new_empty((weight_grad + bias_grad, B, d), dtype=dtype)
    wanted = dx_BTd is not None, weight_grad, bias_grad
    samples = max(1, BUFFER // max(1, T * d))
    for b in range(0, B, samples):
        chunk = slice(b, b + samples)
        mean_bT1 = None if mean_BT1 is None else mean_BT1[chunk]
        dx, vectors = norm_formula(
            x_BTd[chunk], G_BTd[chunk], mean_bT1, rstd_BT1[chunk], weight_d, wanted
        )
        for vectors_Bd, vectors_bd in zip(vectors_PBd, vectors, strict=True):
            vectors_Bd[chunk] = vectors_bd
        if dx_BTd is not None and dx is not None:
            dx_BTd[chunk] = dx
    return (dx_BTd if native_BTd is None else native_BTd), vectors_PBd.unsqueeze(2)


def norm_formula(
    x_BTd: Tensor,
    G_BTd: Tensor,
    mean_BT1: Tensor | None,
    rstd_BT1: Tensor,
    weight_d: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, list[Tensor]]:
    """``dx``, and the wanted ones of ``Σ_t G·x̂`` and ``Σ_t G``, ``[B, d]`` each, in operators that
    a compiler fuses."""
    input_grad, weight_grad, bias_grad = wanted
    dtype = accumulator(x_BTd)
    x, G, rstd = x_BTd.to(dtype), G_BTd.to(dtype), rstd_BT1.to(dtype)
    x_hat = (x if mean_BT1 is None else x - mean_BT1) * rstd
    vectors = [part.sum(1) for part in (*[G * x_hat] * weight_grad, *[G] * bias_grad)]
    if not input_grad:
        return None, vectors
    g = G if weight_d is None else G * weight_d.to(dtype)
    dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if mean_BT1 is not None:
        dx = dx - g.mean(-1, keepdim=True)
    return (dx * rstd).to(x_BTd.dtype), vectors


def _native_serves(x_BTd: Tensor, *others: Tensor | None) -> bool:
    """Whether PyTorch's LayerNorm kernel takes these: it wants one dtype, not a narrow one."""
    alike = all(other is None or other.dtype == x_BTd.dtype for other in others)
    return alike and accumulator(x_BTd) == x_BTd.dtype


def group_norm_grads(
    x_BCS: Tensor, G_BCS: Tensor, mean_Bg: Tensor, rstd_Bg: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.norm_layer.group_norm_grads`."""
    samples = max(1, BUFFER // max(1, x_BCS.shape[1:].numel()))
    parts = zip(*[x.split(samples) for x in (x_BCS, G_BCS, mean_Bg, rstd_Bg)], strict=True)
    found = [group_norm_formula(*part) for part in parts]
    w_BC, b_BC = (torch.cat(vectors) for vectors in zip(*found, strict=True))
    return w_BC, b_BC


def group_norm_formula(
    x_BCS: Tensor, G_BCS: Tensor, mean_Bg: Tensor, rstd_Bg: Tensor
) -> tuple[Tensor, Tensor]:
    """``Σ_s G·x̂`` and ``Σ_s G``, ``[B, C]`` each, in operators that a compiler fuses."""
    # Σ_s G·x̂ = rstd · (Σ_s G·x - mean · Σ_s G), but that subtracts two large numbers: form x̂.
    dtype, channels = accumulator(x_BCS), x_BCS.shape[1] // mean_Bg.shape[1]
    mean_BC1 = mean_Bg.to(dtype).repeat_interleave(channels, 1).unsqueeze(-1)
    rstd_BC1 = rstd_Bg.to(dtype).repeat_interleave(channels, 1).unsqueeze(-1)
    G = G_BCS.to(dtype)
    return (G * ((x_BCS.to(dtype) - mean_BC1) * rstd_BC1)).sum(-1), G.sum(-1)
