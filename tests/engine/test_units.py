"""Privacy units: users and items, of which a batch holds any number of rows."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from flash_clipping import (
    AdaptiveBound,
    Documents,
    FlashPrivacyEngine,
    PoissonSampling,
    Users,
)
from flash_clipping.engine.sampling.samplers import PoissonSampler
from flash_clipping.ops.error_bounds import ETA
from flash_clipping.randomness import SecretStream
from tests.support.draws import drawn
from tests.support.errors import raises
from tests.support.oracle import assert_close
from tests.support.packed import Reader
from tests.support.private import Released, TwoLayers
from tests.support.units import truth_by_unit
from tests.support.users import BATCH, IDS, ROWS, data, private, step

# -- what is drawn ---------------------------------------------------------------------------------


def drawn_users(rows: Tensor) -> Counter[int]:
    return Counter(IDS[rows].tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_is_all_rows_of_the_users_that_were_drawn(workers: int) -> None:
    module, optimizer, criterion, loader = private(
        loader=DataLoader(data(), batch_size=BATCH, num_workers=workers)
    )
    of_user = Counter(IDS.tolist())
    assert len(loader) == 6
    for x, rows in loader:
        users = drawn_users(rows[: len(rows) * bool(drawn(module))])
        assert users == {user: of_user[user] for user in users}
        assert torch.equal(x, data().tensors[0][rows])
        assert step(module, optimizer, criterion, x, rows).shape == (len(users),)


@pytest.mark.parametrize(("wrap_model", "mode"), [(True, "one_pass"), (False, "two_pass")])
def test_norms_are_those_of_users(wrap_model: bool, mode: str) -> None:
    model = TwoLayers().double()
    module, optimizer, criterion, loader = private(
        model=model, dataset=data(torch.float64), wrap_model=wrap_model, mode=mode
    )
    called = module if wrap_model else model
    for x, rows in loader:
        optimizer.zero_grad()
        criterion(called(x), rows % 3).backward()
        found, coef = module.get_norm_sample(), module.get_clipping_coef()
        sums = {name: p.grad.clone() for name, p in model.named_parameters()}
        if not drawn(module):
            assert not len(found) and not any(map(torch.count_nonzero, sums.values()))
            optimizer.step()
            continue
        users = list(drawn_users(rows))
        index = torch.tensor([users.index(user) for user in IDS[rows].tolist()], dtype=torch.long)
        plain = TwoLayers().double()
        plain.load_state_dict(model.state_dict())

        def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
            return nn.functional.cross_entropy(model(batch[0]), batch[1] % 3, reduction="none")

        truth = truth_by_unit(plain, (x, rows), index, loss, len(users))
        assert_close(found.sort()[0], truth.norms.sort()[0], 1e-9, "norms")
        assert_close(coef.sort()[0], truth.coef(1.0).sort()[0], 1e-9, "coefficients")
        for name, expected in truth.clipped(1.0).items():
            assert_close(sums[name], expected, 1e-8, name)
        optimizer.step()


def test_users_are_drawn_with_the_rate() -> None:
    """Each alike, however many rows it has, and independently of the others."""
    stats = pytest.importorskip("scipy.stats")
    q, draws = 1 / 6, 4000
    stream = SecretStream(seed=0)
    units = Users(IDS)
    sampler = PoissonSampler(num_samples=12, sample_rate=q, units=units, steps=draws, stream=stream)
    seen: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for batch in sampler:
        users = {int(IDS[row]) for row in batch}
        seen.update(users)
        sizes[len(users)] += 1
    assert len(seen) == 12
    for count in seen.values():
        assert abs(count - draws * q) < 5 * (draws * q * (1 - q)) ** 0.5
    expected = [draws * stats.binom.pmf(k, 12, q) for k in range(7)]
    observed = [sizes[k] for k in range(7)]
    chi2 = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    assert chi2 < stats.chi2.ppf(0.9999, 7)


def test_at_most_so_many_rows_of_a_user() -> None:
    """All subsets alike, drawn anew each time."""
    stream = SecretStream(seed=0)
    units = Users(IDS, max_rows=2)
    sampler = PoissonSampler(
        num_samples=12, sample_rate=1.0, units=units, steps=1500, stream=stream
    )
    largest = IDS.mode()[0].item()  # of 7 rows
    pairs: Counter[frozenset[int]] = Counter()
    for batch in sampler:
        assert sampler.last.unit_R.bincount().max() == 2
        pairs[frozenset(row for row in batch if IDS[row] == largest)] += 1
    assert len(pairs) == 21
    assert all(abs(count - 1500 / 21) < 5 * (1500 / 21) ** 0.5 for count in pairs.values())


# -- what is accounted, and what is released -------------------------------------------------------


def test_epsilon_is_for_the_rate_of_units() -> None:
    for name, kind in (("rdp", RDPAccountant), ("prv", PRVAccountant)):
        engine = FlashPrivacyEngine(accountant=name)
        module, optimizer, criterion, loader = private(engine, noise_multiplier=1.5)
        for x, rows in itertools.chain(loader, loader):
            step(module, optimizer, criterion, x, rows)
        expected = kind()
        expected.history = [(1.5, 1 / 6, 12)]
        assert engine.get_epsilon(1e-5) == expected.get_epsilon(1e-5)


def test_gradients_are_divided_by_the_expected_number_of_units() -> None:
    _, optimizer, *_ = private()
    assert optimizer.expected_batch_size == pytest.approx(12 / 6)
    _, optimizer, *_ = private(unit=Users(torch.arange(ROWS) % 2))
    assert optimizer.expected_batch_size == pytest.approx(2 / 6)


def test_a_user_moves_the_sum_by_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two neighbours, of which one has a user with many rows more."""
    released = Released(monkeypatch)
    most = IDS.mode()[0] == IDS
    for keep in (torch.ones(ROWS, dtype=torch.bool), ~most):
        x, rows = (tensor[keep] for tensor in data().tensors)
        dataset = TensorDataset(30 * x, rows)
        module, optimizer, criterion, loader = private(
            loader=DataLoader(dataset, batch_size=len(dataset)),  # all units, in every step
            unit=Users(IDS[keep]),
            max_grad_norm=0.1,
        )
        for x, rows in loader:
            step(module, optimizer, criterion, x, rows)
    first, second = (torch.cat([s.flatten() for s in sums]).double() for sums in released.sums)
    change = (first - second).norm().item()
    assert 0.05 < change <= 0.1 * (1 + ETA)
    assert all(std == pytest.approx(0.1) for _, std in released.releases)


