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
from dataclasses import dataclass

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
    def bands(self) -> int | None:
        """How many diagonals of ``C`` are not 0; ``None``: all of them."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, float | str]:
        """What a checkpoint keeps of it: a name and numbers."""

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
    def bands(self) -> int:
        return 1

    @property
    def settings(self) -> dict[str, float | str]:
        return {"noise": "independent"}


@dataclass(frozen=True)
class BandedNoise(NoiseMechanism):
    """``C`` has ``count`` diagonals: the first coefficients of ``1 / sqrt(1 - x)``.

    The noise of a step is ``w_t = z_t - c_1 w_{t-1} - ... - c_{b-1} w_{t-b+1}``; so much of the
    past is kept, ``b - 1`` times the memory of the parameters in fp32.

    Args:
        count: b, at least 2.

    Source:
        The square root of the matrix of prefix sums, cut off after ``b`` diagonals
        (arXiv 2405.13763); its coefficients are ``binom(2 j, j) / 4^j``. They do not depend on the
        number of steps.

    Raises:
        ValueError: fewer than two diagonals.
    """

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or self.count < 2:
            raise ValueError(
                f"BandedNoise: found {self.count!r} diagonals; expected 2 or more. With one, noise "
                "is independent: IndependentNoise()."
            )

    @property
    def coefficients(self) -> np.ndarray:
        """``[b]``, float64: what is on the diagonals, 1 first."""
        j = np.arange(1, self.count)
        return np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])

    def column(self, steps: int) -> np.ndarray:
        found = np.zeros(steps)
        kept = min(steps, self.count)
        found[:kept] = self.coefficients[:kept]
        return found

    @property
    def bands(self) -> int:
        return self.count

    @property
    def settings(self) -> dict[str, float | str]:
        return {"noise": "banded", "count": self.count}


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
    def bands(self) -> None:
        return None

    @property
    def settings(self) -> dict[str, float | str]:
        return {"noise": "one_step", "share": self.share}
