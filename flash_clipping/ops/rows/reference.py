"""Reference for rows: scaled, without those that are not finite, and summed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from flash_clipping.ops.error_bounds import squared_norms
from flash_clipping.ops.runtime.shapes import LaunchCache, Normalized


def finite_rows(x: Tensor, lost_N: Tensor, in_place: bool) -> Tensor:
    """See :func:`flash_clipping.ops.rows.finite_rows`."""
    found_N = ~torch.isfinite(x.reshape(len(x), x.shape[1:].numel())).all(1)
    lost_N.masked_fill_(found_N, 1)
    found = found_N.view(-1, *(1,) * (x.dim() - 1))
    return x.masked_fill_(found, 0) if in_place else x.masked_fill(found, 0)


def row_scale(x: Tensor, coef_B: Tensor) -> Tensor:
    """See :func:`flash_clipping.ops.rows.row_scale`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    coef = coef_B.to(dtype).view(-1, *(1,) * (x.dim() - 1))
    out = torch.empty_like(x, dtype=dtype)
    torch.mul(x, coef, out=out)
    if coef.device.type == "cpu" and bool((coef != 0).all()):
        return out  # looking costs nothing here, and saves a pass over x
    return out.masked_fill_(coef == 0, 0)


def row_sums(
    rows: Sequence[Tensor], normalized: Sequence[Normalized | None], memo: LaunchCache | None = None
) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.rows.row_sums`."""
    first = rows[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    sizes = [*map(Tensor.size, rows, repeat(2))]
    sums_BN = first.new_empty((len(first), sum(sizes)), dtype=dtype)
    squares: list[Tensor] = []
    for row, x_hat, sums_Bn in zip(rows, normalized, sums_BN.split(sizes, dim=1), strict=True):
        if x_hat is not None:
            x, mean, rstd = (tensor.to(dtype) for tensor in x_hat)
            each = (*row.shape[:2], 1)
            row = row.to(dtype) * ((x - mean.reshape(each)) * rstd.reshape(each))
        torch.sum(row, 1, dtype=dtype, out=sums_Bn)
        squares.append(squared_norms(sums_Bn))
    return sums_BN, torch.stack(squares)
