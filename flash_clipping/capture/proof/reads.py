"""What the layers of a model read in one run of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from flash_clipping.capture.row_values import DIFFERENT, DIFFERENT_LOW, are_alike, digest_of, is_low

#: Something that a tapped layer reads: the layer's path, which of its calls in one call of the
#: root, and which read in that call.
Read: TypeAlias = tuple[str, int, int]


@dataclass
class Note:
    """One read.

    Attributes:
        rows: size of its batch axis.
        answer: whether the layer took it for samples.
        sure: it was computed from the model's inputs.
        beside: it stands beside such a tensor; it may be the same for all samples.
        folded: as many rows for every sample were declared, or found.
        low: its values were rounded to few digits.
        digest: a few numbers for every row.
    """

    rows: int
    answer: bool
    sure: bool
    beside: bool
    folded: bool
    low: bool
    digest: Tensor | None

    def is_alike(
        self, other: Note, rows: Tensor | None = None, of_other: Tensor | None = None
    ) -> bool:
        """Whether these rows of both have the same values, as far as their dtypes can tell."""
        a, b = self.digest, other.digest
        if a is None or b is None:
            return self.rows == other.rows or rows is not None
        a = a if rows is None else a[rows]
        b = b if of_other is None else b[of_other]
        if len(a) != len(b):
            return False
        return not len(a) or are_alike(a, b, DIFFERENT_LOW if self.low or other.low else DIFFERENT)


class Reads(dict[Read, Note]):
    """All reads of one run, in order."""

    #: Where a bag of embeddings begins for each sample, if that says how many samples there are.
    offsets: Tensor | None = None

    def note(
        self,
        read: Read,
        x: Tensor,
        axis: int,
        rows: int | None,
        answer: bool,
        *,
        sure: bool = False,
        beside: bool = False,
        folded: bool = False,
    ) -> None:
        """A layer reads ``x``; ``rows``: what the rule says of its rows, if it knows them."""
        digest = digest_of(x, axis) if rows is None and not beside else None
        found = x.shape[axis] if rows is None else rows
        self[read] = Note(found, answer, sure, beside, folded, is_low(x), digest)

    def forget(self, path: str) -> None:
        """This layer starts again."""
        for read in [read for read in self if read[0] == path]:
            del self[read]


def as_computed(x: Tensor) -> Tensor:
    """A floating input as if something trainable had computed it: what derives from it shows that
    by requiring a gradient."""
    if not x.is_floating_point():
        return x
    with torch.enable_grad():
        return x.detach().requires_grad_().clone()
