"""The engine's loader where rows of the dataset have owners: Poisson batches of privacy units.

A *unit* is a user, a patient, a hospital: whoever all rows with one id belong to. Every step draws
every unit independently with the sample rate, and gives all of its rows. Which rows are of one unit
goes with the batch through the workers, and is announced to the wrapped model for its next forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.capture.no_samples import CollateWithEmpty
from flash_clipping.engine.sampling.loaders import AnnouncedBatches
from flash_clipping.engine.sampling.row_order import OrderedCollate
from flash_clipping.engine.sampling.samplers import BatchSizeNotifier, PoissonSampler
from flash_clipping.errors import FlashClippingError
from flash_clipping.randomness import Draw, Purpose, SecretStream
from flash_clipping.randomness.choices import subset


class UnitsOfRows:
    """Which unit each row of a dataset belongs to.

    Args:
        units: ``[len(dataset)]``: the id of every row's unit, integers of any size.
        rows: how many rows the dataset has.
        sample_rate: the probability of every unit in every step.
        max_rows: at most so many rows of a unit are in a batch; ``None``: all of them.

    Attributes:
        count: how many units there are.

    Raises:
        ValueError: it is not one id for each row, or ``max_rows`` is below 1.
    """

    def __init__(
        self, units: Sequence[int] | Tensor, rows: int, sample_rate: float, max_rows: int | None
    ):
        ids = units.detach().cpu() if isinstance(units, Tensor) else torch.as_tensor(units)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ValueError(f"units: found {ids.dtype}; expected an integer for each row.")
        if tuple(ids.shape) != (rows,):
            raise ValueError(
                f"units: found shape {tuple(ids.shape)} for a dataset of {rows} rows; expected the "
                "id of one unit for each row."
            )
        if max_rows is not None and (isinstance(max_rows, bool) or max_rows < 1):
            raise ValueError(f"max_rows_per_unit: found {max_rows!r}; expected 1 or more, or None.")
        _, place_of_row, sizes = ids.unique(return_inverse=True, return_counts=True)
        self.count = len(sizes)
        self.sample_rate, self.max_rows = sample_rate, max_rows
        self._rows = place_of_row.argsort(stable=True)
        self._starts = [0, *sizes.cumsum(0).tolist()]

    def rows_of(self, unit: int, draw: Draw) -> list[int]:
        """Rows of a unit; of one with too many, some that are drawn anew each time.

        ``draw`` is the step's, of which the units themselves are tensor 0.
        """
        rows = self._rows[self._starts[unit] : self._starts[unit + 1]]
        if self.max_rows is not None and len(rows) > self.max_rows:
            rows = rows[subset(draw, len(rows), self.max_rows, tensor=1 + unit)]
        found: list[int] = rows.tolist()
        return found


class UnitSampler(PoissonSampler):
    """Every step draws every unit independently, with the same probability.

    A batch is a list of pairs: a row's index in the dataset, and its unit's place in the batch.

    Args:
        units: which unit each row of the dataset belongs to.
        steps: batches in an epoch.
        generator, stream: as in :class:`~flash_clipping.engine.sampling.samplers.PoissonSampler`.
    """

    def __init__(
        self,
        *,
        units: UnitsOfRows,
        steps: int,
        generator: Any = None,
        stream: SecretStream | None = None,
    ):
        super().__init__(
            num_samples=units.count,
            sample_rate=units.sample_rate,
            steps=steps,
            generator=generator,
            stream=stream,
        )
        self.units = units
        self.announce = BatchSizeNotifier(strict=True)

    def _samples(self, indices: list[Any]) -> int:
        return indices[-1][1] + 1 if indices else 0

    def _draw(self) -> list[Any]:
        draw = self.stream.draw(Purpose.SAMPLING)
        return [
            (row, place)
            for place, unit in enumerate(self._places(draw).tolist())
            for row in self.units.rows_of(unit, draw)
        ]


class _OwnedRows(Dataset[Any]):
    """A dataset whose rows go with the places of their units."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, pairs: list[tuple[int, int]]) -> tuple[list[int], Any]:
        rows = [row for row, _ in pairs]
        fetch = getattr(self.dataset, "__getitems__", None)
        found = fetch(rows) if callable(fetch) else [self.dataset[row] for row in rows]
        return [place for _, place in pairs], found


