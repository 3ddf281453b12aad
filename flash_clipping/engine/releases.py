"""What was released: sums with Gaussian noise, who took part in them, and what that costs.

A :class:`Release` is what an accountant needs to know of some steps, and nothing else: samplers and
correlated noise are gone. Numbers are dp-accounting's, but for random allocation, which it does not
have (:mod:`flash_clipping.engine.random_allocation`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flash_clipping.engine.random_allocation import allocation_losses, grid_step
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
        takes_part: who takes part, each time anew. ``"always"``: the sample. ``"poisson"``: the
            sample, with probability ``rate``. ``"truncated"``: so, but of more than ``size`` of the
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

    @property
    def _rows(self) -> tuple[list[int], list[float]]:
        """How many rows of a unit are drawn, and with which probabilities."""
        q, k = self.rate, self.size
        rows = [*range(k + 1)]
        return rows, [math.comb(k, n) * q**n * (1 - q) ** (k - n) for n in rows]

    def losses(self, h: float) -> Any:
        """dp-accounting's privacy loss distribution, on a grid of this step."""
        pld = dp_accounting().pld.privacy_loss_distribution
        noise, on_grid = self.noise_multiplier, {"value_discretization_interval": h}
        if self.takes_part == "always":
            return pld.from_gaussian_mechanism(noise / math.sqrt(self.times), **on_grid)
        if self.takes_part == "poisson":
            once = pld.from_gaussian_mechanism(noise, sampling_prob=self.rate, **on_grid)
        elif self.takes_part == "truncated":
            numbers = self.samples, self.rate, self.size, noise
            once = pld.from_truncated_subsampled_gaussian_mechanism(*numbers, **on_grid)
        elif self.takes_part == "one_of":
            once = allocation_losses(noise, self.size, h)
        else:
            once = pld.from_mixture_gaussian_mechanism(noise, *self._rows, **on_grid)
        return once.self_compose(self.times)


def epsilon_by_pld(releases: Sequence[Release], delta: float) -> float:
    """ε of releases one after the other, by their privacy loss distributions.

    Guarantees:
        An upper bound, up to dp-accounting's numerics. Of Gaussians alone it is exact. With next to
        no noise (:data:`LEAST_NOISE`) nothing is amplified: distributions would not fit in memory.
    """
    if not releases:
        return 0.0
    if any(release.noise_multiplier == 0 for release in releases):
        return math.inf
    known = [release.as_if_known for release in releases]
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
    total_losses = releases[0].losses(h)
    for release in releases[1:]:
        total_losses = total_losses.compose(release.losses(h))
    return float(total_losses.get_epsilon_for_delta(delta))


def dp_accounting() -> Any:
    """The package, or ``ImportError`` with how to install it."""
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError as error:
        raise missing_extra("accounting", 'accountant="pld"', error) from error
    return dp_accounting
