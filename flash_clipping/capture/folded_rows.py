"""Layers whose rows are parts of samples: found by the same rehearsals that show whose rows are.

Windows, patches, heads or positions that a model folds into the batch, ``[B * parts, ...]``, are
rows of one sample each. If the rows of a sample lie together, their factors are the sample's, laid
end to end (``Factor.fold``). That is concluded only where values show it:

* rows are as many for each sample in batches of other sizes and orders, and the same samples' rows
  have the same values there;
* they have not in any other regular order of the same rows (all first parts, then all second ones).
  Rows that are all alike, as behind a gate that is still 0, show nothing;
* no value of a sample decided which rows there are, or their order (a router, a sort): it would
  decide otherwise in the next batch (:meth:`~flash_clipping.capture.taint.Taint.is_chosen`).

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flash_clipping.capture.rehearsal import Note, Rehearsals, Run, same_rows
from flash_clipping.capture.row_values import DIFFERENT, DIFFERENT_LOW, are_alike


def find_folded(runs: Rehearsals, whole: Run, other: Run | None, sources: list[Tensor]) -> set[str]:
    """Paths of layers all of whose rows are parts of samples, or samples, as two runs show it, and
    another one on a part of the batch in its own order."""
    if other is None or other.size == whole.size or runs.units is not None:
        return set()
    found = _folded(whole, other)
    if not found:
        return found
    order = [*range(1, whole.size)] if whole.size > 1 else [0] * 3
    third = runs.run_variant(runs.variant(whole, order, sources))
    return set() if third is None else found & _folded(whole, third)


def _folded(whole: Run, other: Run) -> set[str]:
    found: set[str] = set()
    refused: set[str] = set()
    for read, a in whole.notes.items():
        b = other.notes.get(read)
        if a.folded or a.beside or not a.answer or not a.tainted:
            continue
        if b is None or b.beside:
            continue  # the run may have ended before
        if a.rows == whole.size and b.rows == other.size:
            continue  # rows of samples, which are looked at where all reads are
        (found if _is_folded(a, whole, b, other) else refused).add(read[0])
    return found - refused


def _is_folded(a: Note, whole: Run, b: Note, other: Run) -> bool:
    parts, rest = divmod(a.rows, max(whole.size, 1))
    if rest or parts < 2 or b.rows != parts * other.size or a.chosen or b.chosen or not b.tainted:
        return False
    if a.digest is None or b.digest is None or not same_rows(a, b, other):
        return False
    different = DIFFERENT_LOW if a.low or b.low else DIFFERENT
    order = torch.tensor(other.order)
    return not any(
        are_alike(a.digest[rows], b.digest, different)
        for rows in _other_orders(parts, whole.size, order)
    )


def _other_orders(parts: int, size: int, order: Tensor) -> Iterator[Tensor]:
    """Which rows of the first run the second would have, if a sample's rows did not lie together:
    ``inner`` of them do, behind all samples' ``inner`` rows before."""
    for inner in range(1, parts):
        if parts % inner == 0:
            outer_rows = torch.arange(parts // inner)[:, None, None] * (size * inner)
            rows = outer_rows + order[:, None] * inner + torch.arange(inner)
            yield rows.flatten()
