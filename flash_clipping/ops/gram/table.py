"""The table of many layers' operands that one launch of a gram kernel walks over.

B samples, T positions, d input features, p output features, L layers that read one input.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flash_clipping.ops.runtime import tiles
from flash_clipping.ops.runtime.shapes import Group
from flash_clipping.ops.runtime.tables import is_whole, operand_row

SLICE = 4096
SLICE_IN_INPUTS = 8
"""Features of an output gradient that one program walks over for a tile: so many, or so many times
those of the input, whose tile every slice computes anew. A vocabulary's would keep a few programs
at work long after all others are done."""


def launches_of(groups: Sequence[Group]) -> list[Launch]:
    """A launch for all groups of one kind."""
    rows = [Rows(A, Gs) for A, Gs in groups]
    kinds: dict[Kind, list[int]] = {}
    for index, each in enumerate(rows):
        kinds.setdefault(each.kind, []).append(index)
    # Costly groups first, so that the grid ends on short tiles.
    ordered = [sorted(members, key=lambda i: -rows[i].width) for members in kinds.values()]
    return [Launch(members, [rows[i] for i in members]) for members in ordered]


class Kind(NamedTuple):
    """Properties that the groups of one launch share.

    Attributes:
        aligned: whether descriptors can serve all operands.
        whole: whether rows are multiples of 16 bytes as well; False where there are descriptors,
            which do not depend on it.
    """

    B: int
    T: int
    A_dtype: torch.dtype
    G_dtype: torch.dtype
    aligned: bool
    whole: bool
    device: torch.device


class Rows:
    """A group's rows of the table: addresses, strides and widths of its operands.

    Layers of very many features are cut into slices, each with an input of its own; the squared
    norm is the sum of those of the slices.
    """

    def __init__(self, A: Tensor, Gs: Sequence[Tensor]) -> None:
        G_dtype = Gs[0].dtype
        given = [A, *Gs]
        if len(Gs) > 1 and any(G.dtype != G_dtype for G in Gs):
            Gs, G_dtype = [G.float() for G in Gs], torch.float32
        A, self.input, aligned = operand_row(A)
        self.held = [A]  # until the kernel has been launched
        widest = max(SLICE, SLICE_IN_INPUTS * A.shape[2])
        #: Every slice: its layer, where it begins in bytes, strides and width.
        self.places: list[tuple[int, int, int, int, int]] = []
        for layer, G in enumerate(Gs):
            G, (_, stride_b, stride_t, width), G_aligned = operand_row(G)
            self.held.append(G)
            aligned = aligned and G_aligned
            count = tiles.cdiv(width, widest)
            each = tiles.cdiv(width, 64 * count) * 64 if count > 1 else width
            for start in range(0, max(1, width), max(1, each)):
                offset = start * G.element_size()
                place = (layer, offset, stride_b, stride_t, min(each, width - start))
                self.places.append(place)
        self.shared_out = len(self.places) > len(Gs)
        widths = [place[-1] for place in self.places]
        self.widest = max(widths)
        self.width = self.input[3] + (max(widths) if self.shared_out else sum(widths))
        self.copied = any(x is not y for x, y in zip(given, self.held, strict=True))
        B, T, _ = A.shape
        whole = (
            aligned
            and not tiles.has_tma(A.device)
            and is_whole(A.shape[2], A.element_size())
            and all([is_whole(width, G_dtype.itemsize) for width in widths])
        )
        self.kind = Kind(B, T, A.dtype, G_dtype, aligned, whole, A.device)


class Launch:
    """Groups of one kind and their table: rows of six for inputs, then rows of four for layers."""

    def __init__(self, members: Sequence[int], groups: Sequence[Rows]) -> None:
        self.kind = groups[0].kind
        self.copied = any([group.copied for group in groups])
        #: The most features of an operand.
        self.widest = max([max(group.input[3], group.widest) for group in groups])
        self.held = [x for group in groups for x in group.held]  # until the kernel is launched
        #: Whose row it is: of an input its group, of a layer group, layer and offset in bytes.
        self.inputs: list[int] = []
        self.layers: list[tuple[int, int, int]] = []
        inputs: list[int] = []
        layers: list[int] = []
        for index, group in zip(members, groups, strict=True):
            first = len(self.layers)
            for layer, offset, *rest in group.places:
                self.layers.append((index, layer, offset))
                layers += (group.held[1 + layer].data_ptr() + offset, *rest)
            each = 1 if group.shared_out else len(group.places)
            for place in range(first, len(self.layers), each):
                self.inputs.append(index)
                inputs += (*group.input, place, each)
        self.table = array("q", inputs + layers)
        slices = Counter((index, layer) for index, layer, _ in self.layers)
        #: The layers, slices put together.
        self.order = list(slices)
        #: The table's rows for layers, in runs: how many, and whether they are slices of one layer.
        self.runs: list[tuple[int, bool]] = []
        for count in slices.values():
            if count == 1 and self.runs and not self.runs[-1][1]:
                self.runs[-1] = self.runs[-1][0] + 1, False
            else:
                self.runs.append((count, count > 1))

    def read(self, groups: Sequence[Group]) -> None:
        """Take the addresses of operands of the layout that the table was made for."""
        addresses = [groups[index][0].data_ptr() for index in self.inputs]
        self.table[: 6 * len(addresses) : 6] = array("q", addresses)
        addresses = [groups[i][1][layer].data_ptr() + offset for i, layer, offset in self.layers]
        self.table[6 * len(self.inputs) :: 4] = array("q", addresses)

    def of_layers(self, sq_RB: Tensor) -> Tensor:
        """Squared norms of the table's rows for layers -> of the layers, in their order."""
        if not any(sliced for _, sliced in self.runs):
            return sq_RB
        parts = zip(sq_RB.split([rows for rows, _ in self.runs]), self.runs, strict=True)
        return torch.cat([part.sum(0, keepdim=True) if run[1] else part for part, run in parts])
