"""What was released: sums with Gaussian noise, who took part in them, and what that costs.

A :class:`Release` is what an accountant needs to know of some steps, and nothing else: samplers and
correlated noise are gone. Numbers are dp-accounting's, but for random allocation, which it does not
have. There a sample takes part in one of ``t`` steps, nobody knows which.

With the sample the outputs of a round of ``t`` steps are, at worst, ``P``: standard Gaussian noise
times the noise multiplier ``s``, and 1 added in one place that is uniformly random. Without it they
are ``Q``, the noise. Their ratio is a mean of ``t`` independent lognormals, ``S``, whose
distribution is computed on a grid of ``log S``. Losses beyond the ends are infinite.
``docs/sampling.md`` says why ε from it is an upper bound.

Shape suffixes: ``K`` points of a grid.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from flash_clipping.errors import missing_extra

#: Privacy losses are rounded to multiples of this, so that ε is an upper bound; ten times faster
#: than dp-accounting's own 1e-4, for about 1e-4 more.
LOSS_GRID = 1e-3

#: Noise, in how far somebody moves the sum, below which who took part counts as known.
LEAST_NOISE = 0.1


@dataclass(frozen=True)
class Release:
    """A noisy sum, so many times.

    Args:
        noise_multiplier: standard deviation of the noise; 1 is how far one sample moves the sum.
        times: how often.
        takes_part: who takes part, drawn each time. ``"always"``: the sample. ``"poisson"``: the
            sample, with probability ``rate``. ``"truncated"``: so, but of more than ``size`` of all
            ``samples`` that were drawn a random subset is left. ``"one_of"``: the sample, in one of
            the ``size`` sums that a release is then, chosen uniformly. ``"rows"``: each of the
            unit's ``size`` rows, with probability ``rate``.
        rate, size, samples: see above.
        is_discrete: noise on integers, which is accounted for in whole orders of Rényi DP only.
    """

    noise_multiplier: float
    times: int = 1
    takes_part: Literal["always", "poisson", "truncated", "one_of", "rows"] = "always"
    rate: float = 1.0
    size: int = 0
    samples: int = 0
    is_discrete: bool = False

    @property
    def as_if_known(self) -> Release:
        """What it costs at most: a Gaussian mechanism, as it is for whoever knows who took part."""
        # One that is removed makes room for another where batches are cut.
        reach = {"truncated": 2, "rows": self.size}.get(self.takes_part, 1)
        return Release(self.noise_multiplier / reach, self.times)

    def losses(self, h: float) -> Any:
        """dp-accounting's privacy loss distribution, on a grid of this step."""
        if self.takes_part == "always":
            once = replace(self, noise_multiplier=self.noise_multiplier / math.sqrt(self.times))
            return _losses_of_one(replace(once, times=1), h)
        return _losses_of_one(replace(self, times=1), h).self_compose(self.times)


@functools.lru_cache(maxsize=32)
def _losses_of_one(release: Release, h: float) -> Any:
    """The distribution of one sum, which is the same at every step of a run."""
    pld = dp_accounting().pld.privacy_loss_distribution
    noise, on_grid = release.noise_multiplier, {"value_discretization_interval": h}
    if release.takes_part == "always":
        return pld.from_gaussian_mechanism(noise, **on_grid)
    if release.takes_part == "poisson":
        return pld.from_gaussian_mechanism(noise, sampling_prob=release.rate, **on_grid)
    if release.takes_part == "truncated":
        numbers = release.samples, release.rate, release.size, noise
        return pld.from_truncated_subsampled_gaussian_mechanism(*numbers, **on_grid)
    if release.takes_part == "one_of":
        return allocation_losses(noise, release.size, h)
    q, k = release.rate, release.size
    rows = [*range(k + 1)]  # so many of the unit's are drawn, with these probabilities:
    probabilities = [math.comb(k, n) * q**n * (1 - q) ** (k - n) for n in rows]
    return pld.from_mixture_gaussian_mechanism(noise, rows, probabilities, **on_grid)


@functools.lru_cache(maxsize=64)
def epsilon_by_pld(releases: tuple[Release, ...], delta: float) -> float:
    """ε of releases one after the other, by their privacy loss distributions.

    Guarantees:
        An upper bound, up to dp-accounting's numerics. Of Gaussians alone it is exact. With next to
        no noise (:data:`LEAST_NOISE`) nothing is amplified: distributions would not fit in memory.
    """
    if not releases:
        return 0.0
    if any(release.noise_multiplier == 0 for release in releases):
        return math.inf
    known = tuple(release.as_if_known for release in releases)
    if any(release.noise_multiplier < LEAST_NOISE for release in known):
        releases = known
    if all(release.takes_part == "always" for release in releases):
        total = sum(release.times / release.noise_multiplier**2 for release in releases) ** -0.5
        return float(dp_accounting().get_epsilon_gaussian(total, delta))
    h = min(
        grid_step(release.noise_multiplier, release.size)
        if release.takes_part == "one_of"
        else LOSS_GRID
        for release in releases
    )
    # Of batches that are cut: for a neighbour with one sample less, and for one with one more.
    is_cut = [release.takes_part == "truncated" for release in releases]
    found = []
    for more in (0, 1) if any(is_cut) else (0,):
        losses = [
            replace(release, samples=release.samples + more * cut).losses(h)
            for release, cut in zip(releases, is_cut, strict=True)
        ]
        total = functools.reduce(lambda one, other: one.compose(other), losses)
        found.append(float(total.get_epsilon_for_delta(delta)))
    return max(found)


def dp_accounting() -> Any:
    """The package, or ``ImportError`` with how to install it."""
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError as error:
        raise missing_extra("accounting", 'accountant="pld"', error) from error
    return dp_accounting


# -- random allocation -----------------------------------------------------------------------------

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

    @functools.cache
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
    s, pld = _mean_of_lognormals(noise_multiplier, steps, h), dp_accounting().pld
    # The loss is log S under P where the sample is removed, -log S under Q where it is added.
    removed, added = (
        pld.pld_pmf.DensePLDPmf(h, low, mass_K, max(0.0, 1 - float(mass_K.sum())), True)
        for low, mass_K in ((s.low, s.under_P), (-s.high, s.mass_K[::-1].copy()))
    )
    return pld.privacy_loss_distribution.PrivacyLossDistribution(removed, added)
