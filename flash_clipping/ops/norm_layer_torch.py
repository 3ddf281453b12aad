"""Reference for normalisation layers, a few samples at a time.

With ``g = G · weight`` and ``⟨·⟩`` the mean over the features of a row:
``dx = rstd · (g - ⟨g⟩ - x̂ ⟨g·x̂⟩)``; RMSNorm subtracts no mean, so ``⟨g⟩`` is absent there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.ops.shapes import accumulator

BUFFER = 2**18
"""About how many elements a temporary holds (one sample at least)."""


def norm_backward(
    x_BTd: Tensor,
    G_BTd: Tensor,
    mean_BT: Tensor | None,
    rstd_BT: Tensor,
    weight_d: Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """See :func:`flash_clipping.ops.norm_layer.norm_backward`."""
    B, T, d = x_BTd.shape
    dtype = accumulator(x_BTd)
    dx_BTd = (
        torch.empty(x_BTd.shape, dtype=x_BTd.dtype, device=x_BTd.device) if input_grad else None
    )
    w_Bd = x_BTd.new_empty((B, d), dtype=dtype) if weight_grad else None
    b_Bd = x_BTd.new_empty((B, d), dtype=dtype) if bias_grad else None
    samples = max(1, BUFFER // max(1, T * d))
    for b in range(0, B, samples):
        chunk = slice(b, b + samples)
        G = G_BTd[chunk].to(dtype)
        if b_Bd is not None:
            torch.sum(G, 1, out=b_Bd[chunk])
        if dx_BTd is None and w_Bd is None:
            continue
        x, rstd = x_BTd[chunk].to(dtype), rstd_BT[chunk].unsqueeze(-1).to(dtype)
        x_hat = x * rstd if mean_BT is None else (x - mean_BT[chunk].unsqueeze(-1)).mul_(rstd)
        if w_Bd is not None:
            torch.sum(G * x_hat, 1, out=w_Bd[chunk])
        if dx_BTd is not None:
            g = G if weight_d is None else G * weight_d.to(dtype)
            inner = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
            if mean_BT is not None:
                inner -= g.mean(-1, keepdim=True)
            dx_BTd[chunk] = inner.mul_(rstd)
    return dx_BTd, w_Bd, b_Bd


def group_norm_grads(
    x_BCS: Tensor, G_BCS: Tensor, mean_Bg: Tensor, rstd_Bg: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.norm_layer.group_norm_grads`."""
    # Σ_s G·x̂ = rstd · (Σ_s G·x - mean · Σ_s G), but that subtracts two large numbers: form x̂.
    B, C, S = x_BCS.shape
    dtype = accumulator(x_BCS)
    channels = C // mean_Bg.shape[1]
    mean_BC1 = mean_Bg.to(dtype).repeat_interleave(channels, 1).unsqueeze(-1)
    rstd_BC1 = rstd_Bg.to(dtype).repeat_interleave(channels, 1).unsqueeze(-1)
    w_BC = x_BCS.new_empty((B, C), dtype=dtype)
    b_BC = x_BCS.new_empty((B, C), dtype=dtype)
    samples = max(1, BUFFER // max(1, C * S))
    for b in range(0, B, samples):
        chunk = slice(b, b + samples)
        G = G_BCS[chunk].to(dtype)
        torch.sum(G, -1, out=b_BC[chunk])
        x_hat = (x_BCS[chunk].to(dtype) - mean_BC1[chunk]).mul_(rstd_BC1[chunk])
        torch.sum(x_hat.mul_(G), -1, out=w_BC[chunk])
    return w_BC, b_BC
