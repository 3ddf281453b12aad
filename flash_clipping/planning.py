"""Plan a private run: its cost before it starts (``flash-clipping plan``).

How much noise for this ε, how large a batch, how many epochs: :func:`plan` answers for one run,
:meth:`Plan.over` for others beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from opacus.accountants import create_accountant

from flash_clipping.engine.accounting import (
    ADD_OR_REMOVE,
    least_noise,
    with_right_length,
    without_hints,
)
from flash_clipping.errors import InvalidValue, checked_number

__all__ = ["Plan", "plan"]

#: Batches larger than the expected one by so many standard deviations come once in 30,000 steps.
_DEVIATIONS = 4


@dataclass(frozen=True)
class Plan:
    """A run of Poisson batches, and what it costs.

    Attributes:
        samples: in the dataset.
        batch_size: expected; a step draws every sample with ``sample_rate``.
        steps: of the optimizer.
        noise_multiplier: σ: noise has the standard deviation ``1.01 σ C`` in every coordinate of
            the summed gradient, with the clipping bound ``C``.
        epsilon, delta: of the whole run, to add or remove one sample.
        accountant: ``"prv"``, ``"rdp"``, ``"gdp"`` or ``"pld"``.
    """

    samples: int
    batch_size: int
    steps: int
    noise_multiplier: float
    epsilon: float
    delta: float
    accountant: str

    @property
    def sample_rate(self) -> float:
        """The probability with which a step draws a sample: ``1 / ceil(samples / batch_size)``, as
        ``make_private`` has it of a loader with such batches."""
        return 1 / self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

    @property
    def epochs(self) -> float:
        return self.steps / self.steps_per_epoch

    @property
    def largest_batch(self) -> int:
        """Batches are of random sizes; larger ones come once in 30,000 steps."""
        mean = self.samples * self.sample_rate
        spread = math.sqrt(mean * (1 - self.sample_rate))
        return min(self.samples, math.ceil(mean + _DEVIATIONS * spread))

    def micro_batches(self, max_physical_batch_size: int) -> int:
        """Parts of an expected batch, of so many samples at most (``BatchMemoryManager``)."""
        most = max_physical_batch_size
        checked_number("max_physical_batch_size", most, "[1, inf)", example=32, whole=True)
        return -(-self.batch_size // most)

    @property
    def noise_per_coordinate(self) -> float:
        """Standard deviation of the noise in one coordinate of the averaged gradient, in ``C``:
        ``σ / batch_size``. What decides how much noise training sees."""
        return self.noise_multiplier / self.batch_size

    def noise_over_signal(self, parameters: int) -> float:
        """The norm of a step's noise over the largest norm that its averaged gradient can have,
        ``σ sqrt(parameters) / batch_size``. Far above 1 is usual: noise adds up over coordinates
        and averages out over steps."""
        checked_number("parameters", parameters, "[1, inf)", example=1_000_000, whole=True)
        return self.noise_per_coordinate * math.sqrt(parameters)

    @property
    def delta_is_small(self) -> bool:
        """Whether δ is below one over the number of samples. To publish one sample as it is, chosen
        at random, has δ of that size."""
        return self.delta * self.samples < 1

    def over(self, batch_sizes: Sequence[int], epochs: Sequence[float]) -> list[list[Plan]]:
        """Plans with this noise multiplier, for each of these batch sizes (rows) and epochs."""
        same: Any = dict(noise_multiplier=self.noise_multiplier, delta=self.delta)
        of: Any = partial(plan, self.samples, accountant=self.accountant, **same)
        return [[of(batch_size, epochs=count) for count in epochs] for batch_size in batch_sizes]

    def rows(
        self, max_physical_batch_size: int | None = None, parameters: int | None = None
    ) -> list[tuple[str, str]]:
        """Quantities and their values, in words."""
        found = [
            ("samples", f"{self.samples:,}"),
            ("expected batch", f"{self.batch_size:,} (seldom above {self.largest_batch:,})"),
            ("sample rate", f"{self.sample_rate:.4g}"),
            ("steps", f"{self.steps:,} ({self.epochs:.3g} epochs of {self.steps_per_epoch:,})"),
            ("noise multiplier σ", f"{self.noise_multiplier:.4g}"),
            ("ε", f"{self.epsilon:.3g} at δ = {self.delta:.3g}; {ADD_OR_REMOVE}"),
            ("noise in a coordinate of a mean gradient", f"{self.noise_per_coordinate:.3g} C"),
        ]
        if max_physical_batch_size is not None:
            parts = self.micro_batches(max_physical_batch_size)
            found.append(("parts of a batch", f"{parts} of {max_physical_batch_size:,} at most"))
        if parameters is not None:
            over = f"{self.noise_over_signal(parameters):.3g}"
            found.append(("norm of noise over largest signal", over))
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"sample_rate": self.sample_rate, "relation": ADD_OR_REMOVE}


def plan(
    samples: int,
    batch_size: int,
    *,
    epochs: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    accountant: str = "prv",
) -> Plan:
    """The noise that an ε needs, or the ε that a noise has.

    Args:
        samples: in the dataset.
        batch_size: expected size of a step's batch.
        epochs, steps: how long; one of them.
        epsilon, noise_multiplier: one of them.
        delta: by default a tenth of ``1 / samples``.
        accountant: as of ``FlashPrivacyEngine``.

    Raises:
        ValueError: not exactly one of each pair; numbers that no run can have.
    """
    for given in (
        {"epochs": epochs, "steps": steps},
        {"epsilon": epsilon, "noise_multiplier": noise_multiplier},
    ):
        if [*given.values()].count(None) != 1:
            both = " and ".join(f"{name}={value}" for name, value in given.items())
            raise InvalidValue(f"FC930 plan: found {both}; expected one of them.")
    checked_number("samples", samples, "[1, inf)", example=1000, whole=True)
    checked_number("batch_size", batch_size, f"[1, {int(samples)}]", example=samples, whole=True)
    delta = 0.1 / samples if delta is None else delta
    checked_number("delta", delta, "(0, 0.5)", example=1e-5)
    per_epoch = -(-samples // batch_size)
    if steps is None:
        steps = math.ceil(per_epoch * checked_number("epochs", epochs, "(0, inf)", example=1))
    checked_number("steps", steps, "[1, inf)", example=1000, whole=True)
    if epsilon is not None:
        checked_number("epsilon", epsilon, "(0, inf)", example=3.0)
    else:
        checked_number("noise_multiplier", noise_multiplier, "(0, inf)", example=1.0)
    rate = 1 / per_epoch
    counted = with_right_length(create_accountant(accountant))
    if noise_multiplier is None:
        noise_multiplier = least_noise(
            counted,
            target_epsilon=epsilon,  # type: ignore[arg-type]  # given without noise_multiplier
            target_delta=delta,
            sample_rate=rate,
            steps=steps,
        )
    with without_hints():
        counted.history = [(noise_multiplier, rate, steps)]
        found = float(counted.get_epsilon(delta))
    return Plan(samples, batch_size, steps, noise_multiplier, found, delta, accountant)
