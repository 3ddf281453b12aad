"""The clipped sum of a linear layer's per-sample gradients as one product.

B samples, T positions, d input features, p output features.

What is released of a sample must not exceed the clipping bound, so coefficients meet fp32 values
only: a coefficient times a bf16 operand, rounded to bf16 again, would be up to 0.4 % off.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_clipping.ops.clipped_sum import reference
from flash_clipping.ops.clipped_sum.table import Pair, parts_of
from flash_clipping.ops.runtime import backend as backends
from flash_clipping.ops.runtime.shapes import (
    LaunchCache,
    accumulator,
    busy_kinds,
    check_coefficients,
    checked_groups,
)


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
    checked: bool = False,
    memo: LaunchCache | None = None,
) -> list[Tensor]:
    """:func:`clipped_sums` for many layers ``(A, G)`` at once: on a GPU one launch for those of one
    B, T and dtype.

    ``checked`` and ``memo``: the caller has seen to shapes and devices, and hands on what was kept
    for pairs of the same layout.

    Returns:
        ``[p, d]`` for each pair, in fp32 (float64 for float64).
    """
    if not checked:
        groups = checked_groups([(A, [G]) for A, G in pairs])
        for A_BTd, _ in groups:
            check_coefficients(coef_B, A_BTd, "A")
        pairs = [(A_BTd, Gs[0]) for A_BTd, Gs in groups]
    memo = {} if memo is None else memo
    kinds: list[list[int]] | None = memo.get("kinds")
    if kinds is None:
        kinds = memo["kinds"] = busy_kinds([(A, (G,)) for A, G in pairs])
    results: dict[int, Tensor] = {}
    for number, members in enumerate(kinds):
        alike = pairs if len(members) == len(pairs) else [pairs[i] for i in members]
        decides = max(alike[0], key=Tensor.element_size)  # whose dtype an implementation must take
        run = reference.clipped_sums_many
        sums = backends.run(run, backend, decides, alike, coef_B, memo.setdefault(number, {}))
        if alike is pairs:
            return sums
        results.update(zip(members, sums, strict=True))
    if len(results) < len(pairs):
        for idle in {*range(len(pairs))}.difference(results):
            A, G = pairs[idle]
            results[idle] = A.new_zeros((G.shape[2], A.shape[2]), dtype=accumulator(A, G))
    return [results[i] for i in range(len(pairs))]


def in_turn(pairs: Sequence[Pair], *, backend: str = "auto") -> list[list[int]]:
    """Which of these products :func:`clipped_sums_many` had best be asked for together: as many as
    one launch serves, but not so many that all results stand beside all operands. Without kernels,
    those that read one input, which is then scaled once."""
    on_kernels: list[int] = []
    by_input: dict[int, list[int]] = {}
    for i, (A, _) in enumerate(pairs):
        if backends.resolve(backend, A) == "torch":
            by_input.setdefault(id(A), []).append(i)
        else:
            on_kernels.append(i)
    parts = parts_of([pairs[i] for i in on_kernels])
    return [[on_kernels[i] for i in part] for part in parts] + list(by_input.values())
