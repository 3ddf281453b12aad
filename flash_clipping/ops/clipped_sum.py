"""The clipped sum of a linear layer's per-sample gradients as one ordinary matmul.

B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops import backend as backends
from flash_clipping.ops import clipped_sum_torch
from flash_clipping.ops.shapes import (
    Group,
    Memo,
    by_kind,
    check_coefficients,
    checked_groups,
    part_of,
    remembered,
)


def clipped_sums(
    A_BTd: Tensor, Gs: Sequence[Tensor], coef_B: Tensor, *, backend: str = "auto"
) -> list[Tensor]:
    """``Σ_b coef_b G_l,bᵀ A_b`` for every layer ``l`` that reads ``A``.

    One matmul over all ``B·T`` rows for each layer. ``A`` is scaled once for all of them, or the
    narrower operand when there is one layer; nothing is changed in place.

    A sample whose coefficient is 0 adds nothing, whatever its operands hold: inf and NaN too.
    On a GPU, fp32 matmuls follow ``torch.set_float32_matmul_precision``, as those of the
    non-private step do.

    Returns:
        ``[p, d]`` for each layer, in the operands' dtype (the wider if they differ).
    """
    return clipped_sums_of([(A_BTd, Gs)], coef_B, backend=backend)[0]


def clipped_sums_of(
    groups: Sequence[Group],
    coef_B: Tensor,
    *,
    backend: str = "auto",
    checked: bool = False,
    memo: Memo | None = None,
) -> list[list[Tensor]]:
    """:func:`clipped_sums` of groups ``(A, [G, ...])`` that are held at one time anyway.

    On a GPU one launch looks after the dropped samples of all of them. ``checked`` and ``memo``:
    the caller has seen to shapes, ``[B, T, features]``, and devices, and hands on what was kept
    for groups of the same layout.
    """
    ready = groups if checked else checked_groups(groups)
    if not checked:
        for A_BTd, _ in ready:
            check_coefficients(coef_B, A_BTd, "A")
    results: list[list[Tensor]] = [[] for _ in ready]
    for number, members in enumerate(by_kind(ready)):
        alike = [ready[i] for i in members]
        found = _sums_of_kind(alike, coef_B, backend, part_of(memo, number))
        for i, sums in zip(members, found, strict=True):
            results[i] = sums
    return results


def _sums_of_kind(
    groups: list[Group], coef_B: Tensor, backend: str, memo: Memo | None
) -> list[list[Tensor]]:
    first, Gs = groups[0]
    if all(x.dtype != torch.float16 for x in (first, *Gs)):
        return backends.run(clipped_sum_torch.clipped_sums_of, backend, first, groups, coef_B, memo)
    # Below 6e-5 fp16 has ever fewer bits: a scaled operand would lose what makes a small
    # coefficient times a large gradient come out at the bound. Coefficients meet the fp32
    # product instead.
    pairs = [(A, G) for A, Gs in groups for G in Gs]
    sums = iter(backends.run(clipped_sum_torch.clipped_sums_many, backend, first, pairs, coef_B))
    return [[next(sums) for _ in Gs] for _, Gs in groups]


#: A product of fewer FLOP takes the host longer to launch than the device to compute.
SMALL_FLOP = 10e9


def is_small(A_BTd: Tensor, Gs: Sequence[Tensor], *, backend: str = "auto") -> bool:
    """Whether these products are worth handing to :func:`clipped_sums_many` together.

    Never without kernels: there is no launch to save, and a shared input would be scaled for every
    layer that reads it.
    """
    if backends.resolve(backend, A_BTd) == "torch":
        return False
    rows = A_BTd.shape[:-1].numel()
    return all(2 * rows * A_BTd.shape[-1] * G.shape[-1] <= SMALL_FLOP for G in Gs)


def clipped_sums_many(
    pairs: Sequence[tuple[Tensor, Tensor]],
    coef_B: Tensor,
    *,
    backend: str = "auto",
    checked: bool = False,
    memo: Memo | None = None,
) -> list[Tensor]:
    """:func:`clipped_sums` for many small layers ``(A, G)`` at once: one launch on a GPU.

    ``checked`` and ``memo``: the caller has seen to shapes and devices, and hands on what was kept
    for pairs of the same layout.

    Returns:
        ``[p, d]`` for each pair, in its operands' dtype (the wider if they differ).
    """
    if not checked:
        groups = checked_groups([(A, [G]) for A, G in pairs])
        for A_BTd, _ in groups:
            check_coefficients(coef_B, A_BTd, "A")
        pairs = [(A_BTd, Gs[0]) for A_BTd, Gs in groups]
    kinds = remembered(memo, "kinds", lambda: by_kind([(A, [G]) for A, G in pairs]))
    results: dict[int, Tensor] = {}
    for number, members in enumerate(kinds):
        alike = [pairs[i] for i in members]
        sums = backends.run(
            clipped_sum_torch.clipped_sums_many,
            backend,
            alike[0][0],
            alike,
            coef_B,
            part_of(memo, number),
        )
        results.update(zip(members, sums, strict=True))
    return [results[i] for i in range(len(pairs))]
