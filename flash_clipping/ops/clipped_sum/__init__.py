"""The clipped sum of a linear layer's per-sample gradients as one product.

B samples, T positions, d input features, p output features.

What is released of a sample must not exceed the clipping bound, so coefficients meet fp32 values
only: a coefficient times a bf16 operand, rounded to bf16 again, would be up to 0.4 % off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_clipping.ops.clipped_sum import reference
from flash_clipping.ops.runtime import backend as backends, shapes

Pair: TypeAlias = tuple[Tensor, Tensor]
"""``A_BTd`` and ``G_BTp`` of one layer."""

COLUMNS = 10
"""Of the table of a launch: address, strides of samples and positions, and width of G, then of A;
address of the result; first of the layer's tiles."""

SMALL_FLOP = 10e9
"""A product of fewer FLOP takes the host longer to launch than the device to compute."""

AT_ONCE = 1 << 26
"""Elements of clipped sums that are made in one go, of operands or of stored gradients: enough to
keep the device busy, and little beside what letting go of these frees."""


def clipped_sums(
    A_BTd: Tensor, Gs: Sequence[Tensor], coef_B: Tensor, *, backend: str = "auto"
) -> list[Tensor]:
    """``Σ_b coef_b G_l,bᵀ A_b`` for every layer ``l`` that reads ``A``, in fp32.

    A sample whose coefficient is 0 adds nothing, whatever its operands hold: inf and NaN too. fp32
    operands are multiplied in fp32, whatever ``torch.set_float32_matmul_precision`` says: operands
    rounded to TF32 are not those that were measured.

    Returns:
        ``[p, d]`` for each layer, in fp32 (float64 for float64).
    """
    return clipped_sums_many([(A_BTd, G) for G in Gs], coef_B, backend=backend)


def clipped_sums_many(
    pairs: Sequence[Pair],
    coef_B: Tensor,
    *,
    backend: str = "auto",
    memo: shapes.LaunchCache | None = None,
) -> list[Tensor]:
    """:func:`clipped_sums` for many layers ``(A, G)`` at once: on a GPU one launch for those of one
    B, T and dtype. ``memo``: what was kept for pairs of the same layout, from a caller who has seen
    to shapes and devices."""
    if memo is None:
        memo = {}
        groups = shapes.checked_groups([(A, [G]) for A, G in pairs])
        for A_BTd, _ in groups:
            shapes.check_coefficients(coef_B, A_BTd, "A")
        pairs = [(A_BTd, Gs[0]) for A_BTd, Gs in groups]
    kinds: list[tuple[bool, list[int]]] | None = memo.get("kinds")
    if kinds is None:
        kinds = memo["kinds"] = shapes.kinds_of_groups([(A, (G,)) for A, G in pairs])
    results: dict[int, Tensor] = {}
    for number, (is_busy, members) in enumerate(kinds):
        alike = pairs if len(members) == len(pairs) else [pairs[i] for i in members]
        decides = max(alike[0], key=Tensor.element_size)  # whose dtype an implementation must take
        run = reference.clipped_sums_many
        of_kind = run, backend if is_busy else "torch", decides
        sums = backends.run(*of_kind, alike, coef_B, memo.setdefault(number, {}))
        if alike is pairs:
            return sums
        results.update(zip(members, sums, strict=True))
    return [results[i] for i in range(len(pairs))]


class Kind(NamedTuple):
    """Properties that the products of one launch share."""

    B: int
    T: int
    A_dtype: torch.dtype
    G_dtype: torch.dtype
    device: int
    small: bool


def kinds_of(pairs: Sequence[Pair]) -> dict[Kind, list[int]]:
    """The products of every kind, by their places in ``pairs``."""
    kinds: dict[Kind, list[int]] = {}
    for i, (A, G) in enumerate(pairs):
        kinds.setdefault(kind_of(A, G), []).append(i)
    return kinds


def kind_of(A: Tensor, G: Tensor) -> Kind:
    """The kind of one layer's product."""
    B, T, d = A.shape
    small = 2 * B * T * d * G.shape[2] <= SMALL_FLOP
    return Kind(B, T, A.dtype, G.dtype, A.get_device(), small)


def in_turn(pairs: Sequence[Pair], *, backend: str = "auto") -> list[list[int]]:
    """Which of these products :func:`clipped_sums_many` had best be asked for together: as many as
    one launch takes, but no more than :data:`AT_ONCE` elements of results. Without kernels, all of
    one device."""
    kinds: dict[object, list[int]] = {}
    for i, (A, G) in enumerate(pairs):
        on_kernels = backends.resolve(backend, A) != "torch"
        kinds.setdefault(kind_of(A, G) if on_kernels else A.device, []).append(i)
    parts: list[list[int]] = []
    for members in kinds.values():
        room = -1
        for i in members:
            A, G = pairs[i]
            elements = A.shape[2] * G.shape[2]
            if elements > room:
                parts.append([])
                room = AT_ONCE
            parts[-1].append(i)
            room -= elements
    return parts
