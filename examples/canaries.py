"""Canaries of an audit, their scores, and a bound for Gaussians, to copy (docs/auditing.md).

Shape suffixes: ``M`` canaries, ``B`` samples.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from opacus.accountants.analysis.gdp import eps_from_mu
from scipy.stats import norm
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from flash_clipping.auditing import Audit, audit


class Canaries:
    """Samples that fair coins put into the training data.

    Args:
        samples: m canaries, as the training data's own samples are.
        seed: of the coins, for tests; ``None``: the operating system's.

    Attributes:
        included_M: which of them are in the data, bool. Code that computes scores must not
            know it.
    """

    def __init__(self, samples: Dataset[Any], seed: int | None = None) -> None:
        self.samples = samples
        m = len(samples)  # type: ignore[arg-type]
        if seed is None:
            self.included_M: Tensor = torch.tensor([bool(secrets.randbits(1)) for _ in range(m)])
        else:
            self.included_M = torch.rand(m, generator=torch.Generator().manual_seed(seed)) < 0.5

    def among(self, dataset: Dataset[Any]) -> ConcatDataset[Any]:
        """The training data with those canaries that are in it, at its end."""
        chosen = self.included_M.nonzero().flatten().tolist()
        return ConcatDataset([dataset, Subset(self.samples, chosen)])

    def audit(self, score_M: Tensor, *, gaussian: bool = False, **how: Any) -> Audit:
        """As ``flash_clipping.auditing.audit``, with the coins of these canaries; ``gaussian``: by
        :func:`gaussian_lower_bound`."""
        found = audit(score_M, self.included_M, **how)
        if not gaussian:
            return found
        counts = found.canaries, found.guesses, found.correct
        bound = gaussian_lower_bound(*counts, found.delta, found.confidence)
        return replace(found, lower_bound=bound)


def is_improbable_gaussian(
    canaries: int, guesses: int, correct: int, mu: float, significance: float
) -> bool:
    """Whether ``correct`` or more of ``guesses`` are right with less than this probability under
    μ-Gaussian privacy (no test tells two neighbours apart better than ``N(0, 1)`` and ``N(μ, 1)``).

    Algorithm 3 of arXiv 2410.22235, for two alternatives: if the probability were ``significance``,
    the most that ``i`` right guesses can be told from ``i + 1`` bounds what all numbers of right
    guesses add up to, and that falls short of ``guesses / canaries``.
    """
    right = significance * correct / canaries
    wrong = significance * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        before, wrong = wrong, max(wrong, float(norm.cdf(norm.ppf(right) - mu)))
        if wrong == before:
            break  # nor will anything change for fewer
        right = min(1.0, right + i / (guesses - i) * (wrong - before))
    return right + wrong > guesses / canaries


def gaussian_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """As ``flash_clipping.auditing.epsilon_lower_bound``, where the hypotheses are Gaussian
    mechanisms, and ε is theirs at ``delta``, above 0. Tighter; for training whose trade-off
    function is that of no Gaussian (few steps with small sample rates) it is an approximation.

    Source: Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run" (ICML
    2025, arXiv 2410.22235).
    """

    def rejected(mu: float) -> bool:
        return is_improbable_gaussian(canaries, guesses, correct, mu, 1.0 - confidence)

    low, high = 0.0, 64.0  # of which ε is in the thousands
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    if 2 * norm.cdf(low / 2) - 1 <= delta:  # its δ at ε = 0
        return 0.0
    return float(eps_from_mu(mu=low, delta=delta))


@torch.no_grad()
def loss_scores(
    model: nn.Module,
    samples: Dataset[Any],
    losses: Callable[[nn.Module, Any], Tensor],
    *,
    reference: nn.Module | None = None,
    batch_size: int = 64,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Tensor:
    """``[M]``, fp64: minus the loss of every canary, in evaluation mode.

    Args:
        model: after training.
        losses: ``losses(model, batch)`` gives one loss for each sample, ``[B]``.
        reference: a model that has not seen them, whose losses are subtracted: how likely a sample
            is anyhow says nothing.
        batch_size, collate_fn: of the loader.

    Raises:
        ValueError: not one loss for each sample.
    """
    found = []
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=collate_fn)
    for one in [model] if reference is None else [model, reference]:
        modes = [module.training for module in one.modules()]
        one.eval()
        found.append(torch.cat([losses(one, batch).double().cpu() for batch in loader]))
        for module, mode in zip(one.modules(), modes, strict=True):
            module.training = mode
    if found[0].shape != (len(samples),):  # type: ignore[arg-type]
        raise ValueError(f"found losses of shape {[*found[0].shape]}; expected one for each sample")
    return -found[0] if reference is None else found[1] - found[0]
