"""Per-sample weight-gradient norms of linear layers, by whichever algorithm is cheapest.

B samples, T positions, d input features, p output features, L layers that read one input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.certificate import doubt, spread
from flash_clipping.ops.gram import gram_blocks
from flash_clipping.ops.outer import outer_sqnorms, sum_parts
from flash_clipping.ops.runtime import cost
from flash_clipping.ops.runtime.shapes import Group, Memo, SqnormBlock, accumulator, checked_groups


def linear_sqnorms(
    groups: Sequence[Group], *, backend: str = "auto"
) -> list[tuple[Tensor, Tensor]]:
    """Squared norms of ``G_l,bᵀ A_b`` for groups of layers that read the same input.

    Args:
        groups: ``(A, [G_1, ..., G_L])`` with ``A`` of shape ``[B, ..., d]`` and ``G_l`` of shape
            ``[B, ..., p_l]``.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        Squared norms ``[L, B]`` for each group and what rounding may hide of them
        (:mod:`flash_clipping.ops.certificate`), fp32 (float64 for float64).
    """
    ready = checked_groups(groups)
    rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for order, sq_RB, doubt_RB in linear_sqnorm_blocks(ready, backend=backend):
        if doubt_RB is None:
            doubt_RB = torch.zeros_like(sq_RB)
        both = zip(sq_RB.unbind(0), doubt_RB.unbind(0), strict=True)
        rows.update(zip(order, both, strict=True))
    results = []
    for group, (A_BTd, Gs) in enumerate(ready):
        found = [rows[group, layer] for layer in range(len(Gs))]
        if found:
            sqs, doubts = zip(*found, strict=True)
            results.append((torch.stack(sqs), torch.stack(doubts)))
        else:
            none_LB = A_BTd.new_zeros((0, A_BTd.shape[0]), dtype=accumulator(A_BTd))
            results.append((none_LB, none_LB))
    return results


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
    outer: list[tuple[int, int]] = []  # group and layer of each of these parts and doubts
    parts: list[Tensor] = []
    doubts: list[Tensor] = []
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
                sq_1B = rank_one_sqnorms(A_BTd, G).unsqueeze(0)
                blocks.append(SqnormBlock([(group, layer)], sq_1B, None))
            else:
                outer.append((group, layer))
                parts.append(outer_sqnorms(A_BTd, G, in_parts=True, backend=backend)[0])
                doubts.append(doubt(spread(A_BTd, G)))
        gram.append((A_BTd, [Gs_BTp[layer] for layer in left[group]]))
    for members, sq_LB in sum_parts(parts):
        doubt_LB = torch.stack([doubts[i] for i in members])
        blocks.append(SqnormBlock([outer[i] for i in members], sq_LB, doubt_LB))
    for_all = not blocks
    if memo is not None:
        memo["gram for all"] = for_all
    # Groups that others took a part of are not what the memo will be asked for.
    for block in gram_blocks(gram, backend=backend, memo=memo if for_all else None):
        order = [(group, left[group][layer]) for group, layer in block.order]
        blocks.append(block._replace(order=order))
    return blocks


def rank_one_sqnorms(A_B1d: Tensor, G_B1p: Tensor) -> Tensor:
    """``‖g aᵀ‖² = ‖a‖² ‖g‖²`` for samples of one position, ``[B]``.

    Nothing cancels, so nothing is in doubt. In float64, as the square of one operand may be lost in
    fp32 and the other make up for it.
    """
    A_sq = torch.linalg.vector_norm(A_B1d, dim=(1, 2), dtype=torch.float64).square_()
    G_sq = torch.linalg.vector_norm(G_B1p, dim=(1, 2), dtype=torch.float64).square_()
    return A_sq.mul_(G_sq).to(accumulator(A_B1d, G_B1p))
