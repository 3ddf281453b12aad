"""Canaries: their coins, and their scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SCRIPT = "canaries"


def test_canaries_are_put_in_by_their_coins(script: Any) -> None:
    Canaries = script.Canaries  # noqa: N806
    data, canaries = TensorDataset(torch.zeros(5)), Canaries(TensorDataset(torch.ones(100)), seed=0)
    together = canaries.among(data)
    assert len(together) == 5 + int(canaries.included_M.sum())
    assert 30 < len(together) < 80
    assert [float(together[i][0]) for i in range(len(together))] == [0.0] * 5 + [1.0] * (
        len(together) - 5
    )
    coins = [Canaries(TensorDataset(torch.ones(200))).included_M for _ in range(2)]
    assert not torch.equal(*coins) and all(60 < int(coin.sum()) < 140 for coin in coins)
    canaries = Canaries(TensorDataset(torch.ones(300)), seed=1)
    found = canaries.audit(canaries.included_M.float(), guesses=200, epsilon=1.0, delta=1e-5)
    assert found.violated and found.included == int(canaries.included_M.sum())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(x))


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_scores_are_losses_in_evaluation_mode(script: Any) -> None:
    torch.manual_seed(0)
    model, reference = Model(), Model().eval()
    model.drop.eval()
    samples = TensorDataset(torch.randn(10, 4), torch.randint(3, (10,)))
    batch = [*samples[:]]
    scores = script.loss_scores(model, samples, losses, batch_size=4)
    beside = script.loss_scores(model, samples, losses, reference=reference, batch_size=4)
    assert model.training and not model.drop.training and not reference.training
    expected = losses(model.eval(), batch)
    assert torch.allclose(scores, -expected.double())
    assert torch.allclose(beside, (losses(reference, batch) - expected).double())
    with pytest.raises(ValueError, match=r"losses of shape \[1\]; expected one for each sample"):
        script.loss_scores(model, samples, lambda m, b: losses(m, b).mean()[None], batch_size=10)
