"""Accelerate in one process: ``prepare`` before or after ``make_private``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine
from tests.support.errors import raises

pytestmark = [
    pytest.mark.filterwarnings("error:Batches are not drawn"),
]


@pytest.fixture(autouse=True)
def own_state() -> Iterator[None]:
    """Accelerate keeps one state for the process."""

    def reset() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        PartialState._reset_state()

    reset()
    yield
    reset()


class Training:
    """A private model in a loop that Accelerate's users write."""

    def __init__(self, accelerator: Accelerator | None, prepare: str = "", first: bool = False):
        torch.manual_seed(0)
        self.accelerator = accelerator
        self.plain = model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader: Any = DataLoader(
            TensorDataset(torch.randn(20, 4), torch.randint(0, 2, (20,))), batch_size=5
        )
        if first:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        self.engine = FlashPrivacyEngine(accountant="gdp", seed=7)
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=0.1,
        )
        for name in prepare.split():
            setattr(self, name, accelerator.prepare(getattr(self, name)))
        torch.manual_seed(7)
        self.sizes: list[int] = []

    def epoch(self, before_step: Any = None) -> None:
        for x, y in self.loader:
            self.sizes.append(len(x))
            self.optimizer.zero_grad()
            self.backward(F.cross_entropy(self.model(x), y))
            if before_step:
                before_step()
            self.optimizer.step()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss) if self.accelerator else loss.backward()


ALL = "model optimizer loader"


@pytest.mark.parametrize(
    ("prepare", "first"),
    [(ALL, False), ("model", False), ("optimizer", False), ("loader", False), ("", True)],
)
def test_prepared_runs_are_those_without(prepare: str, first: bool) -> None:
    expected = Training(None)
    expected.epoch()
    training = Training(Accelerator(cpu=True), prepare, first)
    training.epoch()
    assert training.sizes == expected.sizes
    assert training.engine.accountant.history == [(1.0, 0.25, 4)]
    for a, b in zip(training.plain.parameters(), expected.plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_prepared_optimizer_does_not_step_without_noise() -> None:
    training = Training(Accelerator(cpu=True), first=True)
    prepared = training.optimizer.original_optimizer
    assert isinstance(prepared, AcceleratedOptimizer)

    def refused() -> None:
        for optimizer in (prepared, prepared.optimizer):
            with raises("FC539", match="SGD itself"):
                optimizer.step()

    training.epoch(refused)
    assert training.engine.accountant.history == [(1.0, 0.25, 4)]


def test_states_hold_the_accountant(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    training = Training(accelerator, ALL)
    accelerator.register_for_checkpointing(training.engine.accountant)
    training.epoch()
    saved = [p.detach().clone() for p in training.plain.parameters()]
    accelerator.save_state(str(tmp_path))
    training.epoch()
    with raises("FC581", ValueError, match="8 steps"):
        accelerator.load_state(str(tmp_path))
    assert training.engine.accountant.history == [(1.0, 0.25, 8)]  # they were run
    training.engine.accountant.history = []  # as of a new engine
    accelerator.load_state(str(tmp_path))
    assert training.engine.accountant.history == [(1.0, 0.25, 4)]
    assert all(torch.equal(a, b) for a, b in zip(training.plain.parameters(), saved, strict=True))


def test_clipping_once_more_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    training = Training(accelerator, ALL)
    with raises("FC503", ValueError, match="is not the clipped sum"):
        training.epoch(lambda: accelerator.clip_grad_norm_(training.plain.parameters(), 1.0))
    assert not training.engine.accountant.history


def test_accumulation_is_refused() -> None:
    """Two Poisson batches are not one of the rate that is accounted."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    training = Training(accelerator, ALL)
    with raises("FC510", ValueError):
        for x, y in training.loader:
            with accelerator.accumulate(training.model):
                training.backward(F.cross_entropy(training.model(x), y))
                training.optimizer.step()
                training.optimizer.zero_grad()
    assert not training.engine.accountant.history


@pytest.mark.parametrize("prepare", [ALL, "model loader", ""])
def test_losses_that_accelerate_divides(prepare: str) -> None:
    """Without ``accumulate`` nothing is added up, and ``backward`` divides all the same."""
    training = Training(Accelerator(cpu=True, gradient_accumulation_steps=2), prepare)
    with raises("FC471", ValueError, match=r"(?ms)divides losses by 2.*Accelerator\(grad.*=1\)$"):
        training.epoch()
    assert not training.engine.accountant.history
    training.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    training.optimizer.zero_grad()
    training.epoch()
    assert training.engine.accountant.history == [(1.0, 0.25, 4)]


def test_a_scaler_is_refused() -> None:
    """``mixed_precision="fp16"`` on a GPU."""
    accelerator = Accelerator(cpu=True)
    training = Training(accelerator, "model loader")
    scaler = torch.amp.GradScaler("cpu")
    training.optimizer = AcceleratedOptimizer(training.optimizer, scaler=scaler)
    training.backward = lambda loss: scaler.scale(loss).backward()  # type: ignore[method-assign]
    with raises("FC470", ValueError):
        training.epoch()
    assert not training.engine.accountant.history
