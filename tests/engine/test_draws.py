"""Draws of the loader, and the forwards, backwards and steps that are made on them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from flash_clipping import (
    FlashPrivacyEngine,
    MicroBatches,
    NoStepWarning,
    PoissonSampling,
    Users,
)
from flash_clipping.capture.draws import DrawnBatch, Draws
from flash_clipping.engine.sampling.loaders import NotPoissonWarning
from tests.support.errors import raises, warns
from tests.support.private import Private, TwoLayers, data, made as made_private
from tests.support.users import IDS, private as of_users

BATCH = 16


def private(**options: Any) -> Any:
    torch.manual_seed(0)
    engine = FlashPrivacyEngine(accountant=options.pop("accountant", "rdp"))
    loader = DataLoader(data(options.pop("size", 64)), batch_size=BATCH)
    return made_private(TwoLayers(), loader, engine, **{"max_grad_norm": 0.1} | options)


def step(made: Any, x: Tensor, y: Tensor) -> None:
    module, optimizer, criterion, _ = made
    optimizer.zero_grad()
    criterion(module(x), y).backward()
    optimizer.step()


def warned(run: Callable[[], Any], *kinds: type[Warning]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in found if issubclass(w.category, kinds)]


# -- one step, one draw ----------------------------------------------------------------------------


def test_two_batches_in_one_forward_are_refused() -> None:
    """Accounted as one draw, they would be two."""
    made = private()
    batches = iter(made[3])
    for first, second in zip(batches, batches, strict=False):
        x, y = (torch.cat(pair) for pair in zip(first, second, strict=True))
        with raises("FC240", match=r"DataLoader\(dataset, batch_size"):
            step(made, x, y)


def test_two_batches_in_one_backward_are_refused() -> None:
    """Unless they happen to have as many samples, which no loop's batches always have."""
    module, optimizer, criterion, loader = private()
    batches, refused = iter(loader), 0
    for (x, y), (more, labels) in zip(batches, batches, strict=False):
        loss = criterion(module(x), y).loss_per_sample.sum()
        loss = loss + criterion(module(more), labels).loss_per_sample.sum()
        if len(x) != len(more):
            with raises("FC201", match="in the same backward"):
                loss.backward()
            refused += 1
    assert refused


def test_two_batches_in_one_step_are_refused() -> None:
    module, optimizer, criterion, loader = private()
    with raises("FC510", match="0, 1"):
        for x, y in loader:
            optimizer.signal_skip_step(True)
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()


