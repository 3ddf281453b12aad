"""The engine's loader: Poisson batches, in one process or several, and what it cannot replace."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from opacus.data_loader import DPDataLoader
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import Tensor, distributed as dist
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from flash_clipping._compat import pytree
from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.no_trace import random_state
from flash_clipping.distributed.process_groups import ProcessGroups, shared_stream
from flash_clipping.engine import wings
from flash_clipping.engine.accounting import Mechanism
from flash_clipping.engine.sampling.samplers import PoissonSampler, ShardedPoissonSampler
from flash_clipping.engine.sampling.units import Users
from flash_clipping.errors import Coded, FlashClippingError, InvalidValue, checked_number, warn
from flash_clipping.randomness import SecretStream

#: Lists of more samples are not searched for an object that is there twice.
_MOST_OBJECTS = 200_000

_POISSON = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)


class NotPoissonWarning(Coded, UserWarning):
    """Steps are accounted as if their batches were drawn by Poisson sampling, and they are not."""


class PoissonLoader(DPDataLoader):
    """Opacus' ``DPDataLoader`` with the samplers of this module.

    A draw without samples is given as one row, the first of the data, which a private model knows
    to be nobody's. ``from_data_loader`` takes all but the sampling from another loader.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        sample_rate: probability of every sample in every step; ``round(1 / sample_rate)`` steps are
            an epoch.
        collate_fn: as in PyTorch.
        drop_last: without meaning here.
        stream: what to draw with; a new one with a key of its own if ``None``.
        process: how batches are drawn, a :class:`~flash_clipping.noise.Mechanism`.
        fills_up: whether batches with fewer rows than ``max_batch_size`` are filled up.
        units: draw these, and not rows: every step has all rows of each unit that was drawn.
        distributed: every process of ``torch.distributed`` draws its part of each batch: samples,
            or units, that are its own.
        processes: those of a model whose parameters are shards, in the place of all: each group of
            them that shares its samples draws one part.
        **kwargs: as in PyTorch.

    Raises:
        ValueError: ``sample_rate`` not in ``(0, 1]``; processes whose loaders differ, or that draw
            units.
    """

    #: Whether the model is told of batches; if not, of parts by whoever runs it on them.
    announces = True
    batch_sampler: PoissonSampler

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        sample_rate: float,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        stream: SecretStream | None = None,
        process: Mechanism | None = None,
        fills_up: bool = True,
        units: Users | None = None,
        distributed: bool = False,
        processes: ProcessGroups | None = None,
        **kwargs: Any,
    ):
        checked_number("sample_rate", sample_rate, "(0, 1]", example=0.01)
        distributed = distributed or processes is not None
        self.sample_rate, self.distributed = sample_rate, distributed
        size, steps = len(dataset), round(1 / sample_rate)  # type: ignore[arg-type]
        stream = SecretStream() if stream is None else stream
        process = wings.PoissonSampling() if process is None else process
        options: dict[str, Any] = {"steps": steps}
        is_shared = processes is not None or not process.is_plain
        if distributed:
            _refuse_different(size, steps, units)
            options |= {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
            if processes is not None:  # those that share samples draw the same
                options |= {"rank": processes.data_rank, "world_size": processes.data_size}
                stream = processes.shared_stream(stream)
            elif is_shared:
                stream = shared_stream([dist.group.WORLD], stream)
        if units is not None:
            options["units"] = units
            size = len(units.rows)
        options |= {"stream": stream, "sample_rate": sample_rate}
        sampler: PoissonSampler
        if distributed and process.is_plain:
            sampler = ShardedPoissonSampler(total_size=size, is_shared=is_shared, **options)
        else:
            sampler = process.sampler(num_samples=size, fills_up=fills_up, **options)
        collate: Any = collate_fn or default_collate
        while hasattr(collate, "wrapped_collator_fn"):  # that of a loader which is private already
            collate = collate.wrapped_collator_fn
        by_order = "units" if sampler.units is not None else ""
        by_order = "max_batch_size" if getattr(sampler, "max_batch_size", None) else by_order
        collate = BatchCollate(collate, dataset, sampler, by_order)
        DataLoader.__init__(self, dataset, batch_sampler=sampler, collate_fn=collate, **kwargs)

    @classmethod
    def from_data_loader(cls, data_loader: DataLoader[Any], **kwargs: Any) -> Any:
        """This loader for another one's data, at that one's rate unless ``sample_rate`` is given.
        That one's own generator goes on seeding workers; it does not tell what is drawn."""
        names = "num_workers pin_memory timeout worker_init_fn multiprocessing_context"
        names += " prefetch_factor persistent_workers drop_last collate_fn generator"
        options = {name: getattr(data_loader, name) for name in names.split()} | kwargs
        options.setdefault("sample_rate", 1 / len(data_loader))
        return cls(data_loader.dataset, **options)

    def share(self, processes: ProcessGroups) -> None:
        """Draw with the other processes of a model that was sharded since this loader was made; all
        of them call it, and those that share their samples draw the same."""
        sampler = cast(ShardedPoissonSampler, self.batch_sampler)
        stream = processes.shared_stream(sampler.stream)
        sampler.share(processes.data_rank, processes.data_size, stream)

    def __iter__(self) -> Any:
        sampler = self.batch_sampler
        if not self.announces:
            return super().__iter__()
        sampler.gives_a_row = True
        try:
            batches = super().__iter__()
        finally:
            sampler.gives_a_row = False
        return _announced(batches, sampler, sampler.pending)


