"""Reference for sums over positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.shapes import accumulator


def row_sums(rows: Sequence[Tensor]) -> Tensor:
    """See :func:`flash_clipping.ops.row_sum.row_sums`."""
    B, _, n = rows[0].shape
    sums_BPn = rows[0].new_empty((B, len(rows), n), dtype=accumulator(rows[0]))
    for i, x in enumerate(rows):
        torch.sum(x, 1, dtype=sums_BPn.dtype, out=sums_BPn[:, i])
    return sums_BPn
