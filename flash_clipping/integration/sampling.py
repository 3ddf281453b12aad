"""The engine's loader: Poisson batches, in one process or several, and what it cannot replace.

The accountants assume that every step draws every sample independently with probability ``q``, the
*sample rate* that they are told. The samplers here do exactly that.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
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

from flash_clipping.capture.no_samples import CollateWithEmpty

#: Steps between two numbers that ``torch.rand`` draws in fp32, in [0, 1).
_GRID = 1 << 24

_POISSON = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)


class NotPoissonWarning(UserWarning):
    """Steps are accounted as if their batches were drawn by Poisson sampling, and they are not."""


class Announcer:
    """Tells the wrapped model how many samples the loader drew for its next forward.

    It does not where batches are fetched ahead of their forward, or left out: then nothing is known
    about the next forward, and the model is told that (``None``).
    """

    def __init__(self) -> None:
        self._module: weakref.ref[Any] | None = None
        self._waiting = False
        self._ahead = False

    def __getstate__(self) -> dict[str, Any]:  # a worker has no model
        return self.__dict__ | {"_module": None}

    def follow(self, module: Any) -> None:
        """Announce to this wrapped model, or hooks, from now on."""
        self._module = weakref.ref(module)
        # In front of what may refuse the forward: the batch after a refusal is announced as well.
        handle = module._module.register_forward_pre_hook(self._note_forward, prepend=True)
        module.autograd_grad_sample_hooks.append(handle)

    def _note_forward(self, module: Any, args: Any) -> None:
        self._waiting = False

    def new_epoch(self) -> None:
        """The loader starts anew."""
        self._waiting = self._ahead = False

    def end_epoch(self) -> None:
        """The loader has given its last batch, or nobody asks it for more."""
        self.new_epoch()
        self._tell(None)

    def __call__(self, samples: int | None) -> None:
        self._ahead = self._ahead or self._waiting
        self._waiting = True
        self._tell(None if self._ahead else samples)

    def _tell(self, samples: int | None) -> None:
        module = self._module() if self._module is not None else None
        expect = getattr(module, "expect_samples", None)
        if expect is not None:
            expect(samples)


class PoissonSampler(UniformWithReplacementSampler):
    """Batches of indices: every step draws every sample independently, with the same probability.

    Args:
        num_samples: in the dataset.
        sample_rate: the probability; exact, as far as the generator is.
        steps: batches in an epoch.
        generator: what to draw with; PyTorch's default if ``None``.

    Attributes:
        drawn: batches that were ever drawn.
    """

    def __init__(self, *, num_samples: int, sample_rate: float, steps: int, generator: Any = None):
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.steps = steps
        self.generator = generator
        self.drawn = 0
        #: Sizes of the batches of the running epoch that its loader has not given yet.
        self.sizes: deque[int] = deque()
        self.announce = Announcer()

    def __iter__(self) -> Iterator[list[int]]:
        self.announce.new_epoch()
        sizes: deque[int] = deque()
        self.sizes = sizes
        try:
            for _ in range(self.steps):
                indices = self._draw()
                self.drawn += 1
                sizes.append(len(indices))
                yield indices
        finally:  # a loop that was left early, too
            self.announce.end_epoch()

    def _draw(self) -> list[int]:
        # torch.rand(...) < rate draws by the next multiple of 2^-24: more than was accounted for.
        whole, rest = divmod(self.sample_rate * _GRID, 1)
        uniform = torch.rand(self.num_samples, generator=self.generator)
        mask = uniform < whole / _GRID
        edge = uniform == whole / _GRID
        if bool(edge.any()):
            again = torch.rand(
                int(edge.sum()), generator=self.generator, dtype=torch.float64, device=edge.device
            )
            mask[edge] = again < rest
        return mask.nonzero().flatten().tolist()


class ShardedPoissonSampler(PoissonSampler):
    """One process's part of batches that all processes draw together.

    Every sample is one process's, which draws it in every step with the given probability. All
    processes take as many steps, with local batches that may be empty. What they draw is
    independent, however their generators are seeded.

    Args:
        total_size: samples in the dataset, the same for all processes.
        sample_rate: the probability.
        steps: batches in an epoch, the same for all processes.
        rank: this process.
        world_size: how many there are.
        generator: where the seed comes from, together with ``rank``; entropy of the operating
            system if ``None``.

    Attributes:
        random: what to draw with; ``None``: ``generator`` itself, where it is a secure one.
    """

    def __init__(
        self,
        *,
        total_size: int,
        sample_rate: float,
        steps: int,
        rank: int,
        world_size: int,
        generator: Any = None,
    ):
        super().__init__(
            num_samples=len(range(rank, total_size, world_size)),
            sample_rate=sample_rate,
            steps=steps,
            generator=generator,
        )
        self.rank, self.world_size, self.total_size = rank, world_size, total_size
        seed: list[int] | None = None
        if generator is not None:
            seed = [int(torch.randint(1 << 62, (1,), generator=generator)), rank]
        self.random: np.random.Generator | None = np.random.default_rng(seed)

    def share(self, rank: int, world_size: int, seed: int) -> None:
        """Draw as one of fewer processes: those of one ``rank`` draw the same batches, where their
        ``seed`` is the same."""
        self.num_samples = len(range(rank, self.total_size, world_size))
        self.rank, self.world_size = rank, world_size
        self.random = np.random.default_rng([seed, rank])

    def _draw(self) -> list[int]:
        if self.random is None:
            places = np.asarray(super()._draw(), dtype=np.int64)
        else:
            places = np.flatnonzero(self.random.random(self.num_samples) < self.sample_rate)
        indices: list[int] = (places * self.world_size + self.rank).tolist()
        return indices


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
        generator: what to draw with; see the samplers.
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
        if distributed:
            _refuse_different(size, steps)
            sampler = ShardedPoissonSampler(
                total_size=size,
                sample_rate=sample_rate,
                steps=steps,
                rank=dist.get_rank(),
                world_size=dist.get_world_size(),
                generator=generator,
            )
        else:
            sampler = PoissonSampler(
                num_samples=size, sample_rate=sample_rate, steps=steps, generator=generator
            )
        collate = collate_fn or default_collate
        while hasattr(collate, "wrapped_collator_fn"):  # of a loader that is private already
            collate = collate.wrapped_collator_fn
        DataLoader.__init__(
            self,
            dataset,
            batch_sampler=sampler,
            collate_fn=_AnnouncingCollate(collate, dataset, sampler.announce),
            generator=generator,
            **kwargs,
        )

    def __iter__(self) -> Any:
        batches = super().__iter__()
        if not self.num_workers and getattr(self.collate_fn, "counts", True):
            return batches  # the collate function announces them
        return _AnnouncedBatches(batches, self.batch_sampler, ahead=bool(self.num_workers))


class _AnnouncingCollate(CollateWithEmpty):
    """Announces what it collates in the process of the model: whoever called it takes it next.

    It goes with the loader into what others make of it, as ``BatchMemoryManager`` does.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, announce: Announcer):
        super().__init__(collate, dataset)
        self.announce = announce
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        #: Whether what is collated is a list of samples; a dataset may fetch a batch as it likes.
        #: Batches of such a dataset are announced by the loader; those of others' loaders are not.
        self.counts = not callable(getattr(dataset, "__getitems__", None))

    def __call__(self, samples: list[Any]) -> Any:
        batch = super().__call__(samples)
        if self.counts and get_worker_info() is None:
            self.announce(len(samples))
        return batch


class _AnnouncedBatches:
    """An iterator over batches that workers have collated ahead, or whose samples cannot be counted
    when they are collated."""

    def __init__(self, batches: Any, sampler: Any, ahead: bool):
        self._batches = batches
        # With workers, the sizes of this epoch: its first batches are drawn by now. Without, of the
        # epoch that begins with the first batch.
        sizes = sampler.sizes if ahead else None
        self._announced = _announced(batches, sampler, sizes)

    def __iter__(self) -> _AnnouncedBatches:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        return next(self._announced)


def _announced(batches: Any, sampler: Any, sizes: deque[int] | None) -> Iterator[Any]:
    try:
        for batch in batches:
            sampler.announce((sampler.sizes if sizes is None else sizes).popleft())
            yield batch
    finally:  # a loop that was left early, too
        sampler.announce.end_epoch()


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
