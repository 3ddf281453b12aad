"""Per-sample gradient norms of linear layers through Gram matrices ("ghost norms").

B samples, T positions, d input features, p output features, L layers that read one input.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_clipping.ops.gram import reference
from flash_clipping.ops.runtime import backend as backends, shapes
from flash_clipping.ops.runtime.shapes import Group, LaunchCache, SqnormBlock


def gram_sqnorms(
    A_BTd: Tensor, Gs: Sequence[Tensor], *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Squared norms of ``G_l,bᵀ A_b`` for every sample ``b`` and layer ``l`` reading ``A``.

    ``‖G_bᵀ A_b‖² = Σ_{t,t'} (A_b A_bᵀ)_{tt'} (G_b G_bᵀ)_{tt'}``. The tiles of ``A Aᵀ`` are computed
    once for all layers, no tile leaves the chip, and only those on and below the diagonal are
    computed. Those on it give the spread ``Σ_t ‖a_t‖ ‖g_t‖`` as well.

    Args:
        A_BTd: the layers' common input, ``[B, ..., d]``.
        Gs: output gradients ``[B, ..., p]``, one for each layer; ``p`` may differ.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``[L, B]`` squared norms, and what rounding may hide of each
        (:mod:`flash_clipping.ops.error_bounds`); fp32 (float64 for float64). A sum that cancels may
        come out below zero by up to the second; one that overflows is inf or NaN.
    """
    ((_, sq_LB, doubt_LB, _),) = gram_blocks(shapes.checked_groups([(A_BTd, Gs)]), backend=backend)
    assert doubt_LB is not None
    return sq_LB, doubt_LB


def gram_blocks(
    ready: Sequence[Group], *, backend: str = "auto", memo: LaunchCache | None = None
) -> list[SqnormBlock]:
    """:func:`gram_sqnorms` of many groups, on a GPU in one launch for each kind (B, T and dtypes),
    in whatever blocks the norms come out: cutting them up takes the host as long as a launch.
    ``memo`` as in :func:`flash_clipping.ops.linear.linear_sqnorm_blocks`. Groups without layers
    have no rows."""
    memo = {} if memo is None else memo
    kinds: list[tuple[bool, list[int]]] | None = memo.get("kinds")
    if kinds is None:
        kinds = memo["kinds"] = shapes.kinds_of_groups(ready)
    blocks: list[SqnormBlock] = []
    for number, (is_busy, members) in enumerate(kinds):
        groups = [ready[i] for i in members]
        of_kind = reference.gram_blocks, backend if is_busy else "torch", groups[0][0]
        found = backends.run(*of_kind, groups, memo.setdefault(number, {}))
        if len(members) < len(ready):
            found = [
                block._replace(order=[(members[i], layer) for i, layer in block.order])
                for block in found
            ]
        blocks += found
    return blocks
