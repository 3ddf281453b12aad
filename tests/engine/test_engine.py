"""``FlashPrivacyEngine`` from end to end, against Opacus' own engine."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.schedulers import ExponentialGradClip, ExponentialNoise, StepGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine, GradSampleModuleFlashClipping
from flash_clipping.noise import releases
from flash_clipping.ops.error_bounds import ETA
from tests.support.draws import drawn
from tests.support.engine import EngineTraining, assert_states_close, convolutional_network
from tests.support.errors import raises
from tests.support.sums import note_norms, note_sums
from tests.support.wrapping import MODES


@pytest.mark.usefixtures("randomness_of_opacus")
@pytest.mark.parametrize(("mode", "poisson_sampling"), [("one_pass", False), ("two_pass", True)])
def test_twenty_steps_of_adamw_equal_opacus_hooks(mode: str, poisson_sampling: bool) -> None:
    options = {"poisson_sampling": poisson_sampling, "lr": 1e-3}
    start = convolutional_network().state_dict()
    hooks = EngineTraining(PrivacyEngine(), torch.optim.AdamW, **options).steps(20)
    flash = EngineTraining(FlashPrivacyEngine(), torch.optim.AdamW, mode=mode, **options).steps(20)
    assert_states_close(flash, hooks)
    moved = max((flash.state()[name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e-2  # there was something to compare


@pytest.mark.usefixtures("randomness_of_opacus")
@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
@pytest.mark.parametrize("wrap_model", [True, False])
def test_sgd_equals_opacus_hooks(wrap_model: bool, loss_reduction: str) -> None:
    lr = 0.5 if loss_reduction == "mean" else 0.5 / 128
    options = {"wrap_model": wrap_model, "loss_reduction": loss_reduction, "lr": lr}
    hooks = EngineTraining(PrivacyEngine(), **options).steps(5)
    flash = EngineTraining(FlashPrivacyEngine(), **options).steps(5)
    assert_states_close(flash, hooks)


def test_same_epsilon_as_opacus() -> None:
    options: dict[str, Any] = {"noise_multiplier": 1.1, "poisson_sampling": True}
    for accountant in ("prv", "rdp", "gdp"):
        hooks = EngineTraining(PrivacyEngine(accountant=accountant), **options).steps(5)
        flash = EngineTraining(FlashPrivacyEngine(accountant=accountant), **options).steps(5)
        assert flash.engine.accountant.history == hooks.engine.accountant.history
        assert flash.engine.get_epsilon(1e-5) == hooks.engine.get_epsilon(1e-5)
        assert flash.engine.get_epsilon(1e-5) > 0


@pytest.mark.parametrize("loss_reduction", ["mean", "sum"])
def test_noise_is_gaussian_of_the_right_variance(loss_reduction: str) -> None:
    """noise = sigma C on the sum; a two-sided test of its variance and one of its distribution."""
    stats = pytest.importorskip("scipy.stats")
    training = EngineTraining(
        FlashPrivacyEngine(),
        model=nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.Linear(300, 10)),
        noise_multiplier=1.3,
        max_grad_norm=0.7,
        loss_reduction=loss_reduction,
        poisson_sampling=False,
        batch_size=32,
    )
    torch.manual_seed(2)
    noises = []
    for x, y in list(training.loader)[:2]:
        training.optimizer.zero_grad()
        training.criterion(training.model(x), y).backward()
        clipped = [param.grad.clone() for param in training.plain.parameters()]
        training.optimizer.step()
        divisor = training.optimizer.expected_batch_size if loss_reduction == "mean" else 1
        noises.append(
            torch.cat(
                [
                    (param.grad * divisor - before).flatten()
                    for param, before in zip(training.plain.parameters(), clipped, strict=True)
                ]
            ).double()
            / (1.3 * 0.7)
        )
    for noise in noises:
        chi2 = noise.square().sum().item()
        tail = stats.chi2.cdf(chi2, len(noise))
        assert 1e-4 < tail < 1 - 1e-4, f"variance {chi2 / len(noise):.4f} of {len(noise)} draws"
        assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-4
    correlation = stats.pearsonr(noises[0].numpy(), noises[1].numpy())
    assert correlation.pvalue > 1e-4  # fresh noise at every step


def test_make_private_with_epsilon() -> None:
    options = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 2, "batch_size": 200}
    hooks = EngineTraining(PrivacyEngine(), **options)
    flash = EngineTraining(FlashPrivacyEngine(), mode="two_pass", **options)
    assert flash.optimizer.noise_multiplier == hooks.optimizer.noise_multiplier
    flash.steps(2 * len(flash.loader))
    assert 2.9 < flash.engine.get_epsilon(1e-5) <= 3.01
    assert isinstance(flash.wrapper, GradSampleModuleFlashClipping)
    assert flash.wrapper.mode == "two_pass"


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize(("epochs", "batches", "steps"), [(3, 75, 225), (1 / 49, 49, 1)])
def test_the_target_is_not_exceeded_after_the_last_step(
    epochs: float, batches: int, steps: int, accountant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int(3 / (1 / 75)) is 224, and int(49 * (1 / 49)) is 0."""
    monkeypatch.setattr(releases, "LOSS_GRID", 1e-2)  # the same one when the target is asked for
    engine = FlashPrivacyEngine(accountant=accountant)
    model = nn.Linear(3, 2)
    _, optimizer, *_ = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(2 * batches, 3)), batch_size=2),
        target_epsilon=8.0,
        target_delta=1e-3,
        epochs=epochs,
        epsilon_tolerance=1e-3,
        max_grad_norm=1.0,
    )
    engine.accountant.history = [(optimizer.noise_multiplier, 1 / batches, steps)]
    assert 7.99 < engine.get_epsilon(1e-3) <= 8.0


