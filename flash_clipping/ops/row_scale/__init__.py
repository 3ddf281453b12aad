"""Scale each sample by its clipping coefficient. B samples, T positions."""

from __future__ import annotations

from torch import Tensor

from flash_clipping.ops.row_scale import reference
from flash_clipping.ops.runtime import backend as backends
from flash_clipping.ops.runtime.shapes import check_coefficients


def row_scale(x: Tensor, coef_B: Tensor, *, backend: str = "auto") -> Tensor:
    """``coef_b · x_b`` for ``x`` of shape ``[B, ...]``, as a fresh tensor in fp32 (float64 for
    float64): rounded to 16 bits, what was clipped might exceed its bound again.

    Samples whose coefficient is 0 become exactly 0, also where ``x`` holds inf or NaN.
    """
    check_coefficients(coef_B, x, "x")
    return backends.run(reference.row_scale, backend, x, x, coef_B)
