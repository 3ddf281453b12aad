"""How batches are drawn and how noise is made: which of these go together, and what they release.

Each pair of the two is a :class:`~flash_clipping.noise.releases.Release`, or is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, get_args

from flash_clipping.engine.accounting import ADD_OR_REMOVE, ZERO_OUT, Sampling
from flash_clipping.engine.sampling.samplers import PoissonSampler
from flash_clipping.errors import InvalidValue, check_one_of, checked_number
from flash_clipping.noise.mechanisms import BandedNoise, IndependentNoise, NoiseMechanism
from flash_clipping.noise.releases import Release
from flash_clipping.noise.samplers import (
    AllocationSampler,
    CyclicPoissonSampler,
    FixedOrderSampler,
    FixedShapeSampler,
    RowsOfUnitsSampler,
    ShuffledSampler,
)


@dataclass(frozen=True)
class MechanismSpec:
    """How batches are drawn, and how noise is made.

    Args:
        sampling: ``"poisson"``: every step draws every sample with the sample rate.
            ``"cyclic_poisson"``: samples are in as many groups as noise has diagonals, and a step
            draws from the next group only, with so many times the rate. ``"fixed_order"``: batches
            are parts of the dataset, the same in every epoch, in the same order. ``"shuffled"``:
            the same, but other parts in every epoch. ``"random_allocation"``: every sample takes
            part in ``participations`` steps of a round, chosen uniformly and for itself; a round
            has ``participations * cycle`` steps. ``"poisson_rows"``: every step draws every row of
            every unit with the sample rate.
        noise: how the noise of steps is correlated.
        samples: in the dataset.
        max_batch_size: of a Poisson batch with more samples a random subset of this size is taken;
            ``None``: all.
        cycle: steps from a group, or a batch, to its next turn.
        participations: of a sample in a round of random allocation.
        rows_per_unit: the most rows that a unit has; of ``"poisson_rows"`` alone.

    Raises:
        ValueError: the two do not go together.
    """

    sampling: str = "poisson"
    noise: NoiseMechanism = field(default_factory=IndependentNoise)
    samples: int = 0
    max_batch_size: int | None = None
    cycle: int = 1
    participations: int = 1
    rows_per_unit: int | None = None

    def __post_init__(self) -> None:
        check_one_of("sampling", self.sampling, get_args(Sampling))
        checked_number("participations", self.participations, "[1, inf)", example=1, whole=True)
        if self.participations > 1 and self.sampling != "random_allocation":
            raise InvalidValue(
                f"FC316 participations: found {self.participations} with "
                f"sampling={self.sampling!r}; expected sampling='random_allocation'."
            )
        if (self.sampling == "poisson_rows") != (self.rows_per_unit is not None):
            raise InvalidValue(
                f"FC281 max_rows_per_unit: found {self.rows_per_unit} with "
                f"sampling={self.sampling!r}; expected sampling='poisson_rows' and the most rows "
                "of a unit, by which epsilon is for all of them."
            )
        served = {"fixed_order": NoiseMechanism, "cyclic_poisson": BandedNoise}
        fits = isinstance(self.noise, served.get(self.sampling, IndependentNoise))
        found = f"{type(self.noise).__name__} with sampling={self.sampling!r}"
        if self.max_batch_size is not None:
            fits, found = fits and self.sampling == "poisson", f"max_batch_size with {found}"
        if not fits:
            raise InvalidValue(
                f"FC316 make_private: found {found}. A sample may take part in two steps whose "
                "noise partly cancels, and epsilon must know how often. It does for "
                "IndependentNoise with every sampling but 'cyclic_poisson' (max_batch_size: with "
                "'poisson' alone), for BandedNoise with 'cyclic_poisson' or 'fixed_order', and for "
                "BandedInverseNoise and BufferedNoise with 'fixed_order'."
            )
        if isinstance(self.noise, BandedNoise) and self.noise.count > self.cycle:
            raise InvalidValue(
                f"FC316 make_private: found BandedNoise({self.noise.count}) with {self.cycle} "
                "batches in an epoch. Steps in which one sample takes part must be further apart "
                "than noise reaches. Use fewer diagonals, or smaller batches."
            )

    @property
    def is_plain(self) -> bool:
        """Whether Opacus' own accountants describe it."""
        return self == MechanismSpec(samples=self.samples)

    @property
    def is_in_order(self) -> bool:
        """Whether step t must take batch t."""
        return self.sampling not in ("poisson", "poisson_rows")

    @property
    def round_steps(self) -> int:
        """Steps whose batches are drawn together, all of one noise multiplier."""
        drawn_together = self.sampling in ("shuffled", "random_allocation")
        return self.participations * self.cycle if drawn_together else 1

    @property
    def relation(self) -> str:
        """The neighbouring relation of ε, in words."""
        if self.sampling == "poisson_rows":
            return f"add or remove one unit, of {self.rows_per_unit} rows at most"
        added = self.sampling in ("poisson", "random_allocation")
        return ADD_OR_REMOVE if added else ZERO_OUT

    def sampler(self, *, fills_up: bool = True, **options: Any) -> PoissonSampler:
        """What draws its batches: a sampler with these options of :class:`PoissonSampler`;
        ``fills_up``: whether batches with fewer rows than ``max_batch_size`` are filled up."""
        if self.max_batch_size is not None:
            return FixedShapeSampler(
                max_batch_size=self.max_batch_size, fills_up=fills_up, **options
            )
        kinds: dict[str, Callable[..., PoissonSampler]] = {
            "poisson": PoissonSampler,
            "poisson_rows": RowsOfUnitsSampler,
            "fixed_order": FixedOrderSampler,
            "shuffled": ShuffledSampler,
            "random_allocation": partial(AllocationSampler, participations=self.participations),
            "cyclic_poisson": partial(CyclicPoissonSampler, cycle=self.cycle),
        }
        return kinds[self.sampling](**options)

    def releases(self, noise_multiplier: float, sample_rate: float, steps: int) -> list[Release]:
        """What so many steps in a row release, as it is for each of the neighbours that there are;
        ε is the largest of them.

        ``noise_multiplier``: standard deviation of the independent noise ``Z``, in clipping bounds;
        ``sample_rate``: of one step, over the whole dataset.
        """
        noise = noise_multiplier
        if self.max_batch_size is not None:
            # For a neighbour with one sample less, and for one with one more.
            return [
                Release(noise, steps, "truncated", sample_rate, self.max_batch_size, samples)
                for samples in (self.samples, self.samples + 1)
            ]
        if self.sampling == "poisson_rows":
            assert self.rows_per_unit is not None  # see requested_process
            return [Release(noise, steps, "rows", sample_rate, self.rows_per_unit)]
        if self.sampling in ("fixed_order", "shuffled"):
            # Whatever the order is, a sample takes part once in every epoch: nothing is amplified.
            return [Release(noise / self.noise.sensitivity(steps, self.cycle))]
        if self.sampling == "random_allocation":
            # A round that has begun counts in full. k steps of a round are one step in each of k
            # parts of it, which are random and may be known (Feldman and Shenfeld 2025).
            times = -(-steps // self.round_steps) * self.participations
            return [Release(noise, times, "one_of", size=self.cycle)]
        rate, times = sample_rate, steps
        if self.sampling == "cyclic_poisson":
            # Columns of one sample's steps are orthogonal: each is a release of its own
            # (arXiv 2306.08153, theorem 4).
            rate, times = min(1.0, sample_rate * self.cycle), -(-steps // self.cycle)
        return [Release(noise / self.noise.sensitivity(steps), times, "poisson", rate)]

    def state_dict(self) -> dict[str, Any]:
        """Plain values, to compare with those of a checkpoint."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "noise"}
        return numbers | self.noise.settings
