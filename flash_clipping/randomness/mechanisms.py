"""Noise across steps: independent, or correlated so that steps take some of it back.

A run of ``T`` steps releases ``X + inv(C) Z``: row ``t`` of ``X`` is the clipped sum of step ``t``,
``Z`` has independent rows of Gaussian noise, and ``C`` is lower triangular, so that no step waits
for a later one. By the data processing inequality this costs as much privacy as ``C X + Z``: a
Gaussian mechanism, whose sensitivity is the norm of the sum of those columns of ``C`` in whose
steps a sample takes part (Denisov et al. 2022, arXiv 2202.08312; Choquette-Choo et al. 2023,
arXiv 2306.08153). Here ``C`` is a Toeplitz matrix, given by its first column.

Shape suffixes: ``T`` steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np


class NoiseMechanism(ABC):
    """How the noise of steps is made of independent noise: a Toeplitz matrix ``C``.

    Entries of its first column are 1 at first, never negative, and never grow.
    """

    @abstractmethod
    def column(self, steps: int) -> np.ndarray:
        """``[T]``, float64: the first column of ``C`` for so many steps."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, float | str]:
        """For a checkpoint: a name and numbers."""

    def sensitivity(self, steps: int, separation: int | None = None) -> float:
        """How far one sample moves ``C X`` in ``steps`` steps, in clipping bounds.

        Args:
            steps: T.
            separation: a sample takes part in steps that are at least so many apart, and as often
                as that allows; ``None``: once.

        Source:
            For such ``C`` no pattern of steps is worse than ``0, separation, 2 separation, ...``
            (Kalinin and Lampert 2024, arXiv 2405.13763, theorem 2).
        """
        if separation is not None and separation < 1:
            raise ValueError(f"separation: found {separation}; expected 1 or more steps.")
        column_T = self.column(steps)
        total_T = np.zeros(steps)
        for start in range(0, steps, separation or max(1, steps)):
            total_T[start:] += column_T[: steps - start]
        return float(np.linalg.norm(total_T))


@dataclass(frozen=True)
class IndependentNoise(NoiseMechanism):
    """Every step's noise is its own: DP-SGD as it is known. ``C`` is the identity."""

    def column(self, steps: int) -> np.ndarray:
        return np.eye(1, max(steps, 0))[0]

    @property
    def settings(self) -> dict[str, float | str]:
        return {"noise": "independent"}


@dataclass(frozen=True)
class BandedNoise(NoiseMechanism):
    """``C`` has ``count`` diagonals, by default the first coefficients of ``1 / sqrt(1 - x)``.

    The noise of a step is ``w_t = z_t - c_1 w_{t-1} - ... - c_{b-1} w_{t-b+1}``.

    Args:
        count: b, at least 2.
        memory: ``"stored"``: the last rows ``w`` are kept, ``b - 1`` times the memory of the
            parameters in fp32. ``"drawn_again"``: none is; step ``t`` draws the noise of all
            ``t`` steps before it again, from where it was drawn, one parameter at a time. Both
            add the same noise, bitwise.
        weights: what is on the diagonals, 1 first, never negative and never growing; see
            :meth:`optimised`.

    Source:
        The square root of the matrix of prefix sums, cut off after ``b`` diagonals
        (arXiv 2405.13763); its coefficients are ``binom(2 j, j) / 4^j``. They do not depend on the
        number of steps.

    Raises:
        ValueError: fewer than two diagonals; weights for which sensitivities are not known.
    """

    count: int
    memory: Literal["stored", "drawn_again"] = field(default="stored", compare=False)
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or self.count < 2:
            raise ValueError(
                f"BandedNoise: found {self.count!r} diagonals; expected 2 or more. With one, noise "
                "is independent: IndependentNoise()."
            )
        if self.memory not in ("stored", "drawn_again"):
            raise ValueError(
                f"BandedNoise: found memory={self.memory!r}; expected 'stored' or 'drawn_again'."
            )
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(float(c) for c in self.weights))
            self._check(self.weights)

    def _check(self, weights: Sequence[float]) -> None:
        c = np.asarray(weights)
        if not (len(c) == self.count and c[0] == 1 and (c >= 0).all() and (np.diff(c) <= 0).all()):
            raise ValueError(
                f"BandedNoise: found weights {weights}; expected {self.count} of them, 1 first, "
                "never negative and never growing: for others sensitivities are not known."
            )

    @classmethod
    def optimised(
        cls, count: int, steps: int, *, memory: Literal["stored", "drawn_again"] = "stored"
    ) -> BandedNoise:
        """Weights that make the error of prefix sums least, for a run of so many steps.

        The error is the variance of the sum of the noise of steps ``0 .. t``, averaged over ``t``,
        times the squared norm of the weights: what it is at one sensitivity, for samples whose
        steps are at least ``count`` apart. Found by L-BFGS-B from the closed form, among weights
        that never grow: not worse than the closed form. The weights only decide how much noise
        helps; ε is computed for whatever they are.

        Args:
            count: b.
            steps: T.
            memory: as in the class.

        Raises:
            ValueError: fewer than two diagonals; fewer steps than diagonals.
        """
        closed = cls(count, memory)
        if steps < count:
            raise ValueError(
                f"BandedNoise.optimised: found {steps} steps with {count} diagonals; expected as "
                "many steps at least."
            )
        return cls(count, memory, _optimised(closed.coefficients, steps))

    @property
    def coefficients(self) -> np.ndarray:
        """``[b]``, float64: what is on the diagonals, 1 first."""
        if self.weights is not None:
            return np.array(self.weights)
        j = np.arange(1, self.count)
        return np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])

    def column(self, steps: int) -> np.ndarray:
        found = np.zeros(steps)
        kept = min(steps, self.count)
        found[:kept] = self.coefficients[:kept]
        return found

    @property
    def settings(self) -> dict[str, float | str]:
        found: dict[str, float | str] = {"noise": "banded", "count": self.count}
        if self.weights is not None:
            found["weights"] = " ".join(map(repr, self.weights))
        return found


