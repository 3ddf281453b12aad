"""Reference for row scaling: ``coef_b · x_b``, and 0 where the coefficient is 0."""

from __future__ import annotations

import torch
from torch import Tensor


def row_scale(x: Tensor, coef_B: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.row_scale.row_scale`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    coef = coef_B.to(dtype).view(-1, *(1,) * (x.dim() - 1))
    out = torch.empty_like(x, dtype=dtype)
    torch.mul(x, coef, out=out)
    if coef.device.type == "cpu" and bool((coef != 0).all()):
        return out  # looking costs nothing here, and saves a pass over x
    return out.masked_fill_(coef == 0, 0)
