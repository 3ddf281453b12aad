"""The clipped sum of a linear layer's per-sample gradients as one product.

B samples, T positions, d input features, p output features.

What is released of a sample must not exceed the clipping bound, so coefficients meet fp32 values
only: a coefficient times a bf16 operand, rounded to bf16 again, would be up to 0.4 % off.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flash_clipping.ops.clipped_sum import reference
from flash_clipping.ops.runtime import backend as backends
from flash_clipping.ops.runtime.shapes import (
    Memo,
    accumulator,
    by_kind,
    check_coefficients,
    checked_groups,
    part_of,
    remembered,
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
    ((A_BTd, Gs),) = checked_groups([(A_BTd, Gs)])
    check_coefficients(coef_B, A_BTd, "A")
    results: list[Tensor | None] = [None] * len(Gs)
    for members in by_kind([(A_BTd, [G]) for G in Gs]):
        alike = [Gs[i] for i in members]
        if A_BTd.numel() == 0 or alike[0].numel() == 0:
            dtype, d = accumulator(A_BTd, *alike), A_BTd.shape[2]
            sums = [A_BTd.new_zeros((G.shape[2], d), dtype=dtype) for G in alike]
        else:
            decides = _widest(A_BTd, alike[0])
            sums = backends.run(reference.clipped_sums, backend, decides, A_BTd, alike, coef_B)
        for i, total in zip(members, sums, strict=True):
            results[i] = total
    return [total for total in results if total is not None]


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
        ``[p, d]`` for each pair, in fp32 (float64 for float64).
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
            reference.clipped_sums_many,
            backend,
            _widest(*alike[0]),
            alike,
            coef_B,
            part_of(memo, number),
        )
        results.update(zip(members, sums, strict=True))
    return [results[i] for i in range(len(pairs))]


def _widest(A_BTd: Tensor, G_BTp: Tensor) -> Tensor:
    """The operand whose dtype decides which implementation can serve both."""
    return max((A_BTd, G_BTp), key=Tensor.element_size)
