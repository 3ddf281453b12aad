"""The engine's loader: Poisson batches, in one process or several, and what it cannot replace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from opacus.data_loader import DPDataLoader
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import distributed as dist
from torch.utils.data import (
    BatchSampler,
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

from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.no_samples import CollateWithEmpty
from flash_clipping.engine.accounting import Process
from flash_clipping.engine.fixed_shapes import FixedShapeSampler
from flash_clipping.engine.sampling.ordered import (
    CyclicPoissonSampler,
    FixedOrderSampler,
    OrderedSampler,
)
from flash_clipping.engine.sampling.row_order import OrderedCollate
from flash_clipping.engine.sampling.samplers import (
    BatchSizeNotifier,
    PoissonSampler,
    ShardedPoissonSampler,
)
from flash_clipping.randomness import SecretStream

_POISSON = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)


class NotPoissonWarning(UserWarning):
    """Steps are accounted as if their batches were drawn by Poisson sampling, and they are not."""


class PoissonLoader(DPDataLoader):
    """Opacus' ``DPDataLoader`` with the samplers of this module.

    Batches may be empty: they have the structure of the others. Made by ``from_data_loader``, which
    takes all but the sampling from another loader.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        sample_rate: probability of every sample in every step; ``round(1 / sample_rate)`` steps are
            an epoch.
        collate_fn: as in PyTorch.
        drop_last: without meaning here.
        generator: a ``torch.Generator`` that seeds the draws: for tests and debugging. PyTorch
            seeds its workers with it, too.
        stream: what to draw with; a new one with a key of its own if ``None``.
        process: how batches are drawn (:mod:`flash_clipping.engine.accounting`).
        distributed: every process of ``torch.distributed`` draws its part of each batch.
        batch_first: accepted for compatibility; the batch axis is found.
        rand_on_empty: must be false.
        **kwargs: as in PyTorch.

    Raises:
        ValueError: ``rand_on_empty``; processes whose loaders differ.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        sample_rate: float,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        generator: Any = None,
        stream: SecretStream | None = None,
        process: Process | None = None,
        distributed: bool = False,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        **kwargs: Any,
    ):
        if rand_on_empty:
            raise ValueError(
                "rand_on_empty=True: found a request to put a made-up sample into batches without "
                "samples. It would take part in the sum, which then changes by up to 2 C when a "
                "sample is added to such a batch. Leave it out: batches without samples are served."
            )
        self.sample_rate = sample_rate
        self.distributed = distributed
        size = len(dataset)  # type: ignore[arg-type]
        steps = round(1 / sample_rate)
        sampler: PoissonSampler
        process = Process() if process is None else process
        if distributed and not process.is_plain:
            raise ValueError(
                f"data_loader: found {process.state_dict()} with a model of several processes. "
                "Each would draw its own part of a batch, which no accountant here describes. "
                "Train in one process."
            )
        if distributed:
            _refuse_different(size, steps)
            sampler = ShardedPoissonSampler(
                total_size=size,
                sample_rate=sample_rate,
                steps=steps,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                generator=generator,
                stream=stream,
            )
        else:
            sampler = _sampler(
                process,
                num_samples=size,
                sample_rate=sample_rate,
                steps=steps,
                generator=generator,
                stream=stream,
            )
        collate = collate_fn or default_collate
        while hasattr(collate, "wrapped_collator_fn"):  # of a loader that is private already
            collate = collate.wrapped_collator_fn
        if isinstance(sampler, FixedShapeSampler):
            collate = OrderedCollate(collate, "max_batch_size")
        DataLoader.__init__(
            self,
            dataset,
            batch_sampler=sampler,
            collate_fn=_AnnouncingCollate(collate, dataset, sampler.announce),
            generator=generator,
            **kwargs,
        )

    @classmethod
    def from_data_loader(
        cls, data_loader: DataLoader[Any], *, generator: Any = None, **kwargs: Any
    ) -> Any:
        """This loader for another one's data.

        That one's own generator, which shuffled its batches, goes on seeding workers. It does not
        tell what is drawn: people set it to a number that everybody knows.

        Args:
            data_loader: what to take all but the sampling from.
            generator: seeds the draws, for tests and debugging.
            **kwargs: ``stream``, ``distributed``, ``batch_first``, ``rand_on_empty``.
        """
        if isinstance(data_loader.dataset, IterableDataset):
            raise ValueError("Uniform sampling is not supported for IterableDataset")
        loader = cls(
            data_loader.dataset,
            sample_rate=1 / len(data_loader),
            num_workers=data_loader.num_workers,
            collate_fn=data_loader.collate_fn,
            pin_memory=data_loader.pin_memory,
            drop_last=data_loader.drop_last,
            timeout=data_loader.timeout,
            worker_init_fn=data_loader.worker_init_fn,
            multiprocessing_context=data_loader.multiprocessing_context,
            generator=generator,
            prefetch_factor=data_loader.prefetch_factor,
            persistent_workers=data_loader.persistent_workers,
            **kwargs,
        )
        if generator is None:
            loader.generator = data_loader.generator
        return loader

    def __iter__(self) -> Any:
        batches = super().__iter__()
        strict = self.batch_sampler.announce.strict
        if not strict and not self.num_workers and getattr(self.collate_fn, "counts", True):
            return batches  # the collate function announces them
        return AnnouncedBatches(batches, self.batch_sampler, ahead=bool(self.num_workers))


