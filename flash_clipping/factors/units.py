"""Rows of a batch that belong to privacy units: users, patients, documents.

Layers record what they would record of samples, row by row. Here that becomes what belongs to
units. The clipped sum over units is that over rows, each with the coefficient of its unit, so rows
stay as they are; only norms have to know which rows belong together.

M rows (or positions of rows), U units, T positions of a row, N rows and their positions, d
features, p output features, V rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.factors.base import DenseGrad, MeasuredOnce, PerSampleGrad, accumulation_dtype
from flash_clipping.factors.convolution import ConvolutionGrad
from flash_clipping.factors.embedding import (
    BLOCK,
    EmbeddingBagGrad,
    EmbeddingGrad,
    ScaledEmbeddingGrad,
    Scattered,
    TiedEmbeddingGrad,
)
from flash_clipping.factors.linear import LinearGrad, SegmentedLinearGrad, SumGrad
from flash_clipping.factors.merge import RearrangedGrad, StackedGrad, merge
from flash_clipping.ops import error_bounds
from flash_clipping.ops.convolution.reference import weighted_sum
from flash_clipping.ops.embedding.reference import sums_by_index
from flash_clipping.ops.runtime.backend import full_precision
from flash_clipping.ops.segments import (
    Rows,
    Segments,
    grouped_sums,
    segment_grads,
    segment_sqnorms,
    segment_sums,
)


class UnitMap:
    """Which unit each row belongs to.

    Args:
        index_M: int64, 0 to ``count - 1``, or -1 for rows of none.
        count: how many units there are.
        in_order: whether rows are known to lie in the order of their units, those of none last. A
            map on the CPU is looked at.
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


def by_units(factor: PerSampleGrad, units: UnitMap) -> PerSampleGrad:
    """A factor whose "samples" are M rows, as that of the units which these rows belong to."""
    if isinstance(factor, StackedGrad):
        return StackedGrad([by_units(part, units) for part in factor.parts])
    if isinstance(factor, RearrangedGrad):
        return RearrangedGrad(by_units(factor.inner, units), factor.arrange)
    if isinstance(factor, UnitGrad):
        return UnitGrad(factor.rows, factor.units.then(units))
    if isinstance(factor, MeasuredOnce):
        return UnitGrad(factor, units)
    return DenseGrad(_unit_sums(factor, units))


@dataclass(eq=False)
class UnitGrad(MeasuredOnce):
    """``g_u = Σ g_m`` over the rows m of unit u.

    Args:
        rows: the gradients of rows, in whatever form.
        units: which unit each row belongs to.
    """

    rows: PerSampleGrad
    units: UnitMap

    @property
    def batch_size(self) -> int:
        return self.units.count

    def operands(self) -> tuple[()]:
        return ()  # it is handled by itself, whatever it holds

    def measure(self, backend: str) -> tuple[Tensor, Tensor]:
        sq_U, doubt_U = _measure(self.rows, self.units, backend)
        return sq_U.unsqueeze(1), doubt_U

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            index_M = self.units.index_M
            coef_B = torch.ones(self.units.count, device=index_M.device)
        rows = self.rows
        if isinstance(rows, LinearGrad) and rows.A_BTd.shape[1] == 1:
            # A kernel that takes rows for samples would take a step for each of them.
            A, G, segments = _segmented(rows, self.units)
            return grouped_sums(A, G, segments, coef_B, backend=backend)[0]
        if isinstance(rows, TiedEmbeddingGrad):
            head = UnitGrad(rows.head, self.units).clipped_sum(coef_B, backend)
            return head + rows.lookup.clipped_sum(self.units.of_rows(coef_B), backend)
        if isinstance(rows, ConvolutionGrad) and rows.G.is_cpu:
            shape, dtype = rows.weight_shape, accumulation_dtype(rows.G.dtype)
            coef_M = self.units.of_rows(coef_B).to(dtype)
            return weighted_sum(rows.dense_in_chunks(), coef_M, shape, dtype)
        return rows.clipped_sum(self.units.of_rows(coef_B), backend)

    def dense(self) -> Tensor:
        return _unit_sums(self.rows, self.units)

    def is_worth_storing(self, readers: Callable[[], int]) -> bool:
        """Where the gradients of a linear map's units take no more memory than its operands: one
        product then serves norms and sums. How many rows each unit has decides nothing: a plan
        must not depend on that."""
        rows = self.rows
        if not isinstance(rows, LinearGrad) or rows.A_BTd.dim() != 3 or rows.G_BTp.dim() != 3:
            return False
        N, d, p = rows.A_BTd.shape[:2].numel(), rows.A_BTd.shape[2], rows.G_BTp.shape[2]
        elements = self.units.count * d * p
        if not 0 < elements <= N * (d + p):
            return False
        shared = readers()  # who reads A as well keeps it as long
        return shared > 0 and elements <= N * (d / shared + p)

    def stored(self, backend: str) -> DenseGrad:
        """The gradients of units, in the operands' dtype: what is measured is what is released."""
        assert isinstance(self.rows, LinearGrad)
        grads = segment_grads(*_segmented(self.rows, self.units), backend=backend)
        return DenseGrad(grads.squeeze(1))

    @classmethod
    def concatenate(cls, factors: Sequence[UnitGrad]) -> PerSampleGrad:
        maps = {id(factor.units): factor.units for factor in factors}
        if len(maps) == 1:
            return by_units(merge([factor.rows for factor in factors]), factors[0].units)
        # Rows of other maps, as of an expert that is called twice: every position becomes a row.
        parts: list[Any] = [factor.rows for factor in factors]
        names = _OPERANDS.get(type(parts[0]), ())
        if not names or len({*map(type, parts)}) > 1:
            return DenseGrad.sum_of(factors)
        index_N = [
            factor.units.index_M.repeat_interleave(getattr(part, names[0]).shape[1])
            for factor, part in zip(factors, parts, strict=True)
        ]
        operands = {
            name: torch.cat([getattr(part, name).flatten(0, 1) for part in parts]).unsqueeze(1)
            for name in names
        }
        units = UnitMap(torch.cat(index_N), factors[0].units.count)
        return cls(replace(parts[0], **operands), units)


