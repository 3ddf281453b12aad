"""A batch that is drawn and not stepped on: one warning by name. What is no such batch is silent;
and a batch without samples needs nothing but the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flash_clipping import AdaptiveBound, FlashPrivacyEngine, MicroBatches, NoStepWarning
from tests.engine.test_draws import LOOPS, private, some_left_out, step
from tests.support.draws import drawn
from tests.support.errors import raises
from tests.support.private import data


def warned(run: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in found if issubclass(w.category, NoStepWarning)]


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


def failed(made: Any) -> None:
    for number, (x, y) in enumerate(made[3]):
        try:
            if number == 1:
                raise RuntimeError("out of memory")
            step(made, x, y)
        except RuntimeError:
            continue


def sums_read(made: Any) -> None:
    """As Sophia and GradNorm do; no step at all is needed to notice."""
    module, optimizer, criterion, loader = made
    for x, y in loader:
        criterion(module(x), y).backward()
        assert all(p.grad is not None for p in module.parameters())
        optimizer.zero_grad()


def sums_read_late(made: Any) -> None:
    module, optimizer, criterion, loader = made
    for x, y in loader:
        module.zero_grad(set_to_none=True)
        criterion(module(x), y).backward()


def parts_left_out(made: Any) -> None:
    manager = BatchMemoryManager(data_loader=made[3], max_physical_batch_size=50, optimizer=made[1])
    with manager as batches:
        for number, (x, y) in enumerate(batches):
            if number != 1:
                step(made, x, y)


WRONG = [not_finite, too_few, failed, sums_read, sums_read_late, parts_left_out, some_left_out]


@pytest.mark.parametrize("loop", WRONG)
def test_batches_that_were_left_out_are_named_once(loop: Any) -> None:
    made = private()
    (message,) = warned(lambda: [loop(made) for _ in range(3)] and None)
    assert "no optimizer.step() followed" in message
    assert "step() as always, on its row" in message and "MicroBatches(optimizer)" in message


def with_workers(loop: Any) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    made = FlashPrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data(), batch_size=16, num_workers=2, prefetch_factor=3),
        noise_multiplier=1.0,
        max_grad_norm=0.1,
    )
    return warned(lambda: loop(made))


def test_batches_of_workers() -> None:
    assert len(with_workers(too_few)) == 1
    assert with_workers(left_early) == []


# -- silent ----------------------------------------------------------------------------------------


def left_early(made: Any) -> None:
    for _ in range(2):
        for number, (x, y) in enumerate(made[3]):
            if number == 2:
                break
            step(made, x, y)
        for x, y in islice(made[3], 3):
            step(made, x, y)


def a_look_within_the_loop(made: Any) -> None:
    batches = iter(made[3])
    next(batches)
    for x, y in batches:
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


def trained_within(made: Any) -> None:
    for x, y in made[3]:
        step(made, x, y)
        for inner, labels in islice(made[3], 2):
            step(made, inner, labels)


def two_ahead(made: Any) -> None:
    ahead: list[Any] = []
    for batch in made[3]:
        ahead.append(batch)
        if len(ahead) == 3:
            step(made, *ahead.pop(0))
    for batch in ahead:
        step(made, *batch)


def generator_first(made: Any) -> None:
    """The discriminator's sums of a generator's backward are cleared before its own step."""
    module, optimizer, criterion, loader = made
    generator = nn.Linear(6, 6)
    for x, y in loader:
        fake = generator(torch.randn(len(x), 6))
        criterion(module(fake), torch.ones_like(y)).backward()
        optimizer.zero_grad()
        criterion(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_micro_batches(made: Any) -> None:
    module, optimizer, criterion, loader = made
    parts = MicroBatches(optimizer)
    for x, y in loader:
        optimizer.zero_grad()
        parts(lambda a, b: criterion(module(a), b).backward(), x, y)
        optimizer.step()


RIGHT = [loop for loop in LOOPS if loop is not some_left_out]
RIGHT += [left_early, a_look_within_the_loop, evaluated_between, trained_within, two_ahead]
RIGHT += [generator_first, in_micro_batches]


@pytest.mark.parametrize("loop", RIGHT)
def test_ordinary_loops_are_silent(loop: Any) -> None:
    made = private()
    assert warned(lambda: [loop(made) for _ in range(3)] and None) == []


# -- no samples ------------------------------------------------------------------------------------


class Pictures(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((6,), float(index)), {"label": torch.tensor(index % 3)}


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer", AdaptiveBound(0.5, 0.01, 10.0, 0.1)])
def test_a_step_on_no_samples_is_noise_and_accounted(mode: str, clipping: str) -> None:
    """Also of lists, as torchvision's detectors have them."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    plain = DataLoader(Pictures(), batch_size=1, collate_fn=lambda b: (*zip(*b, strict=True),))
    engine = FlashPrivacyEngine(accountant="rdp")
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=plain,
        noise_multiplier=0.05,
        max_grad_norm=[0.1, 0.1] if clipping == "per_layer" else 0.1,
        clipping=clipping,
        mode=mode,
    )
    empty = 0

    def train() -> None:
        nonlocal empty
        for images, targets in loader:
            optimizer.zero_grad()
            before = model.weight.detach().clone()
            x, samples = torch.stack(images), drawn(module)
            y = torch.stack([target["label"] for target in targets])
            nn.functional.cross_entropy(module(x), y).backward()
            empty += not samples
            optimizer.step()
            assert not torch.equal(before, model.weight)

    assert warned(train) == []
    assert empty > 5
    assert len(engine.accountant) == len(loader)


def test_a_step_on_samples_needs_their_backward() -> None:
    made = private()
    for x, _ in made[3]:
        assert len(x)
        with raises("FC501", ValueError):
            made[1].step()
