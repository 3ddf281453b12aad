"""Backward of normalisation layers, with per-sample gradients of their scale and shift.

B samples, T positions, d features (LayerNorm, RMSNorm); C channels, S positions, g groups
(GroupNorm).
"""

from __future__ import annotations

from torch import Tensor

from flash_clipping.errors import InvalidValue
from flash_clipping.ops.norm_layer import reference
from flash_clipping.ops.runtime import backend as backends
from flash_clipping.ops.runtime.shapes import as_rows


def norm_backward(
    x: Tensor,
    G: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight_d: Tensor | None,
    *,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
    parts_kept: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``y = weight · x̂ + bias`` with ``x̂ = (x - mean) · rstd``, in one pass.

    LayerNorm when ``mean`` is given; RMSNorm, whose ``x̂ = x · rstd``, when it is None.

    Args:
        x, G: input and output gradient, ``[B, ..., d]``.
        mean, rstd: statistics of every row, ``[B, ...]`` (a trailing 1 is accepted).
        weight_d: the layer's weight, or None when it has none.
        input_grad, weight_grad, bias_grad: which results are wanted.
        parts_kept: leave sums over positions as parts ``[B, n, d]`` for a caller who adds many
            up at once. Where the parts of one vector would have more elements than this, n
            is 1.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``dx`` like ``x``, and per sample ``Σ_t G·x̂`` and ``Σ_t G``, both ``[B, d]`` (or in parts)
        in fp32 (float64 for float64); None for what is not wanted.
    """
    shape = x.shape
    if shape != G.shape or x.get_device() != G.get_device():
        raise InvalidValue(
            f"FC303 x has shape {tuple(shape)} on {x.device} and G {tuple(G.shape)} on {G.device}; "
            "they must agree."
        )
    x_BTd, G_BTd = as_rows(x, "x"), as_rows(G, "G")
    B, T, _ = x_BTd.shape
    for statistic in (rstd,) if mean is None else (mean, rstd):
        if statistic.numel() != B * T or statistic.shape[:1] != shape[:1]:
            raise InvalidValue(
                f"FC303 found statistics of shape {tuple(statistic.shape)} for x of shape "
                f"{tuple(shape)}; expected one for every row, [B, ...] or [B, ..., 1]."
            )
    operands = x_BTd, G_BTd, mean, rstd, weight_d, (input_grad, weight_grad, bias_grad)
    dx, vectors = backends.run(reference.norm_backward, backend, x_BTd, *operands)
    if dx is not None and dx.shape != shape:
        dx = dx.reshape(shape)
    elements = vectors.shape[1:].numel()  # of one vector's parts
    if vectors.shape[2] > 1 and (parts_kept is None or elements > parts_kept):
        vectors = vectors.sum(2, keepdim=True)  # both in one launch
    if parts_kept is None:
        vectors = vectors.squeeze(2)
    each = vectors.unbind(0)  # at once, as views one by one take the host a while
    return dx, each[0] if weight_grad else None, each[-1] if bias_grad else None


def group_norm_grads(
    x: Tensor, G: Tensor, mean_Bg: Tensor, rstd_Bg: Tensor, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Per-sample gradients of GroupNorm's scale and shift: ``Σ_s G·x̂`` and ``Σ_s G``.

    Args:
        x, G: input and output gradient, ``[B, C, ...]``.
        mean_Bg, rstd_Bg: statistics of every group.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        Two ``[B, C]`` tensors in fp32 (float64 for float64).
    """
    if x.shape != G.shape or x.dim() < 2:
        raise InvalidValue(
            f"FC303 x has shape {tuple(x.shape)} and G {tuple(G.shape)}; expected [B, C, ...]."
        )
    if mean_Bg.shape != rstd_Bg.shape or mean_Bg.dim() != 2 or mean_Bg.shape[0] != x.shape[0]:
        raise InvalidValue(
            f"FC303 mean has shape {tuple(mean_Bg.shape)} and rstd {tuple(rstd_Bg.shape)}; "
            f"expected [{x.shape[0]}, groups]."
        )
    x_BCS = x.unsqueeze(-1) if x.dim() == 2 else x.flatten(2)
    G_BCS = G.unsqueeze(-1) if G.dim() == 2 else G.flatten(2)
    return backends.run(reference.group_norm_grads, backend, x_BCS, x_BCS, G_BCS, mean_Bg, rstd_Bg)
