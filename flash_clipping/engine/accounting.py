"""Opacus' accountants, which count steps here, and the noise for a target.

What these do not know, other ways to draw batches and to make noise, is in
:mod:`flash_clipping.noise`.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
from opacus.accountants import GaussianAccountant, IAccountant, PRVAccountant, RDPAccountant
from opacus.accountants.analysis import rdp as analysis

from flash_clipping._compat import compute_once
from flash_clipping.engine import wings
from flash_clipping.engine.sampling.samplers import PoissonSampler
from flash_clipping.errors import Coded, InvalidValue
from flash_clipping.ops.noise import NoiseGrid

#: The neighbouring relation of ε, in words.
ADD_OR_REMOVE = "add or remove one sample"
ZERO_OUT = "zero out one sample"

#: The unit that is hidden as a whole, if nothing else is said.
SAMPLE = "a sample of the dataset"

_MOST_NOISE = 1e6

#: Points of a privacy loss's distribution that are computed: a minute, and a few GB.
_MOST_POINTS = 2**25
#: The largest ε that is computed from them; ``exp(ε)`` overflows above 709.
_MOST_LOSS = 600.0

compute_once(analysis)

_Steps = list[tuple[float, float, int]]


def _count(history: Sequence[Sequence[Any]]) -> int:
    return sum(steps for _, _, steps in history)


@dataclass(frozen=True)
class Mechanism(ABC):
    """How batches are drawn and how noise is made: sampler, noise and what both release.

    Args:
        noise_grid: round noisy sums to a grid that does not depend on data, against attacks on
            floating-point addition (``docs/noise.md``).

    Attributes:
        samples: in the dataset.
        cycle: steps from a group, or a batch, to its next turn.
        takes_part: who takes part in a step, in words.
        relation: the neighbouring relation of ε, in words.
        is_plain: whether Opacus' own accountants describe it.
        is_in_order: whether step t must take batch t.
        round_steps: steps whose batches are drawn together, all of one noise multiplier.

    Raises:
        ValueError: arguments that do not go together.
    """

    noise_grid: NoiseGrid = field(default=False, kw_only=True, compare=False)
    samples: int = field(default=0, init=False, repr=False)
    cycle: int = field(default=1, init=False, repr=False)

    takes_part: ClassVar[str]
    relation: ClassVar[str] = ADD_OR_REMOVE
    is_plain: ClassVar[bool] = False
    is_in_order: ClassVar[bool] = False
    round_steps: ClassVar[int] = 1

    def __post_init__(self) -> None:
        known = (False, True, "exact") if self.is_plain else (False, True)
        if self.noise_grid not in known:
            raise InvalidValue(
                f"FC301 noise_grid: found {self.noise_grid!r}; expected one of {known}."
            )

    def on(self, samples: int = 0, cycle: int = 1, unit: Any = None) -> Self:
        """This mechanism for a dataset, with so many batches in an epoch, and for such units.
        ``ValueError`` if it does not go with them."""
        if unit is not None:
            raise InvalidValue(
                f"FC316 make_private: found {self} with unit={unit}. It is accounted for samples "
                "of the dataset only."
            )
        found = copy.copy(self)
        vars(found).update(samples=samples, cycle=cycle)
        return found

    @abstractmethod
    def sampler(self, *, fills_up: bool = True, **options: Any) -> PoissonSampler:
        """Make what draws its batches: a sampler with these options of ``PoissonSampler``;
        ``fills_up``: whether batches with fewer rows than ``max_batch_size`` are filled up."""

    @abstractmethod
    def releases(self, noise_multiplier: float, sample_rate: float, steps: int) -> Any:
        """Return what so many steps release.

        ``noise_multiplier``: standard deviation of the independent noise ``Z``, in clipping bounds;
        ``sample_rate``: of one step, over the whole dataset.
        """

    def state_dict(self) -> dict[str, Any]:
        """Plain values, to compare with those of a checkpoint."""
        of_noise = "noise", "noise_grid"
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in of_noise}
        return {"mechanism": type(self).__name__, "noise": "IndependentNoise()", **numbers}


class CountsSteps:
    """An accountant whose ``len`` is the number of steps; Opacus' is that of changes of noise."""

    history: _Steps

    def __len__(self) -> int:
        return _count(self.history)

    def load_state_dict(self, state_dict: Any) -> None:
        """As in Opacus, before the first step; ``ValueError`` if own steps would be forgotten."""
        before, steps = self.history, len(self)
        super().load_state_dict(state_dict)  # type: ignore[misc]  # of the class beside
        self.history = [(*entry,) for entry in self.history]
        if before and before != self.history:
            self.history = before
            raise InvalidValue(
                f"FC581 load: found an accountant that has accounted for {steps} steps already. It "
                "would forget them, and what they released is not undone by going back. Load into "
                "a new engine, or a new trainer, before its first step; this model may hold the "
                "checkpoint's weights by now:\n"
                "    engine = flash_clipping.FlashPrivacyEngine()"
            )


