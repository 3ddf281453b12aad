"""Clipped sums on a GPU: scale one operand, one library matmul, and care for dropped samples.

A dropped sample (coefficient 0) is zero in the scaled operand, but ``0 · inf`` is NaN where the
other operand is not finite. The host does not look whether there is one: it would wait for the
device. Small operands are copied with dropped samples set to zero, in the launch that scales. For
the products of large ones one kernel looks at the coefficients and, only if one is 0, computes
them again with those rows masked: slow, right, and hardly ever needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from flash_clipping.ops.clipped_sum_torch import rows_for_matmul, scales_input
from flash_clipping.ops.grouped_product_triton import grouped_products, repair_products
from flash_clipping.ops.row_scale_triton import row_scale_many, scale_and_clean
from flash_clipping.ops.shapes import Group, Memo, part_of, remembered

_Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.dtype]

SMALL_BYTES = 4 * 2**20
"""Copying this much costs about what launching the repair kernel does (3 µs at 4.3 TB/s)."""


def clipped_sums_of(
    groups: Sequence[Group], coef_B: Tensor, memo: Memo | None = None
) -> list[list[Tensor]]:
    """See :func:`flash_clipping.ops.clipped_sum.clipped_sums_of`."""
    whole: list[int] = []  # groups whose products are looked after together
    to_scale: list[Tensor] = []
    sums: list[list[Tensor]] = []
    for A_BTd, Gs in groups:
        scale_A = scales_input(A_BTd, Gs)
        x, y = (A_BTd, Gs[0]) if scale_A else (Gs[0], A_BTd)
        if len(Gs) == 1 and y.numel() * y.element_size() <= SMALL_BYTES:
            x, y = scale_and_clean(x, y, coef_B)
            sums.append(_products(x, [y], swap=not scale_A))
        else:
            whole.append(len(sums))
            to_scale.append(x)
            sums.append([])
    if not whole:
        return sums
    # What may have to be computed again, by what one launch has in common.
    doubtful: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, Tensor, Tensor]]] = {}
    scaled_copies = row_scale_many(to_scale, coef_B)
    for i in reversed(whole):
        scaled = scaled_copies.pop()  # let go of after its products
        A_BTd, Gs = groups[i]
        if scales_input(A_BTd, Gs):
            sums[i] = _products(scaled, Gs, swap=False)
        else:
            sums[i] = _products(scaled, [A_BTd], swap=True)
        kind = (A_BTd.shape[:2], sums[i][0].dtype)
        members = doubtful.setdefault(kind, [])
        members += [(A_BTd, G, product) for G, product in zip(Gs, sums[i], strict=True)]
    for kind, members in doubtful.items():
        operands = [(A, G) for A, G, _ in members]
        if any([A.dtype != kind[1] or G.dtype != kind[1] for A, G in operands]):
            operands = [(A.to(kind[1]), G.to(kind[1])) for A, G in operands]
        products = [product for _, _, product in members]
        repair_products(operands, products, coef_B, part_of(memo, kind))
    return sums


def clipped_sums_many(
    pairs: Sequence[tuple[Tensor, Tensor]], coef_B: Tensor, memo: Memo | None = None
) -> list[Tensor]:
    """See :func:`flash_clipping.ops.clipped_sum.clipped_sums_many`."""
    sums: dict[int, Tensor] = {}
    for kind, members in remembered(memo, "launches", lambda: _launches(pairs)).items():
        alike = [pairs[i] for i in members]
        _, A_dtype, G_dtype = kind
        if A_dtype != G_dtype:
            dtype = torch.promote_types(A_dtype, G_dtype)
            alike = [(A.to(dtype), G.to(dtype)) for A, G in alike]
            products = grouped_products(alike, coef_B)
        else:
            products = grouped_products(alike, coef_B, memo=part_of(memo, kind))
        sums.update(zip(members, products, strict=True))
    return [sums[i] for i in range(len(pairs))]


def _launches(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[_Kind, list[int]]:
    """What one launch serves: all pairs of one kind."""
    kinds: dict[_Kind, list[int]] = {}
    for i, (A, G) in enumerate(pairs):
        kinds.setdefault((A.shape[:2], A.dtype, G.dtype), []).append(i)
    return kinds


def _products(scaled: Tensor, others: Sequence[Tensor], *, swap: bool) -> list[Tensor]:
    """``otherᵀ scaled``, or ``scaledᵀ other`` with ``swap`` (where G is the scaled operand)."""
    if torch.is_autocast_enabled(scaled.device.type):
        with torch.autocast(scaled.device.type, enabled=False):
            return _products(scaled, others, swap=swap)
    products = []
    for other in others:
        scaled_NF, other_NF = rows_for_matmul(scaled, other)
        left, right = (scaled_NF, other_NF) if swap else (other_NF, scaled_NF)
        products.append(torch.mm(left.mT, right))
    return products