def test_one_batch_twice_in_one_step_is_refused() -> None:
    """Each of its samples would count for up to twice the bound."""
    module, optimizer, criterion, loader = private()
    before = [p.detach().clone() for p in module.parameters()]

    def backward(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()

    batches = iter(loader)
    x, y = next(batches)
    optimizer.signal_skip_step(True)
    backward(x, y)
    with raises("FC511", match="batch 0"):
        backward(x, y)
    assert all(map(torch.equal, before, module.parameters()))
    optimizer.zero_grad()
    optimizer.discard_step()
    backward(*next(batches))
    assert not any(map(torch.equal, before, module.parameters()))


def test_a_loader_of_ones_own_after_passes_without_a_step() -> None:
    def train() -> None:
        made = private()
        for _ in range(30):
            for x, _ in made[3]:
                x.mean()
        for x, y in DataLoader(data(), batch_size=BATCH, shuffle=True):
            step(made, x, y)

    (message,) = warned(train, NotPoissonWarning)
    assert "did not give" in message


@pytest.mark.parametrize(("first", "second"), [(8, 4), (4, 8), (4, 4)])
def test_batches_of_an_earlier_loader_at_another_rate(first: int, second: int) -> None:
    """What they draw more often than is accounted for makes epsilon too small."""
    engine, module, loaders = FlashPrivacyEngine(), TwoLayers(), list[Any]()
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch_size in (first, second):
        made = engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=DataLoader(data(16), batch_size=batch_size),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        module, optimizer = made[:2]
        loaders.append(made[2])
    x, y = next(iter(loaders[0]))
    F.cross_entropy(module(x), y).backward()
    with warns("FC335", NotPoissonWarning) if first > second else contextlib.nullcontext():
        optimizer.step()


def test_two_steps_on_one_batch() -> None:
    def train() -> None:
        made = private()
        for x, y in made[3]:
            step(made, x, y)
            step(made, x, y)

    (message,) = warned(train, NotPoissonWarning)
    assert "a second step on batch 0" in message


def ordinary(made: Any) -> None:
    for x, y in made[3]:
        step(made, x, y)


def fetched_ahead(made: Any) -> None:
    batches = iter(made[3])
    ahead = next(batches)
    for following in batches:
        step(made, *ahead)
        ahead = following
    step(made, *ahead)


def in_a_list(made: Any) -> None:
    for x, y in list(made[3]):
        step(made, x, y)


def beside_evaluation(made: Any) -> None:
    for x, y in made[3]:
        with torch.no_grad():
            made[0](x)
            made[0](data().tensors[0])
        step(made, x, y)


def in_parts(made: Any) -> None:
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    manager = BatchMemoryManager(data_loader=made[3], max_physical_batch_size=5, optimizer=made[1])
    with manager as batches:
        for x, y in batches:
            step(made, x, y)


def adversarial(made: Any) -> None:
    """A discriminator's loop: its step, then a backward through it that is somebody else's."""
    module, optimizer, criterion, loader = made
    generator = nn.Linear(6, 6)
    for x, y in loader:
        optimizer.zero_grad(set_to_none=True)
        fake = generator(torch.randn(len(x), 6))
        loss = criterion(module(x), y) + criterion(module(fake.detach()), torch.zeros_like(y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        criterion(module(fake), torch.ones_like(y)).backward()


def pairs(size: int) -> list[Any]:
    return [*zip(torch.randn(size, 6), torch.zeros(size, dtype=torch.long), strict=True)]


def selected(indices: list[int]) -> Any:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"x": [[0.0] * 6] * 8, "y": [0] * 8})
    return whole.select([1, 0, 2, 3, 5, 4]).select(indices)


def joined(*numbers: int, shuffled: bool = False) -> Any:
    datasets = pytest.importorskip("datasets")
    found = [datasets.Dataset.from_dict({"x": [0.0] * 8, "y": [0] * 8}) for _ in range(2)]
    tables = [found[n].shuffle(seed=k) if shuffled else found[n] for k, n in enumerate(numbers)]
    return datasets.concatenate_datasets(tables)


HALVES, FOUR = data(), pairs(4)


REPEATED: dict[str, Any] = {
    "parts": lambda: ConcatDataset([data()] * 2),
    "indices": lambda: Subset(data(), [0, 5, 0, 7]),
    "from the end": lambda: Subset(data(8), [7, 2, -1]),
    "nested": lambda: Subset(Subset(data(), [3, 3, 4]), [0, 1]),
    "tensor of indices": lambda: Subset(data(), torch.tensor([1, 2, 1])),
    "parts that overlap": lambda: ConcatDataset([Subset(HALVES, [0, 1]), Subset(HALVES, [1, 2])]),
    "a list": lambda: FOUR * 3,
    "lists": lambda: ConcatDataset([FOUR, [*reversed(FOUR)]]),
    "selected": lambda: selected([0, 3, 3]),
    "a table joined with itself": lambda: joined(0, 0),
}


APART: dict[str, Any] = {
    "parts": lambda: ConcatDataset([data(), data()]),
    "split": lambda: ConcatDataset([Subset(HALVES, [0, 1]), Subset(HALVES, [3, 2])]),
    "one of each": lambda: Subset(ConcatDataset([HALVES] * 2), [0, 65, 2]),
    "a list": lambda: pairs(9),
    "equal texts and numbers": lambda: ["a", "a", 1, 1, (1, "a"), (1, "a"), None, None],
    "selected": lambda: selected([3, 0]),
    "two tables": lambda: joined(0, 1),
    "an empty part": lambda: ConcatDataset([Subset(HALVES, []), HALVES]),
}


def given(dataset: Any) -> dict[str, Any]:
    model = TwoLayers()
    options = {"module": model, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    return options | {"data_loader": DataLoader(dataset, batch_size=2)}


@pytest.mark.parametrize("name", REPEATED)
def test_a_sample_that_is_there_twice_is_refused(name: str) -> None:
    """Unless ``units`` say whose each row is."""
    options = given(dataset := REPEATED[name]())
    with raises("FC330", ValueError, match=r"(?s)more than once.*unit=Users") as refused:
        FlashPrivacyEngine().make_private(**options)
    names_indices = "unit=Users(data_loader.dataset.indices))" in str(refused.value)
    assert names_indices == (name in ("indices", "from the end", "tensor of indices"))
    FlashPrivacyEngine().make_private(**options, unit=Users([0] * len(dataset)))


@pytest.mark.parametrize("name", APART)
def test_samples_that_are_there_once_are_served(name: str) -> None:
    FlashPrivacyEngine().make_private(**given(APART[name]()))


def test_the_rate_that_is_accounted_is_the_one_that_is_drawn_with() -> None:
    loader = private()[3]
    with pytest.raises(AttributeError, match="sample_rate"):
        loader.batch_sampler.sample_rate = 0.88
    assert loader.batch_sampler.sample_rate == 1 / len(loader)


# -- whose row it is -------------------------------------------------------------------------------


def users() -> tuple[Any, Tensor, Tensor]:
    """A private model, and a batch of several users."""
    made = of_users()
    for x, rows in made[3]:
        if len(set(IDS[rows].tolist())) > 2:
            return made, x, rows
    raise AssertionError


def norms_of(made: Any, x: Tensor, rows: Tensor) -> Tensor:
    module, optimizer, criterion, _ = made
    optimizer.zero_grad()
    criterion(module(x), rows % 3).backward()
    return module.get_norm_sample().sort()[0]


def test_rows_that_the_loop_sorts_are_refused_or_declared() -> None:
    """One user would move the sum by the bounds of all whose rows it was given."""
    made, x, rows = users()
    expected = norms_of(made, x, rows)
    order = x.norm(dim=1).argsort()
    for moved in (x[order], x[order].clone().unsqueeze(1).squeeze(1), x[order].double().float()):
        with raises("FC243"):
            made[0](moved)
    made[0].expect_rows(order)
    torch.testing.assert_close(norms_of(made, x[order], rows[order]), expected)
    made[0].expect_rows(None)
    with raises("FC243"):
        made[0](x[order])


def test_the_same_rows_are_known_however_they_come() -> None:
    made, x, rows = users()
    expected = norms_of(made, x, rows)
    for same in (x.clone(), x.contiguous().view(len(x), 6), x.unsqueeze(1).squeeze(1)):
        torch.testing.assert_close(norms_of(made, same, rows), expected)
    changed = x * 1.0000001 + 1
    with raises("FC243"):
        made[0](changed)
    made[0].expect_rows(torch.arange(len(x)))
    norms_of(made, changed, rows)


def padded() -> tuple[Any, Tensor, Tensor, int]:
    pytest.importorskip("dp_accounting")
    made = private(
        accountant="pld", mechanism=PoissonSampling(max_batch_size=20), noise_multiplier=1.0
    )
    for x, y in made[3]:
        count = made[0]._session.rows.draws.waiting[-1].samples
        if 2 < count < 18:
            return made, x, y, count
    raise AssertionError


def test_padding_that_the_loop_moves_is_refused_or_declared() -> None:
    """Drawn rows would count nothing, and others would take part in every step."""
    made, x, y, count = padded()
    order = torch.arange(20).flip(0)
    with raises("FC243"):
        made[0](x[order])
    made[0].expect_rows(order)
    made[2](made[0](x[order]), y[order]).backward()
    norms = made[0].get_norm_sample()
    assert (norms[-count:] > 0).all() and (norms[:-count] == 0).all()
    made[0].expect_rows(torch.zeros(20, dtype=torch.long))
    with raises("FC242"):
        made[0](x)


def test_batches_without_tensors_are_refused_or_declared() -> None:
    class Texts(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return f"{index}"

    made = of_users(loader=DataLoader(Texts(torch.arange(len(IDS))), batch_size=6))
    for names in made[3]:
        if not len(names):
            continue
        x = torch.randn(len(names), 6)
        with raises("FC243"):
            made[0](x)
        made[0].expect_rows(torch.arange(len(names)))
        made[0](x)


# -- batches that were left out, or taken ahead ----------------------------------------------------


def several(labels_alike: bool = True) -> tuple[Draws, list[Tensor]]:
    """Two batches that were given, of which none was used, and the tensors of the last one."""
    draws = Draws(strict=True)
    x, y = torch.arange(8.0).view(2, 4), torch.tensor([0, 1])
    other = y.clone() if labels_alike else y.flip(0)
    draws.give(DrawnBatch(0, 2, 2, torch.tensor([0, 1]), (x, other)))
    draws.give(DrawnBatch(1, 1, 2, torch.tensor([5, 5]), (x + 9, y)))
    return draws, [x + 9, y]


@pytest.mark.parametrize("inputs", ["changed", "with a mask"])
@pytest.mark.parametrize("labels_alike", [True, False])
def test_equal_labels_do_not_tell_which_of_several_batches_it_is(
    labels_alike: bool, inputs: str
) -> None:
    """Its rows would be clipped as those of other users: two rows of one user, each by itself."""
    draws, (x, y) = several(labels_alike)
    called = [x / 7, y] if inputs == "changed" else [x.clone(), y, torch.randn(2, 3)]
    with raises("FC243"):
        draws.of_forward(called, 0)
    draws.expect_rows(torch.arange(2))
    found = draws.of_forward(called, 0)
    assert found is not None and found.number == 1


CLEARED = {
    "optimizer": lambda module, optimizer: optimizer.zero_grad(),
    "model": lambda module, optimizer: module.zero_grad(),
}


MODES = pytest.mark.parametrize("mode", ["one_pass", "two_pass"])


@MODES
@pytest.mark.parametrize("by", CLEARED)
def test_a_look_before_training_is_forgotten(mode: str, by: str) -> None:
    """As notebooks keep ``loss0``, and as an interrupt between forward and backward leaves it."""
    made = private(mode=mode)
    module, optimizer, criterion, loader = made
    looks = []
    for x, y in loader:
        looks.append(criterion(module(x), y))
        CLEARED[by](module, optimizer)
        break
    for x, y in loader:
        looks.append(criterion(module(x), y))  # an interrupt here
        break
    for x, y in loader:
        CLEARED[by](module, optimizer)
        loss = criterion(module(x), y)
        loss.backward()
        found = [p.grad.clone() for p in module.parameters()]
        optimizer.zero_grad()
        del loss
        criterion(module(x), y).backward()
        for sums, p in zip(found, module.parameters(), strict=True):
            assert torch.allclose(sums, p.grad, atol=1e-7)
        optimizer.step()
    assert len(looks) == 2


def in_turn(made: Any, clear: Callable[[], None], x: Tensor) -> None:
    first = made.model(x)
    clear()
    second = made.model(2 * x)
    clear()
    (first.square().sum(1) + second.sum(1)).mean().backward()


@MODES
def test_what_a_backward_reaches_counts(mode: str) -> None:
    """Gradients may be cleared between forward and backward: nothing of it is forgotten."""
    x, sums = data().tensors[0][:8], []
    for cleared in (False, True):
        made = Private(mode=mode)
        in_turn(made, made.optimizer.zero_grad if cleared else lambda: None, x)
        assert len(made.wrapper.get_norm_sample()) == 8
        sums.append([p.grad.clone() for p in made.plain.parameters()])
    assert all(map(torch.equal, *sums))


# -- warned of -------------------------------------------------------------------------------------


def not_finite(made: Any) -> None:
    module, optimizer, criterion, loader = made
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(module(x), y).loss_per_sample.mean()
        if number == 1:  # as if it were not
            continue
        loss.backward()
        optimizer.step()


def too_few(made: Any) -> None:
    for number, (x, y) in enumerate(made[3]):
        if number != 2:
            step(made, x, y)


def sums_read(made: Any) -> None:
    """As Sophia and GradNorm do; no step at all is needed to notice."""
    module, optimizer, criterion, loader = made
    for x, y in loader:
        criterion(module(x), y).backward()
        assert all(p.grad is not None for p in module.parameters())
        optimizer.zero_grad()


def parts_left_out(made: Any) -> None:
    manager = BatchMemoryManager(data_loader=made[3], max_physical_batch_size=50, optimizer=made[1])
    with manager as batches:
        for number, (x, y) in enumerate(batches):
            if number != 1:
                step(made, x, y)


WRONG = [not_finite, too_few, sums_read, parts_left_out]


@pytest.mark.parametrize("loop", WRONG)
def test_batches_that_were_left_out_are_named_once(loop: Any) -> None:
    made = private()
    kinds = NoStepWarning, NotPoissonWarning
    (message,) = warned(lambda: [loop(made) for _ in range(3)], *kinds)
    assert "no optimizer.step() followed" in message
    assert "step() as always, on its row" in message and "MicroBatches(optimizer)" in message


# -- silent ----------------------------------------------------------------------------------------


def left_early(made: Any) -> None:
    for _ in range(2):
        for number, (x, y) in enumerate(made[3]):
            if number == 2:
                break
            step(made, x, y)
        for x, y in islice(made[3], 3):
            step(made, x, y)


def evaluated_between(made: Any) -> None:
    """Over the same loader, in the midst of an epoch and in between."""
    for number, (x, y) in enumerate(made[3]):
        step(made, x, y)
        if number % 2:
            for inputs, _ in made[3]:
                with torch.no_grad():
                    made[0](inputs)
    assert sum(len(x) for x, _ in made[3]) > 0


def in_micro_batches(made: Any) -> None:
    module, optimizer, criterion, loader = made
    parts = MicroBatches(optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        parts(lambda a, b: criterion(module(a), b).backward(), x, y)
        optimizer.step()


RIGHT = [ordinary, fetched_ahead, in_a_list, beside_evaluation, in_parts]
RIGHT += [adversarial, left_early, evaluated_between, in_micro_batches]


@pytest.mark.parametrize("loop", RIGHT)
def test_ordinary_loops_are_silent(loop: Any) -> None:
    made = private()
    kinds = NoStepWarning, NotPoissonWarning
    assert warned(lambda: [loop(made) for _ in range(3)], *kinds) == []


# -- no samples ------------------------------------------------------------------------------------


def test_a_step_on_samples_needs_their_backward() -> None:
    made = private()
    for x, _ in made[3]:
        assert len(x)
        with raises("FC501", ValueError):
            made[1].step()
