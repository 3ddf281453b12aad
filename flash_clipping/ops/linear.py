"""Per-sample weight-gradient norms of linear layers, by whichever algorithm is cheapest.

B samples, T positions, d input features, p output features, L layers that read one input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.error_bounds import cores_of, doubt_of_sums, spread
from flash_clipping.ops.gram import gram_blocks
from flash_clipping.ops.outer import outer_sqnorms, sum_parts
from flash_clipping.ops.runtime import cost, shapes
from flash_clipping.ops.runtime.shapes import Group, LaunchCache, SqnormBlock

HUGE = 2.0**63
"""Norm of an operand, of fp32 or less, whose square is close to inf in fp32."""


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
        (:mod:`flash_clipping.ops.error_bounds`), fp32 (float64 for float64).
    """
    ready = shapes.checked_groups(groups)
    results = []
    for A_BTd, Gs in ready:
        size, dtype = (2, len(Gs), len(A_BTd)), shapes.accumulator(A_BTd, *Gs)
        sq_LB, doubt_LB = A_BTd.new_zeros(size, dtype=dtype)
        results.append((sq_LB, doubt_LB))
    for order, sq_RB, doubt_RB, _ in linear_sqnorm_blocks(ready, backend=backend):
        for row, (group, layer) in enumerate(order):
            sq_LB, doubt_LB = results[group]
            sq_LB[layer] = sq_RB[row]
            if doubt_RB is not None:
                doubt_LB[layer] = doubt_RB[row]
    return results


def linear_sqnorm_blocks(
    ready: Sequence[Group], *, backend: str = "auto", memo: LaunchCache | None = None
) -> list[SqnormBlock]:
    """:func:`linear_sqnorms` in whatever blocks the norms come out: for a step, which puts them
    into an order of its own anyway, and has seen to shapes, ``[B, T, features]``, and devices.
    ``memo``: what was kept for operands of the same layout."""
    memo = {} if memo is None else memo
    if (by_algorithm := memo.get("algorithms")) is None:
        by_algorithm = memo["algorithms"] = _algorithms(ready)
    blocks: list[SqnormBlock] = []
    for group, layer in by_algorithm["rank_one"]:
        A_B1d, Gs = ready[group]
        blocks.append(SqnormBlock([(group, layer)], rank_one_sqnorms(A_B1d, Gs[layer])[None], None))
    if outer := by_algorithm["outer"]:
        pairs = [(ready[group][0], ready[group][1][layer]) for group, layer in outer]
        parts = [outer_sqnorms(A, G, in_parts=True, backend=backend)[0] for A, G in pairs]
        for members, sq_LB in sum_parts(parts):
            spread_LB = torch.stack([spread(*pairs[i]) for i in members])
            kinds = [(pairs[i][0].shape[1], cores_of(*pairs[i])) for i in members]
            of_kind = {k: doubt_of_sums(sq_LB, spread_LB, *k) for k in dict.fromkeys(kinds)}
            doubt_LB = of_kind[kinds[0]]  # mostly there is one: a few launches for all layers
            if len(of_kind) > 1:
                doubt_LB = torch.stack([of_kind[kind][row] for row, kind in enumerate(kinds)])
            blocks.append(SqnormBlock([outer[i] for i in members], sq_LB, doubt_LB))
    # Layers that take gram share `A Aᵀ` within a group, and one launch between groups.
    if blocks and not by_algorithm["gram"]:
        return blocks
    if not blocks:
        return gram_blocks(ready, backend=backend, memo=memo)
    left: list[list[int]] = [[] for _ in ready]  # their layers in each group
    for group, layer in by_algorithm["gram"]:
        left[group].append(layer)
    gram = [(A, [Gs[i] for i in some]) for (A, Gs), some in zip(ready, left, strict=True)]
    for block in gram_blocks(gram, backend=backend, memo=memo):
        order = [(group, left[group][layer]) for group, layer in block.order]
        blocks.append(block._replace(order=order))
    return blocks


def _algorithms(ready: Sequence[Group]) -> dict[str, list[tuple[int, int]]]:
    """Layers, by their group and their number there, that take each algorithm."""
    found: dict[str, list[tuple[int, int]]] = {"gram": [], "outer": [], "rank_one": []}
    for group, (A_BTd, Gs_BTp) in enumerate(ready):
        device_type, itemsize, shared = A_BTd.device.type, A_BTd.element_size(), len(Gs_BTp)
        for layer, G in enumerate(Gs_BTp):
            sizes = *A_BTd.shape, G.shape[2], itemsize
            algorithm = cost.choose_on(device_type, *sizes, may_store=False, shared=shared)
            found[algorithm].append((group, layer))
    return found


def rank_one_sqnorms(A_B1d: Tensor, G_B1p: Tensor) -> Tensor:
    """``‖g aᵀ‖² = ‖a‖² ‖g‖²`` for samples of one position, ``[B]``.

    Nothing cancels, so nothing is in doubt. In float64, as the square of one operand may be lost in
    fp32 and the other make up for it. Where one is above :data:`HUGE` the norm is not finite: the
    other, times a coefficient, would be rounded to a multiple of the least number of fp32.
    """
    A_norm = torch.linalg.vector_norm(A_B1d, dim=(1, 2), dtype=torch.float64)
    G_norm = torch.linalg.vector_norm(G_B1p, dim=(1, 2), dtype=torch.float64)
    dtype = torch.promote_types(torch.promote_types(A_B1d.dtype, G_B1p.dtype), torch.float32)
    sq_B: Tensor = (A_norm * G_norm).square_()
    if dtype != torch.float64:
        sq_B.div_(A_norm.add_(G_norm) <= HUGE)
    return sq_B.to(dtype)