def _sampler(process: Process, **options: Any) -> PoissonSampler:
    """What draws the batches of a process."""
    if process.max_batch_size is not None:
        return FixedShapeSampler(max_batch_size=process.max_batch_size, **options)
    if process.sampling == "fixed_order":
        return FixedOrderSampler(**options)
    if process.sampling == "cyclic_poisson":
        return CyclicPoissonSampler(cycle=process.cycle, **options)
    return PoissonSampler(**options)


class _AnnouncingCollate(CollateWithEmpty):
    """Announces what it collates in the process of the model: whoever called it takes it next.

    It goes with the loader into what others make of it, as ``BatchMemoryManager`` does.
    """

    def __init__(
        self, collate: Callable[[list[Any]], Any], dataset: Any, announce: BatchSizeNotifier
    ):
        super().__init__(collate, dataset)
        self.announce = announce
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        #: Whether what is collated is a list of samples; a dataset may fetch a batch as it likes.
        #: Batches of such a dataset are announced by the loader; those of others' loaders are not.
        self.counts = not callable(getattr(dataset, "__getitems__", None))
        if announce.strict:
            self.counts = False

    def __call__(self, samples: list[Any]) -> Any:
        batch = super().__call__(samples)
        if self.counts and get_worker_info() is None:
            count = len(samples)
            self.announce(replace(self.announce.last, samples=count, rows=count))
        return batch


class AnnouncedBatches:
    """An iterator over batches that workers have collated ahead, whose samples cannot be counted
    when they are collated, or whose rows are compared with what the model is called with.

    Args:
        batches: a loader's own iterator.
        sampler: what draws for it.
        ahead: whether workers draw ahead.
        taken_apart: makes of what is collated the batch, and what is known of it.
    """

    def __init__(
        self,
        batches: Any,
        sampler: Any,
        ahead: bool,
        taken_apart: Callable[[Any, DrawnBatch], tuple[Any, DrawnBatch]] = lambda batch, draw: (
            batch,
            draw,
        ),
    ):
        self._batches = batches
        # With workers, those of this epoch: its first batches are drawn by now. Without, a
        # batch is given as soon as it is drawn, also where other iterators are in between.
        pending = sampler.pending if ahead else None
        self._announced = _announced(batches, sampler.announce, pending, taken_apart)

    def __iter__(self) -> AnnouncedBatches:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        return next(self._announced)


def _announced(
    batches: Any, announce: BatchSizeNotifier, pending: deque[DrawnBatch] | None, taken_apart: Any
) -> Iterator[Any]:
    try:
        for collated in batches:
            drawn = announce.last if pending is None else pending.popleft()
            batch, draw = taken_apart(collated, drawn)
            if announce.strict:
                draw = replace(draw, tensors=tensors_in(batch))
            announce(draw)
            yield batch
    finally:  # a loop that was left early, too
        announce.given += 0 if pending is None else len(pending)  # drawn, and never given
        announce.draws.end_epoch()


