"""Bags of ids that have no row for each sample, and parameters of several dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
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
