"""Whom ε protects, where that is not one row of the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from flash_clipping.capture.units import Offsets
from flash_clipping.errors import InvalidValue, checked_number
from flash_clipping.randomness import Draw
from flash_clipping.randomness.choices import subset


@dataclass(frozen=True, eq=False)
class Users:
    """Owners of rows: every step draws these, and a batch is all rows of those that were drawn.

    Args:
        ids: ``[len(dataset)]``, integers: the user, patient, ... that each row belongs to.
        max_rows: if an owner has more rows, that many are drawn, uniformly and each time; with
            :class:`~flash_clipping.PoissonRows` once. ``None``: all of them.

    Raises:
        ValueError: an id that is no integer, or several owners of one row.
    """

    ids: Sequence[int] | Tensor = field(repr=False)
    max_rows: int | None = None

    def __post_init__(self) -> None:
        # A copy: what was given may change later.
        ids = torch.as_tensor(self.ids).detach().cpu().clone()
        is_odd = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
        if ids.dim() != 1 or is_odd:  # of several owners none can be removed without the others
            raise InvalidValue(
                f"FC281 Users: found {ids.dtype} of shape {[*ids.shape]}; expected one integer for "
                "each row, its owner."
            )
        if self.max_rows is not None:
            checked_number("max_rows", self.max_rows, "[1, inf)", example=8, whole=True)
        object.__setattr__(self, "ids", ids)

    @cached_property
    def by_row(self) -> Tensor:
        """``[R]``: the owner of each row, from 0."""
        owner_R: Tensor = torch.as_tensor(self.ids).unique(return_inverse=True)[1]
        return owner_R

    @cached_property
    def rows(self) -> Sequence[Tensor]:
        """The rows of each owner."""
        return torch.split(self.by_row.argsort(stable=True), self.by_row.bincount().tolist())

    def rows_of(self, user: int, draw: Draw) -> list[int]:
        """Rows of an owner; of one with too many, some that are drawn again each time."""
        rows = self.rows[user]
        if self.max_rows is not None and len(rows) > self.max_rows:
            # The users themselves are tensor 0 of the step's draw.
            rows = rows[subset(draw, len(rows), self.max_rows, tensor=1 + user)]
        return rows.tolist()


@dataclass(frozen=True)
class Documents:
    """Samples that an argument of the model's forward tells apart: documents in one row, pairs of
    rows, views of an item. They must be the single items that the loader drew.

    Args:
        argument: its name; or :class:`~flash_clipping.Offsets`. It is an integer tensor with the
            user, patient or document of every row ``[R]`` or position ``[R, T]``, 0 to ``U - 1``,
            or -1 for none.
    """

    argument: str | Offsets
