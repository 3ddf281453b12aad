"""Sums over the positions of every sample, for many small tensors at once.

B samples, T positions, n elements, P tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flash_clipping.ops import backend as backends
from flash_clipping.ops import row_sum_torch


class Normalized(NamedTuple):
    """``x̂ = (x - mean) · rstd``, not yet formed; ``x`` is ``[B, T, n]``."""

    x_BTn: Tensor
    mean_BT: Tensor
    rstd_BT: Tensor


def row_sums(
    rows: Sequence[Tensor],
    normalized: Sequence[Normalized] | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """``Σ_t rows_bt``, or ``Σ_t rows_bt · x̂_bt``, of many tensors: one launch on a GPU.

    Args:
        rows: tensors ``[B, T, n]`` of one shape and dtype.
        normalized: one ``x̂`` for each, in the same shape and all of one dtype.

    Returns:
        ``[B, P, n]``, P being the number of tensors; summed in fp32 (float64 for float64) and in a
        fixed order.
    """
    first = rows[0]
    xs = [] if normalized is None else [x_hat.x_BTn for x_hat in normalized]
    for x in (*rows, *xs):
        same_dtype = x.dtype in (first.dtype, xs[0].dtype if xs else first.dtype)
        if x.dim() != 3 or x.shape != first.shape or not same_dtype:
            raise ValueError(
                f"row_sums takes tensors [B, T, n] of one shape and dtype; found {x.dtype} "
                f"{tuple(x.shape)} beside {first.dtype} {tuple(first.shape)}."
            )
    return backends.run(row_sum_torch.row_sums, backend, first, rows, normalized)
