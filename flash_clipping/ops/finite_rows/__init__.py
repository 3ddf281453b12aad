"""Rows that are not finite, set to zero and noted. N rows, F elements of one."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.ops.finite_rows import reference
from flash_clipping.ops.runtime import backend as backends


def finite_rows(
    x: Tensor, lost_N: Tensor, *, in_place: bool = False, backend: str = "auto"
) -> Tensor:
    """``x`` of shape ``[N, ...]`` with zeros in every row that holds inf or NaN.

    One pass: every element is read once, and written once if not ``in_place``.

    Args:
        lost_N: uint8; 1 is written for every row that is not finite, and nothing else.
        in_place: write zeros into ``x`` itself, which must be contiguous and nobody else's.

    Returns:
        ``x`` if ``in_place``; otherwise a fresh tensor.

    Raises:
        ValueError: ``lost_N`` is not one number of uint8 for each row on the device of ``x``, or
            ``x`` is not contiguous and is to be changed in place.
    """
    if lost_N.shape != x.shape[:1] or lost_N.get_device() != x.get_device():
        raise ValueError(
            f"finite_rows: found lost_N of shape {tuple(lost_N.shape)} on {lost_N.device} for x of "
            f"shape {tuple(x.shape)} on {x.device}; expected one entry for each row, there."
        )
    if lost_N.dtype != torch.uint8 or not lost_N.is_contiguous():
        raise ValueError(
            f"finite_rows: found lost_N of {lost_N.dtype}; expected uint8, contiguous."
        )
    if in_place and not x.is_contiguous():
        raise ValueError(
            f"finite_rows: found x with strides {x.stride()} for shape {tuple(x.shape)}, which "
            "cannot be changed in place. Pass a contiguous tensor, or in_place=False."
        )
    return backends.run(reference.finite_rows, backend, x, x, lost_N, in_place)