@pytest.mark.parametrize("clipping", ["per_layer", "automatic", AdaptiveBound(0.5, 0.01, 10.0)])
def test_ways_to_clip(clipping: Any) -> None:
    options: dict[str, Any] = {"clipping": clipping}
    if clipping == "per_layer":
        options["max_grad_norm"] = [0.5] * 4
    if isinstance(clipping, AdaptiveBound):
        options["noise_multiplier"] = 0.1
    module, optimizer, criterion, loader = private(**options)
    for x, rows in loader:
        optimizer.zero_grad()
        criterion(module(x), rows % 3).backward()
        units = drawn(module)
        assert module.get_clipping_coef().shape[-1] == units
        if isinstance(clipping, AdaptiveBound):
            step_record = module.running_step.record
            within = (module.get_norm_sample() <= module.max_grad_norm).sum()
            assert step_record.unclipped == within - units / 2  # about its middle
        optimizer.step()


def test_a_step_on_two_batches_is_refused() -> None:
    """A user of both would add twice the bound to what is accounted for as one step."""
    module, optimizer, criterion, loader = private()
    batches = iter(loader)
    optimizer.signal_skip_step(do_skip=False)
    step(module, optimizer, criterion, *next(batches))
    with raises("FC283"):
        optimizer.signal_skip_step()


# -- items that are units: Documents -------------------------------------------------


