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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from flash_clipping.errors import InvalidValue, checked_number


@dataclass(frozen=True)
class NoiseMechanism(ABC):
    """How the noise of steps is made of independent noise: a Toeplitz matrix ``C``.

    Entries of its first column are 1 at first, never negative, and never grow. The noise of a step
    is independent noise, less shares of what the steps before drew, or of what they left.

    Attributes:
        taken_back: ``[b - 1]``, float64: shares of the noise that the steps before drew, the latest
            first. It is drawn again.
        kept: float64: shares of what is kept: the last rows, the latest first, or buffers.
    """

    @property
    def taken_back(self) -> np.ndarray:
        return np.zeros(0)

    @property
    def kept(self) -> np.ndarray:
        return np.zeros(0)

    @property
    @abstractmethod
    def series(self) -> tuple[np.ndarray, np.ndarray]:
        """Two polynomials, the constant first, float64: their quotient has the first column of
        ``C`` as its power series."""

    def column(self, steps: int) -> np.ndarray:
        """``[T]``, float64: the first column of ``C`` for so many steps."""
        return _filtered(*self.series, np.eye(1, steps + 1)[0])[:steps]  # of 0 steps, too

    def sensitivity(self, steps: int, separation: int | None = None) -> float:
        """How far one sample moves ``C X`` in ``steps`` steps, in clipping bounds.

        Args:
            separation: a sample takes part in steps that are at least so many apart, and as often
                as that allows; ``None``: once.

        Source:
            For such ``C`` no pattern of steps is worse than ``0, separation, 2 separation, ...``
            (Kalinin and Lampert 2024, arXiv 2405.13763, theorem 2).
        """
        if separation is not None:
            checked_number("separation", separation, "[1, inf)", 100, whole=True)
        column_T = self.column(steps)
        total_T = np.zeros(steps)
        for start in range(0, steps, separation or max(1, steps)):
            total_T[start:] += column_T[: steps - start]
        return float(np.linalg.norm(total_T))

    def error(self, steps: int, separation: int | None = None) -> float:
        """The mean variance of prefix sums of the noise, at sensitivity 1: what decides how much a
        mechanism helps at some ε. For independent noise and one participation ``(T + 1) / 2``.

        The sum of the noise of steps ``0 .. t`` is ``sum_i g_i z_{t-i}``, where ``g`` are the
        coefficients of ``1 / ((1 - x) c(x))``: its variance, averaged over ``t``, is
        ``sum_i (1 - i / T) g_i^2``. Arguments are those of :meth:`sensitivity`.
        """
        numerator, denominator = self.series
        g_T = np.cumsum(_filtered(denominator, numerator, np.eye(1, steps)[0]))
        share_T = 1 - np.arange(steps) / steps
        return float(share_T @ g_T**2) * self.sensitivity(steps, separation) ** 2


@dataclass(frozen=True)
class IndependentNoise(NoiseMechanism):
    """Every step's noise is its own: DP-SGD as it is known. ``C`` is the identity."""

    @property
    def series(self) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(1), np.ones(1)


@dataclass(frozen=True)
class BandedNoise(NoiseMechanism):
    """``C`` has ``count`` diagonals, by default the first coefficients of ``1 / sqrt(1 - x)``.

    The noise of a step is ``w_t = z_t - c_1 w_{t-1} - ... - c_{b-1} w_{t-b+1}``.

    Args:
        count: b, at least 2. The last ``b - 1`` rows ``w`` are kept, each of the memory of the
            parameters in fp32.
        weights: what is on the diagonals, 1 first, never negative and never growing; see
            :meth:`optimised`.

    Source:
        The square root of the matrix of prefix sums, cut off after ``b`` diagonals
        (arXiv 2405.13763): ``binom(2 j, j) / 4^j``, whatever the number of steps.

    Raises:
        ValueError: fewer than two diagonals; weights for which sensitivities are not known.
    """

    count: int
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_band(self, "weights")
        if self.weights is None:
            return
        c = self.coefficients
        if not (len(c) == self.count and c[0] == 1 and (c >= 0).all() and (np.diff(c) <= 0).all()):
            raise InvalidValue(
                f"FC318 BandedNoise: found weights {self.weights}; expected {self.count} of them, "
                "1 first, never negative and never growing: for others sensitivities are not known."
            )

    @classmethod
    def optimised(cls, count: int, steps: int) -> BandedNoise:
        """Weights that make the error of prefix sums least, for a run of so many steps.

        The error is :meth:`error`, for samples whose steps are at least ``count`` apart. Found by
        L-BFGS-B from the closed form, among weights that never grow: not worse than the closed
        form. ε is computed for whatever they are.

        Raises:
            ValueError: fewer than two diagonals; fewer steps than diagonals.
        """
        closed = cls(count)
        checked_number("steps", steps, f"[{count}, inf)", 10 * count, whole=True)
        start = closed.coefficients

        def of_ratios(ratios: np.ndarray) -> BandedNoise:
            weights = np.cumprod(np.concatenate([[1.0], ratios]))
            return cls(count, tuple(weights.tolist()))

        return _optimised(closed, of_ratios, start[1:] / start[:-1], (1e-6, 1.0), steps, None)

    @property
    def coefficients(self) -> np.ndarray:
        """``[b]``, float64: what is on the diagonals, 1 first."""
        return _square_root(self.count) if self.weights is None else np.array(self.weights)

    @property
    def kept(self) -> np.ndarray:
        return self.coefficients[1:]

    @property
    def series(self) -> tuple[np.ndarray, np.ndarray]:
        return self.coefficients, np.ones(1)


