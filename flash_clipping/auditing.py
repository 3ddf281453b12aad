"""Does ε hold in practice? Lower bounds on ε from one training run with canaries.

Fair coins put canaries into the training data. After training, somebody who does not know the coins
ranks the canaries by a score, guesses "in" for the highest and "out" for the lowest, and abstains
on the rest. If training is private, too many right guesses are improbable, whatever the score::

    found = audit(score_M, included_M, guesses=300, epsilon=engine.get_epsilon(1e-5), delta=1e-5)
    print(found)

The score decides only how tight the bound is. A lower bound above ε needs bad luck of
``1 - confidence``, a wrong ε needs a bug: in the training, or in what was said about it.

Source: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023,
arXiv 2305.08846): :func:`p_value`, for any (ε, δ).

Shape suffixes: ``M`` canaries.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import binom
from torch import Tensor

from flash_clipping.errors import InvalidValue, checked_number

__all__ = [
    "Audit",
    "audit",
    "epsilon_lower_bound",
    "p_value",
    "right_guesses",
]

#: The first step in which an ε is looked for.
_STEP = 1 / 16


# -- bounds ---------------------------------------------------------------------------------------


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float = 0.0) -> float:
    """Most probable that ``correct`` or more of ``guesses`` are right under (ε, δ)-privacy.

    Theorem 5.2 and Corollary 5.4 of arXiv 2305.08846. Let ``W ~ Binomial(r, e^ε / (1 + e^ε))``;
    under pure ε-privacy the number of right guesses is stochastically dominated by ``W``, and δ
    adds at most ``2 m δ max_{i ≥ 1} P[v - i ≤ W < v] / i``.

    Args:
        canaries: m, how many coins were thrown.
        guesses: r, how many canaries the auditor did not abstain on.
        correct: v, how many guesses were right.
        epsilon, delta: of the hypothesis.

    Raises:
        ValueError: not ``0 <= correct <= guesses <= canaries``; an ``epsilon`` that is negative or
            not finite; ``delta`` not in ``[0, 1)``.
    """
    _check_counts(canaries, guesses, correct)
    checked_number("epsilon", epsilon, "[0, inf)", example=1.0)
    checked_number("delta", delta, "[0, 1)", example=1e-5)
    right = 1.0 / (1.0 + math.exp(-epsilon))
    tail = binom.sf(correct - 1, guesses, right)
    if delta == 0 or correct == 0:
        return float(tail)
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, right))
    slack = np.max(below / np.arange(1, correct + 1))
    return float(min(1.0, tail + 2 * canaries * delta * slack))


def epsilon_lower_bound(
    canaries: int, guesses: int, correct: int, delta: float = 0.0, confidence: float = 0.95
) -> float:
    """The ε below which this many right guesses are improbable: every smaller ε is rejected.

    Args:
        canaries, guesses, correct: as in :func:`p_value`.
        delta: δ of the guarantee.
        confidence: a bound above the true ε has at most ``1 - confidence`` probability.

    Raises:
        ValueError: counts and ``delta`` as in :func:`p_value`; ``confidence`` not between 0 and 1.
    """
    checked_number("confidence", confidence, "(0, 1)", example=0.95)

    def rejected(epsilon: float) -> bool:
        return p_value(canaries, guesses, correct, epsilon, delta) < 1.0 - confidence

    # In 40 halvings of the step that it is in; step by step at first, as δ's part of a p-value need
    # not grow with ε.
    if not rejected(0.0):
        return 0.0
    low, high = 0.0, _STEP
    while rejected(high):
        low, high = high, high + _STEP
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


def _check_counts(canaries: int, guesses: int, correct: int) -> None:
    checked_number("canaries", canaries, "[1, inf)", example=1000, whole=True)
    checked_number("guesses", guesses, f"[0, {int(canaries)}]", example=canaries, whole=True)
    checked_number("correct", correct, f"[0, {int(guesses)}]", example=guesses, whole=True)


def audit(
    score_M: Tensor,
    included_M: Tensor,
    *,
    guesses: int,
    epsilon: float,
    delta: float,
    confidence: float = 0.95,
    relation: str = "add or remove one sample",
) -> Audit:
    """Guess by these scores, and compare what that shows with what was promised.

    Args:
        score_M: ``[M]``, higher for canaries that look as if they were in the data.
        included_M: ``[M]``, bool: whether they were, by fair coins.
        guesses: on how many canaries not to abstain. To be chosen before the scores are known:
            the best of several numbers is not covered by the confidence.
        epsilon: what the accountant says at ``delta``.
        relation: what a coin does to its sample, and ε is for: ``engine.relation``. To zero one
            out is to leave it in the data with a gradient that adds nothing.
        delta, confidence: as in :func:`epsilon_lower_bound`.

    Raises:
        ValueError: scores that are not finite, or not one for each canary; ``epsilon`` that is
            NaN or negative; others as in :func:`epsilon_lower_bound`.
    """
    m = len(included_M)
    score_M = score_M.detach().double().cpu()
    if score_M.shape != (m,) or not score_M.isfinite().all():
        raise InvalidValue(
            f"FC931 audit: found scores of shape {[*score_M.shape]}, "
            f"{int((~score_M.isfinite()).sum())} of them not finite; expected a finite number "
            f"for each of {m} canaries:\n    score_M = score_M.nan_to_num()"
        )
    checked_number("epsilon", epsilon, "[0, inf]", example=1.0)
    correct = right_guesses(score_M, included_M, guesses)
    return Audit(
        canaries=m,
        included=int(included_M.sum()),
        guesses=guesses,
        correct=correct,
        delta=delta,
        confidence=confidence,
        epsilon=epsilon,
        relation=relation,
        lower_bound=epsilon_lower_bound(m, guesses, correct, delta, confidence),
    )


@dataclass
class Audit:
    """What was found, and what was promised.

    Attributes:
        lower_bound: on ε, at ``delta`` and with ``confidence``.
        epsilon: the accountant's.
        relation: which datasets it compares.
    """

    canaries: int
    included: int
    guesses: int
    correct: int
    delta: float
    confidence: float
    epsilon: float
    lower_bound: float
    relation: str = "add or remove one sample"

    @property
    def violated(self) -> bool:
        """Whether training leaked more than the accountant says."""
        return self.lower_bound > self.epsilon

    def rows(self) -> list[tuple[str, str]]:
        """Quantities and their values, in words."""
        share = self.correct / self.guesses if self.guesses else 0.0
        return [
            ("canaries (in the data)", f"{self.canaries} ({self.included})"),
            ("guesses", f"{self.guesses}"),
            ("right", f"{self.correct} ({share:.1%})"),
            (f"ε, lower bound ({self.confidence:.0%} confidence)", f"{self.lower_bound:.2f}"),
            (f"ε, accountant (δ = {self.delta:.3g}; {self.relation})", f"{self.epsilon:.2f}"),
        ]

    @property
    def verdict(self) -> str:
        if self.violated:
            return "The run leaked more than the accountant says."
        return "Nothing contradicts the accountant."

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"violated": self.violated}

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        lines = [f"{name:<{width}}  {value}" for name, value in self.rows()]
        return "\n".join([*lines, self.verdict])


def right_guesses(score_M: Tensor, included_M: Tensor, guesses: int) -> int:
    """How many guesses are right: "in" for the highest half of the guesses' scores, "out" for the
    lowest. Canaries of one score are in the order they were given."""
    checked_number("guesses", guesses, f"[0, {len(score_M)}]", example=len(score_M), whole=True)
    order_M = score_M.argsort(descending=True, stable=True)
    high, low = guesses - guesses // 2, guesses // 2
    hits = included_M[order_M[:high]].sum() + (~included_M[order_M[len(order_M) - low :]]).sum()
    return int(hits)