class StepsOfRdpAccountant(CountsSteps, RDPAccountant):
    """Opacus', with the right length."""


class StepsOfGdpAccountant(CountsSteps, GaussianAccountant):
    """Opacus', with the right length."""


class FeasiblePrvAccountant(CountsSteps, PRVAccountant):
    """Opacus' default, which has an answer where there is next to no noise.

    The distribution of the privacy loss is as wide as ε. Where it would not fit in memory, or its
    exponential not in float64, ε is that of Opacus' RDP accountant, an upper bound too; without
    noise it is infinite.
    """

    def get_epsilon(
        self, delta: float, *, eps_error: float = 0.01, delta_error: float | None = None, **_: Any
    ) -> float:
        """As in Opacus."""
        if any(multiplier == 0 for multiplier, _, _ in self.history):
            return math.inf
        error = delta / 1000 if delta_error is None else delta_error
        return _epsilon_by_prv((*map(tuple, self.history),), delta, eps_error, error)


@lru_cache(maxsize=64)
def _epsilon_by_prv(
    history: tuple[tuple[float, float, int], ...], delta: float, eps_error: float, error: float
) -> float:
    prv, rdp = PRVAccountant(), StepsOfRdpAccountant()
    prv.history = rdp.history = [*history]
    with without_hints(), np.errstate(divide="ignore"):  # at a sample rate of 1
        upper = rdp.get_privacy_spent(delta=delta)[0]
        points = 2 * upper / eps_error * math.sqrt(_count(history) * math.log(12 / error) / 2)
        if upper > _MOST_LOSS or points > _MOST_POINTS:
            return upper
        return float(prv.get_epsilon(delta, eps_error=eps_error, delta_error=error))


def with_right_length(accountant: IAccountant) -> IAccountant:
    """This new accountant of Opacus', as one that counts its steps."""
    ours: dict[type, Callable[[], IAccountant]] = {
        PRVAccountant: FeasiblePrvAccountant,
        RDPAccountant: StepsOfRdpAccountant,
        GaussianAccountant: StepsOfGdpAccountant,
    }
    return ours.get(type(accountant), lambda: accountant)()


def process_of(accountant: IAccountant) -> Mechanism:
    """The mechanism of an accountant's steps; Opacus' know one."""
    found: Mechanism = getattr(accountant, "process", wings.PoissonSampling())
    return found


@contextmanager
def without_hints() -> Iterator[None]:
    """Without Opacus' hint that other orders of RDP may be tighter: nobody here can give any."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the")
        yield


def least_noise(
    accountant: IAccountant,
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    epsilon_tolerance: float = 0.01,
    **options: Any,
) -> float:
    """The least noise multiplier, to within the tolerance, whose ε after these steps is below the
    target, as Opacus looks for it; ``ValueError`` if none is enough.

    By the accountant that will count the steps: Opacus' PRV accountant has an ε too small, or none,
    next to no noise. Where ε jumps over the target the search ends all the same.
    """
    planned = copy.copy(accountant)

    def epsilon(multiplier: float) -> float:
        planned.history = [(multiplier, sample_rate, steps)]
        with without_hints():
            return float(planned.get_epsilon(target_delta, **options))

    low, high = 0.0, 20.0
    while (found := epsilon(high)) > target_epsilon:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise InvalidValue(
                f"FC566 target_epsilon={target_epsilon} with target_delta={target_delta}: no noise "
                f"below {_MOST_NOISE:g} is enough."
            )
    while target_epsilon - found > epsilon_tolerance and high - low > 1e-9 * high:
        middle = (low + high) / 2
        if (of_middle := epsilon(middle)) <= target_epsilon:
            high, found = middle, of_middle
        else:
            low = middle
    return high


class LargeDeltaWarning(Coded, UserWarning):
    """δ is not below one over the number of samples: publishing some samples as they are has it."""


class PlanExceededWarning(Coded, UserWarning):
    """More steps than ``make_private_with_epsilon`` planned: ε is above its target."""