@dataclass(frozen=True)
class BandedInverseNoise(NoiseMechanism):
    """``inv(C)`` has ``count`` diagonals: banded inverse square root (BISR) by default.

    The noise of a step is ``z_t - a_1 z_{t-1} - ... - a_{b-1} z_{t-b+1}``. Noise of the last
    ``b - 1`` steps is drawn again, from where it was drawn: nothing is kept.

    Args:
        count: b, at least 2.
        shares: ``a_1 .. a_{b-1}``, never negative, for which the column of ``C`` never grows; see
            :meth:`optimised`.

    Guarantees:
        The column of ``C`` never grows, whatever the number of steps, if its first ``b`` entries
        do not, which are checked: each later entry is ``sum_i a_i`` times those before it, so
        that two neighbours differ by ``sum_i a_i`` times differences before them.

    Source:
        The inverse of the square root of the matrix of prefix sums, cut off after ``b`` diagonals
        (Kalinin et al. 2025, arXiv 2505.12128): ``a_j = binom(2 j, j) / (4^j (2 j - 1))``.

    Raises:
        ValueError: fewer than two diagonals; shares for which sensitivities are not known.
    """

    count: int
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_band(self, "shares")
        if self.shares is None:
            return
        a = self.taken_back
        fits = len(a) == self.count - 1 and np.isfinite(a).all() and (a >= 0).all()
        if not (fits and a.any() and (np.diff(self.column(self.count)) <= 0).all()):
            raise InvalidValue(
                f"FC318 BandedInverseNoise: found shares {self.shares}; expected {self.count - 1} "
                "of them, none negative and not all 0, for which the column of C never grows: for "
                "others sensitivities are not known."
            )

    @classmethod
    def optimised(cls, count: int, steps: int, separation: int | None = None) -> BandedInverseNoise:
        """Shares that make :meth:`error` least, for a run of so many steps.

        Found by L-BFGS-B from the closed form, among those whose column of ``C`` is log-convex in
        its first ``count`` entries (by Kaluza's theorem none of their shares is negative): not
        worse than the closed form. ε is computed for whatever they are.

        Args:
            separation: steps from one participation of a sample to the next: the number of batches
                in an epoch. ``None``: every sample takes part once.

        Raises:
            ValueError: fewer than two diagonals; fewer steps than diagonals.
        """
        closed = cls(count)
        checked_number("steps", steps, f"[{count}, inf)", 10 * count, whole=True)

        def of_gaps(quotients: np.ndarray) -> BandedInverseNoise:
            # Gaps of neighbours' ratios to 1 never grow: the ratios do, the column is log-convex.
            ratios = 1 - np.maximum(np.cumprod(quotients), 1e-9)  # flat, it grows by rounding
            column = np.cumprod(np.concatenate([[1.0], ratios]))
            a = -_filtered(np.ones(1), column, np.eye(1, count)[0])[1:]
            return cls(count, tuple(np.maximum(a, 0.0).tolist()))

        j = np.arange(1, count)
        start = np.concatenate([[0.5], j[:-1] / j[1:]])
        return _optimised(closed, of_gaps, start, (1e-3, 1 - 1e-6), steps, separation)

    @property
    def taken_back(self) -> np.ndarray:
        if self.shares is not None:
            return np.array(self.shares)
        j = np.arange(1, self.count)
        return _square_root(self.count)[1:] / (2 * j - 1)

    @property
    def series(self) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(1), np.concatenate([[1.0], -self.taken_back])


