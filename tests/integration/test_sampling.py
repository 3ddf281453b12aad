"""What the engine's loader draws, what it announces, and the loaders that it refuses."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from flash_clipping import FlashClippingError, FlashPrivacyEngine, NotPoissonWarning
from flash_clipping.integration.samplers import PoissonSampler, ShardedPoissonSampler

N, BATCH = 60, 6


def data(count: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(count, 4, generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )


def private(loader: Any, engine: PrivacyEngine | None = None, **options: Any) -> Any:
    model = nn.Linear(4, 3)
    return (engine or FlashPrivacyEngine(accountant="rdp")).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=loader,
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options,
    )


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
            r"RandomSampler\(replacement=True.*shuffle=True",
        ),
        "more_samples": (
            with_sampler(RandomSampler(dataset, num_samples=2 * N)),
            "num_samples=120.*over 60",
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
            "DistributedSampler for 2 processes.*DataParallel",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", loaders())
def test_a_loader_whose_sampling_would_be_replaced_silently_is_refused(name: str) -> None:
    loader, message = loaders()[name]
    with pytest.raises(ValueError, match=f"(?s)data_loader: found.*{message}"):
        private(loader)


@pytest.mark.parametrize("name", ["weighted", "subset", "replacement", "more_samples", "no_batch"])
def test_without_poisson_sampling_what_no_rate_describes_is_refused_too(name: str) -> None:
    loader, message = loaders()[name]
    with pytest.raises(ValueError, match=f"(?s)data_loader: found.*{message}"):
        private(loader, poisson_sampling=False)


def test_a_weighted_loader_had_a_rate_that_was_not_its_own() -> None:
    """Opacus accounts 1/20 for it; a sample of weight 100 is drawn with certainty, nearly."""
    weights = [100.0] + [1.0] * (N - 1)
    loader = DataLoader(data(), batch_size=BATCH, sampler=WeightedRandomSampler(weights, 2 * N))
    *_, opacus_loader = private(loader, PrivacyEngine())
    assert opacus_loader.sample_rate == 1 / 20
    with pytest.raises(ValueError, match="WeightedRandomSampler"):
        private(loader)


@pytest.mark.parametrize("shuffle", [True, False])
def test_ordinary_loaders_are_accepted(shuffle: bool) -> None:
    *_, loader = private(DataLoader(data(), batch_size=BATCH, shuffle=shuffle))
    assert isinstance(loader.batch_sampler, PoissonSampler)
    assert len(loader) == N // BATCH and loader.sample_rate == BATCH / N
    *_, again = private(loader)  # private already
    assert len(again) == len(loader) and len(next(iter(again))) == 2
    private(DataLoader(data(), batch_sampler=again.batch_sampler))


def test_a_made_up_sample_in_empty_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="rand_on_empty.*2 C"):
        private(DataLoader(data(), batch_size=BATCH), rand_on_empty=True)


def test_other_modes_of_the_engine_are_opacus() -> None:
    loader = loaders()["subset"][0]
    *_, found = private(loader, grad_sample_mode="hooks")
    assert not isinstance(found.batch_sampler, PoissonSampler)


# -- rate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [93, 99, 186])
def test_an_epoch_has_as_many_steps_as_the_loader_had(batches: int) -> None:
    """int(1 / (1 / 93)) is 92: another rate would be accounted than is drawn with."""
    engine = FlashPrivacyEngine(accountant="rdp")
    module, optimizer, criterion, loader = private(DataLoader(data(batches), batch_size=1), engine)
    assert len(loader) == batches and len(list(loader)) == batches
    assert optimizer.expected_batch_size == 1
    step(module, optimizer, criterion, *next(iter(loader)))
    assert engine.accountant.history[0][1] == loader.batch_sampler.sample_rate == 1 / batches


def test_the_probability_is_the_rate_and_not_the_next_number_that_rand_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At a rate of 1.25 / 2^24, `torch.rand(...) < rate` has probability 2 / 2^24."""
    drawn: dict[torch.dtype, Tensor] = {
        torch.float32: torch.arange(4000).remainder(4) * 2.0**-24,
        torch.float64: (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000,
    }

    def rand(size: int, dtype: torch.dtype = torch.float32, **_: Any) -> Tensor:
        assert size == len(drawn[dtype])
        return drawn[dtype]

    sampler = PoissonSampler(num_samples=4000, sample_rate=1.25 * 2**-24, steps=1)
    monkeypatch.setattr(torch, "rand", rand)
    counts = torch.tensor(next(iter(sampler))).remainder(4).bincount(minlength=4)
    assert counts.tolist() == [1000, 250, 0, 0]


def test_batches_of_one_process_are_those_of_opacus() -> None:
    def sizes(engine: PrivacyEngine, **options: Any) -> list[int]:
        *_, loader = private(DataLoader(data(), batch_size=BATCH), engine, **options)
        torch.manual_seed(3)
        return [len(x) for x, _ in loader]

    expected = sizes(PrivacyEngine(), grad_sample_mode="hooks")
    assert sizes(FlashPrivacyEngine()) == expected and len(set(expected)) > 2


# -- shards ----------------------------------------------------------------------------------------


def shards(generators: list[Any], steps: int, rate: float = 0.5, total: int = 41) -> Tensor:
    """Which samples every process drew in every step: [ranks, steps, total]."""
    world = len(generators)
    drawn = torch.zeros(world, steps, total, dtype=torch.bool)
    for rank, generator in enumerate(generators):
        sampler = ShardedPoissonSampler(
            total_size=total,
            sample_rate=rate,
            steps=steps,
            rank=rank,
            world_size=world,
            generator=generator,
        )
        assert len(sampler) == steps
        for i, indices in enumerate(sampler):
            drawn[rank, i, indices] = True
    return drawn


def test_every_sample_is_one_process_s() -> None:
    drawn = shards([None] * 3, steps=50)
    owners = drawn.any(1).sum(0)
    assert (owners == 1).all()


def test_processes_seeded_alike_draw_independently() -> None:
    steps = 4000
    drawn = shards([torch.Generator().manual_seed(0) for _ in range(2)], steps, total=8).float()
    mine, other = drawn[0, :, 0::2], drawn[1, :, 1::2]  # [steps, 4]
    assert not torch.equal(mine, other)
    table = torch.cat([mine, other], 1)
    correlation = torch.corrcoef(table.T) - torch.eye(8)
    assert correlation.abs().max() < 5 / steps**0.5
    rates = table.mean(0)
    assert (rates - 0.5).abs().max() < 5 * 0.5 / steps**0.5


def test_a_generator_repeats_and_its_absence_does_not() -> None:
    seeded = [shards([torch.Generator().manual_seed(0)] * 1, 20) for _ in range(2)]
    assert torch.equal(*seeded)
    free = []
    for _ in range(2):
        torch.manual_seed(0)
        free.append(shards([None], 20))
    assert not torch.equal(*free)


def test_empty_local_batches_are_batches() -> None:
    drawn = shards([None] * 2, steps=200, rate=0.02, total=20)
    sizes = drawn.sum(2)
    assert (sizes == 0).any() and (sizes > 0).any()


# -- announcements ---------------------------------------------------------------------------------


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What the loader tells the wrapped model, in order."""
    from flash_clipping import GradSampleHooksFlashClipping as hooks

    found: list[int | None] = []
    monkeypatch.setattr(
        hooks, "expect_samples", lambda self, samples: found.append(samples), raising=False
    )
    return found


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=["here", "workers"])
def test_every_batch_is_announced(announced: list[int | None], options: dict[str, Any]) -> None:
    module, optimizer, criterion, loader = private(DataLoader(data(), batch_size=3, **options))
    for _ in range(2):
        sizes = []
        for x, y in loader:
            sizes.append(len(x))
            assert announced[-1] == len(x)
            step(module, optimizer, criterion, x, y)
        assert [n for n in announced if n is not None] == sizes and announced[-1] is None
        assert len(sizes) == len(loader)
        announced.clear()


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["here", "workers"])
def test_nothing_is_announced_after_a_loop_that_was_left(
    announced: list[int | None], options: dict[str, Any]
) -> None:
    """What comes next may be from anywhere."""
    module, optimizer, criterion, loader = private(DataLoader(data(), batch_size=3, **options))
    for x, y in loader:
        step(module, optimizer, criterion, x, y)
        break
    assert announced[0] == len(x) and announced[-1] is None


@pytest.mark.parametrize("wrap_model", [True, False])
def test_physical_batches_are_announced(announced: list[int | None], wrap_model: bool) -> None:
    module, optimizer, criterion, loader = private(
        DataLoader(data(), batch_size=BATCH), wrap_model=wrap_model
    )
    model = module if wrap_model else module._module
    sizes = []
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as batches:
        for x, y in batches:
            sizes.append(len(x))
            step(model, optimizer, criterion, x, y)
    assert announced == [*sizes, None] and max(sizes) == 2


def test_physical_batches_of_workers_are_not_announced(announced: list[int | None]) -> None:
    module, optimizer, criterion, loader = private(
        DataLoader(data(), batch_size=BATCH, num_workers=1)
    )
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as batches:
        for x, y in itertools.islice(batches, 3):
            step(module, optimizer, criterion, x, y)
    assert set(announced) <= {None}


def test_nothing_is_said_where_batches_are_fetched_ahead(announced: list[int | None]) -> None:
    """As Accelerate and Lightning do: what was announced is not what the next forward gets."""
    module, optimizer, criterion, loader = private(DataLoader(data(), batch_size=BATCH))
    for epoch in range(2):
        batches = iter(loader)
        ahead = next(batches)
        for following in batches:
            step(module, optimizer, criterion, *ahead)
            ahead = following
        assert announced[1:] == [None] * 10, epoch
        announced.clear()


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
    assert len(messages) == 1 and "1 steps, and 0 batches drawn" in messages[0]


class NoIterableItems(Dataset):  # type: ignore[type-arg]
    """Opacus' loader looks into the first item."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


def test_items_may_be_anything_that_collates() -> None:
    *_, loader = private(DataLoader(NoIterableItems(), batch_size=1))
    torch.manual_seed(0)
    assert 0 in {len(batch) for batch in loader}


def test_epsilon_says_what_it_is_for() -> None:
    text = FlashPrivacyEngine.get_epsilon.__doc__ or ""
    assert "added or removed" in text and "expected batch size" in text
    engine = FlashPrivacyEngine(accountant="rdp")
    module, optimizer, criterion, loader = private(DataLoader(data(), batch_size=BATCH), engine)
    step(module, optimizer, criterion, *next(iter(loader)))
    assert engine.get_epsilon(1e-5) == engine.accountant.get_epsilon(1e-5)


class FetchesBatches(torch.utils.data.TensorDataset):
    """Fetches a batch at once, as two tensors and not as a list of samples."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[indices] for tensor in self.tensors)


def test_a_dataset_that_fetches_batches_is_not_miscounted() -> None:
    data = FetchesBatches(torch.randn(60, 3), torch.randn(60, 1))
    model = torch.nn.Linear(3, 1)
    module, optimizer, criterion, loader = FlashPrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        criterion=torch.nn.MSELoss(),
        data_loader=torch.utils.data.DataLoader(data, batch_size=20, collate_fn=tuple),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()


def test_several_rows_of_a_sample_are_refused_whoever_fetches_them() -> None:
    """Each would be clipped by itself, and what was accounted for be too little."""

    class Views(FetchesBatches):
        def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
            x, y = super().__getitems__(indices)
            return torch.cat([x, -x]), torch.cat([y, y])

    model = torch.nn.Linear(3, 1)
    module, optimizer, criterion, loader = FlashPrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        criterion=torch.nn.MSELoss(),
        data_loader=torch.utils.data.DataLoader(
            Views(torch.randn(60, 3), torch.randn(60, 1)), batch_size=20, collate_fn=tuple
        ),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(2):  # epochs
        for x, y in loader:
            with pytest.raises(FlashClippingError, match="samples"):
                criterion(module(x), y).backward()
