"""Layers whose rows are parts of samples: found by the same rehearsals that show whose rows are.

Windows, patches, heads or positions that a model folds into the batch, ``[B * parts, ...]``, are
rows of one sample each. If the rows of a sample lie together, their factors are the sample's, laid
end to end (``Factor.fold``). That is concluded only where values show it:

* rows are as many for each sample in batches of other sizes and orders, and the same samples' rows
  have the same values there;
* they have not in any other regular order of the same rows (all first parts, then all second ones),
  nor along another axis.
  Rows that are all alike, as behind a gate that is still 0, show nothing. Ids that are all alike
  (token types, all 0) are taken for rows that lie together: they were made for tokens that do, and
  gradients must show it (:mod:`flash_clipping.capture.row_gradients`);
* no value of a sample decided which rows there are, or their order (a router, a sort): it would
  decide otherwise in the next batch (:meth:`~flash_clipping.capture.taint.Taint.is_chosen`).

Where they show another order, or another axis, that is the layer's layout
(:mod:`flash_clipping.capture.row_layouts`).

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flash_clipping.capture.rehearsal import Note, Rehearsals, Run
from flash_clipping.capture.row_layouts import TOGETHER, Layout, Seen
from flash_clipping.capture.row_values import DIFFERENT, DIFFERENT_LOW, are_alike


@dataclass
class Found:
    """What rehearsals have shown of rows that are not the samples.

    Attributes:
        folded: paths of layers whose rows are parts of samples that lie together.
        layouts: where samples lie otherwise, by what their layout goes by.
        paths: of the layers in which they do.
    """

    folded: set[str] = field(default_factory=set)
    layouts: dict[str, Seen] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.folded or self.layouts)


def find_folded(runs: Rehearsals, whole: Run, other: Run | None, sources: list[Tensor]) -> Found:
    """Layers whose rows are no samples, and where these lie in what they read, as two runs show it,
    and another one on a part of the batch in its own order."""
    if other is None or other.size == whole.size or runs.units is not None:
        return Found()
    found = _found(whole, other)
    if not found:
        return found
    order = [*range(1, whole.size)] if whole.size > 1 else [0] * 3
    third = runs.run_variant(runs.variant(whole, order, sources))
    if third is None:
        return Found()
    again = _found(whole, third)
    layouts = {key: seen for key, seen in found.layouts.items() if again.layouts.get(key) == seen}
    return Found(found.folded & again.folded, layouts, found.paths & again.paths)


def _found(whole: Run, other: Run) -> Found:
    by_key: dict[str, Seen] = {}
    paths: dict[str, str] = {}
    refused: set[str] = set()  # keys
    for read, a in whole.notes.items():
        b = other.notes.get(read)
        if a.folded or a.beside or not a.answer or not a.tainted:
            continue
        if b is None or b.beside:
            continue  # the run may have ended before
        if a.rows == whole.size and b.rows == other.size:
            continue  # rows of samples, which are looked at where all reads are
        found = _layout(a, whole, b, other)
        paths[a.key] = read[0]
        if found is None:
            refused.add(a.key)
            continue
        parts, layout = found
        if by_key.setdefault(a.key, {}).setdefault(parts, layout) != layout:
            refused.add(a.key)
    result = Found()
    refused_paths = {paths[key] for key in refused}
    axes: dict[str, set[int]] = {}
    for key, seen in by_key.items():
        axes.setdefault(paths[key], set()).update(layout.axis for layout in seen.values())
    for key in by_key.keys() - refused:
        path = paths[key]
        if path in refused_paths or len(axes[path]) > 1:
            continue
        is_layer = key == path
        together = set(by_key[key].values()) == {TOGETHER}
        if together or (is_layer and axes[path] == {0}):
            result.folded.add(path)  # its rows lie together, or will
        if is_layer or not together:
            result.layouts[key] = by_key[key]
        if not together:
            result.paths.add(path)
    return result


def _layout(a: Note, whole: Run, b: Note, other: Run) -> tuple[int, Layout] | None:
    """The one layout in which samples lie in both runs, and how many entries each has along its
    axis; ``None`` where values show none, or several."""
    if a.chosen or b.chosen or not b.tainted or other.order is None:
        return None
    different = DIFFERENT_LOW if a.low or b.low else DIFFERENT
    order = torch.tensor(other.order)
    alike = []
    for axis, first in {0: a.digest, **a.along}.items():
        second = b.digest if axis == 0 else b.along.get(axis)
        if first is None or second is None or not whole.size:
            continue
        parts, rest = divmod(len(first), whole.size)
        if rest or len(second) != parts * other.size or (axis == 0 and parts < 2):
            continue
        for outer in range(1, parts + 1):
            if parts % outer == 0:
                rows = _rows(parts, outer, whole.size, order)
                if are_alike(first[rows], second, different):
                    alike.append((parts, Layout(axis, outer)))
        if (
            axis == 0
            and a.ids
            and alike[:1] == [(parts, TOGETHER)]
            and bool((first == first[0]).all())
        ):
            return parts, TOGETHER
    if len(alike) != 1 or not (a.free or alike[0][1] == TOGETHER):
        return None
    return alike[0]


def _rows(parts: int, outer: int, size: int, order: Tensor) -> Tensor:
    """Which rows of the first run the second has: ``inner`` of a sample lie together, behind all
    samples' ``inner`` rows before."""
    inner = parts // outer
    outer_rows = torch.arange(outer)[:, None, None] * (size * inner)
    return (outer_rows + order[:, None] * inner + torch.arange(inner)).flatten()
