"""The table of many layers' operands that one launch of a clipped-sum kernel walks over.

B samples, T positions, d input features, p output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_clipping.ops.runtime.tables import Table, firsts_of, is_whole

Pair: TypeAlias = tuple[Tensor, Tensor]
"""``A_BTd`` and ``G_BTp`` of one layer."""

COLUMNS = 10
"""Of a row: address, strides of samples and positions, and width of G, then of A; address of the
result; first of the layer's tiles."""

BLOCK = 128
"""Side of a tile of the result."""

SMALL_FLOP = 10e9
"""A product of fewer FLOP takes the host longer to launch than the device to compute."""

AT_ONCE = 1 << 26
"""Elements of clipped sums that are made in one go, of operands or of stored gradients: enough to
keep the device busy, and little beside what letting go of these frees."""


class Kind(NamedTuple):
    """Properties that the products of one launch share."""

    B: int
    T: int
    A_dtype: torch.dtype
    G_dtype: torch.dtype
    device: int
    small: bool


def kinds_of(pairs: Sequence[Pair]) -> dict[Kind, list[int]]:
    """The products of every kind, by their places in ``pairs``."""
    kinds: dict[Kind, list[int]] = {}
    for i, (A, G) in enumerate(pairs):
        B, T, d = A.shape
        small = 2 * B * T * d * G.shape[2] <= SMALL_FLOP
        kind = Kind(B, T, A.dtype, G.dtype, A.get_device(), small)
        kinds.setdefault(kind, []).append(i)
    return kinds


def parts_of(pairs: Sequence[Pair]) -> list[list[int]]:
    """Products that one launch serves: of one kind, and no more than :data:`AT_ONCE` elements."""
    parts: list[list[int]] = []
    for members in kinds_of(pairs).values():
        room = 0
        for i in members:
            A, G = pairs[i]
            elements = A.shape[2] * G.shape[2]
            if elements > room:
                parts.append([])
                room = AT_ONCE
            parts[-1].append(i)
            room -= elements
    return parts


class Products(Table):
    """The table of one launch, for pairs of one B, T and dtype.

    Attributes:
        shapes: ``(p, d)`` of every result.
        G_whole, A_whole: whether rows of these operands are multiples of 16 bytes as well, in all
            pairs.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        super().__init__(COLUMNS)
        self.shapes = [(G.shape[2], A.shape[2]) for A, G in pairs]
        self.G_whole = all([is_whole(G.shape[2], G.element_size()) for _, G in pairs])
        self.A_whole = all([is_whole(A.shape[2], A.element_size()) for A, _ in pairs])
        for A, G in pairs:
            self.numbers.extend(self.describe(G))
            self.numbers.extend(self.describe(A))
            self.numbers.extend((0, 0))

    def cut(self, width: int) -> int:
        """Share out tiles of so many columns; how many there are."""
        tiles = [-(-p // BLOCK) * -(-d // width) for p, d in self.shapes]
        firsts, count = firsts_of(tiles)
        self.set_column(COLUMNS - 1, firsts)
        return count

    def read(self, pairs: Sequence[Pair]) -> None:
        """Take the addresses of operands of the layout that the table was made for."""
        self.set_column(0, [G.data_ptr() for _, G in pairs])
        self.set_column(4, [A.data_ptr() for A, _ in pairs])
