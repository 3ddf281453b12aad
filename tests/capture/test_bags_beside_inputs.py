"""Bags of ids beside dense features, as recommendation models have them, and bags whose weights are
trained."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof.gate import FIRST_AUDIT
from tests.support.autograd import check_by_autograd, squares
from tests.support.oracle import assert_close
from tests.support.wrapping import MODES

pytestmark = pytest.mark.without_gate

B = 4


class Recommender(nn.Module):
    """DLRM: a table for each kind of ids, whose ids of all samples lie end to end."""

    def __init__(self, tables: int, last: bool) -> None:
        super().__init__()
        self.dense, self.top = nn.Linear(5, 4), nn.Linear(4 * (tables + 1), 1)
        bags = [nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=last) for _ in range(tables)]
        self.bags = nn.ModuleList(bags)

    def forward(
        self, x: Tensor, ids: list[Tensor], offsets: list[Tensor], weights: list[Tensor]
    ) -> Tensor:
        given = zip(self.bags, ids, offsets, weights, strict=True)
        found = [bag(i, o, per_sample_weights=w) for bag, i, o, w in given]
        return self.top(torch.cat([self.dense(x).tanh(), *found], 1))


def jagged(tables: int, last: bool) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    lengths = torch.randint(0, 4, (tables, B))
    lengths[:, 0] = 2
    ids = [torch.randint(0, 10, (int(n),)) for n in lengths.sum(1)]
    starts = [torch.cat([torch.zeros(1, dtype=torch.long), n.cumsum(0)]) for n in lengths]
    offsets = starts if last else [s[:-1] for s in starts]
    weights = [torch.rand(len(i), dtype=torch.float64) for i in ids]
    return torch.randn(B, 5, dtype=torch.float64), ids, offsets, weights


def one(b: int, last: bool, given: Any) -> tuple[Any, ...]:
    """The arguments with one sample alone."""
    x, ids, offsets, weights = given
    spans = []
    for i, o in zip(ids, offsets, strict=True):
        edges = [*o.tolist(), len(i)]
        spans.append(slice(edges[b], edges[b + 1]))
    starts = [torch.tensor([0, s.stop - s.start][: 1 + last]) for s in spans]
    cut = [[y[s] for y, s in zip(ys, spans, strict=True)] for ys in (ids, weights)]
    return x[b : b + 1], cut[0], starts, cut[1]


@pytest.mark.parametrize(("mode", "last"), [("one_pass", True), ("two_pass", False)])
@pytest.mark.parametrize("tables", [2, B])
def test_dense_features_beside_jagged_ids(tables: int, last: bool, mode: str) -> None:
    torch.manual_seed(0)
    model, given = Recommender(tables, last).double(), jagged(tables, last)
    plain, norms = copy.deepcopy(model), []
    for b in range(B):
        loss = plain(*one(b, last, given)).square().sum()
        grads = torch.autograd.grad(loss, [*plain.parameters()])
        norms.append(torch.stack([g.norm() for g in grads]).norm())
    flash: Any = GradSampleModuleFlashClipping(model, mode=mode)
    for _ in range(FIRST_AUDIT + 2):  # an audit looks again
        flash(*given).square().sum(1).mean().backward()
        assert_close(flash.get_norm_sample(), torch.stack(norms), 1e-9)
        flash.zero_grad()


class Weighted(nn.Module):
    """Bags of as many ids, with weights that a layer computes, and that are parameters."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 6, mode="sum", padding_idx=padding)
        self.weigh, self.head = nn.Linear(3, 1), nn.Linear(6, 2)
        self.of_ids = nn.Parameter(torch.rand(10))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        weights = self.weigh(x).squeeze(-1)
        return self.head(
            self.bag(ids, per_sample_weights=weights)
            + self.bag(ids, per_sample_weights=self.of_ids[ids])
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", [None, 3])
def test_weights_that_are_trained(padding: int | None, mode: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 10, (B, 5))
    ids[:, 0] = 3
    batch = ids, torch.randn(B, 5, 3, dtype=torch.float64)
    check_by_autograd(Weighted(padding).double(), batch, squares, mode=mode)
