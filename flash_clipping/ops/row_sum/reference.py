"""Reference for sums over positions and their norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import Memo, Normalized


def row_sums(
    rows: Sequence[Tensor], normalized: Sequence[Normalized | None], memo: Memo | None = None
) -> tuple[Tensor, Tensor]:
    """See :func:`flash_clipping.ops.row_sum.row_sums`."""
    first = rows[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    sizes = []
    for row in rows:
        sizes.append(row.shape[2])
    sums_BN = first.new_empty((len(first), sum(sizes)), dtype=dtype)
    norms: list[Tensor] = []
    for row, x_hat, sums_Bn in zip(rows, normalized, sums_BN.split(sizes, dim=1), strict=True):
        if x_hat is not None:
            x, mean, rstd = (tensor.to(dtype) for tensor in x_hat)
            each = (*row.shape[:2], 1)
            row = row.to(dtype) * ((x - mean.reshape(each)) * rstd.reshape(each))
        torch.sum(row, 1, dtype=dtype, out=sums_Bn)
        norms.append(torch.linalg.vector_norm(sums_Bn, dim=1))
    return sums_BN, torch.stack(norms).square_()