class BatchCollate:
    """Collates by the user's function, and announces what it collates in the process of the model,
    where the loader does not: whoever called it takes it next. It goes into what others make of the
    loader, ``BatchMemoryManager``.

    Args:
        by_order: what goes by the order of rows, if anything does: samples in reverse order must
            give rows in reverse order then. That is checked in the first batches, in every process
            that collates, until one had rows that differ.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], dataset: Any, sampler: Any, by_order: str = ""
    ):
        self.wrapped_collator_fn, self.dataset, self.sampler = collate, dataset, sampler
        self.by_order = by_order

    def __getstate__(self) -> dict[str, Any]:  # a worker has none, nor its key
        return self.__dict__ | {"sampler": None}

    def __call__(self, samples: Any) -> Any:
        sampler: Any = self.sampler if get_worker_info() is None else None
        tells = sampler is not None and not sampler.by_loader
        tells = tells and (not sampler.strict or sampler.in_parts)
        is_list = isinstance(samples, list)  # else what the dataset's __getitems__ gave
        draw = sampler.last if tells else None
        if not samples if is_list else draw is not None and not draw.rows:
            if draw is None:  # a row would be taken for a sample
                raise FlashClippingError(
                    "FC253 BatchMemoryManager, or another loader around that of make_private: "
                    "found a draw without samples, whose row nobody tells the model of. Use "
                    "MicroBatches(optimizer), or let the process of the model collate:\n"
                    "    DataLoader(..., num_workers=0)"
                )
            samples = [self.dataset[0]] if is_list else self.dataset.__getitems__([0])
            draw = draw.with_a_row()
        elif draw is not None and not sampler.strict:
            own = samples if is_list else next((x for x in tensors_in(samples) if x.dim()), None)
            rows = draw.rows if own is None else len(own)
            draw = replace(draw, samples=rows, rows=rows)
        batch = self._collated(samples)
        if draw is not None:
            sampler.announce(draw, batch)
        return batch

    def _collated(self, samples: Any) -> Any:
        by_order = self.by_order
        if not by_order or not isinstance(samples, list) or len(samples) < 2:
            return self.wrapped_collator_fn(samples)
        reverse = copy.deepcopy(samples[::-1])  # collate functions may take samples apart
        with torch.random.fork_rng(devices=[]):
            backward = self.wrapped_collator_fn(reverse)
        batch = self.wrapped_collator_fn(samples)
        for rows, other in zip(tensors_in(batch), tensors_in(backward), strict=False):
            if not rows.dim() or len(rows) != len(samples) or rows.shape != other.shape:
                continue
            if not _are_equal(rows, other.flip(0)):
                raise FlashClippingError(
                    f"FC284 collate_fn: {by_order} goes by the order of the rows, and this "
                    "collate function gave other rows for the same samples in reverse order. Sort "
                    "inside of the model, and change samples in the dataset's __getitem__."
                )
            if not _are_equal(rows, other):
                self.by_order = ""  # it keeps it
        return batch


def _are_equal(x: Tensor, y: Tensor) -> bool:
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _announced(batches: Any, sampler: PoissonSampler, pending: deque[DrawnBatch]) -> Iterator[Any]:
    """Batches that are not announced when they are collated (``BatchCollate``)."""
    try:
        for batch in batches:
            sampler.announce(pending.popleft(), batch)
            yield batch
    finally:  # a loop that was left early, too
        sampler.given += len(pending)  # drawn, and never given
        sampler.draws.end_epoch()


def _refuse_different(size: int, steps: int, units: Users | None) -> None:
    """Refuse loaders of several processes that do not draw from the same data."""
    own = f"{size} samples, {steps} batches"
    if units is not None:
        digest = hashlib.sha256(units.by_row.numpy().tobytes()).hexdigest()[:16]
        own += f", {len(units.rows)} units (map {digest}), max_rows={units.max_rows}"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    if len(set(found)) > 1:
        listed = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
        raise InvalidValue(
            f"FC331 data_loader: the processes' loaders differ ({listed}). Expected the whole "
            "dataset, the same batch size and the same units in every process."
        )


def refuse_no_batch(loader: DataLoader[Any]) -> None:
    """Raise ``ValueError`` for a loader without batches: no step would have a sample rate."""
    if not isinstance(loader, DataLoader):
        _refuse(f"a {type(loader).__name__}", "Give torch.utils.data.DataLoader(dataset, ...)")
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None
    if size == 0:
        _refuse("a dataset without samples", "See what it was read from")
    if size and not len(loader):
        found = f"no batch: {size} samples and drop_last=True"
        _refuse(found, "Use a smaller batch size, or drop_last=False")


def refuse_loader(loader: Any, *, poisson_sampling: bool, distributed: bool) -> None:
    """Raise ``ValueError`` for a loader whose sampling can be neither replaced nor accounted for:
    that samples in another way than all of the dataset alike, once per epoch."""
    dataset, batches = loader.dataset, loader.batch_sampler
    if isinstance(dataset, IterableDataset) and poisson_sampling:
        _refuse(
            f"its dataset is a {type(dataset).__name__}, an IterableDataset"
            + ("" if isinstance(dataset, Sized) else " without __len__"),
            "Samples are drawn by their number, of a known number of them. Use a dataset with "
            "__len__ and __getitem__; or, where reading the stream again in every step is "
            "affordable,\n    StreamedDataset([dataset], sizes=["
            + (str(len(dataset)) if isinstance(dataset, Sized) else "...")
            + "])\nof flash_clipping; or poisson_sampling=False, for which "
            "epsilon is an approximation",
        )
    if batches is None and (poisson_sampling or not isinstance(dataset, IterableDataset)):
        _refuse("batch_size=None", "Give it a batch size: samples are one axis of a batch")
    size = len(dataset)
    rate = getattr(batches, "sample_rate", 0.0)
    is_another = getattr(batches, "is_strict", False) or rate > (1 + 1e-9) / len(loader)
    if is_another and not poisson_sampling:
        _refuse(
            f"batch_sampler={type(batches).__name__} with sample_rate={rate}, {len(loader)} "
            "batches, and poisson_sampling=False",
            "Poisson batches of a rate of one over their number would be accounted. Leave "
            "poisson_sampling out",
        )
    if isinstance(batches, _POISSON) or batches is None:
        return
    if type(batches) is not BatchSampler:
        if poisson_sampling:
            _refuse(
                f"batch_sampler={type(batches).__name__}",
                "Poisson sampling would replace it. Use DataLoader(dataset, batch_size=..., "
                "shuffle=True), as it was before anything prepared it",
            )
        return
    sampler: Any = batches.sampler
    is_plain = type(sampler) in (SequentialSampler, RandomSampler) and len(sampler) == size
    if type(sampler) is DistributedSampler:
        is_plain = distributed or sampler.num_replicas == 1
    replaces = isinstance(sampler, RandomSampler) and sampler.replacement
    is_odd = isinstance(sampler, SubsetRandomSampler | WeightedRandomSampler) or replaces
    is_odd |= isinstance(sampler, RandomSampler) and len(sampler) != size
    if is_odd or (poisson_sampling and not is_plain):
        found = f"sampler={type(sampler).__name__}, with {len(sampler)} of {size} samples"
        _refuse(
            found + ", replaced when drawn" * replaces,
            "Epsilon is for batches that draw all of the dataset alike, with one probability. Use "
            "DataLoader(dataset, batch_size=..., shuffle=True), with torch.utils.data.Subset for "
            "a part of the data, and weights in the loss of each sample",
        )


def refuse_repeats(dataset: Any) -> None:
    """Raise ``ValueError`` for a dataset that has a sample more than once, as far as its indices,
    its parts and the objects of its lists tell."""
    if not (_table_of(dataset) or isinstance(dataset, Subset | ConcatDataset | list)):
        return
    found: dict[Any, list[Any]] = {}
    for source, numbers in _samples(dataset, np.arange(len(dataset))):
        found.setdefault(source, []).append(numbers)
    if all(
        len(np.unique(numbers)) == len(numbers) for numbers in map(np.concatenate, found.values())
    ):
        return
    line = "unit=Users(ids))  # one integer for every row, the same for a repeated one"
    if isinstance(dataset, Subset) and not isinstance(dataset.dataset, Subset | ConcatDataset):
        places = np.asarray(dataset.indices) % len(dataset.dataset)  # type: ignore[arg-type]
        if len(np.unique(places)) < len(places):
            line = "unit=Users(data_loader.dataset.indices))"
    _refuse(
        f"a {type(dataset).__name__} that has a sample more than once",
        "It would count once for each of its places. Declare whose each is:\n"
        f"    make_private(..., {line}\nor leave repetitions out, and train for more epochs",
    )


def _samples(dataset: Any, index_R: Any) -> Iterator[tuple[Any, Any]]:
    """What tells these rows apart: where they are from in the end, and their numbers there. A
    dataset of another kind than are known is one alone."""
    if not len(index_R):
        return
    index_R = index_R % len(dataset)  # numbers from the end
    if isinstance(dataset, Subset):
        places = np.asarray(dataset.indices)
        if places.dtype.kind in "iu":  # not names
            yield from _samples(dataset.dataset, places[index_R])
    elif isinstance(dataset, ConcatDataset):
        starts = np.array([0, *dataset.cumulative_sizes])
        part_R = np.searchsorted(starts, index_R, side="right") - 1
        for place, part in enumerate(dataset.datasets):
            yield from _samples(part, index_R[part_R == place] - starts[place])
    elif table := _table_of(dataset):
        if dataset._indices is not None:  # the table of what was selected
            index_R = dataset._indices.column(0).to_numpy().astype(np.int64)[index_R]
        at: list[Any] = []  # in memory: the same for a table that was joined with itself
        for chunk in table.column(0).chunks:
            first = next((x.address for x in chunk.buffers()[1:] if x), id(chunk))
            at.append(8 * first + chunk.offset + np.arange(len(chunk)))
        yield "memory", np.concatenate(at)[index_R]
    else:
        yield id(dataset), index_R
        if isinstance(dataset, list) and len(index_R) <= _MOST_OBJECTS:
            # One object is one sample, but numbers, texts and tuples of these may be equal.
            own: Any = list | dict | Tensor | np.ndarray
            samples = [dataset[index] for index in index_R]
            inside = [(x, *x) if isinstance(x, tuple) else (x,) for x in samples]
            ids = [id(x[0]) for x in inside if any(isinstance(part, own) for part in x)]
            yield "objects", np.array(ids, dtype=np.int64)


def _table_of(dataset: Any) -> Any:
    """The table of a dataset of Hugging Face's."""
    package = type(dataset).__module__.partition(".")[0]
    return getattr(dataset, "_data", None) if package == "datasets" else None


