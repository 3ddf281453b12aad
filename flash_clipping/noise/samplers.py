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
from flash_clipping.randomness import Purpose
from flash_clipping.randomness.choices import coin_tosses, subset


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

    def __init__(self, *, rounds: Any, **kwargs: Any):
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