class _UnitCollate:
    """Collates rows as they would be without units, and the places of these beside them."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any):
        self.wrapped_collator_fn = collate
        self._collate = CollateWithEmpty(OrderedCollate(collate, "units"), dataset)

    def __call__(self, fetched: tuple[list[int], Any]) -> tuple[Tensor, Any]:
        places, rows = fetched
        return torch.tensor(places, dtype=torch.int64), self._collate(rows)


class UnitLoader(DataLoader[Any]):
    """Another loader with a :class:`UnitSampler`; its batches are that loader's kind of batches.

    Args:
        loader: what to take all but the sampling from.
        units: which unit each row of its dataset belongs to.
        generator: a ``torch.Generator`` that seeds the draws; not the loader's own, which goes on
            seeding workers.
        stream: what to draw with; a new one with a key of its own if ``None``.
        batch_first: accepted for compatibility.
        distributed, rand_on_empty: must be false.

    Raises:
        ValueError: one of these is not.
    """

    def __init__(
        self,
        loader: Any,
        units: UnitsOfRows,
        generator: Any = None,
        *,
        stream: SecretStream | None = None,
        distributed: bool = False,
        rand_on_empty: bool = False,
        batch_first: bool = True,
    ):
        if distributed:
            raise ValueError(
                "units: found with a model of several processes, each of which draws rows of its "
                "own. Train in one process; or make every item of the dataset a whole unit, and "
                "give make_private sample_of=... in the place of units."
            )
        if rand_on_empty:
            raise ValueError(
                "rand_on_empty=True: found with units. A made-up row would be a unit that nobody "
                "is. Leave it out: batches without rows are served."
            )
        dataset = plain_dataset(loader)
        collate = loader.collate_fn or default_collate
        while hasattr(collate, "wrapped_collator_fn"):  # of a loader that is private already
            collate = collate.wrapped_collator_fn
        self.sample_rate = units.sample_rate
        sampler = UnitSampler(units=units, steps=len(loader), generator=generator, stream=stream)
        super().__init__(
            _OwnedRows(dataset),
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=_UnitCollate(collate, dataset),  # type: ignore[arg-type]
            generator=loader.generator,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def __iter__(self) -> Any:
        ahead = bool(self.num_workers)
        return AnnouncedBatches(super().__iter__(), self.batch_sampler, ahead, _with_units)


def _with_units(collated: tuple[Tensor, Any], draw: DrawnBatch) -> tuple[Any, DrawnBatch]:
    """The batch, and what was drawn with the unit of each row."""
    unit_R, batch = collated
    return batch, replace(draw, unit_R=unit_R)


def plain_dataset(loader: Any) -> Any:
    """The user's dataset."""
    dataset = loader.dataset
    return dataset.dataset if isinstance(dataset, _OwnedRows) else dataset


def refuse_units(
    units: Any, max_rows: int | None, *, sample_of: Any, flash: bool, poisson: bool
) -> None:
    """Refuse arguments that do not go with ``units``.

    Raises:
        ValueError: units would be sampled otherwise than is accounted, or not at all.
    """
    if units is None:
        if max_rows is not None:
            raise ValueError(
                "max_rows_per_unit: found a number without units=..., the unit of every row."
            )
        return
    if not flash:
        raise ValueError("units: found with another grad_sample_mode; only 'flash' clips units.")
    if sample_of is not None:
        raise ValueError(
            "units and sample_of: found both. With units the loader says which unit each row "
            "belongs to; with sample_of an argument of the forward does, and items are units."
        )
    if not poisson:
        raise ValueError(
            "units: found with poisson_sampling=False; the loader would not draw units. Leave "
            "poisson_sampling at its default."
        )


def refuse_split_units(module: Any, *, by_hand: bool = False) -> None:
    """Refuse steps on other batches than were drawn: parts of one, or several.

    Args:
        module: the wrapped model, or its hooks.
        by_hand: whether the loop itself skips steps, not ``BatchMemoryManager``.

    Raises:
        FlashClippingError: parts of one unit would be clipped one by one; or who is drawn in two
            batches of one step would add twice the bound.
    """
    if module is None:
        return
    if by_hand:
        if module._session.whole_batches:
            raise FlashClippingError(
                "optimizer.signal_skip_step(): found a loader whose batches must come whole, with "
                "one step for each (units, max_batch_size or batches in an order). A step of two "
                "of them could hold one sample twice, and is accounted for as one. Call "
                "optimizer.step() after every batch; for larger steps use a loader with a larger "
                "batch_size. Nothing was released."
            )
        return
    if module._session.units_of_calls.from_loader:
        raise FlashClippingError(
            "BatchMemoryManager: found with make_private(units=...). It splits batches between any "
            "two rows, so that parts of one unit would be clipped one by one, and a unit could add "
            "several times the bound. Use a loader with a smaller batch_size, max_rows_per_unit, "
            "or activation checkpointing (mode='two_pass')."
        )
    if module._session.whole_batches:
        raise FlashClippingError(
            "BatchMemoryManager: found with make_private(max_batch_size=...) or batches in an "
            "order. It splits batches, and nobody could tell which parts are padding or which step "
            "a part belongs to. Use a loader with a smaller batch_size, or activation "
            "checkpointing (mode='two_pass')."
        )
