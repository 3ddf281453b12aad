"""Batches in an order: what correlated noise needs, since steps of one sample must lie apart.

Step ``t`` takes batch ``t`` and no other. A batch that was drawn and not stepped on is drawn again
in the next epoch; a step on another one is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.engine.sampling.samplers import BatchSizeNotifier, PoissonSampler
from flash_clipping.errors import FlashClippingError
from flash_clipping.randomness import Purpose
from flash_clipping.randomness.choices import coin_tosses, subset


class OrderedSampler(PoissonSampler):
    """Batches by the number of their step.

    Attributes:
        taken: steps that were taken.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.announce = BatchSizeNotifier(strict=True)
        self.taken = 0
        self._next = 0

    def __iter__(self) -> Iterator[list[int]]:
        self._next = self.taken
        return super().__iter__()

    def _number(self) -> int:
        return self._next - 1

    def check_step(self, draw: DrawnBatch | None) -> None:
        """Refuse a step on another batch than this step's.

        Raises:
            FlashClippingError: the loop has left one out, or took one twice.
        """
        if draw is None or draw.number != self.taken:
            found = "an unknown batch" if draw is None else f"batch {draw.number}"
            raise FlashClippingError(
                f"optimizer.step(): found step {self.taken} (from 0) with {found} of the loader. "
                "Noise is correlated over steps, and epsilon is for one step on every batch, in "
                "order. Call optimizer.step() once for each batch; do not leave batches out. "
                "Nothing was released."
            )


class FixedOrderSampler(OrderedSampler):
    """Every epoch has the same batches in the same order; every sample is in one of them.

    Which is drawn at random, once. Batches differ by one sample in size at most.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        draw = self.stream.draw(Purpose.SAMPLING)
        self._order = subset(draw, self.num_samples, self.num_samples)

    def _draw(self) -> list[int]:
        number, self._next = self._next, self._next + 1
        batch: list[int] = self._order[number % self.steps :: self.steps].tolist()
        return batch


class CyclicPoissonSampler(OrderedSampler):
    """Samples are in groups, and each step draws from the next one.

    The group of a sample is its number modulo ``cycle``. A step draws every sample of its group
    independently, with probability ``cycle * sample_rate``.

    Args:
        cycle: how many groups there are.
        **kwargs: as in :class:`~flash_clipping.engine.sampling.samplers.PoissonSampler`.

    Raises:
        ValueError: the probability would be above 1.
    """

    def __init__(self, *, cycle: int, **kwargs: Any):
        super().__init__(**kwargs)
        if cycle * self.sample_rate > 1:
            raise ValueError(
                f"sampling='cyclic_poisson': found {cycle} groups and {self.steps} batches in an "
                "epoch; expected at least as many batches as groups. Use fewer diagonals, or "
                "smaller batches."
            )
        self.cycle = cycle

    def _draw(self) -> list[int]:
        number, self._next = self._next, self._next + 1
        group = number % self.cycle
        members = len(range(group, self.num_samples, self.cycle))
        draw = self.stream.draw(Purpose.SAMPLING)
        mask = coin_tosses(draw, members, self.cycle * self.sample_rate)
        batch: list[int] = (mask.nonzero().flatten() * self.cycle + group).tolist()
        return batch
