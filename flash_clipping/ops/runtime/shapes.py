"""Shapes and dtypes that every operation agrees on.

B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_clipping.errors import InvalidValue

Group: TypeAlias = tuple[Tensor, Sequence[Tensor]]
"""One input ``[B, T, d]`` and the output gradients ``[B, T, p]`` of the layers that read it."""

LaunchCache: TypeAlias = dict[Any, Any]
"""Kept by an operation for operands of one layout: tables without addresses, and which operands
share a launch. A caller who passes the same memo again guarantees that all operands agree with
those before in dtype, shape, device and :data:`ALIGNMENT`, in strides along axes of more than one
element, in their order, and in which of them share memory."""

#: Bytes: launches differ by whether addresses are multiples of this, not by addresses.
ALIGNMENT = 16


class SqnormBlock(NamedTuple):
    """Squared norms ``[R, B]`` of some layers, in whatever order they come out.

    Attributes:
        order: which layer each row is of: its group, and its number there.
        doubt_RB: what rounding may hide of them (:mod:`flash_clipping.ops.error_bounds`), or None.
        spread_sq_RB: squares of ``Σ_t ‖a_t‖ ‖g_t‖``, where Gram matrices gave the norms.
    """

    order: Sequence[tuple[int, int]]
    sq_RB: Tensor
    doubt_RB: Tensor | None
    spread_sq_RB: Tensor | None = None


class Normalized(NamedTuple):
    """``x̂ = (x - mean) · rstd``, not yet formed; ``x`` is ``[B, T, n]``. The statistics are those
    of ``B·T`` rows in their order, along whatever axes: views take the host a while."""

    x_BTn: Tensor
    mean: Tensor
    rstd: Tensor


def kinds_of_groups(groups: Sequence[Group]) -> list[tuple[bool, list[int]]]:
    """Indices of groups that one implementation takes together: one device, the same dtypes; and
    whether these have elements. Without groups that have no layers."""
    kinds: dict[tuple[bool, object], list[int]] = {}
    for index, (A, Gs) in enumerate(groups):
        if Gs:
            is_busy = bool(A.numel()) and any([G.numel() for G in Gs])
            kind = (A.get_device(), A.dtype, frozenset([G.dtype for G in Gs]))
            kinds.setdefault((is_busy, kind), []).append(index)
    return [(is_busy, members) for (is_busy, _), members in kinds.items()]


def accumulator(*tensors: Tensor) -> torch.dtype:
    """The dtype norms are summed and returned in: fp32, or float64 for float64 operands."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def in_one_dtype(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their dtypes."""
    if x.dtype == y.dtype:
        return x, y
    common = torch.promote_types(x.dtype, y.dtype)
    return x.to(common), y.to(common)


def as_rows(x: Tensor, name: str) -> Tensor:
    """View ``[B, ..., d]`` as ``[B, T, d]``; a copy only where strides allow no view."""
    if x.dim() < 2:
        raise InvalidValue(
            f"FC303 {name} has shape {tuple(x.shape)}; expected a leading sample dimension and a "
            "trailing feature dimension."
        )
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


def checked_groups(groups: Sequence[Group]) -> list[Group]:
    """The groups with operands ``[B, T, features]``, which agree in B, T and device."""
    ready: list[Group] = []
    for A, Gs in groups:
        A_BTd, Gs_BTp = as_rows(A, "A"), [as_rows(G, "G") for G in Gs]
        for G in Gs_BTp:
            if A_BTd.shape[:-1] != G.shape[:-1]:
                raise InvalidValue(
                    f"FC303 A has shape {tuple(A_BTd.shape)} and G has shape {tuple(G.shape)}; all "
                    "dimensions but the last must agree."
                )
            if A_BTd.get_device() != G.get_device():
                raise InvalidValue(f"FC303 A is on {A_BTd.device} and G is on {G.device}.")
        ready.append((A_BTd, Gs_BTp))
    return ready


def check_coefficients(coef_B: Tensor, x: Tensor, name: str) -> None:
    """One coefficient for each sample of ``x``, on its device."""
    if coef_B.shape != x.shape[:1]:
        raise InvalidValue(
            f"FC303 coef_B has shape {tuple(coef_B.shape)}; expected ({x.shape[0]},), one "
            f"coefficient for each sample of {name}, whose shape is {tuple(x.shape)}."
        )
    if coef_B.get_device() != x.get_device():
        raise InvalidValue(f"FC303 coef_B is on {coef_B.device} and {name} is on {x.device}.")
