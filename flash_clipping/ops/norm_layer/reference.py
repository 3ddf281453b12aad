"""Reference for normalisation layers, a few samples at a time.

With ``g = G · weight``, ``x̂ = (x - mean) · rstd`` and ``⟨·⟩`` the mean over the features of a row:
``dx = rstd · (g - ⟨g⟩ - x̂ ⟨g·x̂⟩)``. RMSNorm subtracts no mean: there ``x̂ = x · rstd`` and ``⟨g⟩``
is absent. A row's ``rstd`` is taken out of sums over features, ``⟨g·x̂⟩ = rstd ⟨g·(x - mean)⟩``, and
made the weights of sums over positions: these are matrix products, which saves half of the passes.
PyTorch's own kernel gives LayerNorm's ``dx`` in one pass where all dtypes are one.
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
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor | None, Tensor]:
    """``dx``, and the wanted ones of ``Σ_t G·x̂`` and ``Σ_t G``, in that order, ``[0 to 2, B, n,
    d]``: in ``n`` parts for a kernel's convenience, here in one."""
    B, T, d = x_BTd.shape
    mean_BT, rstd_BT = None if mean is None else mean.reshape(B, T), rstd.reshape(B, T)
    dtype = accumulator(x_BTd)
    dx_BTd = native_BTd = None
    if input_grad and mean is not None and _native_serves(x_BTd, G_BTd, mean, rstd, weight_d):
        statistics = mean.reshape(B, T, 1).contiguous(), rstd.reshape(B, T, 1).contiguous()
        native_BTd = torch.ops.aten.native_layer_norm_backward(
            G_BTd, x_BTd, (d,), *statistics, weight_d, None, [True, False, False]
        )[0]
    elif input_grad:
        dx_BTd = torch.empty(x_BTd.shape, dtype=x_BTd.dtype, device=x_BTd.device)
    vectors_PBd = x_BTd.new_empty((weight_grad + bias_grad, B, d), dtype=dtype)
    w_Bd = vectors_PBd[0] if weight_grad else None
    b_Bd = vectors_PBd[-1] if bias_grad else None
    weight = None if weight_d is None else weight_d.to(dtype)
    samples = max(1, BUFFER // max(1, T * d))
    for b in range(0, B, samples):
        chunk = slice(b, b + samples)
        G = G_BTd[chunk].to(dtype)
        if b_Bd is not None:
            torch.sum(G, 1, out=b_Bd[chunk])
        if dx_BTd is None and w_Bd is None:
            continue
        x, rstd_bT1 = x_BTd[chunk].to(dtype), rstd_BT[chunk].unsqueeze(-1).to(dtype)
        centred = x if mean_BT is None else x - mean_BT[chunk].unsqueeze(-1)
        in_place = centred is not x and dx_BTd is None
        products = centred.mul_(G) if in_place else G * centred
        if w_Bd is not None:
            torch.bmm(rstd_bT1.mT, products, out=w_Bd[chunk].unsqueeze(1))
        if dx_BTd is not None:
            dx = dx_BTd[chunk] if dx_BTd.dtype == dtype else torch.empty_like(G)
            torch.mul(G, 1 if weight is None else weight, out=dx)
            if mean_BT is not None:
                dx -= _mean_of(G, weight)
            slope = _mean_of(products, weight) * rstd_bT1.pow(3)
            dx.mul_(rstd_bT1).addcmul_(centred, slope, value=-1)
            if dx_BTd.dtype != dtype:
                dx_BTd[chunk] = dx
    return (dx_BTd if native_BTd is None else native_BTd), vectors_PBd.unsqueeze(2)


def _native_serves(x_BTd: Tensor, *others: Tensor | None) -> bool:
    """Whether PyTorch's LayerNorm kernel takes these: it wants one dtype, not a narrow one."""
    alike = all(other is None or other.dtype == x_BTd.dtype for other in others)
    return alike and accumulator(x_BTd) == x_BTd.dtype


def _mean_of(x_BTd: Tensor, weight_d: Tensor | None) -> Tensor:
    """Mean of ``x · weight`` over the features of each row, ``[B, T, 1]``."""
    if weight_d is None:
        return x_BTd.mean(-1, keepdim=True)
    return (x_BTd @ weight_d).unsqueeze(-1) / x_BTd.shape[-1]


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