def _refuse(found: str, advice: str) -> None:
    raise InvalidValue(f"FC330 data_loader: found {found}. {advice}.")


def refuse_split_units(module: Any, by: str) -> None:
    """Raise ``FlashClippingError`` for steps ``by`` this on other batches than were drawn: parts of
    them, or several together."""
    if module is not None and module._session.rows.whole_batches:
        raise FlashClippingError(
            f"FC283 {by}: found a loader whose batches must come whole (units, max_batch_size or "
            "batches in an order): parts of one unit would be clipped one by one. Nothing was "
            "released. Call optimizer.step() after every batch, and use a loader with another "
            "batch_size, Users(ids, max_rows=...), or activation checkpointing (mode='two_pass')."
        )


def watch_sampling(engine: Any, module: Any, optimizer: Any, loader: Any) -> None:
    """Announce batches to the model; warn when steps were not sampled as they are accounted."""
    sampler, session = loader.batch_sampler, module._session
    is_ours = isinstance(sampler, PoissonSampler)
    in_order = is_ours and sampler.taken is not None
    session.rows.units_of_calls.from_loader = is_ours and sampler.units is not None
    session.rows.units_of_calls.are_items = is_ours
    session.rows.padding.rows = getattr(sampler, "rows", None)
    session.rows.whole_batches = is_ours and sampler.strict
    if is_ours:
        sampler.follow(module)
        module.forbid_grad_accumulation()  # a second backward is of the same samples
    elif not isinstance(sampler, _POISSON) and len(loader) != 1:  # nor all of the data
        _warn(engine, f"poisson_sampling=False, and a loader with {type(sampler).__name__}")
    #: Steps on batches that nobody announced: BatchMemoryManager's, whose workers collate.
    silent, account = 0, optimizer.step_hooks[0]

    def note_step(optimizer: Any) -> None:
        nonlocal silent
        draw = getattr(optimizer.step_record, "draw", None)
        if in_order:
            sampler.check_step(draw)  # before noise is drawn, too, where it is correlated
        elif is_ours:
            silent += draw is None
            if draw is not None and draw.rate > sampler.sample_rate:
                _warn(engine, f"a batch of another loader, which draws by {draw.rate:.3g}")
            elif draw is not None and draw.stepped:
                _warn(engine, f"a second step on batch {draw.number} of the loader")
            elif draw is None and silent > sampler.drawn - sampler.given:
                found = "a step on a batch that the loader which make_private returned did not give"
                _warn(engine, f"{found} for it")
        session.rows.draws.note_step(draw)
        if draw is not None:
            draw.stepped = True
        account(optimizer)
        if in_order:
            sampler.taken += 1

    optimizer.step_hooks[0] = note_step


