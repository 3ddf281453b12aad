"""Reference for clipped sums: scale one operand by the coefficients, then one matmul."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.row_scale_torch import row_scale
from flash_clipping.ops.shapes import Group, Memo


def clipped_sums_of(
    groups: Sequence[Group], coef_B: Tensor, memo: Memo | None = None
) -> list[list[Tensor]]:
    """See :func:`flash_clipping.ops.clipped_sum.clipped_sums_of`."""
    return [_clipped_sums(A_BTd, Gs, coef_B) for A_BTd, Gs in groups]


def _clipped_sums(A_BTd: Tensor, Gs: Sequence[Tensor], coef_B: Tensor) -> list[Tensor]:
    # 0 · inf is NaN, so a dropped sample must be zero in both operands. Only the CPU may look
    # whether there is one; on a GPU looking would wait for the device.
    clean = coef_B.device.type != "cpu" or bool((coef_B == 0).any())
    scale_A = scales_input(A_BTd, Gs)
    kept_B = (coef_B != 0).to(coef_B.dtype)
    scaled_A = row_scale(A_BTd, coef_B if scale_A else kept_B) if scale_A or clean else A_BTd
    sums = []
    for G_BTp in Gs:
        scaled_G = (
            row_scale(G_BTp, kept_B if scale_A else coef_B) if clean or not scale_A else G_BTp
        )
        A_Nd, G_Np = rows_for_matmul(scaled_A, scaled_G)
        sums.append(G_Np.mT @ A_Nd)
    return sums


def clipped_sums_many(
    pairs: Sequence[tuple[Tensor, Tensor]], coef_B: Tensor, memo: Memo | None = None
) -> list[Tensor]:
    """See :func:`flash_clipping.ops.clipped_sum.clipped_sums_many`."""
    sums = []
    for A, G in pairs:
        dtype = torch.promote_types(A.dtype, G.dtype)
        if dtype == torch.float16:  # see ops/clipped_sum.py
            A, G = A.float(), G.float()
        sums.append(_clipped_sums(A, [G], coef_B)[0].to(dtype))
    return sums


def scales_input(A_BTd: Tensor, Gs: Sequence[Tensor]) -> bool:
    """Whether to scale ``A`` (shared by several layers, or narrower) rather than ``G``."""
    return len(Gs) > 1 or A_BTd.shape[-1] <= Gs[0].shape[-1]


def rows_for_matmul(x_BTf: Tensor, y_BTf: Tensor) -> tuple[Tensor, Tensor]:
    """Both as ``[B·T, features]`` of one dtype. Any common order of rows gives the same sum, so
    operands laid out time first are taken in that order, without a copy."""
    if x_BTf.dtype != y_BTf.dtype:
        dtype = torch.promote_types(x_BTf.dtype, y_BTf.dtype)
        x_BTf, y_BTf = x_BTf.to(dtype), y_BTf.to(dtype)
    plain = x_BTf.is_contiguous() and y_BTf.is_contiguous()
    if not plain and _is_time_first(x_BTf) and _is_time_first(y_BTf):
        x_BTf, y_BTf = x_BTf.transpose(0, 1), y_BTf.transpose(0, 1)
    return x_BTf.flatten(0, 1), y_BTf.flatten(0, 1)


def _is_time_first(x_BTf: Tensor) -> bool:
    return x_BTf.transpose(0, 1).is_contiguous()
