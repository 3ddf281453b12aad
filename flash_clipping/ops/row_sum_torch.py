"""Reference for sums over positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.shapes import Memo, Normalized, accumulator


def row_sums(
    rows: Sequence[Tensor], normalized: Sequence[Normalized] | None, memo: Memo | None = None
) -> Tensor:
    """See :func:`flash_clipping.ops.row_sum.row_sums`."""
    B, _, n = rows[0].shape
    dtype = accumulator(rows[0])
    sums_BPn = rows[0].new_empty((B, len(rows), n), dtype=dtype)
    for i, row in enumerate(rows):
        if normalized is not None:
            x, mean, rstd = (tensor.to(dtype) for tensor in normalized[i])
            row = row.to(dtype) * ((x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1))
        torch.sum(row, 1, dtype=dtype, out=sums_BPn[:, i])
    return sums_BPn