def _warn(engine: Any, found: str) -> None:
    if not engine._warned_not_poisson:
        engine._warned_not_poisson = True
        warnings.warn(
            f"FC335 Batches are not drawn by Poisson sampling: found {found}. The epsilon that is "
            "reported may be too small for them. Take batches from the loader that make_private "
            "returns, with poisson_sampling=True; for an epsilon that holds in any order, "
            "make_private(mechanism=Shuffled()) with accountant='pld'.",
            NotPoissonWarning,
            stacklevel=5,
        )


def warn_of_mixing(loader: DataLoader[Any]) -> None:
    """Warn of a collate function that mixes samples: two batches with one sample in common have no
    row in common. Both are made of the same items, by the same random numbers.

    Warns:
        UserWarning: so it is for some tensor. Not of random rows that are padded differently.
    """
    dataset, collate = loader.dataset, loader.collate_fn
    if collate in (None, default_collate) or not hasattr(dataset, "__getitem__"):
        return

    def rows(*items: Any, seed: int = 0) -> list[Tensor]:
        with random_state([], seed=seed):
            found = collate(copy.deepcopy([*items]))
        tensors = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]
        return [x for x in tensors if x.dim() and len(x) == len(items)]

    try:
        with random_state([], seed=0):
            first, second, third = (dataset[index] for index in range(3))
        # A permutation of two may leave them as they are.
        draws = [[rows(first, x, seed=seed) for x in (second, third)] for seed in range(6)]
        one, pairs = draws[0][0], [pair for each in draws for pair in zip(*each, strict=True)]
        if not all(map(torch.equal, one, rows(first, second))):
            return  # it draws by a generator of its own
        is_random = not all(all(map(torch.equal, one, anew)) for anew, _ in draws)
        if is_random and any(x.shape != y.shape for x, y in pairs):
            return
        if all(_share_a_row(x, y) for x, y in pairs):
            return
    except Exception:  # noqa: BLE001  (it needs other items, or more of them)
        return
    name = getattr(collate, "__name__", type(collate).__name__)
    warn(
        f"FC336 data_loader: its collate_fn ({name}) gives a sample another row beside another "
        "sample. If it mixes samples (mixup, cutmix, statistics of the batch), no clipping bounds "
        "one. Augment each sample alone, in the dataset:\n"
        "    DataLoader(dataset, batch_size=batch_size)",
        stacklevel=3,
    )


def _share_a_row(one: Tensor, other: Tensor) -> bool:
    """Whether two batches have a row in common, in what both have: one may be padded further."""
    sizes = [min(pair) for pair in zip(one.shape[1:], other.shape[1:], strict=True)]
    both = tuple(slice(size) for size in sizes)
    return any(torch.equal(a[both], b[both]) for a in one for b in other)
