"""Sums over the positions of every sample, for many small tensors at once.

B samples, T positions, n elements, P tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_clipping.ops import backend as backends
from flash_clipping.ops import row_sum_torch
from flash_clipping.ops.shapes import Memo, Normalized


def row_sums(
    rows: Sequence[Tensor],
    normalized: Sequence[Normalized] | None = None,
    *,
    backend: str = "auto",
    memo: Memo | None = None,
) -> Tensor:
    """``Σ_t rows_bt``, or ``Σ_t rows_bt · x̂_bt``, of many tensors: one launch on a GPU.

    Args:
        rows: tensors ``[B, T, n]`` of one shape and dtype.
        normalized: one ``x̂`` for each, in the same shape and all of one dtype.
        memo: what was kept for operands of the same layout; they need no checks.

    Returns:
        ``[B, P, n]``, P being the number of tensors; summed in fp32 (float64 for float64) and in a
        fixed order.
    """
    if not memo:
        _check(rows, normalized)
    return backends.run(row_sum_torch.row_sums, backend, rows[0], rows, normalized, memo)


def _check(rows: Sequence[Tensor], normalized: Sequence[Normalized] | None) -> None:
    first = rows[0]
    _check_alike(rows)
    if normalized is not None:
        xs = [x_hat.x_BTn for x_hat in normalized]
        _check_alike(xs)
        statistics = [each.shape for x_hat in normalized for each in x_hat[1:]]
        if len(xs) != len(rows) or xs[0].shape != first.shape:
            raise ValueError(
                f"row_sums found {len(xs)} normalized tensors {tuple(xs[0].shape)} for {len(rows)} "
                f"of rows {tuple(first.shape)}; expected one for each, of the same shape."
            )
        if any(shape != first.shape[:2] for shape in statistics):
            raise ValueError(
                f"row_sums takes means and rstds [B, T]; found {tuple(statistics[0])} beside rows "
                f"{tuple(first.shape)}."
            )


def _check_alike(tensors: Sequence[Tensor]) -> None:
    first = tensors[0]
    for x in tensors:
        if x.dim() != 3 or x.shape != first.shape or x.dtype != first.dtype:
            raise ValueError(
                f"row_sums takes tensors [B, T, n] of one shape and dtype; found {x.dtype} "
                f"{tuple(x.shape)} beside {first.dtype} {tuple(first.shape)}."
            )