def _refuse_different(size: int, steps: int) -> None:
    """Refuse loaders of several processes that do not draw from the same data."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (size, steps))
    if len(set(found)) > 1:
        listed = "; ".join(f"rank {r}: {n} samples, {s} batches" for r, (n, s) in enumerate(found))
        raise ValueError(
            f"data_loader: the processes' loaders differ ({listed}). Expected the whole dataset "
            "and the same batch size in every process: each then draws its own share of it."
        )


def refuse_loader(loader: Any, *, poisson_sampling: bool, distributed: bool) -> None:
    """Refuse a loader whose sampling can be neither replaced nor accounted for.

    Raises:
        ValueError: it samples in another way than all of the dataset alike, once per epoch.
    """
    if isinstance(loader.dataset, IterableDataset) and poisson_sampling:
        _refuse(
            f"its dataset is a {type(loader.dataset).__name__}, an IterableDataset",
            "Poisson sampling draws samples by their index. Use a dataset with __len__ and "
            "__getitem__, or poisson_sampling=False, for which epsilon is an approximation",
        )
    if not hasattr(loader.dataset, "__len__"):
        _refuse(
            f"its dataset ({type(loader.dataset).__name__}) has no __len__",
            "The sample rate and the expected batch size need the number of samples",
        )
    batches = loader.batch_sampler
    if batches is None and (poisson_sampling or not isinstance(loader.dataset, IterableDataset)):
        _refuse("batch_size=None", "Give it a batch size: samples are one axis of a batch")
    if not len(loader):
        _refuse(
            f"no batch: {len(loader.dataset)} samples and drop_last=True",
            "Use a smaller batch size, or drop_last=False",
        )
    if isinstance(batches, FixedShapeSampler | OrderedSampler) and not poisson_sampling:
        _refuse(
            f"batch_sampler={_name(batches)}, of another engine, with poisson_sampling=False",
            "Its batches are accounted for by that engine alone. Leave poisson_sampling out",
        )
    rate = getattr(batches, "sample_rate", 0.0)
    if not poisson_sampling and rate > (1 + 1e-9) / len(loader):
        _refuse(
            f"a Poisson sampler with sample_rate={rate}, and {len(loader)} batches",
            "A rate of one over the number of batches would be accounted. Use such a rate, or "
            "leave poisson_sampling out",
        )
    if isinstance(batches, _POISSON) or batches is None:
        return
    if type(batches) is not BatchSampler:
        if poisson_sampling:
            _refuse(
                f"batch_sampler={_name(batches)}",
                "Poisson sampling would replace it, and draw batches of another kind. Use "
                "DataLoader(dataset, batch_size=..., shuffle=True), as it was before anything "
                "prepared it",
            )
        return
    sampler: Any = batches.sampler
    size = len(loader.dataset)
    if isinstance(sampler, WeightedRandomSampler):
        _refuse(
            f"sampler={_name(sampler)}",
            "Its weights give samples different probabilities, and epsilon is computed for one "
            "that all share. Use DataLoader(dataset, batch_size=..., shuffle=True), and weights in "
            "the loss of each sample",
        )
    if isinstance(sampler, RandomSampler) and (sampler.replacement or len(sampler) != size):
        _refuse(
            f"sampler=RandomSampler(replacement={sampler.replacement}, num_samples="
            f"{len(sampler)}) over {size} samples",
            "The sample rate would be another than batch_size / len(dataset). Use "
            "DataLoader(dataset, batch_size=..., shuffle=True)",
        )
    if isinstance(sampler, SubsetRandomSampler):
        _refuse(
            f"sampler={_name(sampler)}, with {len(sampler)} of {size} samples",
            "The others would be sampled too, and counted. Use "
            "DataLoader(torch.utils.data.Subset(dataset, indices), batch_size=..., shuffle=True)",
        )
    if not poisson_sampling:
        return
    if type(sampler) is DistributedSampler:
        if not distributed and sampler.num_replicas > 1:
            _refuse(
                f"a DistributedSampler for {sampler.num_replicas} processes, and a model of one",
                "Wrap the model in opacus.distributed.DifferentiallyPrivateDistributedDataParallel",
            )
    elif type(sampler) not in (SequentialSampler, RandomSampler) or len(sampler) != size:
        _refuse(
            f"sampler={_name(sampler)}, with {len(sampler)} of {size} samples",
            "Poisson sampling would replace it by one that draws all of the dataset alike. Use "
            "DataLoader(dataset, batch_size=..., shuffle=True), with torch.utils.data.Subset for "
            "a part of the data",
        )


def _refuse(found: str, advice: str) -> None:
    raise ValueError(f"data_loader: found {found}. {advice}.")


def _name(thing: Any) -> str:
    return type(thing).__name__


def is_accounted_for(loader: Any) -> bool:
    """Whether batches are what the accountants assume: Poisson, or all of the data."""
    return isinstance(loader.batch_sampler, _POISSON) or len(loader) == 1