#: Tensors ``[M, T, ...]`` of gradients whose positions may be laid end to end.
_OPERANDS: dict[type, tuple[str, str]] = {
    LinearGrad: ("A_BTd", "G_BTp"),
    EmbeddingGrad: ("ids_BT", "G_BTd"),
}


def _measure(rows: PerSampleGrad, units: UnitMap, backend: str) -> tuple[Tensor, Tensor]:
    """Squared norms of units, ``[U]``, and what rounding may hide of them."""
    if isinstance(rows, LinearGrad):
        return segment_sqnorms(*_segmented(rows, units), backend=backend)
    if isinstance(rows, SegmentedLinearGrad):
        return _segmented_sqnorms(rows, units, backend)
    if isinstance(rows, EmbeddingGrad | EmbeddingBagGrad | ScaledEmbeddingGrad):
        scattered = _scattered(rows, units)
        sq_U, spread_U = scattered.sqnorms()
        return sq_U, error_bounds.doubt_of_sums(sq_U, spread_U, len(scattered.ids_N))
    if isinstance(rows, TiedEmbeddingGrad):
        return _tied_sqnorms(rows, units, backend)
    assert isinstance(rows, ConvolutionGrad)
    sums_U, sq_M = _convolution_sums(rows, units)
    sq_U = DenseGrad(sums_U).sqnorms(backend)
    if not sq_M.is_cpu:  # other products are released than were measured
        return sq_U, error_bounds.error_bound(units.sums(rows.spread().unsqueeze(1))[:, 0])
    # Rows are added up in turn.
    spread_U = units.sums(sq_M.sqrt().unsqueeze(1))[:, 0]
    return sq_U, error_bounds.doubt_of_sums(sq_U, spread_U, 128 * len(units))


def _convolution_sums(rows: ConvolutionGrad, units: UnitMap) -> tuple[Tensor, Tensor]:
    """Gradients of units, and squared norms of those of rows. A chunk at a time: all rows'
    gradients at once would be the largest tensor of the step."""
    dtype = accumulation_dtype(rows.G.dtype)
    sums_U = rows.G.new_zeros((units.count, *rows.weight_shape), dtype=dtype)
    sq_M = rows.G.new_zeros(len(units), dtype=dtype)
    for chunk, grads in rows.dense_in_chunks():
        sums_U += UnitMap(units.index_M[chunk], units.count).sums(grads)
        sq_M[chunk] = error_bounds.squared_norms(grads)
    return sums_U, sq_M


def _segmented(rows: LinearGrad, units: UnitMap) -> tuple[Rows, Rows, Segments]:
    """Operands of a linear map, by units."""
    segments = units.segments(rows.A_BTd.shape[1])
    A, G = (segments.rows(x.flatten(0, 1)) for x in (rows.A_BTd, rows.G_BTp))
    return A, G, segments


def _unit_sums(rows: PerSampleGrad, units: UnitMap) -> Tensor:
    """The gradients of units, ``[U, *parameter]`` in fp32 (float64 for float64)."""
    if isinstance(rows, SumGrad) and rows.normalized is None:
        # As they are: every position of a row is one, and nothing is widened in between.
        shape = rows.rows_BTn.shape[2:] if rows.shape is None else rows.shape
        sums_Un = units.sums(rows.rows_BTn.flatten(0, 1), rows.rows_BTn.shape[1])
        return sums_Un.view(units.count, *shape)
    if isinstance(rows, ConvolutionGrad):
        return _convolution_sums(rows, units)[0]
    return units.sums(rows.dense())


