"""Per-sample weight-gradient norms of linear layers, by whichever algorithm is cheapest.

B samples, T positions, d input features, p output features, L layers that read one input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops import cost
from flash_clipping.ops.gram import gram_blocks
from flash_clipping.ops.outer import outer_sqnorms, sum_parts
from flash_clipping.ops.shapes import Group, Memo, SqnormBlock, accumulator, checked_groups


def linear_sqnorms(groups: Sequence[Group], *, backend: str = "auto") -> list[Tensor]:
    """Squared norms of ``G_l,bᵀ A_b`` for groups of layers that read the same input.

    Args:
        groups: ``(A, [G_1, ..., G_L])`` with ``A`` of shape ``[B, ..., d]`` and ``G_l`` of shape
            ``[B, ..., p_l]``.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``[L, B]`` for each group, fp32 (float64 for float64).
    """
    ready = checked_groups(groups)
    rows: dict[tuple[int, int], Tensor] = {}
    for order, sq_RB in linear_sqnorm_blocks(ready, backend=backend):
        rows.update(zip(order, sq_RB.unbind(0), strict=True))
    return [
        torch.stack([rows[group, layer] for layer in range(len(Gs))])
        if Gs
        else A_BTd.new_zeros((0, A_BTd.shape[0]), dtype=accumulator(A_BTd))
        for group, (A_BTd, Gs) in enumerate(ready)
    ]


def linear_sqnorm_blocks(
    ready: Sequence[Group], *, backend: str = "auto", memo: Memo | None = None
) -> list[SqnormBlock]:
    """:func:`linear_sqnorms` in whatever blocks the norms come out.

    For a caller who has seen to shapes, ``[B, T, features]``, and devices; ``memo`` is what was
    kept for operands of the same layout. A step takes its norms in this way, as it puts them into
    an order of its own anyway.
    """
    if memo is not None and memo.get("gram for all"):
        return gram_blocks(ready, backend=backend, memo=memo)
    # Layers that take gram share `A Aᵀ` within a group, and one launch between groups.
    gram: list[Group] = []
    left: list[list[int]] = []  # their layers in each group
    outer: list[tuple[int, int]] = []  # group and layer of each of these parts
    parts: list[Tensor] = []
    blocks: list[SqnormBlock] = []
    for group, (A_BTd, Gs_BTp) in enumerate(ready):
        B, T, d = A_BTd.shape
        device_type, itemsize = A_BTd.device.type, A_BTd.element_size()
        left.append([])
        for layer, G in enumerate(Gs_BTp):
            p = G.shape[2]
            algorithm = cost.choose_on(
                device_type, B, T, d, p, itemsize, may_store=False, shared=len(Gs_BTp)
            )
            if algorithm == "gram":
                left[group].append(layer)
            elif algorithm == "rank_one":
                blocks.append(([(group, layer)], rank_one_sqnorms(A_BTd, G).unsqueeze(0)))
            else:
                outer.append((group, layer))
                parts.append(outer_sqnorms(A_BTd, G, in_parts=True, backend=backend)[0])
        gram.append((A_BTd, [Gs_BTp[layer] for layer in left[group]]))
    blocks += [([outer[i] for i in members], sq_LB) for members, sq_LB in sum_parts(parts)]
    for_all = not blocks
    if memo is not None:
        memo["gram for all"] = for_all
    # Groups that others took a part of are not what the memo will be asked for.
    for order, sq_RB in gram_blocks(gram, backend=backend, memo=memo if for_all else None):
        blocks.append(([(group, left[group][layer]) for group, layer in order], sq_RB))
    return blocks


def rank_one_sqnorms(A_B1d: Tensor, G_B1p: Tensor) -> Tensor:
    """``‖g aᵀ‖² = ‖a‖² ‖g‖²`` for samples of one position, ``[B]``."""
    dtype = accumulator(A_B1d, G_B1p)
    A_sq = torch.linalg.vector_norm(A_B1d, dim=(1, 2), dtype=dtype).square_()
    return A_sq.mul_(torch.linalg.vector_norm(G_B1p, dim=(1, 2), dtype=dtype).square_())
