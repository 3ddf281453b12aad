"""``force_functorch``: each function goes backward by itself, and paddings are not trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.autograd import squares, truth_by_autograd
from tests.support.uses import IDS, D, Holder, make_around, measured, seeded_batch

pytestmark = pytest.mark.without_gate


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


PADDED: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.Embedding(7, D, padding_idx=2),
    "subclass": lambda: Scaled(7, D, padding_idx=2),
    "function": lambda: Holder(
        lambda m, i: F.embedding(i, m.table, padding_idx=2) * m.v,
        table=torch.randn(7, D),
        v=torch.randn(D),
    ),
    "negative": lambda: Holder(lambda m, i: F.embedding(i, m.table, -5), table=torch.randn(7, D)),
    "aten": lambda: Holder(lambda m, i: torch.embedding(m.table, i, 2), table=torch.randn(7, D)),
    "bag": lambda: Holder(
        lambda m, i: F.embedding_bag(i, m.table, padding_idx=2, mode="sum")[:, None],
        table=torch.randn(7, D),
    ),
}


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_not_trained(name: str, force: bool) -> None:
    def middle() -> nn.Module:
        return Holder(lambda m, x, i: x + m.layer(i), layer=PADDED[name]())

    truth = truth_by_autograd(make_around(middle), (*seeded_batch(), IDS), squares)
    (table,) = [g for n, g in truth.grads.items() if g.shape[1:] == (7, D)]
    assert table[:, 2].abs().max() == 0 < table[:, 1].abs().max()
    measured(
        make_around(middle),
        truth,
        (*seeded_batch(), IDS),
        "one_pass",
        "wrapped",
        force_functorch=force,
    )
