"""The privacy loss of random allocation: a sample takes part in one of ``t`` steps, nobody knows
which.

With the sample the outputs of a round of ``t`` steps are, at worst, ``P``: standard Gaussian noise
times the noise multiplier ``s``, and 1 added in one place that is uniformly random. Without it they
are ``Q``, the noise. (Whatever a step's gradient depends on, it is what somebody who sees ``P`` or
``Q`` can make of it: turned into the gradient's direction, and diluted by noise where its norm is
below the bound; Choquette-Choo et al. 2024, arXiv 2410.06266; Chua et al. 2024, arXiv 2412.16802;
Feldman and Shenfeld 2025, arXiv 2502.08202.) Their ratio is a mean of ``t`` independent lognormals,

    P / Q = S = (1/t) sum_i U_i,    U_i = exp((x_i - 1/2) / s^2),    x_i ~ N(0, s^2) under Q,

and both directions of ``delta(epsilon)`` are expectations of a *convex* function of it under
``Q``: ``max(S - e^epsilon, 0)`` where the sample is removed, ``max(1 - e^epsilon S, 0)`` where it
is added. A value that goes to two neighbours on a grid, such that its mean is kept, makes both
larger, never smaller; sums keep that order. The grid is one of ``log S``, and a mean of two values
``e^{ih}`` and ``e^{jh}`` is ``e^{ih}`` times something that depends on ``j - i`` only: ``t``
summands need ``2 log2 t`` sums over all pairs of grid points. Every product is positive, so that
small probabilities are as precise as large ones. What lies beyond the ends counts as infinite
loss.

Shape suffixes: ``K`` points of a grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

#: Standard deviations of noise beyond which losses count as infinite: a probability of 1e-23.
_TAIL = 10.0
#: Probability that is cut off at each end of every sum.
_CUT = 1e-20
#: The step of the grid: in standard deviations of ``log S``, and at most.
_FINENESS, _COARSEST = 0.02, 0.02
#: Nodes and weights of Gauss and Legendre on [-1, 1].
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)


@dataclass(frozen=True)
class _Means:
    """What a mean of lognormals is under ``Q``: ``exp((low + k) h)`` with ``mass_K[k]``."""

    h: float
    low: int
    mass_K: np.ndarray

    @property
    def high(self) -> int:
        """The last point."""
        return self.low + len(self.mass_K) - 1

    @property
    def under_P(self) -> np.ndarray:
        """``[K]``: the probabilities under ``P``, which are ``S`` times those under ``Q``."""
        found: np.ndarray = self.mass_K * np.exp(np.arange(self.low, self.high + 1) * self.h)
        return found

    def cut(self) -> _Means:
        """Without ends that are improbable under both."""
        most_K = np.maximum(self.mass_K, self.under_P)
        first, last = (int(np.searchsorted(np.cumsum(m), _CUT)) for m in (most_K, most_K[::-1]))
        return _Means(self.h, self.low + first, self.mass_K[first : len(most_K) - last])


def grid_step(noise_multiplier: float, steps: int) -> float:
    """A grid of ``log S`` that is fine enough; ε is an upper bound on any other one, too."""
    spread = math.sqrt(math.log1p(math.expm1(noise_multiplier**-2) / steps))
    return min(_FINENESS * spread, _COARSEST)


def _mean_of_lognormals(noise_multiplier: float, steps: int, h: float) -> _Means:
    """The distribution of ``S`` for rounds of so many steps, on a grid; larger in convex order."""

    @cache
    def mean_of(count: int, level: int) -> _Means:
        # In a mean of t, what the grid adds to the variance of n of them is n / t as large.
        own = h * 2 ** (level // 2)
        if count == 1:
            return _lognormal(noise_multiplier, own)
        half = count // 2
        a, b = mean_of(half, level + 1), mean_of(count - half, level + 1)
        return _mean(a, b, half / count, own)

    return mean_of(steps, 0)


def _lognormal(s: float, h: float) -> _Means:
    """Of one ``U``."""
    middle, reach = -0.5 / s**2, _TAIL / s
    low = math.floor((middle - reach) / h)
    high = math.ceil((reach - middle) / h)  # that of P, whose middle is the other one's negative
    place = (_NODES + 1) / 2
    x = s * ((np.arange(low, high)[:, None] + place) * h - middle)
    mass = np.exp(-(x**2) / 2) * (_WEIGHTS * s * h / math.sqrt(8 * math.pi))
    upper = np.expm1(place * h) / math.expm1(h)
    mass_K = np.zeros(high - low + 1)
    mass_K[:-1] = (mass * (1 - upper)).sum(1)
    mass_K[1:] += (mass * upper).sum(1)
    return _Means(h, low, mass_K).cut()


def _mean(a: _Means, b: _Means, share: float, h: float) -> _Means:
    """Of ``share`` times a value of ``a`` and ``1 - share`` times an independent one of ``b``.

    ``h`` divides their grids' step, which is the same.
    """
    times = round(a.h / h)
    apart = np.arange(b.low - a.high, b.high - a.low + 1)
    log_mean = np.logaddexp(math.log(share), math.log1p(-share) + apart * a.h)
    offset = np.floor(log_mean / h).astype(np.int64)
    upper = np.clip(np.expm1(log_mean - offset * h) / math.expm1(h), 0.0, 1.0)
    first, last = np.maximum(a.low, b.low - apart), np.minimum(a.high, b.high - apart)
    start, end = times * first + offset, times * last + offset
    low = int(start.min())
    mass_K = np.zeros(int(end.max()) - low + 2)
    for d, up, i, j, to, until in zip(
        *(n.tolist() for n in (apart, upper, first, last, start - low, end - low)), strict=True
    ):
        both = a.mass_K[i - a.low : j + 1 - a.low] * b.mass_K[i + d - b.low : j + 1 + d - b.low]
        mass_K[to : until + 1 : times] += (1 - up) * both
        mass_K[to + 1 : until + 2 : times] += up * both
    return _Means(h, low, mass_K).cut()


def allocation_losses(noise_multiplier: float, steps: int, h: float) -> Any:
    """dp-accounting's privacy loss distribution of one round, on a grid of this step.

    Args:
        noise_multiplier: ``s``; below 0.05 the largest losses overflow.
        steps: ``t``, 1 or more.
        h: see :func:`grid_step`.

    Guarantees:
        ε is an upper bound for one sample that is added or removed, up to rounding of float64.
    """
    from dp_accounting import pld

    s = _mean_of_lognormals(noise_multiplier, steps, h)
    # The loss is log S under P where the sample is removed, -log S under Q where it is added.
    removed, added = (
        pld.pld_pmf.DensePLDPmf(h, low, mass_K, max(0.0, 1 - float(mass_K.sum())), True)
        for low, mass_K in ((s.low, s.under_P), (-s.high, s.mass_K[::-1].copy()))
    )
    return pld.privacy_loss_distribution.PrivacyLossDistribution(removed, added)
