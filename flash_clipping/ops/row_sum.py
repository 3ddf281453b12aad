"""Sums over the positions of every sample, for many small tensors at once.

B samples, T positions, n elements, P tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_clipping.ops import backend as backends
from flash_clipping.ops import row_sum_torch


def row_sums(rows: Sequence[Tensor], *, backend: str = "auto") -> Tensor:
    """``Σ_t rows_bt`` of tensors ``[B, T, n]`` of one shape and dtype: one launch on a GPU.

    Returns:
        ``[B, P, n]``, P being the number of tensors; summed in fp32 (float64 for float64) and in a
        fixed order.
    """
    first = rows[0]
    for x in rows:
        if x.dim() != 3 or x.shape != first.shape or x.dtype != first.dtype:
            raise ValueError(
                f"row_sums takes tensors [B, T, n] of one shape and dtype; found {x.dtype} "
                f"{tuple(x.shape)} beside {first.dtype} {tuple(first.shape)}."
            )
    return backends.run(row_sum_torch.row_sums, backend, first, rows)
