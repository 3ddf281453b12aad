"""Per-sample gradients of a linear layer, squared and summed as they are formed.

B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.ops import backend as backends
from flash_clipping.ops import outer_torch
from flash_clipping.ops.shapes import as_rows, check_coefficients, check_same_rows


def outer_sqnorms(
    A_BTd: Tensor, G_BTp: Tensor, *, store: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    """Squared norms of the per-sample gradients ``G_bᵀ A_b``, and with ``store`` the gradients.

    Args:
        A_BTd: the layer's input, ``[B, ..., d]``.
        G_BTp: its output gradient, ``[B, ..., p]``.
        store: keep the gradients; what is squared is then the rounded value that is kept, so that
            what is measured is what is released.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``[B]`` squared norms in fp32 (float64 for float64), and ``[B, p, d]`` gradients in G's
        dtype or None.
    """
    A_BTd, G_BTp = as_rows(A_BTd, "A"), as_rows(G_BTp, "G")
    check_same_rows(A_BTd, G_BTp, "A", "G")
    if A_BTd.dtype != G_BTp.dtype:
        common = torch.promote_types(A_BTd.dtype, G_BTp.dtype)
        A_BTd, G_BTp = A_BTd.to(common), G_BTp.to(common)
    return backends.run(outer_torch.outer_sqnorms, backend, A_BTd, A_BTd, G_BTp, store)


def weighted_sum(grads: Tensor, coef_B: Tensor, *, backend: str = "auto") -> Tensor:
    """``Σ_b coef_b · grads_b`` for stored per-sample gradients ``[B, ...]``.

    The sum is accumulated in fp32 (float64 for float64) and rounded once to the gradients' dtype.
    A coefficient of 0 excludes its sample, whatever the gradient holds: inf and NaN too.
    """
    check_coefficients(coef_B, grads, "grads")
    return backends.run(outer_torch.weighted_sum, backend, grads, grads, coef_B)
