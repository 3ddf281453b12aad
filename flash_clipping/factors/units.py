"""Rows of a batch that belong to privacy units: users, patients, documents.

Layers record what they would record of samples, row by row. Every factor can say what belongs to
units instead (:meth:`~flash_clipping.factors.PerSampleGrad.by_units`). The clipped sum over units
is that over rows, each with the coefficient of its unit, so rows stay as they are; only norms have
to know which rows belong together.

M rows (or positions of rows), U units, N rows and their positions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.ops.segments import Segments, segment_sums


class UnitMap:
    """Which unit each row belongs to.

    Args:
        index_M: int64, 0 to ``count - 1``, or -1 for rows of none.
        count: how many units there are.
        in_order: whether rows are known to lie in the order of their units, those of none last. A
            map on the CPU is checked.
    """

    def __init__(self, index_M: Tensor, count: int, in_order: bool = False):
        self.index_M, self.count = index_M, count
        if not in_order and index_M.device.type == "cpu":
            in_order = bool((self.bins_M.diff() >= 0).all())
        self.in_order = in_order
        self._on: dict[torch.device, UnitMap] = {}
        self._segments: dict[int, Segments] = {}
        self._then: dict[int, tuple[UnitMap, UnitMap]] = {}

    def __len__(self) -> int:
        return len(self.index_M)

    def on(self, device: torch.device) -> UnitMap:
        """This map on another device."""
        if device == self.index_M.device:
            return self
        if device not in self._on:
            index_M = self.index_M
            if device.type == "cuda" and index_M.device.type == "cpu":
                index_M = index_M.pin_memory()  # the copy does not wait then
            there = index_M.to(device, non_blocking=True)
            self._on[device] = UnitMap(there, self.count, self.in_order)
        return self._on[device]

    def segments(self, positions: int = 1) -> Segments:
        """The map for so many positions of every row; layers share it."""
        if positions not in self._segments:
            index_N = self.index_M.repeat_interleave(positions)
            self._segments[positions] = Segments(index_N, self.count, is_sorted=self.in_order)
        return self._segments[positions]

    def then(self, units: UnitMap) -> UnitMap:
        """These rows by the units that their own units belong to; layers share it."""
        if id(units) not in self._then:
            index_M = F.pad(units.index_M, (0, 1), value=-1)[self.bins_M]
            self._then[id(units)] = UnitMap(index_M, units.count), units
        return self._then[id(units)][0]

    def sums(self, X_Nf: Tensor, positions: int = 1) -> Tensor:
        """So many ``positions`` of every row, ``[N, ...]``, added up for each unit: ``[U, ...]`` in
        fp32 (float64 for float64)."""
        segments = self.segments(positions)
        rows = segments.rows(X_Nf.reshape(len(segments), math.prod(X_Nf.shape[1:])))
        return segment_sums(rows.sorted(), segments).view(self.count, *X_Nf.shape[1:])

    def of_rows(self, coef_U: Tensor) -> Tensor:
        """Each row's coefficient, ``[M]``; 0 for rows of no unit."""
        return F.pad(coef_U, (0, 1))[self.bins_M]

    @property
    def bins_M(self) -> Tensor:
        """Unit of every row; U for rows of none."""
        return self.index_M.masked_fill(self.index_M < 0, self.count)
