"""Canaries: their coins, and their scores."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.accountants.analysis.gdp import eps_from_mu
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flash_clipping import auditing

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
    how = {"guesses": 200, "epsilon": 1.0, "delta": 1e-5, "gaussian": True}
    assert canaries.audit(canaries.included_M.float(), **how).lower_bound > found.lower_bound


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


@pytest.mark.parametrize("mu", [pytest.param(0.5, marks=pytest.mark.slow), 2.0])
def test_the_gaussian_bound_holds_for_gaussians_and_is_tighter(script: Any, mu: float) -> None:
    """Scores ``N(mu, 1)`` of canaries in the data, ``N(0, 1)`` of others: mu-Gaussian."""
    m, guesses, delta = 120, 60, 1e-3
    true = eps_from_mu(mu=mu, delta=delta)
    bound = functools.cache(functools.partial(script.gaussian_lower_bound, m, guesses))
    of_other = functools.cache(functools.partial(auditing.epsilon_lower_bound, m, guesses))
    generator = torch.Generator().manual_seed(0)
    bounds, of_any = [], []
    for _ in range(100):
        included_M = torch.rand(m, generator=generator) < 0.5
        score_M = included_M * mu + torch.randn(m, generator=generator)
        correct = auditing.right_guesses(score_M, included_M, guesses)
        bounds.append(bound(correct, delta))
        of_any.append(of_other(correct, delta))
    assert sum(found > true for found in bounds) / 100 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 100)
    assert sorted(bounds)[50] > 1.3 * sorted(of_any)[50] > 0


def test_the_gaussian_bound_of_one_guess_by_hand(script: Any) -> None:
    """One canary, one right guess: at best ``Phi(mu / 2)``. The recursion has one step, from
    ``s`` to ``s + Phi(probit(s) - mu)``, and rejects where that is above 1."""
    for significance in (0.6, 0.9):
        for mu in (0.0, 0.5, 3.0):
            most = significance + torch.special.ndtr(
                torch.special.ndtri(torch.tensor(significance, dtype=torch.float64)) - mu
            )
            found = script.is_improbable_gaussian(1, 1, 1, mu, significance)
            assert found == bool(most > 1)


def test_a_gaussian_mechanism_that_delta_covers_has_no_epsilon(script: Any) -> None:
    """A μ of 0.09 is more than this many right guesses show; it is (0, 0.04)-private."""
    assert script.gaussian_lower_bound(100, 100, 62, 0.1) == 0.0
    assert script.gaussian_lower_bound(100, 100, 62, 1e-5) > 0
