"""Samplers of batches that Opacus' accountants do not know.

They go with processes that an accountant of this wing knows. Of several processes all draw the
whole batch, from a key that they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.engine.sampling.samplers import PoissonSampler
from flash_clipping.engine.sampling.units import Users
from flash_clipping.errors import FlashClippingError, InvalidValue, checked_number
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
    """Batches by the number of their step."""

    taken: int = 0

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


class RoundSampler(OrderedSampler):
    """The batches of a round of steps (``round_steps``: an epoch, unless a subclass says otherwise)
    are drawn together, and kept until it has ended."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.round_steps = self.steps
        self._rounds: dict[int, Sequence[Tensor]] = {}

    def begin_run(self) -> None:
        """Begin with a new round: steps from now on are accounted for separately."""
        self.taken, self._rounds = 0, {}

    def _batch(self, number: int) -> list[int]:
        which, place = divmod(number, self.round_steps)
        if which not in self._rounds:
            running = self.taken // self.round_steps
            self._rounds = {n: kept for n, kept in self._rounds.items() if n >= running}
            self._rounds[which] = self._round(self.stream.draw(Purpose.SAMPLING))
        return self._own(self._rounds[which][place])

    def _round(self, draw: Draw) -> Sequence[Tensor]:
        """The indices of every batch of a round."""
        raise NotImplementedError


class ShuffledSampler(RoundSampler):
    """Every epoch cuts the dataset into batches at random, again; every sample is in one of them.
    Batches differ by one sample in size at most."""

    def _round(self, draw: Draw) -> Sequence[Tensor]:
        order = subset(draw, self.num_samples, self.num_samples)
        return [order[place :: self.steps] for place in range(self.steps)]


class FixedOrderSampler(ShuffledSampler):
    """Every epoch has the same batches in the same order, drawn at random, once."""

    def _batch(self, number: int) -> list[int]:
        return super()._batch(number % self.round_steps)


class AllocationSampler(RoundSampler):
    """Every sample takes part in ``participations`` steps of a round, chosen uniformly for each
    sample alone: with one of ``len(loader)`` steps, balls in bins."""

    def __init__(self, *, participations: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.participations = participations
        self.round_steps = participations * self.steps

    def _round(self, draw: Draw) -> Sequence[Tensor]:
        steps_NK = allocations(draw, self.num_samples, self.round_steps, self.participations)
        by_step = steps_NK.flatten().argsort(stable=True) // self.participations
        sizes = steps_NK.flatten().bincount(minlength=self.round_steps)
        return torch.split(by_step, sizes.tolist())


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


class CyclicPoissonSampler(OrderedSampler):
    """Samples are in ``cycle`` groups, by their number modulo ``cycle``; each step draws from the
    next one, every sample independently, with probability ``cycle * sample_rate``."""

    def __init__(self, *, cycle: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.cycle = cycle

    def _batch(self, number: int) -> list[int]:
        group = number % self.cycle
        members = len(range(group, self.num_samples, self.cycle))
        draw = self.stream.draw(Purpose.SAMPLING)
        mask = coin_tosses(draw, members, self.cycle * self.sample_rate)
        return self._own(mask.nonzero().flatten() * self.cycle + group)
