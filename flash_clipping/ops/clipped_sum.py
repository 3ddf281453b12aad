"""The clipped sum of a linear layer's per-sample gradients as one ordinary matmul.

B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_clipping.ops import backend as backends
from flash_clipping.ops import clipped_sum_torch
from flash_clipping.ops.shapes import as_rows, check_coefficients, check_same_rows


def clipped_sums(
    A_BTd: Tensor, Gs: Sequence[Tensor], coef_B: Tensor, *, backend: str = "auto"
) -> list[Tensor]:
    """``Σ_b coef_b G_l,bᵀ A_b`` for every layer ``l`` that reads ``A``.

    One matmul over all ``B·T`` rows for each layer. ``A`` is scaled once for all of them, or the
    narrower operand when there is one layer; nothing is changed in place.

    A sample whose coefficient is 0 adds nothing, whatever its operands hold: inf and NaN too.
    On a GPU, fp32 matmuls follow ``torch.set_float32_matmul_precision``, as those of the
    non-private step do.

    Returns:
        ``[p, d]`` for each layer, in the operands' dtype (the wider if they differ).
    """
    A_BTd = as_rows(A_BTd, "A")
    Gs = [as_rows(G, "G") for G in Gs]
    for G in Gs:
        check_same_rows(A_BTd, G, "A", "G")
    check_coefficients(coef_B, A_BTd, "A")
    return backends.run(clipped_sum_torch.clipped_sums, backend, A_BTd, A_BTd, Gs, coef_B)