def _segmented_sqnorms(
    rows: SegmentedLinearGrad, units: UnitMap, backend: str
) -> tuple[Tensor, Tensor]:
    """Rows that are sorted by their samples, sorted anew by the units of these."""
    sorted_ = rows.segments
    unit_N = torch.where(sorted_.inside_N, units.index_M[sorted_.sample_N], -1)
    segments = Segments(unit_N, units.count, sorted_.group_N, sorted_.groups)
    order_N = segments.order_N
    A, G = (x.reordered(order_N) for x in (rows.A, rows.G))
    sq_S, doubt_S = segment_sqnorms(A, G, segments, backend=backend)
    return segments.by_sample(sq_S), segments.by_sample(doubt_S)


def _tied_sqnorms(rows: TiedEmbeddingGrad, units: UnitMap, backend: str) -> tuple[Tensor, Tensor]:
    """``‖lookup‖² + ‖head‖² + 2 ⟨lookup, head⟩``, unit by unit.

    Of the cross term ``Σ Ghead[s, id_t] ⟨Gemb[t], Ahead[s]⟩`` all pairs of positions are computed,
    and those of two units left out: a wait for the device would be the price of leaving them out
    before.
    """
    head = rows.head
    scattered = _scattered(rows.lookup, units)
    lookup_sq_U, spread_U = scattered.sqnorms()
    head_sq_U, head_doubt_U = _measure(head, units, backend)
    dtype = torch.float64  # as in gram/reference.py
    A_Pd, G_PV = head.A_BTd.flatten(0, 1), head.G_BTp.flatten(0, 1)
    unit_P = units.bins_M.repeat_interleave(head.A_BTd.shape[1])
    cross_P = A_Pd.new_zeros(len(A_Pd), dtype=dtype)
    step = max(1, min(1024, len(A_Pd)))
    width = max(1, BLOCK // step)
    ids_N, unit_N = scattered.ids_N.clamp(max=scattered.table - 1), scattered.unit_N
    with full_precision(A_Pd.device):
        for p in range(0, len(A_Pd), step):
            for n in range(0, len(ids_N), width):
                here, there = slice(p, p + step), slice(n, n + width)
                weights = G_PV[here][:, ids_N[there]]
                products = A_Pd[here].to(dtype) @ scattered.G_Nd[there].to(dtype).mT
                one_unit = unit_P[here, None] == unit_N[there]
                cross_P[here] += torch.where(one_unit, products * weights, 0).sum(1)
    cross_U = sums_by_index(cross_P.unsqueeze(1), unit_P, units.count + 1)[:-1, 0]
    sq_U = lookup_sq_U + head_sq_U + 2 * cross_U.to(lookup_sq_U.dtype)
    rows_P1 = error_bounds.spread(A_Pd.unsqueeze(1), G_PV.unsqueeze(1)).double().unsqueeze(1)
    head_spread_U = sums_by_index(rows_P1, unit_P, units.count + 1)[:-1, 0].to(sq_U.dtype)
    cores, among = error_bounds.cores_of(A_Pd, G_PV), max(len(A_Pd), len(ids_N))
    # The head is measured by Gram matrices or products. It may be larger than what is left of it.
    of_products_U = error_bounds.doubt_of_term(head_sq_U, head_spread_U, among, cores)
    head_doubt_U = torch.maximum(head_doubt_U, of_products_U)
    spread_U = spread_U + head_spread_U
    doubt_U = error_bounds.doubt_of_sums(sq_U + head_doubt_U, spread_U, among, cores)
    return sq_U, doubt_U.add_(head_doubt_U)


def _scattered(
    rows: EmbeddingGrad | EmbeddingBagGrad | ScaledEmbeddingGrad, units: UnitMap
) -> Scattered:
    """What gets no gradient, as padding, is of no unit."""
    count, table = units.count, rows.num_embeddings
    if isinstance(rows, EmbeddingBagGrad):
        G_Nd = rows.G_Bd[rows.bags_N] * rows.weights_N[:, None]
        return Scattered(rows.ids_N, G_Nd, units.bins_M[rows.bags_N], count, table)
    if isinstance(rows, ScaledEmbeddingGrad):
        unit_N = units.bins_M.repeat_interleave(rows.ids_BTL.shape[1:].numel())
        unit_N = unit_N.masked_fill(rows.ids_BTL.flatten() < 0, count)
        lookup = rows.lookup()
        return Scattered(lookup.ids_BT.flatten(), lookup.G_BTd.flatten(0, 1), unit_N, count, table)
    ids_N = rows.ids_BT.flatten()
    unit_N = units.bins_M.repeat_interleave(rows.ids_BT.shape[1])
    if rows.padding_idx is not None:
        unit_N = unit_N.masked_fill(ids_N == rows.padding_idx, count)
    return Scattered(ids_N, rows.G_BTd.flatten(0, 1), unit_N, count, table)