@pytest.mark.parametrize("mode", MODES)
def test_poisson_sampling_with_empty_batches(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    few = TensorDataset(
        torch.randn(40, 1, 8, 8, generator=generator),
        torch.randint(0, 10, (40,), generator=generator),
    )
    training = EngineTraining(FlashPrivacyEngine(), dataset=few, batch_size=1, mode=mode, lr=1.0)
    torch.manual_seed(3)
    sizes, read = [], note_norms(training.wrapper, training.optimizer)
    for x, y in training.loader:
        before = training.state()
        sizes.append(drawn(training.wrapper))
        training.step(x, y)
        assert len(x) == max(1, sizes[-1])
        assert read[-1][0].shape == (sizes[-1],)
        unchanged = all(
            torch.equal(before[name], value) for name, value in training.state().items()
        )
        assert unchanged == (sizes[-1] == 0)
    assert 0 in sizes and max(sizes) > 1
    # Every batch counts for the budget, empty ones too.
    assert sum(steps for *_, steps in training.engine.accountant.history) == len(sizes) == 40


def test_empty_batch_gets_noise() -> None:
    training = EngineTraining(FlashPrivacyEngine(), noise_multiplier=1.0)
    before = training.state()
    training.wrapper.expect_samples(0)
    training.step(torch.full((1, 1, 8, 8), torch.inf), torch.zeros(1, dtype=torch.long))
    for name, value in training.state().items():
        assert torch.isfinite(value).all()
        assert not torch.equal(value, before[name])


@pytest.mark.usefixtures("randomness_of_opacus")
@pytest.mark.parametrize(("mode", "poisson_sampling"), [("one_pass", True), ("two_pass", False)])
def test_virtual_steps_equal_one_big_batch(mode: str, poisson_sampling: bool) -> None:
    options: dict[str, Any] = {"mode": mode, "poisson_sampling": poisson_sampling, "lr": 0.5}
    whole = EngineTraining(FlashPrivacyEngine(), **options).steps(5)
    parts = EngineTraining(FlashPrivacyEngine(), **options)
    torch.manual_seed(1)
    physical = logical = 0
    with BatchMemoryManager(
        data_loader=parts.loader, max_physical_batch_size=24, optimizer=parts.optimizer
    ) as loader:
        for x, y in loader:
            assert len(x) <= 24
            parts.step(x, y)
            physical += 1
            logical = sum(steps for *_, steps in parts.engine.accountant.history)
            if logical == 5:
                break
    assert physical > 20
    assert_states_close(parts, whole, 1e-6)
    assert parts.engine.accountant.history == whole.engine.accountant.history


def test_schedulers_change_noise_and_clipping() -> None:
    training = EngineTraining(FlashPrivacyEngine(), noise_multiplier=1.0, poisson_sampling=False)
    noise = ExponentialNoise(training.optimizer, gamma=0.5)
    clip = ExponentialGradClip(training.optimizer, gamma=0.1)
    sums = note_sums(training.optimizer)
    read = note_norms(training.wrapper, training.optimizer)
    expectations = ((1.0, 0.5), (0.5, 0.05), (0.25, 0.005))
    for epoch, (expected_noise, expected_clip) in enumerate(expectations):
        training.steps(1, seed=epoch)  # the same noise twice is refused
        norms, coef = read.pop()
        torch.testing.assert_close(coef, (expected_clip / (norms + 1e-6)).clamp(max=1))
        total = torch.cat([summed.flatten() for summed in sums[-1]]).norm()
        assert total <= expected_clip * len(norms) * (1 + 1e-5)
        assert training.optimizer.noise_multiplier == pytest.approx(expected_noise)
        expected_std = expected_noise * expected_clip * (1 + ETA)
        assert training.optimizer._noise_std() == pytest.approx(expected_std)
        noise.step()
        clip.step()
    multipliers = [multiplier for multiplier, *_ in training.engine.accountant.history]
    assert multipliers == pytest.approx([1.0, 0.5, 0.25])


def test_checkpoint_resumes_where_it_was() -> None:
    options: dict[str, Any] = {"poisson_sampling": False, "noise_multiplier": 0.0, "lr": 1e-3}
    through = EngineTraining(FlashPrivacyEngine(), torch.optim.AdamW, **options)
    batches = list(through.loader)[:6]
    for x, y in batches:
        through.step(x, y)

    first = EngineTraining(FlashPrivacyEngine(), torch.optim.AdamW, **options)
    scheduler = StepGradClip(first.optimizer, step_size=100, gamma=0.5)
    for x, y in batches[:3]:
        first.step(x, y)
        scheduler.step()
    file = io.BytesIO()
    first.engine.save_checkpoint(
        path=file,
        module=first.wrapper,
        optimizer=first.optimizer,
        grad_clip_scheduler=scheduler,
        checkpoint_dict={"epoch": 1},
    )
    file.seek(0)

    second = EngineTraining(
        FlashPrivacyEngine(),
        torch.optim.AdamW,
        model=copy.deepcopy(convolutional_network()),
        **options,
    )
    second_scheduler = StepGradClip(second.optimizer, step_size=100, gamma=0.5)
    checkpoint = second.engine.load_checkpoint(
        path=file,
        module=second.wrapper,
        optimizer=second.optimizer,
        grad_clip_scheduler=second_scheduler,
    )
    assert checkpoint["epoch"] == 1
    assert second_scheduler.last_epoch == scheduler.last_epoch
    for x, y in batches[3:]:
        second.step(x, y)
    assert_states_close(second, through, 0.0)
    assert second.engine.accountant.history == through.engine.accountant.history


def test_checkpoint_of_opacus_loads() -> None:
    """State dicts have Opacus' names: a model trained by its engine goes on with this one."""
    hooks = EngineTraining(PrivacyEngine(), poisson_sampling=False).steps(2)
    file = io.BytesIO()
    hooks.engine.save_checkpoint(path=file, module=hooks.wrapper, optimizer=hooks.optimizer)
    file.seek(0)
    flash = EngineTraining(FlashPrivacyEngine(), poisson_sampling=False)
    flash.engine.load_checkpoint(path=file, module=flash.wrapper, optimizer=flash.optimizer)
    assert_states_close(flash, hooks, 0.0)
    assert_states_close(flash.steps(2), hooks.steps(2))
    assert flash.engine.accountant.history == hooks.engine.accountant.history


def test_an_earlier_checkpoint_brings_no_epsilon_back() -> None:
    training = EngineTraining(FlashPrivacyEngine(accountant="rdp"), noise_multiplier=1.0)
    engine, file = training.steps(1).engine, io.BytesIO()
    given = {"path": file, "module": training.wrapper, "optimizer": training.optimizer}
    engine.save_checkpoint(**given)
    file.seek(0)
    spent = training.steps(1).engine.get_epsilon(1e-5)
    with raises("FC581", ValueError):
        engine.load_checkpoint(**given)
    assert engine.get_epsilon(1e-5) == spent
