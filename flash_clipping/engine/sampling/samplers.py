"""Samplers of batches of indices, which draw from a secret stream of their own.

Accountants assume that every step draws every sample independently with the *sample rate* ``q``
that they are told, and that nobody can guess who took part. Of several processes each draws its
own samples. Samplers of other batches are in :mod:`flash_clipping.noise.process`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from types import FrameType
from typing import Any

import torch
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor

from flash_clipping.capture.draws import DrawnBatch, Draws
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.engine.sampling.units import Users
from flash_clipping.randomness import Draw, Purpose, SecretStream
from flash_clipping.randomness.choices import coin_tosses


class PoissonSampler(UniformWithReplacementSampler):
    """Batches of indices: every step draws every sample independently, with the same probability.

    Args:
        num_samples: that this process draws: every ``world_size``-th one; units, where these are
            drawn.
        sample_rate: the probability, rounded down to a multiple of ``2^-64``.
        steps: batches in an epoch.
        stream: what to draw with; a new one with a key of its own if ``None``.
        rank, world_size: this process, and how many get a part of each batch.
        units: samples are these; a batch is all rows of those that were drawn.

    Attributes:
        drawn: batches that were ever drawn.
        given: of how many of them the loop was given something.
        strict: whether rows of the model's calls are compared with those of these batches.
        draws: what the loop is given, until the model has used it; one for all loaders of a model.
        last: the batch, or part, that was drawn last, whichever iterator it is for.
        in_parts: whether the loop is given parts, as many as the sampler says.
        by_loader: whether the loader announces ``last`` itself, and not what collates it.
        part_size: where the loader cuts batches into parts, the most samples of one.
        parts: in how many parts all processes then have to cut the batches that were drawn in this
            epoch, until they are taken.
        is_last_part: whether the batch ends with the part that ``BatchMemoryManager`` was given
            last; ``None`` where it is given batches, and splits them itself.

    Guarantees:
        PyTorch's, NumPy's and Python's generators are neither read nor changed while batches are
        drawn. A copy, a pickled sampler and a forked process draw with keys of their own.
    """

    #: Whether forwards must be of its batches, row by row.
    is_strict = False
    #: Whether the sampler itself cuts batches that are too large.
    may_be_split = False
    #: Steps that were taken, where they must take batches in order; ``None``: they need not.
    taken: int | None = None
    is_last_part: bool | None = None
    part_size: int | None = None
    #: Samples, in the batch that was drawn last, of the process that has most of them.
    _most = 0
    _last: Draw | None = None
    _loops = 0
    _number: int | None = None

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        steps: int,
        stream: SecretStream | None = None,
        rank: int = 0,
        world_size: int = 1,
        units: Users | None = None,
    ):
        self.num_samples, self._sample_rate = num_samples, sample_rate
        self.units, self.steps = units, steps
        self.stream = SecretStream() if stream is None else stream
        self.rank, self.world_size = rank, world_size
        self.drawn: int = 0
        self.given: int = 0
        self.last: DrawnBatch = DrawnBatch(-1, 0, 0)
        self.in_parts: bool = False
        self.by_loader: bool = False
        self.strict: bool = self.is_strict or units is not None
        self.draws: Draws = Draws()
        #: Batches of the epoch that began last which its loader has not given yet.
        self.pending: deque[DrawnBatch] = deque()
        #: Whether the loader that begins an epoch now announces what it gives. Where no sample was
        #: drawn it is given the first row of the data; for others their collate function does that.
        self.gives_a_row = False
        self.parts: deque[int] = deque()

    def follow(self, module: Any) -> None:
        """Give to this wrapped model, or hooks, from now on."""
        self.draws = module._session.rows.draws
        vars(self.draws).update(vars(Draws(self.strict)))
        module.follow_rows()

    def announce(self, draw: DrawnBatch, batch: Any) -> None:
        """The loop is given this batch, or a part of one."""
        self.given += draw.number != self._number
        self._number, draw.rate = draw.number, self.sample_rate
        self.draws.give(replace(draw, tensors=tensors_in(batch)) if self.strict else draw)

    @property
    def sample_rate(self) -> float:  # type: ignore[override]  # writeable there
        """The probability that is drawn with, and accounted: it cannot be set."""
        return self._sample_rate

    def __iter__(self) -> Iterator[list[int]]:
        self.pending = pending = deque[DrawnBatch]()
        return self._batches(self._limit_for(sys._getframe(1)), self.gives_a_row, pending)

    def _batches(
        self, limit: int | None, gives_a_row: bool, pending: deque[DrawnBatch]
    ) -> Iterator[list[int]]:
        """An epoch, in parts of ``limit`` samples at most."""
        self.in_parts, self.is_last_part = limit is not None, None
        self.draws.begin_epoch()
        self.parts, first = deque(), self.taken
        self._loops = loop = self._loops + 1
        try:
            for place in range(self.steps):
                indices, draw = self._draw(self.drawn if first is None else first + place)
                self.drawn += 1
                draw.loop, draw.place = loop, place
                if self.part_size is not None:
                    self.parts.append(self._parts_of(self.part_size))
                parts = 1 if limit is None else self._parts_of(limit)
                for number in range(parts):
                    self.is_last_part = None if limit is None else number == parts - 1
                    own, part = indices[number::parts], draw
                    if parts > 1:  # those that count are the first of the batch
                        counted = len(range(number, draw.samples, parts))
                        part = replace(draw, samples=counted, rows=len(own))
                    if not own and gives_a_row:
                        own, part = [0], part.with_a_row()
                    self.last, self.by_loader = part, gives_a_row
                    pending.append(part)
                    yield own
        finally:  # a loop that was left early, too
            self.draws.end_epoch()

    def _limit_for(self, asking: FrameType) -> int | None:
        """How many samples a part may have, for the frame that asks for the first batch; ``None``:
        batches are given whole. (A generator that kept its reader would outlive the loop, and its
        end would not be noticed.)"""
        reader = asking.f_locals.get("self")
        if isinstance(reader, BatchSplittingSampler) and self._splits_for(reader.optimizer):
            return int(reader.max_batch_size)
        return None

    def _splits_for(self, optimizer: Any) -> bool:
        """Whether the ``BatchMemoryManager`` of this optimizer gets parts that are alike in all
        processes, unlike Opacus' own. Only optimizers of this library are told which is the last.
        """
        return self.may_be_split and hasattr(optimizer, "_sharded")

    def _parts_of(self, size: int) -> int:
        """Parts of so many samples at most that the last batch has in all processes."""
        return max(1, -(-self._largest() // size))

    def _largest(self) -> int:
        return self._most

    def _draw(self, number: int) -> tuple[list[int], DrawnBatch]:
        """The next batch, and what is told of it."""
        drawn = self._batch(number)
        if self.units is None:
            return drawn, DrawnBatch(number, len(drawn), len(drawn))
        assert self._last is not None
        rows = [self.units.rows_of(unit, self._last) for unit in drawn]
        unit_R = torch.tensor([place for place, own in enumerate(rows) for _ in own]).long()
        indices = [*chain.from_iterable(rows)]
        return indices, DrawnBatch(number, len(drawn), len(indices), unit_R)

    def _batch(self, number: int) -> list[int]:
        """The samples of a batch, which are all that was drawn."""
        self._last = self.stream.draw(Purpose.SAMPLING)
        own = self._places(self._last) * self.world_size + self.rank
        self._most = len(own)
        return own.tolist()

    def _places(self, draw: Draw) -> Tensor:
        """``[drawn]``, int64: which of ``num_samples`` are drawn, in order."""
        mask = coin_tosses(draw, self.num_samples, self.sample_rate, shard=self.rank)
        return mask.nonzero().flatten()


class ShardedPoissonSampler(PoissonSampler):
    """One process's part of Poisson batches.

    Every sample is one process's, which draws it in every step with the given probability; a unit
    with all of its rows. All processes take as many steps, with local batches that may be empty.
    Their draws are independent, seeded or not. Where they share a key and step together,
    ``BatchMemoryManager`` gets as many parts of a batch in every process as the largest batch
    needs; some may be empty.

    Args:
        total_size: samples (or units) in the dataset, the same for all processes.
        is_shared: whether all processes have the key of ``stream``. Then those of one ``rank`` draw
            the same batches, and each knows how many samples others have.
        **kwargs: as in :class:`PoissonSampler`; ``steps`` the same for all processes.
    """

    def __init__(
        self, *, total_size: int, rank: int, world_size: int, is_shared: bool = False, **kwargs: Any
    ):
        samples = len(range(rank, total_size, world_size))
        super().__init__(num_samples=samples, rank=rank, world_size=world_size, **kwargs)
        self.total_size, self._is_shared = total_size, is_shared

    def share(self, rank: int, world_size: int, stream: SecretStream) -> None:
        """Draw as one of these processes from now on, with a stream that all of them share."""
        self.num_samples = len(range(rank, self.total_size, world_size))
        self.rank, self.world_size = rank, world_size
        self.stream, self._is_shared = stream, True

    def _splits_for(self, optimizer: Any) -> bool:
        # Optimizers of other models step alone; and rows of a unit stay together.
        together = self._is_shared and getattr(optimizer, "_sharded", None) is not None
        return together and self.units is None

    def _largest(self) -> int:
        assert self._last is not None
        counts = []
        for rank in range(self.world_size):
            samples = len(range(rank, self.total_size, self.world_size))
            counts.append(coin_tosses(self._last, samples, self.sample_rate, shard=rank).sum())
        return int(max(counts))
