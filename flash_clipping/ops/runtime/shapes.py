"""Shapes and dtypes that every operation agrees on.

B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

Kept = TypeVar("Kept")

Group: TypeAlias = tuple[Tensor, Sequence[Tensor]]
"""One input ``[B, T, d]`` and the output gradients ``[B, T, p]`` of the layers that read it."""

Memo: TypeAlias = dict[Any, Any]
"""What an operation keeps for operands of one layout: tables without their addresses, and what is
launched together. Whoever hands the same memo again answers for it that all operands agree with
those before in dtype, shape, device and :data:`ALIGNMENT`, in strides along axes of more than one
element, in their order, and in which of them lie in the same memory; not for statistics
(:class:`Normalized`)."""

#: Bytes: launches differ by whether addresses are multiples of this, not by addresses.
ALIGNMENT = 16


class SqnormBlock(NamedTuple):
    """Squared norms of some layers, in whatever order they come out.

    Attributes:
        order: which layer each row is of: its group, and its number there.
        sq_RB: squared norms ``[R, B]``.
        doubt_RB: what rounding may hide of them (:mod:`flash_clipping.ops.certificate`), or None.
    """

    order: Sequence[tuple[int, int]]
    sq_RB: Tensor
    doubt_RB: Tensor | None


GroupSqnorms: TypeAlias = tuple[Tensor, Tensor]
"""``[L, B]`` squared norms of a group's weights, and what rounding may hide of each."""


class Normalized(NamedTuple):
    """``x̂ = (x - mean) · rstd``, not yet formed; ``x`` is ``[B, T, n]``.

    The statistics are those of ``B·T`` rows in their order, whatever axes they lie along: layers
    have them as ``[B, ..., 1]``, and a view of each takes the host a while.
    """

    x_BTn: Tensor
    mean: Tensor
    rstd: Tensor


def remembered(memo: Memo | None, key: object, make: Callable[[], Kept]) -> Kept:
    """What the memo has under the key; made, and kept if there is a memo, where it has nothing."""
    if memo is None:
        return make()
    if key not in memo:
        memo[key] = make()
    found: Kept = memo[key]
    return found


def part_of(memo: Memo | None, key: object) -> Memo | None:
    """The memo of one of several launches."""
    return None if memo is None else memo.setdefault(key, {})


def by_kind(groups: Sequence[Group]) -> list[list[int]]:
    """Indices of groups that one implementation can serve together: one device, the same dtypes.

    Which implementation runs, and on which device it launches, is decided by one tensor for all.
    """
    kinds: dict[object, list[int]] = {}
    for index, (A, Gs) in enumerate(groups):
        kind = (A.get_device(), A.dtype, frozenset([G.dtype for G in Gs]))
        kinds.setdefault(kind, []).append(index)
    return list(kinds.values())


def accumulator(*tensors: Tensor) -> torch.dtype:
    """The dtype norms are summed and returned in: fp32, or float64 for float64 operands."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def as_rows(x: Tensor, name: str) -> Tensor:
    """View ``[B, ..., d]`` as ``[B, T, d]``; a copy only where strides allow no view."""
    if x.dim() < 2:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; expected a leading sample dimension and a "
            "trailing feature dimension."
        )
    if x.dim() == 3:
        return x
    if x.dim() == 2:
        return x.unsqueeze(1)
    return x.flatten(1, -2)


def check_same_rows(x: Tensor, y: Tensor, x_name: str, y_name: str) -> None:
    """Both are ``[B, T, features]`` with the same B and T, on one device."""
    if x.shape[:-1] != y.shape[:-1]:
        raise ValueError(
            f"{x_name} has shape {tuple(x.shape)} and {y_name} has shape {tuple(y.shape)}; all "
            "dimensions but the last must agree."
        )
    # Comparing devices takes longer than all the rest.
    if x.get_device() != y.get_device():
        raise ValueError(f"{x_name} is on {x.device} and {y_name} is on {y.device}.")


def checked_groups(groups: Sequence[Group]) -> list[Group]:
    """The groups with operands ``[B, T, features]``, which agree in B, T and device."""
    ready: list[Group] = []
    for A, Gs in groups:
        A_BTd, Gs_BTp = as_rows(A, "A"), [as_rows(G, "G") for G in Gs]
        for G in Gs_BTp:
            check_same_rows(A_BTd, G, "A", "G")
        ready.append((A_BTd, Gs_BTp))
    return ready


def check_coefficients(coef_B: Tensor, x: Tensor, name: str) -> None:
    """One coefficient for each sample of ``x``, on its device."""
    if coef_B.shape != x.shape[:1]:
        raise ValueError(
            f"coef_B has shape {tuple(coef_B.shape)}; expected ({x.shape[0]},), one coefficient "
            f"for each sample of {name}, whose shape is {tuple(x.shape)}."
        )
    if coef_B.get_device() != x.get_device():
        raise ValueError(f"coef_B is on {coef_B.device} and {name} is on {x.device}.")
