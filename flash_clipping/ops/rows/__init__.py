"""Rows of tensors: scaled by their coefficients, set to zero where they are not finite, and summed
over the positions of every sample, for many small tensors at once.

B samples, T positions, n elements of one tensor and N of all, P tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.errors import InvalidValue
from flash_clipping.ops.rows import reference
from flash_clipping.ops.runtime import backend as backends
from flash_clipping.ops.runtime.shapes import LaunchCache, Normalized, check_coefficients


def finite_rows(
    x: Tensor, lost_N: Tensor, *, in_place: bool = False, backend: str = "auto"
) -> Tensor:
    """``x`` of shape ``[N, ...]`` with zeros in every row that holds inf or NaN.

    Args:
        lost_N: uint8; 1 is written for every row that is not finite, and nothing else.
        in_place: write zeros into ``x`` itself, which must be contiguous and nobody else's, and
            return it; otherwise the result is a fresh tensor.

    Raises:
        ValueError: ``lost_N`` is not one number of uint8 for each row on the device of ``x``, or
            ``x`` is not contiguous and is to be changed in place.
    """
    fits = lost_N.shape == x.shape[:1] and lost_N.get_device() == x.get_device()
    if not fits or lost_N.dtype != torch.uint8 or not lost_N.is_contiguous():
        raise InvalidValue(
            f"FC303 finite_rows: found lost_N {tuple(lost_N.shape)} of {lost_N.dtype} on "
            f"{lost_N.device} for x of shape {tuple(x.shape)} on {x.device}; expected one entry of "
            "uint8 for each row, contiguous, there."
        )
    if in_place and not x.is_contiguous():
        raise InvalidValue(
            f"FC303 finite_rows: found x with strides {x.stride()} for shape {tuple(x.shape)}, "
            "which cannot be changed in place. Pass a contiguous tensor, or in_place=False."
        )
    return backends.run(reference.finite_rows, backend, x, x, lost_N, in_place)


def row_scale(x: Tensor, coef_B: Tensor, *, backend: str = "auto") -> Tensor:
    """``coef_b · x_b`` for ``x`` of shape ``[B, ...]``, as a fresh tensor in fp32 (float64 for
    float64): rounded to 16 bits, what was clipped might exceed its bound again.

    Samples whose coefficient is 0 become exactly 0, also where ``x`` holds inf or NaN.
    """
    check_coefficients(coef_B, x, "x")
    return backends.run(reference.row_scale, backend, x, x, coef_B)


WIDE = 1 << 14
"""Elements from which a vector is better summed apart from narrower ones: every vector of a launch
has room for as many parts of its norm as the widest."""


def row_sums(
    rows: Sequence[Tensor],
    normalized: Sequence[Normalized | None] | None = None,
    *,
    backend: str = "auto",
    memo: LaunchCache | None = None,
) -> tuple[Tensor, Tensor]:
    """``Σ_t rows_bt``, or ``Σ_t rows_bt · x̂_bt``, of many tensors: one launch on a GPU.

    Args:
        rows: tensors ``[B, T, n]`` of one B, T and dtype; each has an n of its own.
        normalized: for each an ``x̂`` of the same shape, or None; those that are of one dtype.
        memo: what was kept for operands of the same layout.

    Returns:
        The sums side by side, ``[B, N]``, and the squared norms of each, ``[P, B]``; both in fp32
        (float64 for float64), and summed in a fixed order.
    """
    x_hats = [None] * len(rows) if normalized is None else normalized
    return backends.run(reference.row_sums, backend, rows[0], rows, x_hats, memo)
