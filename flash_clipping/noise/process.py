"""How batches are drawn and noise is made: sampler, noise and what both release, in one object.

Batches other than Poisson's have samplers of their own. Of several processes all draw the whole
batch, from a key that they share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.engine.accounting import ZERO_OUT, Mechanism
from flash_clipping.engine.sampling.samplers import PoissonSampler
from flash_clipping.engine.sampling.units import Users
from flash_clipping.errors import FlashClippingError, InvalidValue, checked_number
from flash_clipping.noise.mechanisms import BandedNoise, IndependentNoise, NoiseMechanism
from flash_clipping.noise.releases import Release
from flash_clipping.randomness import Draw, Purpose
from flash_clipping.randomness.choices import allocations, coin_tosses, subset


class WholeBatchSampler(PoissonSampler):
    """Batches that all processes draw alike, of which each takes its rows, by their number."""

    is_strict = may_be_split = True

    def _own(self, indices: Tensor) -> list[int]:
        """This process's part of a batch."""
        self._most = -(-len(indices) // self.world_size)
        return indices[self.rank :: self.world_size].tolist()


class FixedShapeSampler(WholeBatchSampler):
    """Every step draws every sample independently, and takes at most ``max_batch_size`` of them.

    Of more samples a uniformly random subset of that size is left. Fewer are filled up with samples
    that were not drawn, behind those that count. Of several processes each gets as many rows, and
    those that count are spread evenly.

    Args:
        max_batch_size: of all processes together.
        fills_up: ``False``: batches have the rows that count, and no more.
        **kwargs: as in :class:`PoissonSampler`.

    Attributes:
        rows: of this process's part of every batch; ``None`` where they are not filled up.
    """

    def __init__(self, *, max_batch_size: int, fills_up: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        samples = self.num_samples
        checked_number(
            "max_batch_size", max_batch_size, f"[1, {samples}]", example=samples, whole=True
        )
        if max_batch_size % self.world_size:
            fewer = max_batch_size - max_batch_size % self.world_size
            raise InvalidValue(
                f"FC337 max_batch_size: found {max_batch_size} rows, for {self.world_size} "
                "processes together; expected a multiple of these, so that all have batches of one "
                "shape:\n"
                f"    max_batch_size={fewer or self.world_size}"
            )
        self.max_batch_size = max_batch_size
        self.rows = max_batch_size // self.world_size if fills_up else None

    def _draw(self, number: int) -> tuple[list[int], DrawnBatch]:
        draw = self.stream.draw(Purpose.SAMPLING)
        mask_N = coin_tosses(draw, self.num_samples, self.sample_rate)
        counted = mask_N.nonzero().flatten()
        if len(counted) > self.max_batch_size:
            # Words of another nonce: which are left does not depend on which were drawn.
            counted = counted[subset(draw, len(counted), self.max_batch_size, tensor=1)]
        indices = own = self._own(counted)
        if self.rows is not None:
            padding = (~mask_N).nonzero().flatten()[: self.max_batch_size - len(counted)]
            indices = self._own(torch.cat([counted, padding]))
        return indices, DrawnBatch(number, len(own), len(indices))


class OrderedSampler(WholeBatchSampler):
    """Batches by the number of their step. Those of a round are drawn together, and kept until it
    has ended.

    Args:
        rounds: the mechanism, which says how many steps a round has, and draws one.
        **kwargs: as in :class:`PoissonSampler`.
    """

    taken: int = 0

    def __init__(self, *, rounds: InOrder, **kwargs: Any):
        super().__init__(**kwargs)
        self.rounds = rounds
        self._kept: dict[int, Sequence[Tensor]] = {}

    def begin_run(self) -> None:
        """Begin with a new round: steps from now on are accounted for separately."""
        self.taken, self._kept = 0, {}

    def check_step(self, draw: DrawnBatch | None) -> None:
        """Raise ``FlashClippingError`` for a step on another batch than this step's: the loop has
        left one out, or took one twice."""
        if draw is None or draw.number != self.taken:
            found = "an unknown batch" if draw is None else f"batch {draw.number}"
            raise FlashClippingError(
                f"FC512 optimizer.step(): found step {self.taken} (from 0) with {found} of the "
                "loader. Epsilon is for one step on every batch, in order. Nothing was released. "
                "Call optimizer.step() once for each."
            )

    def _batch(self, number: int) -> list[int]:
        steps = self.rounds.drawn_together(self.steps)
        which, place = divmod(number, steps)
        which = 0 if self.rounds.repeats else which
        if which not in self._kept:
            running = self.taken // steps
            self._kept = {n: kept for n, kept in self._kept.items() if n >= running}
            draw = self.stream.draw(Purpose.SAMPLING)
            self._kept[which] = self.rounds.round(draw, self, which)
        return self._own(self._kept[which][place])


class RowsOfUnitsSampler(PoissonSampler):
    """Every step draws every row independently, with the same probability; of a unit with too many
    rows some are chosen uniformly, once, and the others are never drawn."""

    def __init__(self, *, units: Users, world_size: int = 1, **kwargs: Any):
        if world_size > 1:
            raise InvalidValue(
                "FC316 PoissonRows: found with a model of several processes. Draw users in the "
                "place of their rows (PoissonSampling); or train in one process."
            )
        super().__init__(**kwargs | {"num_samples": 0})
        draw = self.stream.draw(Purpose.SAMPLING)
        users = range(len(units.rows))
        self._kept = sorted(row for user in users for row in units.rows_of(user, draw))
        self.num_samples = len(self._kept)

    def _batch(self, number: int) -> list[int]:
        return [self._kept[place] for place in super()._batch(number)]


@dataclass(frozen=True)
class PoissonSampling(Mechanism):
    """Every step draws every sample independently, with the sample rate. The default.

    Args:
        max_batch_size: every batch has this many rows, over all processes: of more samples a random
            subset is taken; fewer are filled up by rows that add exactly nothing. The sample rate
            is still the loader's; needs ``accountant="pld"``. ``None``: batches of any size.
        noise_grid: as of :class:`Mechanism`; also ``"exact"``: round sums to a grid and add
            integers with the law of a discrete Gaussian, drawn exactly, on the CPU; needs
            ``accountant="discrete_gaussian"``.
    """

    max_batch_size: int | None = None

    takes_part = "Every step draws every sample independently, with the sample rate."

    @property
    def is_plain(self) -> bool:  # type: ignore[override]  # by its fields
        return self.max_batch_size is None

    def sampler(self, *, fills_up: bool = True, **options: Any) -> PoissonSampler:
        if self.max_batch_size is None:
            return PoissonSampler(**options)
        return FixedShapeSampler(max_batch_size=self.max_batch_size, fills_up=fills_up, **options)

    def releases(self, noise_multiplier: float, sample_rate: float, steps: int) -> Release:
        if (size := self.max_batch_size) is None:
            return Release(noise_multiplier, steps, "poisson", sample_rate)
        return Release(noise_multiplier, steps, "truncated", sample_rate, size, self.samples)


@dataclass(frozen=True)
class PoissonRows(Mechanism):
    """Every step draws every row of every user independently, with the sample rate, and clips it
    separately; ε is for users. Needs ``unit=Users(ids, max_rows=...)`` and ``accountant="pld"``."""

    #: The most rows of a user.
    rows: int = field(default=1, init=False, repr=False)

    takes_part = (
        "Every step draws every row independently, with the sample rate; no unit has more rows "
        "than its number."
    )

    @property
    def relation(self) -> str:  # type: ignore[override]  # by its fields
        return f"add or remove one unit, of {self.rows} rows at most"

    def sampler(self, *, fills_up: bool = True, **options: Any) -> PoissonSampler:
        return RowsOfUnitsSampler(**options)

    def on(self, samples: int = 0, cycle: int = 1, unit: Any = None) -> Self:
        if not isinstance(unit, Users) or unit.max_rows is None:
            raise InvalidValue(
                f"FC281 PoissonRows: found unit={unit}; expected the most rows of a user:\n"
                "    unit=Users(ids, max_rows=8)"
            )
        found = super().on(samples, cycle)
        vars(found)["rows"] = unit.max_rows
        return found

    def releases(self, noise_multiplier: float, sample_rate: float, steps: int) -> Release:
        return Release(noise_multiplier, steps, "rows", sample_rate, self.rows)


class InOrder(Mechanism):
    """A mechanism whose batches are taken in order, and drawn a round at a time."""

    is_in_order = True
    #: Whether all rounds are as the first.
    repeats: ClassVar[bool] = False

    def sampler(self, *, fills_up: bool = True, **options: Any) -> PoissonSampler:
        return OrderedSampler(rounds=self, **options)

    def drawn_together(self, steps: int) -> int:
        """So many of its steps are a round, of so many in an epoch."""
        return steps

    @abstractmethod
    def round(self, draw: Draw, sampler: PoissonSampler, number: int) -> Sequence[Tensor]:
        """The indices of every batch of this round."""


@dataclass(frozen=True)
class RandomAllocation(InOrder):
    """Every sample takes part in some steps of a round, chosen uniformly and for itself: balls in
    bins. Needs ``accountant="pld"``.

    Args:
        participations: steps of a round in which a sample takes part; a round has
            ``participations * len(data_loader)`` steps.
    """

    participations: int = 1

    takes_part = (
        "Every sample chooses its steps of a round uniformly and for itself; a round that has "
        "begun counts in full."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_number("participations", self.participations, "[1, inf)", example=1, whole=True)

    @property
    def round_steps(self) -> int:  # type: ignore[override]  # by its fields
        return self.participations * self.cycle

    def drawn_together(self, steps: int) -> int:
        return self.participations * steps

    def round(self, draw: Draw, sampler: PoissonSampler, number: int) -> Sequence[Tensor]:
        """Batches of samples that chose their steps, each uniformly for itself."""
        steps, k = self.drawn_together(sampler.steps), self.participations
        steps_NK = allocations(draw, sampler.num_samples, steps, k)
        by_step = steps_NK.flatten().argsort(stable=True) // k
        sizes = steps_NK.flatten().bincount(minlength=steps)
        return torch.split(by_step, sizes.tolist())

    def releases(self, noise_multiplier: float, sample_rate: float, steps: int) -> Release:
        # A round that has begun counts in full. k steps of a round are one step in each of k parts
        # of it, which are random and may be known (Feldman and Shenfeld 2025).
        times = -(-steps // self.round_steps) * self.participations
        return Release(noise_multiplier, times, "one_of", size=self.cycle)


@dataclass(frozen=True)
class FixedOrder(InOrder):
    """Batches are parts of the dataset, the same in every epoch, in the same order. Needs
    ``accountant="pld"``.

    Args:
        noise: how the noise of steps is correlated (:mod:`flash_clipping.noise.mechanisms`).

    Raises:
        ValueError: noise that reaches over more steps than an epoch has; a grid for correlated
            noise.
    """

    noise: NoiseMechanism = field(default_factory=IndependentNoise)

    takes_part = "Every sample takes part once in an epoch, in the same step of each."
    relation = ZERO_OUT
    repeats = True
    #: What ``noise`` may be.
    _served: ClassVar[Any] = NoiseMechanism

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.noise, self._served):
            raise InvalidValue(
                f"FC316 {type(self).__name__}: found noise={self.noise}; expected "
                f"{self._served.__name__}. A sample may take part in two steps whose noise partly "
                "cancels, and epsilon must know how often."
            )
        if self.noise_grid and not isinstance(self.noise, IndependentNoise):
            raise InvalidValue(
                f"FC316 noise_grid: found {self.noise_grid!r} with noise={self.noise}: what is "
                "rounded off would not be taken back. Leave one of them out."
            )

    def on(self, samples: int = 0, cycle: int = 1, unit: Any = None) -> Self:
        if isinstance(self.noise, BandedNoise) and self.noise.count > cycle:
            raise InvalidValue(
                f"FC316 {type(self).__name__}: found BandedNoise({self.noise.count}) with {cycle} "
                "batches in an epoch. Steps in which one sample takes part must be further apart "
                "than noise reaches. Use fewer diagonals, or smaller batches."
            )
        return super().on(samples, cycle, unit)

    def round(self, draw: Draw, sampler: PoissonSampler, number: int) -> Sequence[Tensor]:
        """Parts of the dataset at random, which differ by one sample in size at most."""
        order = subset(draw, sampler.num_samples, sampler.num_samples)
        return [order[place :: sampler.steps] for place in range(sampler.steps)]

    def releases(self, noise_multiplier: float, sample_rate: float, steps: int) -> Release:
        # Whatever the order is, a sample takes part once in every epoch: nothing is amplified.
        return Release(noise_multiplier / self.noise.sensitivity(steps, self.cycle))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"noise": repr(self.noise)}


@dataclass(frozen=True)
class Shuffled(FixedOrder):
    """Batches are parts of the dataset, others in every epoch. Their order amplifies nothing. Needs
    ``accountant="pld"``."""

    noise: NoiseMechanism = field(default_factory=IndependentNoise, init=False, repr=False)

    repeats = False
    takes_part = "Every sample takes part once in an epoch. Its order amplifies nothing."

    @property
    def round_steps(self) -> int:  # type: ignore[override]  # by its fields
        return self.cycle


@dataclass(frozen=True)
class CyclicPoisson(FixedOrder):
    """Samples are in as many groups as noise has diagonals: a step draws from the next group only,
    with so many times the sample rate. Needs ``accountant="pld"``.

    Args:
        noise: :class:`~flash_clipping.noise.BandedNoise`.
    """

    repeats = False
    takes_part = "Every step draws every sample of its group independently."
    _served = BandedNoise

    def on(self, samples: int = 0, cycle: int = 1, unit: Any = None) -> Self:
        found = super().on(samples, cycle, unit)
        vars(found)["cycle"] = self.noise.count  # type: ignore[attr-defined]  # is BandedNoise: _served
        return found

    def drawn_together(self, steps: int) -> int:
        return 1

    def round(self, draw: Draw, sampler: PoissonSampler, number: int) -> Sequence[Tensor]:
        """A Poisson batch of the next group, which has the samples of every ``cycle``-th number."""
        group = number % self.cycle
        members = len(range(group, sampler.num_samples, self.cycle))
        mask = coin_tosses(draw, members, self.cycle * sampler.sample_rate)
        return [mask.nonzero().flatten() * self.cycle + group]

    def releases(self, noise_multiplier: float, sample_rate: float, steps: int) -> Release:
        # Columns of one sample's steps are orthogonal: each is a release of its own
        # (arXiv 2306.08153, theorem 4).
        rate, times = min(1.0, sample_rate * self.cycle), -(-steps // self.cycle)
        return Release(noise_multiplier / self.noise.sensitivity(steps), times, "poisson", rate)
