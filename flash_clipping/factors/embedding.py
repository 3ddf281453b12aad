"""Embeddings, bags of them, and embeddings that are heads as well.

Shape suffixes: ``B`` samples, ``T`` positions, ``N`` ids of all bags, ``V`` rows of the table,
``d`` features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.factors.base import Factor, accumulation_dtype
from flash_clipping.factors.linear import Outer
from flash_clipping.ops import certificate
from flash_clipping.ops.embedding import (
    embedding_clipped_sum,
    embedding_sqnorms,
    tied_cross_term,
)
from flash_clipping.ops.embedding.reference import sums_by_index
from flash_clipping.ops.row_scale import row_scale


class Lookup(Factor):
    """An embedding: row ``id_t`` of the gradient receives ``G_t``."""

    def __init__(
        self, ids_BT: Tensor, G_BTd: Tensor, num_embeddings: int, padding_idx: int | None = None
    ):
        self.ids_BT = ids_BT
        self.G_BTd = G_BTd
        self.num_embeddings = num_embeddings
        self.padding_idx = padding_idx

    @property
    def batch_size(self) -> int:
        return self.G_BTd.shape[0]

    def sqnorms(self, backend: str) -> Tensor:
        return self._parts(backend).sum(1)

    def sqnorm_parts(self, backend: str) -> Tensor:
        return self._parts(backend)

    def _parts(self, backend: str) -> Tensor:
        return embedding_sqnorms(
            self.ids_BT,
            self.G_BTd,
            padding_idx=self.padding_idx,
            num_embeddings=self.num_embeddings,
            in_parts=True,
            backend=backend,
        )

    def doubt(self, backend: str) -> Tensor | None:
        return None if self.ids_BT.shape[1] == 1 else certificate.doubt(self.spread())

    def spread(self) -> Tensor:
        """``Σ_t ‖G_t‖``, ``[B]``, over the ids that receive a gradient."""
        dtype = accumulation_dtype(self.G_BTd.dtype)
        norms_BT = torch.linalg.vector_norm(self.G_BTd, dim=2, dtype=dtype)
        if self.padding_idx is not None:
            norms_BT = norms_BT.masked_fill(self.ids_BT == self.padding_idx, 0)
        return norms_BT.sum(1)

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        if coef_B is None:
            padding_idx = -1 if self.padding_idx is None else self.padding_idx
            return torch.ops.aten.embedding_dense_backward(
                self.G_BTd, self.ids_BT, self.num_embeddings, padding_idx, False
            )
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

    @classmethod
    def concatenate(cls, factors: Sequence[Lookup]) -> Factor:
        first = factors[0]
        if any(factor.padding_idx != first.padding_idx for factor in factors):
            return super().concatenate(factors)
        return cls(
            torch.cat([factor.ids_BT for factor in factors], dim=1),
            torch.cat([factor.G_BTd for factor in factors], dim=1),
            first.num_embeddings,
            first.padding_idx,
        )


class Bag(Factor):
    """An embedding bag: row ``id_n`` of sample ``bag_n`` receives ``weight_n G_bag``.

    All ids of one bag receive multiples of one vector, so that
    ``||g_b||^2 = ||G_b||^2 sum_id (sum of the weights of id in bag b)^2``. ``N`` counts the ids of
    all bags.
    """

    def __init__(
        self, bags_N: Tensor, ids_N: Tensor, weights_N: Tensor, G_Bd: Tensor, num_embeddings: int
    ):
        self.bags_N = bags_N
        self.ids_N = ids_N
        self.weights_N = weights_N
        self.G_Bd = G_Bd
        self.num_embeddings = num_embeddings

    @property
    def batch_size(self) -> int:
        return self.G_Bd.shape[0]

    def sqnorms(self, backend: str) -> Tensor:
        dtype = accumulation_dtype(self.G_Bd.dtype)
        # Runs of equal (bag, id), added up in a fixed order.
        keys_N, order_N = (self.bags_N * self.num_embeddings + self.ids_N).sort(stable=True)
        run_N = torch.ones_like(keys_N).cumsum(0) - 1
        if keys_N.numel():
            run_N = torch.cat([run_N[:1], (keys_N[1:] != keys_N[:-1]).long().cumsum(0)])
        weights_N1 = self.weights_N[order_N].to(dtype).unsqueeze(1)
        sums_N1 = sums_by_index(weights_N1, run_N, len(run_N))
        bag_N = torch.zeros_like(keys_N).index_put((run_N,), self.bags_N[order_N])
        multiplicity_B = sums_by_index(sums_N1.square(), bag_N, self.batch_size).squeeze(1)
        # In float64: the square of one may be lost in fp32, and the other make up for it.
        norm_B = torch.linalg.vector_norm(self.G_Bd, dim=1, dtype=torch.float64)
        return norm_B.square().mul_(multiplicity_B).to(dtype)

    def doubt(self, backend: str) -> Tensor | None:
        dtype = accumulation_dtype(self.G_Bd.dtype)
        weights_N1 = self.weights_N.to(dtype).abs().unsqueeze(1)
        weight_B = sums_by_index(weights_N1, self.bags_N, self.batch_size).squeeze(1)
        norm_B = torch.linalg.vector_norm(self.G_Bd, dim=1, dtype=torch.float64)
        return certificate.doubt(norm_B.mul_(weight_B).to(dtype))

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        G_Bd, weights_N = self.G_Bd, self.weights_N
        if coef_B is not None:
            G_Bd = row_scale(G_Bd, coef_B, backend=backend)
            # A dropped sample's weights may not be finite, and 0 * inf is NaN.
            weights_N = torch.where(coef_B[self.bags_N] == 0, 0, weights_N)
        G_Nd = G_Bd[self.bags_N] * weights_N[:, None]
        return torch.ops.aten.embedding_dense_backward(
            G_Nd, self.ids_N, self.num_embeddings, -1, False
        )

    def dense(self) -> Tensor:
        G_Nd = self.G_Bd[self.bags_N] * self.weights_N[:, None]
        (B, d), V = self.G_Bd.shape, self.num_embeddings
        return sums_by_index(G_Nd, self.bags_N * V + self.ids_N, B * V).view(B, V, d)


class TiedEmbedding(Factor):
    """One matrix read as an embedding and applied as a linear map (GPT-2's head)."""

    def __init__(self, lookup: Lookup, head: Outer):
        self.lookup = lookup
        self.head = head

    @property
    def batch_size(self) -> int:
        return self.head.batch_size

    def sqnorms(self, backend: str) -> Tensor:
        cross_B = tied_cross_term(
            self.lookup.ids_BT,
            self.lookup.G_BTd,
            self.head.A_BTd,
            self.head.G_BTp,
            padding_idx=self.lookup.padding_idx,
            backend=backend,
        )
        # The three rounded terms of a sum that cancels may come out below zero.
        return self.lookup.sqnorms(backend) + self.head.sqnorms(backend) + 2 * cross_B

    def doubt(self, backend: str) -> Tensor | None:
        spread_B = certificate.spread(self.head.A_BTd, self.head.G_BTp)
        return certificate.doubt(spread_B.add_(self.lookup.spread()))

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        return self.head.clipped_sum(coef_B, backend) + self.lookup.clipped_sum(coef_B, backend)

    def dense(self) -> Tensor:
        return self.lookup.dense() + self.head.dense()
