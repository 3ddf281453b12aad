"""Embeddings, bags of them, embeddings that are heads as well, and tables of which a position reads
many rows, where each receives a multiple of one vector.

Shape suffixes: ``B`` samples, ``T`` positions, ``N`` ids of all bags, ``V`` rows of the table,
``d`` features; ``L`` rows that a position reads of a table of ``E``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_clipping.factors.base import Factored, PerSampleGrad, accumulation_dtype
from flash_clipping.factors.linear import LinearGrad
from flash_clipping.factors.units import UnitMap
from flash_clipping.ops import error_bounds
from flash_clipping.ops.embedding import (
    UNSORTED,
    adds_up_runs,
    embedding_clipped_sum,
    embedding_sqnorms,
    sums_of_weighted_rows,
    tied_cross_term,
)
from flash_clipping.ops.embedding.reference import sums_by_index
from flash_clipping.ops.linear import linear_sqnorm_blocks
from flash_clipping.ops.rows import row_scale
from flash_clipping.ops.runtime.backend import full_precision, runs_kernels

#: Elements of temporaries in sums of rows of a table.
BLOCK = 1 << 22


#: :func:`~flash_clipping.ops.error_bounds.doubt_of_sums` or ``doubt_of_term``.
Bound: TypeAlias = Callable[[Tensor, Tensor, int, torch.dtype | None], Tensor]


class Scattered(NamedTuple):
    """Rows of a table that receive a gradient each: row ``ids_N[n]`` receives ``G_Nd[n]``, of the
    sample, or unit, ``unit_N[n]``; none of it belongs to a unit where that is ``units``."""

    ids_N: Tensor
    G_Nd: Tensor
    unit_N: Tensor
    units: int
    table: int

    def sqnorms(self) -> tuple[Tensor, Tensor]:
        """``Σ_id ‖Σ_n G_n‖²`` of every unit, and ``Σ_n ‖G_n‖``; ``[U]`` both.

        Runs of one unit and one id are added up in float64, as many features at a time as
        :data:`BLOCK` allows.
        """
        dtype = accumulation_dtype(self.G_Nd.dtype)
        N = len(self.ids_N)
        keys_N, order_N = (self.unit_N * self.table + self.ids_N).sort(stable=True)
        new_N = torch.ones_like(keys_N)
        new_N[1:] = keys_N[1:] != keys_N[:-1]
        run_N = new_N.cumsum(0) - 1
        unit_of_run_N = torch.zeros_like(keys_N).index_put((run_N,), self.unit_N[order_N])
        sq_N = self.G_Nd.new_zeros(N, dtype=torch.float64)
        for columns_Nf in self.G_Nd.split(max(1, BLOCK // max(1, N)), dim=1):
            rows_Nf = columns_Nf[order_N].double()
            sq_N += sums_by_index(rows_Nf, run_N, N).square_().sum(1)
        norm_N = torch.linalg.vector_norm(self.G_Nd, dim=1, dtype=dtype)
        sq_U, spread_U = self._by_unit(sq_N, unit_of_run_N), self._by_unit(norm_N, self.unit_N)
        return sq_U.to(dtype), spread_U.to(dtype)

    def _by_unit(self, X_N: Tensor, unit_N: Tensor) -> Tensor:
        # In float64: as many as a unit has ids are added up in turn.
        return sums_by_index(X_N.double().unsqueeze(1), unit_N, self.units + 1)[:-1, 0]


class TableGrad(Factored):
    """A table of which each position reads rows."""

    @abstractmethod
    def scattered(self, units: UnitMap) -> Scattered:
        """What its rows of a batch leave, by units; what gets no gradient, as padding, is of no
        unit."""

    def measure_units(self, units: UnitMap, backend: str) -> tuple[Tensor, Tensor]:
        scattered = self.scattered(units)
        sq_U, spread_U = scattered.sqnorms()
        return sq_U, error_bounds.doubt_of_sums(sq_U, spread_U, len(scattered.ids_N))


@dataclass(eq=False)
class EmbeddingGrad(TableGrad):
    """An embedding: row ``id_t`` of the gradient receives ``G_t``."""

    ids_BT: Tensor
    G_BTd: Tensor
    num_embeddings: int
    padding_idx: int | None = None
    positions = "ids_BT", "G_BTd"

    @property
    def batch_size(self) -> int:
        return self.G_BTd.shape[0]

    def measure(self, backend: str) -> tuple[Tensor, Tensor | None]:
        parts_Bn = self.square_parts(backend)
        if self.G_BTd.shape[1] == 1:
            return parts_Bn, None
        return parts_Bn, self.doubt(parts_Bn.sum(1), self.spread(), backend)

    def doubt(
        self,
        sq_B: Tensor,
        spread_B: Tensor,
        backend: str,
        of: Bound = error_bounds.doubt_of_sums,
        among: int = 0,
    ) -> Tensor:
        """The error bound of these squared norms, of sums or of terms of others; ``among`` rows of
        the batch they are added up."""
        T, d = self.G_BTd.shape[1:]
        kernels = runs_kernels(backend, self.G_BTd, "embedding_sqnorms")
        if kernels and T <= UNSORTED:  # Gram matrices
            return error_bounds.error_bound(spread_B, d)
        one_hot = kernels and not adds_up_runs(T, d, self.num_embeddings, self.padding_idx)
        return of(sq_B, spread_B, max(T, among), self.G_BTd.dtype if one_hot else None)

    def square_parts(self, backend: str) -> Tensor:
        """Squared norms in parts ``[B, n]`` that are still to be added up."""
        return embedding_sqnorms(
            self.ids_BT,
            self.G_BTd,
            padding_idx=self.padding_idx,
            num_embeddings=self.num_embeddings,
            in_parts=True,
            backend=backend,
        )

    def spread(self) -> Tensor:
        """``Σ_t ‖G_t‖``, ``[B]``, over ids that receive a gradient."""
        dtype = accumulation_dtype(self.G_BTd.dtype)
        norms_BT: Tensor = torch.linalg.vector_norm(self.G_BTd, dim=2, dtype=dtype)
        if self.padding_idx is not None:
            norms_BT = norms_BT.masked_fill(self.ids_BT == self.padding_idx, 0)
        return norms_BT.sum(1)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            padding_idx = -1 if self.padding_idx is None else self.padding_idx
            table: Tensor = torch.ops.aten.embedding_dense_backward(
                self.G_BTd, self.ids_BT, self.num_embeddings, padding_idx, False
            )
            return table
        return embedding_clipped_sum(
            self.ids_BT,
            self.G_BTd,
            coef_B,
            self.num_embeddings,
            padding_idx=self.padding_idx,
            backend=backend,
        )

    def dense(self) -> Tensor:
        B, _, d = self.G_BTd.shape
        samples_B1 = torch.arange(B, device=self.ids_BT.device)[:, None]
        G_BTd = self.G_BTd
        if self.padding_idx is not None:
            G_BTd = G_BTd * (self.ids_BT != self.padding_idx).unsqueeze(-1)
        V = self.num_embeddings
        return sums_by_index(G_BTd, self.ids_BT + samples_B1 * V, B * V).view(B, V, d)

    def scattered(self, units: UnitMap) -> Scattered:
        ids_N = self.ids_BT.flatten()
        unit_N = units.bins_M.repeat_interleave(self.ids_BT.shape[1])
        if self.padding_idx is not None:
            unit_N = unit_N.masked_fill(ids_N == self.padding_idx, units.count)
        return Scattered(ids_N, self.G_BTd.flatten(0, 1), unit_N, units.count, self.num_embeddings)

    def tied_to(self, other: PerSampleGrad) -> PerSampleGrad | None:
        return TiedEmbeddingGrad(self, other) if isinstance(other, LinearGrad) else None

    @classmethod
    def concatenate(cls, factors: Sequence[EmbeddingGrad]) -> PerSampleGrad:
        first = factors[0]
        if any(factor.padding_idx != first.padding_idx for factor in factors):
            return super().concatenate(factors)
        return cls(
            torch.cat([factor.ids_BT for factor in factors], dim=1),
            torch.cat([factor.G_BTd for factor in factors], dim=1),
            first.num_embeddings,
            first.padding_idx,
        )


@dataclass(eq=False)
class EmbeddingBagGrad(TableGrad):
    """An embedding bag: row ``id_n`` of sample ``bag_n`` receives ``weight_n G_bag``.

    All ids of one bag receive multiples of one vector, so that
    ``||g_b||^2 = ||G_b||^2 sum_id (sum of the weights of id in bag b)^2``. ``N`` counts the ids of
    all bags.
    """

    bags_N: Tensor
    ids_N: Tensor
    weights_N: Tensor
    G_Bd: Tensor
    num_embeddings: int

    @property
    def batch_size(self) -> int:
        return self.G_Bd.shape[0]

    def measure(self, backend: str) -> tuple[Tensor, Tensor]:
        weights_N1, B = self.weights_N.unsqueeze(1), self.batch_size
        scattered = Scattered(self.ids_N, weights_N1, self.bags_N, B, self.num_embeddings)
        sq_weight_B, spread_B = scattered.sqnorms()
        # In float64: the square of one may be lost in fp32, and the other make up for it.
        sq_G_B = torch.linalg.vector_norm(self.G_Bd, dim=1, dtype=torch.float64).square_()
        dtype = sq_weight_B.dtype
        doubt_B = error_bounds.doubt_of_sums(sq_weight_B, spread_B, len(self.ids_N))
        return (sq_G_B * sq_weight_B).to(dtype).unsqueeze(1), sq_G_B.mul_(doubt_B).to(dtype)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        G_Bd, weights_N = self.G_Bd, self.weights_N
        if coef_B is not None:
            G_Bd = row_scale(G_Bd, coef_B, backend=backend)
            # A dropped sample's weights may not be finite, and 0 * inf is NaN.
            weights_N = torch.where(coef_B[self.bags_N] == 0, 0, weights_N)
        dtype = accumulation_dtype(G_Bd.dtype)
        total = sums_of_weighted_rows(
            self.ids_N, self.bags_N, weights_N.to(dtype), G_Bd.to(dtype), self.num_embeddings
        )
        return total.to(G_Bd.dtype)

    def dense(self) -> Tensor:
        (B, d), V = self.G_Bd.shape, self.num_embeddings
        return sums_by_index(self._rows(), self.bags_N * V + self.ids_N, B * V).view(B, V, d)

    def _rows(self) -> Tensor:
        """What every id receives, ``[N, d]``."""
        return self.G_Bd[self.bags_N] * self.weights_N[:, None]

    def scattered(self, units: UnitMap) -> Scattered:
        unit_N = units.bins_M[self.bags_N]
        return Scattered(self.ids_N, self._rows(), unit_N, units.count, self.num_embeddings)


@dataclass(eq=False)
class TiedEmbeddingGrad(Factored):
    """One matrix read as an embedding and applied as a linear map (GPT-2's head)."""

    lookup: EmbeddingGrad
    head: LinearGrad

    @property
    def batch_size(self) -> int:
        return self.head.batch_size

    def measure(self, backend: str) -> tuple[Tensor, Tensor]:
        lookup, A_BTd, G_BTp = self.lookup, self.head.A_BTd, self.head.G_BTp
        cross_B, off_B = tied_cross_term(
            lookup.ids_BT,
            lookup.G_BTd,
            A_BTd,
            G_BTp,
            padding_idx=lookup.padding_idx,
            backend=backend,
        )
        (block,) = linear_sqnorm_blocks([(A_BTd, [G_BTp])], backend=backend)
        (_, (head_sq_B,), head_doubt_1B, spread_sq_1B) = block
        lookup_sq_B, spread_B = lookup.square_parts(backend).sum(1), lookup.spread()
        # The three rounded terms of a sum that cancels may come out below zero. Each is in doubt by
        # its own size, and by what its sums lost.
        sq_B = cross_B.mul(2).add_(head_sq_B).add_(lookup_sq_B)
        u = torch.finfo(sq_B.dtype).eps / 2
        doubt_B = off_B.mul(2).add_(head_sq_B.abs().add(lookup_sq_B), alpha=64 * u)
        of_term = error_bounds.doubt_of_term
        doubt_B += lookup.doubt(lookup_sq_B, spread_B, backend, of_term)
        S, cores = A_BTd.shape[1], error_bounds.cores_of(A_BTd, G_BTp)
        if spread_sq_1B is not None and head_doubt_1B is not None:
            head_spread_B = spread_sq_1B[0].sqrt()
            doubt_B += head_doubt_1B[0]
        else:
            head_spread_B = error_bounds.spread(A_BTd, G_BTp)
            doubt_B += of_term(head_sq_B, head_spread_B, S, cores)
        spread_B, positions = spread_B + head_spread_B, max(S, lookup.ids_BT.shape[1])
        doubt_B += error_bounds.doubt_of_sums(sq_B + doubt_B, spread_B, positions, cores)
        return sq_B.unsqueeze(1), doubt_B

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return self.head.clipped_sum(coef_B, backend) + self.lookup.clipped_sum(coef_B, backend)

    def dense(self) -> Tensor:
        return self.lookup.dense() + self.head.dense()

    def clipped_sum_of_units(self, units: UnitMap, coef_U: Tensor, backend: str) -> Tensor:
        head = self.head.clipped_sum_of_units(units, coef_U, backend)
        return head + self.lookup.clipped_sum_of_units(units, coef_U, backend)

    def measure_units(self, units: UnitMap, backend: str) -> tuple[Tensor, Tensor]:
        """``‖lookup‖² + ‖head‖² + 2 ⟨lookup, head⟩``, unit by unit.

        Of the cross term ``Σ Ghead[s, id_t] ⟨Gemb[t], Ahead[s]⟩`` all pairs of positions P of the
        head and N of the lookup are computed, and those of two units left out: a wait for the
        device would be the price of leaving them out before.
        """
        head = self.head
        scattered = self.lookup.scattered(units)
        lookup_sq_U, spread_U = scattered.sqnorms()
        head_sq_U, head_doubt_U = head.measure_units(units, backend)
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
        rows_P = error_bounds.spread(A_Pd.unsqueeze(1), G_PV.unsqueeze(1)).double()
        of_units_U2 = sums_by_index(torch.stack([cross_P, rows_P], 1), unit_P, units.count + 1)[:-1]
        cross_U, head_spread_U = of_units_U2.to(lookup_sq_U.dtype).unbind(1)
        sq_U = lookup_sq_U + head_sq_U + 2 * cross_U
        cores, among = error_bounds.cores_of(A_Pd, G_PV), max(len(A_Pd), len(ids_N))
        # The head is measured by Gram matrices or products. It may be larger than what is left.
        of_products_U = error_bounds.doubt_of_term(head_sq_U, head_spread_U, among, cores)
        head_doubt_U = torch.maximum(head_doubt_U, of_products_U)
        spread_U = spread_U + head_spread_U
        doubt_U = error_bounds.doubt_of_sums(sq_U + head_doubt_U, spread_U, among, cores)
        return sq_U, doubt_U.add_(head_doubt_U)
