"""``unit=Users(...)``: users are drawn, clipped and accounted, with all of their rows."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flash_clipping import AdaptiveBound, FlashPrivacyEngine, Users
from flash_clipping.engine.sampling.samplers import PoissonSampler
from flash_clipping.ops.error_bounds import ETA
from flash_clipping.randomness import SecretStream
from tests.support.draws import drawn
from tests.support.errors import raises
from tests.support.oracle import assert_close
from tests.support.private import Released, TwoLayers
from tests.support.units import truth_by_unit
from tests.support.users import BATCH, IDS, ROWS, data, private, step
from tests.support.wrapping import MODES

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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap_model", [True, False])
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
        assert sampler.announce.last.unit_R.bincount().max() == 2
        pairs[frozenset(row for row in batch if IDS[row] == largest)] += 1
    assert len(pairs) == 21
    assert all(abs(count - 1500 / 21) < 5 * (1500 / 21) ** 0.5 for count in pairs.values())


def test_every_kind_of_batch() -> None:
    """Batches are what the loader's own collate function makes of rows."""

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.ones(6) * index, "name": str(index)}

    def collate(rows: list[Any]) -> Any:
        return {"x": torch.stack([row["x"] for row in rows]), "names": [r["name"] for r in rows]}

    for function in (None, collate):
        loader = DataLoader(Rows(), batch_size=BATCH, collate_fn=function)
        module, *_, found = private(loader=loader)
        for batch in found:
            assert isinstance(batch, dict)
            module(batch["x"]).square().sum(1).mean().backward()
            module.zero_grad()


class FetchesBatches(TensorDataset):
    """Fetches a batch at once, as two tensors and not as a list of rows."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        return tuple(tensor[indices] for tensor in self.tensors)


def test_a_dataset_that_fetches_batches() -> None:
    dataset = FetchesBatches(*data().tensors)
    module, optimizer, criterion, loader = private(
        loader=DataLoader(dataset, batch_size=BATCH, collate_fn=tuple)
    )
    for x, rows in loader:
        assert len(step(module, optimizer, criterion, x, rows)) == len(drawn_users(rows))


@pytest.mark.parametrize("workers", [0, 1])
def test_nobody_is_drawn(workers: int) -> None:
    """A step without units adds noise only."""
    few = torch.arange(ROWS) % 2
    module, optimizer, criterion, loader = private(
        unit=Users(few), loader=DataLoader(data(), batch_size=2, num_workers=workers)
    )
    sizes = []
    for x, rows in loader:
        count = drawn(module)
        sizes.append(len(step(module, optimizer, criterion, x, rows)))
        assert sizes[-1] == count and len(x)
    assert 0 in sizes


def test_a_batch_without_units_may_be_left_out() -> None:
    module, optimizer, criterion, loader = private(
        unit=Users(torch.zeros(ROWS, dtype=torch.long)), loader=DataLoader(data(), batch_size=4)
    )
    torch.manual_seed(3)
    left_out = 0
    for _ in range(3):
        for x, rows in loader:
            if not drawn(module):
                left_out += 1
                continue
            step(module, optimizer, criterion, x, rows)
    assert left_out


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


def test_a_target_epsilon() -> None:
    engine = FlashPrivacyEngine(accountant="rdp")
    model = TwoLayers()
    module, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data(), batch_size=BATCH),
        target_epsilon=8.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
        unit=Users(IDS.tolist(), max_rows=3),
    )
    for x, rows in itertools.chain(loader, loader):
        step(module, optimizer, criterion, x, rows)
    assert 7 < engine.get_epsilon(1e-5) <= 8.0


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
