"""Bags of ids that have no row for each sample, and parameters of several dtypes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof.gate import FIRST_AUDIT
from tests.support.autograd import id_batch, mean_squares, squares, truth_by_autograd
from tests.support.errors import raises
from tests.support.oracle import assert_close
from tests.support.wrapping import MODES


class Ragged(nn.Module):
    """Called with the ids of all samples end to end."""

    def __init__(self, last: bool, per_bag: int = 1):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(9, 4, mode="mean", include_last_offset=last)
        self.head = nn.Linear(4 * per_bag, 3)
        self.per_bag = per_bag

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(ids, offsets).unflatten(0, (-1, self.per_bag)).flatten(1))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("sizes", [(1, 3, 2), (2, 2), (1, 1, 1, 1), (5,)])
def test_bags_end_to_end_are_samples(sizes: tuple[int, ...], last: bool) -> None:
    ids = torch.randint(9, (sum(sizes),))
    ends = torch.tensor(sizes).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends if last else ends[:-1]])
    model = Ragged(last).double()
    norms = []
    for part in ids.split(sizes):
        own = torch.tensor([0, len(part)] if last else [0])
        model.zero_grad()
        mean_squares(model(part, own)).backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
    flash = GradSampleModuleFlashClipping(model)
    for _ in range(2):
        flash.zero_grad()
        mean_squares(flash(ids, offsets)).backward()
        assert_close(flash.get_norm_sample(), torch.stack(norms), 1e-9)


def test_bags_end_to_end_several_to_a_sample() -> None:
    model = Ragged(False, per_bag=2).double()
    with raises("FC201", match=r"head \(Linear\).* 2 rows"):
        mean_squares(
            GradSampleModuleFlashClipping(model)(torch.arange(8), torch.tensor([0, 2, 4, 6]))
        ).backward()


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


class MixedDtypes(nn.Module):
    """A bf16 body between an fp32 embedding and an fp64 head."""

    def __init__(self, body: torch.dtype, head: torch.dtype):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.body = nn.Linear(6, 6).to(body)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3).to(head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(torch.tanh(self.body(x.to(self.body.weight.dtype))).to(x.dtype))
        return self.head(x.to(self.head.weight.dtype))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("body", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", [torch.float32, torch.float64])
def test_parameters_of_different_dtypes(head: torch.dtype, body: torch.dtype, mode: str) -> None:
    """Each sum is in fp32, or wider; norms are one number per sample over all."""
    torch.manual_seed(0)
    model = MixedDtypes(body, head)
    batch = id_batch(4, 5)
    truth = truth_by_autograd(copy.deepcopy(model), batch, squares)
    bound = truth.norms.median().item()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound, mode=mode)
    squares(flash, batch).backward()
    # The truth rounds every per-sample gradient to the dtype of its parameter.
    unit = torch.finfo(body).eps
    assert_close(flash.get_norm_sample(), truth.norms, max(unit, 1e-5), "norms")
    for name, grad in truth.clipped(bound).items():
        param = model.get_parameter(name)
        wide = torch.promote_types(param.dtype, torch.float32)
        assert param.grad is not None and param.grad.dtype == wide, name
        assert_close(param.grad, grad, max(4 * unit, 1e-5), name)
