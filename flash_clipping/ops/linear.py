"""Per-sample weight-gradient norms of linear layers, by whichever algorithm is cheapest.

B samples, T positions, d input features, p output features, L layers that read one input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops import cost
from flash_clipping.ops.gram import gram_of_checked
from flash_clipping.ops.outer import outer_sqnorms, sum_parts
from flash_clipping.ops.shapes import Group, Memo, accumulator, checked_groups


def linear_sqnorms(
    groups: Sequence[Group],
    *,
    backend: str = "auto",
    checked: bool = False,
    memo: Memo | None = None,
) -> list[Tensor]:
    """Squared norms of ``G_l,bᵀ A_b`` for groups of layers that read the same input.

    Args:
        groups: ``(A, [G_1, ..., G_L])`` with ``A`` of shape ``[B, ..., d]`` and ``G_l`` of shape
            ``[B, ..., p_l]``.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.
        checked: the caller has seen to shapes, ``[B, T, features]``, and devices.
        memo: what was kept for operands of the same layout, which are ``checked``.

    Returns:
        ``[L, B]`` for each group, fp32 (float64 for float64).
    """
    if memo is not None and memo.get("gram for all"):
        return [sq_LB for sq_LB, _ in gram_of_checked(groups, backend=backend, memo=memo)]
    # Layers that take gram share `A Aᵀ` within a group, and one launch between groups.
    gram: list[Group] = []
    rows: list[dict[int, Tensor]] = []  # of each group: layer -> norms, or nothing yet
    outer: list[tuple[int, int]] = []  # group and layer of each of these parts
    parts: list[Tensor] = []
    for group, (A_BTd, Gs_BTp) in enumerate(groups if checked else checked_groups(groups)):
        B, T, d = A_BTd.shape
        device_type, itemsize = A_BTd.device.type, A_BTd.element_size()
        rows.append({})
        left: list[Tensor] = []
        for layer, G in enumerate(Gs_BTp):
            p = G.shape[2]
            algorithm = cost.choose_on(
                device_type, B, T, d, p, itemsize, may_store=False, shared=len(Gs_BTp)
            )
            if algorithm == "gram":
                left.append(G)
            elif algorithm == "rank_one":
                rows[group][layer] = rank_one_sqnorms(A_BTd, G)
            else:
                outer.append((group, layer))
                parts.append(outer_sqnorms(A_BTd, G, in_parts=True, backend=backend)[0])
        gram.append((A_BTd, left))
    for members, norms_LB in sum_parts(parts):
        for i, norm_B in zip(members, norms_LB.unbind(0), strict=True):
            group, layer = outer[i]
            rows[group][layer] = norm_B
    if memo is not None:
        memo["gram for all"] = not any(rows)
    # Groups that others took a part of are not what the memo will be asked for.
    norms = gram_of_checked(gram, backend=backend, memo=None if any(rows) else memo)
    results = []
    for (_, Gs), done, (gram_LB, _) in zip(groups, rows, norms, strict=True):
        if done:
            rest = iter(gram_LB)
            gram_LB = torch.stack(
                [done[layer] if layer in done else next(rest) for layer in range(len(Gs))]
            )
        results.append(gram_LB)
    return results


def rank_one_sqnorms(A_B1d: Tensor, G_B1p: Tensor) -> Tensor:
    """``‖g aᵀ‖² = ‖a‖² ‖g‖²`` for samples of one position, ``[B]``."""
    dtype = accumulator(A_B1d, G_B1p)
    A_sq = torch.linalg.vector_norm(A_B1d, dim=(1, 2), dtype=dtype).square_()
    return A_sq.mul_(torch.linalg.vector_norm(G_B1p, dim=(1, 2), dtype=dtype).square_())