@dataclass(frozen=True)
class OneStepNoise(NoiseMechanism):
    """A step takes back some of the last one's noise: ``z_t - share z_{t-1}``.

    The last one's is drawn again, from where it was drawn: nothing is kept. ``C`` has
    ``share^j`` on its diagonals, all of them.

    Args:
        share: λ, between 0 and 1.

    Raises:
        ValueError: it is not between them.
    """

    share: float

    def __post_init__(self) -> None:
        if not (0 < self.share < 1 and math.isfinite(self.share)):
            raise ValueError(
                f"OneStepNoise: found a share of {self.share}; expected one between 0 and 1. With "
                "0 noise is independent: IndependentNoise()."
            )

    def column(self, steps: int) -> np.ndarray:
        return self.share ** np.arange(steps, dtype=np.float64)

    @property
    def settings(self) -> dict[str, float | str]:
        return {"noise": "one_step", "share": self.share}


def prefix_error(weights: np.ndarray, steps: int) -> tuple[float, np.ndarray]:
    """The mean squared error of prefix sums at sensitivity 1, and its derivative by the weights.

    The sum of the noise of steps ``0 .. t`` is ``sum_i g_i z_{t-i}``, where ``g`` are the
    coefficients of ``1 / ((1 - x) c(x))``: its variance, averaged over ``t``, is
    ``sum_i (1 - i / T) g_i^2``.

    Args:
        weights: ``[b]``, 1 first.
        steps: T.

    Returns:
        The error, and ``[b]``, its derivative; both float64.
    """
    from scipy.signal import lfilter  # Opacus has it

    impulse = np.eye(1, steps)[0]
    g_T = np.cumsum(lfilter([1.0], weights, impulse))
    # d g / d c_j = -x^j g / c.
    moved_T = lfilter([1.0], weights, g_T)
    share_T = 1 - np.arange(steps) / steps
    error, square = float(share_T @ g_T**2), float(weights @ weights)
    slopes = [-2 * (share_T[j:] * g_T[j:]) @ moved_T[: steps - j] for j in range(len(weights))]
    return error * square, np.array(slopes) * square + 2 * weights * error


def _optimised(start: np.ndarray, steps: int) -> tuple[float, ...]:
    """By the ratios of neighbours, which are between 0 and 1."""
    from scipy.optimize import minimize

    def loss(ratios: np.ndarray) -> tuple[float, np.ndarray]:
        weights = np.cumprod(np.concatenate([[1.0], ratios]))
        error, slope = prefix_error(weights, steps)
        behind = np.cumsum((slope * weights)[::-1])[::-1][1:]
        return error, behind / ratios

    found = minimize(
        loss,
        start[1:] / start[:-1],
        jac=True,
        method="L-BFGS-B",
        bounds=[(1e-6, 1.0)] * (len(start) - 1),
    ).x
    weights = np.cumprod(np.concatenate([[1.0], found]))
    if not prefix_error(weights, steps)[0] < prefix_error(start, steps)[0]:
        weights = start
    return tuple(weights.tolist())
