"""Sampling: loaders, streams and collate functions."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from flash_clipping import FlashPrivacyEngine, NotPoissonWarning, Users
from flash_clipping.engine.sampling.loaders import PoissonLoader, warn_of_mixing
from flash_clipping.engine.sampling.samplers import PoissonSampler, ShardedPoissonSampler
from flash_clipping.engine.sampling.streams import StreamedDataset
from flash_clipping.randomness import SecretStream, SeededNoiseWarning
from tests.support.errors import raises, warns
from tests.support.private import made

N, BATCH = 60, 6


def data(count: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 4, generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )


def private(loader: Any, engine: PrivacyEngine | None = None, **options: Any) -> Any:
    return made(nn.Linear(4, 3), loader, engine, **options)


def step(module: Any, optimizer: Any, criterion: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    optimizer.step()


# -- refused loaders -------------------------------------------------------------------------------


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter(data())

    def __len__(self) -> int:
        return N


class ByLength(SequentialSampler):
    """A sampler of somebody's, of which nothing is known."""


def loaders() -> dict[str, tuple[Any, str]]:
    dataset = data()

    def with_sampler(sampler: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=BATCH, sampler=sampler)

    batches = BatchSampler(SequentialSampler(dataset), BATCH, drop_last=False)
    return {
        "weighted": (
            with_sampler(WeightedRandomSampler([1.0] * N, N)),
            "WeightedRandomSampler.*weights in the loss",
        ),
        "subset": (
            with_sampler(SubsetRandomSampler(range(12))),
            "SubsetRandomSampler.*12 of 60.*torch.utils.data.Subset",
        ),
        "replacement": (
            with_sampler(RandomSampler(dataset, replacement=True)),
            "RandomSampler.*replaced when drawn.*shuffle=True",
        ),
        "more_samples": (
            with_sampler(RandomSampler(dataset, num_samples=2 * N)),
            "with 120 of 60 samples",
        ),
        "part": (with_sampler(SequentialSampler(range(12))), "12 of 60 samples.*Subset"),
        "own": (with_sampler(ByLength(dataset)), "ByLength.*shuffle=True"),
        "own_batches": (
            DataLoader(dataset, batch_sampler=type("Bucketed", (BatchSampler,), {})(
                SequentialSampler(dataset), BATCH, False
            )),
            "batch_sampler=Bucketed.*shuffle=True",
        ),
        "list_of_batches": (DataLoader(dataset, batch_sampler=list(batches)), "batch_sampler=list"),
        "stream": (DataLoader(Stream(), batch_size=BATCH), "Stream, an IterableDataset.*__getit"),
        "no_batch_size": (DataLoader(dataset, batch_size=None), "batch_size=None"),
        "no_batch": (DataLoader(dataset, batch_size=2 * N, drop_last=True), "60 samples and drop"),
        "other_processes": (
            with_sampler(DistributedSampler(dataset, 2, 0)),
            "sampler=DistributedSampler, with 30 of 60 samples",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", loaders())
def test_a_loader_whose_sampling_would_be_replaced_silently_is_refused(name: str) -> None:
    loader, message = loaders()[name]
    with raises("FC330", ValueError, match=f"(?s)data_loader: found.*{message}"):
        private(loader)


@pytest.mark.parametrize("name", ["weighted", "subset", "replacement", "more_samples", "no_batch"])
def test_without_poisson_sampling_what_no_rate_describes_is_refused_too(name: str) -> None:
    loader, message = loaders()[name]
    with raises("FC330", ValueError, match=f"(?s)data_loader: found.*{message}"):
        private(loader, poisson_sampling=False)


@pytest.mark.parametrize("shuffle", [True, False])
def test_ordinary_loaders_are_accepted(shuffle: bool) -> None:
    *_, loader = private(DataLoader(data(), batch_size=BATCH, shuffle=shuffle))
    assert isinstance(loader.batch_sampler, PoissonSampler)
    assert len(loader) == N // BATCH and loader.sample_rate == BATCH / N
    *_, again = private(loader)  # private already
    assert len(again) == len(loader) and len(next(iter(again))) == 2
    private(DataLoader(data(), batch_sampler=again.batch_sampler))


def test_other_modes_of_the_engine_are_opacus() -> None:
    loader = loaders()["subset"][0]
    *_, found = private(loader, grad_sample_mode="hooks")
    assert not isinstance(found.batch_sampler, PoissonSampler)


# -- rate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [49, 93, 99, 186])
def test_an_epoch_has_as_many_steps_as_the_loader_had(batches: int) -> None:
    """int(1 / (1 / 93)) is 92: another rate would be accounted than is drawn with.
    int(49 * (1 / 49)) is 0, by which sums would be divided."""
    engine = FlashPrivacyEngine(accountant="rdp")
    module, optimizer, criterion, loader = private(DataLoader(data(batches), batch_size=1), engine)
    assert optimizer.expected_batch_size == 1
    step(module, optimizer, criterion, *next(iter(loader)))
    assert engine.accountant.history[0][1] == loader.batch_sampler.sample_rate == 1 / batches
    assert len(loader) == batches and len(list(loader)) == batches


# -- where draws come from -------------------------------------------------------------------------


def batches(loader: Any, epochs: int = 1) -> list[list[Any]]:
    """The rows of every batch."""
    return [rows.tolist() for _ in range(epochs) for (rows,) in loader]


def numbered(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(N)), batch_size=BATCH, **options)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_nobody_who_knows_the_generators_knows_the_batches() -> None:
    """Neither the loader's own generator, which people set for shuffling, nor PyTorch's."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        plain = numbered(shuffle=True, generator=seeded(0))
        *_, loader = private(plain)
        assert loader.generator is plain.generator  # seeds workers, as before
        found.append(batches(loader, 3))
    assert found[0] != found[1]


@pytest.mark.parametrize("units", [None, torch.arange(N) // 4])
def test_drawing_changes_no_state_of_a_generator(units: Any) -> None:
    options = {} if units is None else {"unit": Users(units, max_rows=2)}
    *_, loader = private(numbered(), **options)
    sampler = loader.batch_sampler
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert any(sampler)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]


@pytest.mark.parametrize("units", [None, torch.arange(N) // 4])
def test_the_engine_s_seed_is_the_loader_s(units: Any) -> None:
    found = []
    for _ in range(2):
        with warns("FC570", SeededNoiseWarning):
            engine = FlashPrivacyEngine(seed=5)
        *_, loader = private(numbered(), engine, unit=units if units is None else Users(units))
        found.append([*loader.batch_sampler])
    assert found[0] == found[1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_loader_draw_other_batches(copied: Any) -> None:
    loader = PoissonLoader.from_data_loader(numbered())
    assert batches(copied(loader), 2) != batches(loader, 2)


# -- shards ----------------------------------------------------------------------------------------


def shards(
    world: int, steps: int, rate: float = 0.5, total: int = 41, seed: int | None = None
) -> Tensor:
    """Which samples every process drew in every step: [ranks, steps, total]."""
    drawn = torch.zeros(world, steps, total, dtype=torch.bool)
    for rank in range(world):
        sampler = ShardedPoissonSampler(
            total_size=total,
            sample_rate=rate,
            steps=steps,
            rank=rank,
            world_size=world,
            stream=None if seed is None else SecretStream(seed=seed),
        )
        assert len(sampler) == steps
        for i, indices in enumerate(sampler):
            drawn[rank, i, indices] = True
    return drawn


def test_every_sample_is_one_process_s() -> None:
    owners = shards(3, steps=50).any(1).sum(0)
    assert (owners == 1).all()


@pytest.mark.parametrize("seed", [None, 0])
def test_processes_draw_independently_seeded_alike_or_not(seed: int | None) -> None:
    steps = 2000
    drawn = shards(2, steps, total=8, seed=seed).float()
    table = torch.cat([drawn[0, :, 0::2], drawn[1, :, 1::2]], 1)  # [steps, 8]
    correlation = torch.corrcoef(table.T) - torch.eye(8)
    assert correlation.abs().max() < 5 / steps**0.5
    assert (table.mean(0) - 0.5).abs().max() < 5 * 0.5 / steps**0.5


# -- announcements ---------------------------------------------------------------------------------


def told(module: Any) -> list[int]:
    """Rows of the batches that the loader gave and no forward has used."""
    return [draw.rows for draw in module._session.rows.draws.waiting if not draw.used]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["here", "workers"])
def test_every_batch_is_announced(options: dict[str, Any]) -> None:
    module, optimizer, criterion, loader = private(DataLoader(data(), batch_size=3, **options))
    numbers = []
    for _ in range(2):
        for x, y in loader:
            assert told(module) == [len(x)]
            numbers.append(module._session.rows.draws.waiting[-1].number)
            step(module, optimizer, criterion, x, y)
            assert told(module) == []
    assert numbers == [*range(2 * len(loader))]


# -- not Poisson -----------------------------------------------------------------------------------


def caught(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in found if issubclass(w.category, NotPoissonWarning)]


def test_one_warning_without_poisson_sampling() -> None:
    engine = FlashPrivacyEngine()

    def twice() -> None:
        for _ in range(2):
            private(DataLoader(data(), batch_size=BATCH), engine, poisson_sampling=False)

    messages = caught(twice)
    assert len(messages) == 1 and "poisson_sampling=False" in messages[0]


def test_no_warning_where_the_accountant_is_right() -> None:
    def right() -> None:
        private(DataLoader(data(), batch_size=N), poisson_sampling=False)  # all samples, always
        poisson = PoissonSampler(num_samples=N, sample_rate=0.1, steps=10)
        private(DataLoader(data(), batch_sampler=poisson), poisson_sampling=False)
        module, optimizer, criterion, loader = private(DataLoader(data(), batch_size=BATCH))
        for x, y in loader:
            step(module, optimizer, criterion, x, y)
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as batches:
            for x, y in batches:
                step(module, optimizer, criterion, x, y)

    assert caught(right) == []


def test_one_warning_for_batches_of_another_loader() -> None:
    """A trainer's own."""
    theirs = DataLoader(data(), batch_size=BATCH)

    def train() -> None:
        module, optimizer, criterion, _ = private(DataLoader(data(), batch_size=BATCH))
        for x, y in theirs:
            step(module, optimizer, criterion, x, y)

    messages = caught(train)
    assert len(messages) == 1 and "did not give" in messages[0]


# -- streams ---------------------------------------------------------------------------------------


class Samples(IterableDataset):  # type: ignore[type-arg]
    """A stream of these samples; of unknown size."""

    def __init__(self, samples: list[Any]):
        self.samples = samples
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for sample in self.samples:
            self.read += 1
            yield sample


def streams_of(*sizes: int) -> tuple[list[Samples], list[Any]]:
    samples = [*data(sum(sizes))]
    ends = [0, *itertools.accumulate(sizes)]
    return [Samples(samples[a:b]) for a, b in itertools.pairwise(ends)], samples


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_shards_are_drawn_as_those_of_a_list(workers: int) -> None:
    streams, samples = streams_of(7, 0, 30, 23)
    epochs = []
    for dataset in (samples, StreamedDataset(streams, [7, 0, 30, 23])):
        with warns("FC570", SeededNoiseWarning):
            engine = FlashPrivacyEngine(accountant="rdp", seed=3)
        loader = DataLoader(dataset, batch_size=BATCH, num_workers=workers)  # type: ignore[arg-type]
        module, optimizer, criterion, loader = private(loader, engine)
        epochs.append([*loader])
        for x, y in epochs[-1]:
            assert x.shape[1:] == (4,) and len(x) == len(y)
        for x, y in loader:
            step(module, optimizer, criterion, x, y)
    for (x, y), (x_list, y_list) in zip(*epochs, strict=True):
        assert torch.equal(x, x_list) and torch.equal(y, y_list)


def test_shards_without_a_drawn_sample_are_not_read() -> None:
    streams, samples = streams_of(10, 10, 10)
    dataset = StreamedDataset(streams, [10, 10, 10])
    found = dataset.__getitems__([25, 3])
    assert torch.equal(found[0][0], samples[25][0]) and torch.equal(found[1][0], samples[3][0])
    assert [stream.read for stream in streams] == [10, 0, 10]  # counted when first read
    assert torch.equal(dataset[21][0], samples[21][0])
    assert [stream.read for stream in streams] == [10, 0, 12]
    with pytest.raises(IndexError, match="sample 30 of 30"):
        dataset[30]


@pytest.mark.parametrize("size", [9, 11])
def test_a_shard_of_another_size_is_an_error(size: int) -> None:
    streams, _ = streams_of(10, 10)
    dataset = StreamedDataset(streams, [10, size])
    dataset[3]
    with raises("FC334", match=f"10 samples in shard 1; expected {size}"):
        dataset[12]


def test_a_stream_that_is_read_once_only_is_an_error() -> None:
    dataset = StreamedDataset([iter(data(10))], [10])
    dataset[3]
    with raises("FC334", match="0.*0"):
        dataset[3]


def test_streams_of_unknown_size_are_refused() -> None:
    streams, _ = streams_of(10, 20)
    with raises("FC334", ValueError, match="shard 0, a Samples"):
        StreamedDataset(streams)
    with raises("FC334", ValueError, match=r"sizes \[10\] for 2 shards"):
        StreamedDataset(streams, [10])
    with raises("FC330", ValueError, match="Samples, an IterableDataset without __len__"):
        private(DataLoader(streams[0], batch_size=5))
    assert len(StreamedDataset([Stream()])) == N


Items = list[tuple[Tensor, Tensor]]


class Texts(list[Any]):
    def __init__(self) -> None:
        torch.manual_seed(0)
        lengths = (5, 2, 7, 3)
        super().__init__((torch.randn(n, 3) + 4, torch.tensor(n % 3)) for n in lengths)


class Images(list[Any]):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__((torch.randn(4, 4), torch.tensor(n % 3)) for n in range(4))


def mixup(items: Items) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    share = torch.distributions.Beta(1.0, 1.0).sample()
    y = F.one_hot(y, 3).float()
    return share * x + (1 - share) * x.roll(1, 0), share * y + (1 - share) * y.roll(1, 0)


def mixed_with_a_permutation(items: Items) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    return x.lerp(x[torch.randperm(len(x))], 0.3), y


def standardised(items: Items) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    return (x - x.mean(0)) / x.std(0), y


def padded(items: Items) -> dict[str, Tensor]:
    x = pad_sequence([x for x, _ in items], batch_first=True)
    return {"x": x, "y": torch.stack([y for _, y in items])}


def sorted_by_length(items: Items) -> dict[str, Tensor]:
    return padded(sorted(items, key=lambda item: -len(item[0])))


def masked(items: Items) -> dict[str, Tensor]:
    found = padded(items)
    return {**found, "x": found["x"] * (torch.rand(found["x"].shape[:2]) < 0.5)[..., None]}


generator = torch.Generator().manual_seed(0)


def augmented_by_its_own(items: Items) -> tuple[Tensor, Tensor]:
    x, y = default_collate(items)
    return x + torch.randn(x.shape, generator=generator), y


MIXING: dict[str, tuple[Any, Callable[..., Any]]] = {
    "mixup": (Images, mixup),
    "permuted": (Images, mixed_with_a_permutation),
    "standardised": (Images, standardised),
}


ALONE: dict[str, tuple[Any, Callable[..., Any] | None]] = {
    "default": (Images, None),
    "padded": (Texts, padded),
    "sorted": (Texts, sorted_by_length),
    "masked at random": (Texts, masked),
    "augmented by its own": (Images, augmented_by_its_own),
    "fails": (Texts, default_collate),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_collate_function_that_mixes_is_warned_of(name: str) -> None:
    dataset, collate = MIXING[name]
    with warns("FC336", match=f"its collate_fn \\({collate.__name__}\\) gives a sample"):
        warn_of_mixing(DataLoader(dataset(), batch_size=2, collate_fn=collate))


@pytest.mark.parametrize("name", ALONE)
def test_one_that_does_not_is_never_warned_of(name: str) -> None:
    dataset, collate = ALONE[name]
    loader = DataLoader(dataset(), batch_size=2, collate_fn=collate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = torch.random.get_rng_state()
        warn_of_mixing(loader)
    assert torch.equal(state, torch.random.get_rng_state())