@dataclass(frozen=True)
class BufferedNoise(NoiseMechanism):
    """Buffered linear Toeplitz noise (BLT): ``C`` has ``c_0 = 1``, ``c_j = sum_i w_i l_i^(j-1)``.

    ``d`` buffers, each of the memory of the parameters in fp32, stand for all noise before: the
    noise of a step is ``r_t = z_t - sum_i w_i s_i``, after which each buffer becomes
    ``s_i := l_i s_i + r_t``.

    Args:
        weights: ``w``, ``d`` numbers above 0 with a sum of 1 at most.
        decays: ``l``, as many numbers from 0 to 1, 1 not included.

    Guarantees:
        The column of ``C`` is never negative and never grows: ``c_1`` is the sum of the weights,
        and each later entry is made of numbers none of which is larger than before.

    Source:
        Dvijotham et al. 2024, arXiv 2404.16706; for several participations McMahan et al. 2024,
        arXiv 2408.08868.

    Raises:
        ValueError: other weights or decays: sensitivities are not known.
    """

    weights: tuple[float, ...]
    decays: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("weights", "decays"):
            object.__setattr__(self, name, _floats(getattr(self, name)))
        w, decay = np.array(self.weights), np.array(self.decays)
        fits = len(w) == len(decay) > 0 and (w > 0).all() and w.sum() <= 1
        if not (fits and (decay >= 0).all() and (decay < 1).all()):
            raise InvalidValue(
                f"FC318 BufferedNoise: found weights {self.weights} and decays {self.decays}; "
                "expected as many of both, weights above 0 with a sum of 1 at most, and decays "
                "from 0 to 1, 1 not included: for others sensitivities are not known."
            )

    @classmethod
    def optimised(cls, buffers: int, steps: int, separation: int | None = None) -> BufferedNoise:
        """Weights and decays that make :meth:`error` least, for a run of so many steps, found by
        L-BFGS-B. ε is computed for whatever they are.

        Args:
            buffers: d, 1 or more; above 6 little is gained.
            separation: as in :meth:`BandedInverseNoise.optimised`.

        Raises:
            ValueError: no buffer; fewer steps than buffers.
        """
        checked_number("buffers", buffers, "[1, inf)", 3, whole=True)
        checked_number("steps", steps, f"[{buffers}, inf)", 100 * buffers, whole=True)

        def of_numbers(x: np.ndarray) -> BufferedNoise:
            # Half of them: logarithms of weights; half: of how far decays are below 1. Their sum is
            # kept below 1 by what it would be with one weight more.
            weights = np.exp(x[:buffers])
            weights /= 1 + weights.sum()
            return cls(tuple(weights.tolist()), tuple((-np.expm1(x[buffers:])).tolist()))

        # Decays at even distances between those that forget at once, and those that do not in T.
        gaps = np.linspace(0, -math.log(steps), buffers + 2)[1:-1]
        start = np.concatenate([gaps / 2, gaps])
        bounds = (-30.0, -1e-9)
        return _optimised(of_numbers(start), of_numbers, start, bounds, steps, separation)

    @property
    def kept(self) -> np.ndarray:
        return np.array(self.weights)

    def column(self, steps: int) -> np.ndarray:
        # Term by term: products of many factors near 1 - x lose digits.
        found: np.ndarray = np.eye(1, max(steps, 0))[0]
        powers = np.arange(steps - 1, dtype=np.float64)
        for weight, decay in zip(self.weights, self.decays, strict=True):
            found[1:] += weight * decay**powers
        return found

    @property
    def series(self) -> tuple[np.ndarray, np.ndarray]:
        denominator = np.poly(self.decays)
        numerator = denominator.copy()
        for number, weight in enumerate(self.weights):
            numerator[1:] += weight * np.poly(np.delete(self.decays, number))
        return numerator, denominator


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(map(float, values))


def _check_band(noise: Any, name: str) -> None:
    """Check the number of diagonals; plain numbers in its place and in that of the attribute."""
    checked_number("count", noise.count, "[2, inf)", 4, whole=True)
    object.__setattr__(noise, "count", int(noise.count))
    if (given := getattr(noise, name)) is not None:
        object.__setattr__(noise, name, _floats(given))


def _square_root(count: int) -> np.ndarray:
    """``binom(2 j, j) / 4^j``: the first coefficients of ``1 / sqrt(1 - x)``."""
    j = np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])


def _filtered(numerator: np.ndarray, denominator: np.ndarray, x_T: np.ndarray) -> np.ndarray:
    """The power series ``x`` times the quotient of two polynomials."""
    from scipy.signal import lfilter  # Opacus has it

    found: np.ndarray = lfilter(numerator, denominator, x_T)
    return found


_Mechanism = TypeVar("_Mechanism", bound=NoiseMechanism)


def _optimised(
    closed: _Mechanism,
    make: Callable[[np.ndarray], _Mechanism],
    start: np.ndarray,
    bounds: tuple[float, float],
    steps: int,
    separation: int | None,
) -> _Mechanism:
    """What ``make`` makes of the numbers, within these bounds, with the least error; ``closed``,
    where that is not better."""
    from scipy.optimize import minimize

    found = minimize(
        lambda x: math.log(make(x).error(steps, separation)),
        start,
        jac="3-point",
        method="L-BFGS-B",
        bounds=[bounds] * len(start),
    ).x
    best = make(found)
    return best if best.error(steps, separation) < closed.error(steps, separation) else closed
