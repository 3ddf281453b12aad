"""Bags of embeddings: several in a sample, or end to end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import (
    check_steps,
    mean_squares,
    squares,
)
from tests.support.errors import raises
from tests.support.oracle import assert_close

pytestmark = pytest.mark.without_gate


class Bags(nn.Module):
    """``F`` bags of ids in every sample."""

    def __init__(self, F: int, flat: bool):
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.head = nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(4 * F, 3)
        self.F, self.flat = F, flat

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids.unflatten(1, (self.F, -1)).flatten(0, 1)
        if self.flat:
            offsets = torch.arange(0, rows.numel(), rows.shape[1])
            x = self.bag(rows.flatten(), offsets)
        else:
            x = self.bag(rows)
        return self.head(x.unflatten(0, (len(ids), -1)).flatten(1))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("F", [2, 4])
def test_several_bags_in_a_sample(F: int, frozen: bool) -> None:
    """Rows are found to be parts of samples. The change was F x C without the head."""
    model = Bags(F, flat=False).double()
    model.head.requires_grad_(not frozen)
    check_steps(model, [(torch.randint(9, (B, 4 * F)),) for B in (3, 1, 5, 2)], squares)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("F", [2, 4])
def test_several_bags_end_to_end_in_a_sample(F: int, frozen: bool) -> None:
    """Whose a bag is shows in its gradient."""
    model = Bags(F, flat=True).double()
    model.head.requires_grad_(not frozen)
    check_steps(model, [(torch.randint(9, (B, 4 * F)),) for B in (3, 1, 5, 2)], squares)


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
