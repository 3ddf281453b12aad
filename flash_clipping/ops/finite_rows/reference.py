"""Reference for rows that are not finite: which they are, and zeros in their place."""

from __future__ import annotations

import torch
from torch import Tensor


def finite_rows(x: Tensor, lost_N: Tensor, in_place: bool) -> Tensor:
    """See :func:`flash_clipping.ops.finite_rows.finite_rows`."""
    found_N = ~torch.isfinite(x.reshape(len(x), x.shape[1:].numel())).all(1)
    lost_N.masked_fill_(found_N, 1)
    found = found_N.view(-1, *(1,) * (x.dim() - 1))
    return x.masked_fill_(found, 0) if in_place else x.masked_fill(found, 0)
