"""Per-sample weight-gradient norms of linear layers, by whichever algorithm is cheapest.

B samples, T positions, d input features, p output features, L layers that read one input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops import cost
from flash_clipping.ops.gram import gram_sqnorms
from flash_clipping.ops.outer import outer_sqnorms
from flash_clipping.ops.shapes import accumulator, as_rows, check_same_rows


def linear_sqnorms(
    groups: Sequence[tuple[Tensor, Sequence[Tensor]]], *, backend: str = "auto"
) -> list[Tensor]:
    """Squared norms of ``G_l,bᵀ A_b`` for groups of layers that read the same input.

    Args:
        groups: ``(A, [G_1, ..., G_L])`` with ``A`` of shape ``[B, ..., d]`` and ``G_l`` of shape
            ``[B, ..., p_l]``.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``[L, B]`` for each group, fp32 (float64 for float64).
    """
    results = []
    for A, Gs in groups:
        A_BTd = as_rows(A, "A")
        Gs_BTp = [as_rows(G, "G") for G in Gs]
        for G in Gs_BTp:
            check_same_rows(A_BTd, G, "A", "G")
        results.append(_group_sqnorms(A_BTd, Gs_BTp, backend))
    return results


def _group_sqnorms(A_BTd: Tensor, Gs: list[Tensor], backend: str) -> Tensor:
    """Each layer by its own cheapest algorithm; those that take gram share ``A Aᵀ``."""
    B, T, d = A_BTd.shape
    sq_LB = A_BTd.new_zeros((len(Gs), B), dtype=accumulator(A_BTd, *Gs))
    machine = cost.machine_for(A_BTd.device.type, A_BTd.element_size())
    by_gram = []
    for layer, G in enumerate(Gs):
        algorithm = cost.choose(
            B=B,
            T=T,
            d=d,
            p=G.shape[-1],
            itemsize=A_BTd.element_size(),
            may_store=False,
            shared=len(Gs),
            machine=machine,
        )
        if algorithm == "gram":
            by_gram.append(layer)
        elif algorithm == "rank_one":
            sq_LB[layer] = rank_one_sqnorms(A_BTd, G)
        else:
            sq_LB[layer] = outer_sqnorms(A_BTd, G, backend=backend)[0]
    if by_gram:
        weight_sq, _ = gram_sqnorms(A_BTd, [Gs[layer] for layer in by_gram], backend=backend)
        for layer, sq_B in zip(by_gram, weight_sq, strict=True):
            sq_LB[layer] = sq_B
    return sq_LB


def rank_one_sqnorms(A_B1d: Tensor, G_B1p: Tensor) -> Tensor:
    """``‖g aᵀ‖² = ‖a‖² ‖g‖²`` for samples of one position, ``[B]``."""
    dtype = accumulator(A_B1d, G_B1p)
    A_sq = torch.linalg.vector_norm(A_B1d, dim=(1, 2), dtype=dtype).square_()
    return A_sq.mul_(torch.linalg.vector_norm(G_B1p, dim=(1, 2), dtype=dtype).square_())
