"""Per-sample gradients of a linear layer, squared and summed as they are formed.

B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.outer import reference
from flash_clipping.ops.runtime import backend as backends, shapes


def outer_sqnorms(
    A_BTd: Tensor,
    G_BTp: Tensor,
    *,
    store: bool = False,
    in_parts: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Squared norms of the per-sample gradients ``G_bᵀ A_b``, and with ``store`` the gradients.

    Args:
        A_BTd: the layer's input, ``[B, ..., d]``.
        G_BTp: its output gradient, ``[B, ..., p]``.
        store: keep the gradients; what is squared is then the rounded value that is kept, so that
            what is measured is what is released.
        in_parts: leave the squared norms as parts ``[B, n]`` that are still to be added up, for
            a caller who has many to add up at once.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        ``[B]`` squared norms in fp32 (float64 for float64), and ``[B, p, d]`` gradients in G's
        dtype or None.
    """
    ((A_BTd, (G_BTp,)),) = shapes.checked_groups([(A_BTd, [G_BTp])])
    A_BTd, G_BTp = shapes.in_one_dtype(A_BTd, G_BTp)
    parts_Bn, grads_Bpd = backends.run(reference.outer_sqnorms, backend, A_BTd, A_BTd, G_BTp, store)
    return parts_Bn if in_parts else parts_Bn.sum(1), grads_Bpd


def outer_grads(A_BTd: Tensor, G_BTp: Tensor) -> Tensor:
    """The gradients ``G_bᵀ A_b`` alone, ``[B, p, d]`` in the operands' dtype (the wider). Where
    ``p`` or ``d`` is small a library is faster than a kernel that squares and sums as well, and
    takes the host a quarter of the time."""
    A_BTd, G_BTp = shapes.in_one_dtype(A_BTd, G_BTp)
    if not torch.is_grad_enabled() and backends.is_always_precise(A_BTd):
        return torch.bmm(G_BTp.mT, A_BTd)  # as in every step: context managers take a while
    with torch.no_grad(), backends.full_precision(A_BTd.device):
        return torch.bmm(G_BTp.mT, A_BTd)


def sum_parts(parts: Sequence[Tensor]) -> list[tuple[list[int], Tensor]]:
    """Squared norms from parts ``[B, n]``, a launch for all of one shape, dtype and device: indices
    of these, and their squared norms, one row ``[B]`` for each."""
    alike: dict[object, list[int]] = {}
    for i, parts_Bn in enumerate(parts):
        kind = (parts_Bn.shape, parts_Bn.dtype, parts_Bn.get_device())
        alike.setdefault(kind, []).append(i)
    found = []
    for members in alike.values():
        some = [parts[i] for i in members]
        stacked = some[0].unsqueeze(0) if len(some) == 1 else torch.stack(some)
        found.append((members, stacked.sum(-1)))
    return found


def weighted_sum(grads: Tensor, coef_B: Tensor, *, backend: str = "auto") -> Tensor:
    """``Σ_b coef_b · grads_b`` for stored per-sample gradients ``[B, ...]``.

    Accumulated and returned in fp32 (float64 for float64).
    A coefficient of 0 excludes its sample, whatever the gradient holds: inf and NaN too.
    """
    shapes.check_coefficients(coef_B, grads, "grads")
    return backends.run(reference.weighted_sums_many, backend, grads, [grads], coef_B)[0]


def weighted_sums_many(
    grads: Sequence[Tensor], coef_B: Tensor, *, backend: str = "auto"
) -> list[Tensor]:
    """:func:`weighted_sum` of several tensors by the same coefficients: one launch on a GPU."""
    kinds: dict[object, list[int]] = {}
    for i, tensor in enumerate(grads):
        shapes.check_coefficients(coef_B, tensor, "grads")
        kinds.setdefault((tensor.get_device(), tensor.dtype), []).append(i)
    results: dict[int, Tensor] = {}
    for members in kinds.values():
        alike = [grads[i] for i in members]
        sums = backends.run(reference.weighted_sums_many, backend, alike[0], alike, coef_B)
        results.update(zip(members, sums, strict=True))
    return [results[i] for i in range(len(grads))]