def packed(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Two views of each item."""
    x = torch.stack([x for x, _ in rows]).repeat_interleave(2, 0) if rows else torch.empty(0, 6)
    labels = torch.tensor([int(row) for _, row in rows], dtype=torch.long).repeat_interleave(2)
    return x, labels, torch.arange(len(rows)).repeat_interleave(2)


def test_views_of_an_item() -> None:
    module, optimizer, criterion, loader = private(
        loader=DataLoader(data(), batch_size=BATCH, collate_fn=packed),
        unit=Documents("item"),
    )
    for x, rows, item in loader:
        optimizer.zero_grad()
        (criterion(module(x, item=item), rows % 3) / 2).backward()
        assert len(module.get_norm_sample()) == len(x) // 2
        optimizer.step()


@pytest.mark.parametrize("change", [lambda item: item // 2, lambda item: item.clamp(min=1)])
def test_items_that_are_joined_are_refused(change: Any) -> None:
    module, optimizer, criterion, loader = private(
        loader=DataLoader(data(), batch_size=BATCH, collate_fn=packed),
        unit=Documents("item"),
    )
    with raises("FC273", match=r"\d+"):
        for x, _, item in loader:
            if len(x) > 2:
                module(x, item=change(item))


class Texts(Dataset[Any]):
    """Token ids of documents of different lengths."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 17, (1 + index % 5,), generator=generator)


def in_one_row(documents: list[Tensor]) -> dict[str, Tensor]:
    numbers = [torch.full((len(d),), n) for n, d in enumerate(documents)]
    places = [torch.arange(len(d)) for d in documents]
    columns = {"ids": documents, "places": places, "document": numbers}
    return {name: torch.cat(found)[None] for name, found in columns.items()}


def test_documents_that_are_packed() -> None:
    """Drawn one by one, packed by the collate function, clipped one by one."""
    loader = DataLoader(Texts(), batch_size=4, collate_fn=in_one_row)
    model = Reader()
    module, optimizer, criterion, loader = private(
        model=model, loader=loader, unit=Documents("document"), max_grad_norm=0.1
    )
    sizes = [1]
    while min(sizes) > 0 or max(sizes) <= 4:  # one batch in fifty is empty
        assert len(sizes) < 2000
        for batch in loader:
            optimizer.zero_grad()
            logits = module(**batch)
            criterion(logits.flatten(0, 1), batch["ids"].flatten() % 4).backward()
            sizes.append(len(module.get_norm_sample()))
            assert sizes[-1] == drawn(module) in (0, int(batch["document"].max() + 1))
            optimizer.step()
    assert min(sizes) == 0 and max(sizes) > 4
    assert optimizer.expected_batch_size == 4


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unit": Users(IDS[1:])}, r"Users: found shape \(35,\) for a dataset of 36 rows"),
        ({"poisson_sampling": False}, r"unit: .*poisson_sampling=False"),
        ({"grad_sample_mode": "ghost"}, r"unit: found with another grad_sample_mode"),
        ({"unit": Documents("x"), "grad_sample_mode": "ghost"}, r"unit: .*'flash'"),
    ],
)
def test_refused_arguments(options: dict[str, Any], words: str) -> None:
    with raises("FC281|FC313", ValueError, match=words):
        private(**options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Users(IDS.float()), r"Users: found torch.float32 of shape"),
        (lambda: Users(IDS > 50), r"Users: found torch.bool"),
        (lambda: Users(IDS, max_rows=0), r"max_rows: found 0; .* in \[1, inf\)"),
        (lambda: private(unit=Documents(IDS)), r"Documents: found Tensor"),
        (lambda: private(unit=IDS), r"unit: found .*Tensor.*; .*\n    unit=Users\(ids\)"),
    ],
)
def test_refused_units(make: Any, words: str) -> None:
    with raises("FC280|FC281|FC302|FC319", (ValueError, TypeError), match=words):
        make()


def test_splitting_batches_is_refused() -> None:
    module, optimizer, criterion, loader = private()
    with (
        BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as batches,
        raises("FC283"),
    ):
        next(iter(batches))


def test_a_forward_of_other_rows() -> None:
    module, _, _, loader = private()
    with raises("FC244"):
        module(torch.randn(5, 6))
    batches = iter(loader)
    x, _ = next(batches)
    module(x)
    while len(x) < 2:
        x, _ = next(batches)
        module(x)
    with raises("FC243", match=r"\d+"):
        module(x[1:])
    with torch.no_grad():
        module(x[1:])
    del batches
    module(x)
    x, _ = next(iter(loader))  # of a loop that nobody goes on with
    module(x).sum().backward()
    with raises("FC243"):
        module(torch.randn_like(x))


def in_order_of_values(rows: list[Any]) -> Any:
    return default_collate(sorted(rows, key=lambda row: float(row[0].sum())))


def noisy(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x + torch.randn_like(x), y


@pytest.mark.parametrize("collate", [in_order_of_values, noisy])
@pytest.mark.parametrize("what", ["units", "max_batch_size"])
def test_collate_functions_that_do_not_keep_order(what: str, collate: Any) -> None:
    """The engine says by their places whose rows they are, and which of them count."""
    pld = pytest.importorskip("dp_accounting") and "pld"
    options = (
        {} if what == "units" else {"unit": None, "mechanism": PoissonSampling(max_batch_size=12)}
    )
    engine = FlashPrivacyEngine(accountant="rdp" if what == "units" else pld)
    loader = DataLoader(data(), batch_size=BATCH, collate_fn=collate)
    *_, loader = private(engine, loader=loader, **options)
    with raises("FC284", match=rf"collate_fn: {what} goes by the order"):
        list(loader)
