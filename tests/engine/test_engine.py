"""``make_private`` as Opacus does it, in other modes, unwrapped, and every way to go backward."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.schedulers import StepGradClip
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine, GradSampleModuleFlashClipping
from flash_clipping.noise import releases
from flash_clipping.ops.error_bounds import ETA
from tests.support.engine import EngineTraining, assert_states_close, convolutional_network
from tests.support.errors import raises


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


@pytest.mark.parametrize(
    ("accountant", "epochs", "batches", "steps"), [("rdp", 3, 75, 225), ("pld", 1 / 49, 49, 1)]
)
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


# -- Opacus' other modes --------------------------------------------------------------------------


B, T, D = 5, 8, 3


class Fourier(nn.Module):
    """As in a Fourier neural operator: modes are multiplied by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 1)
        self.modes = nn.Parameter(torch.randn(3, D, D, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.first(x), dim=1)[:, :3]
        mixed = torch.einsum("bki,kio->bko", found, self.modes)
        return self.last(torch.fft.irfft(mixed, n=T, dim=1) + x).mean((1, 2))


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Fourier().double()
    model.modes.data = model.modes.data.to(torch.cdouble)
    return model, torch.randn(B, T, D).double()


def reals(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def flat(tensors: Any) -> Tensor:
    return torch.cat([reals(x.detach()).flatten() for x in tensors])


def truth(model: nn.Module, x: Tensor) -> Tensor:
    plain, found = copy.deepcopy(model), []
    for b in range(len(x)):
        plain.zero_grad()
        plain(x[b : b + 1]).square().sum().backward()
        found.append(flat(p.grad for p in plain.parameters()))
    return torch.stack(found)


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_norms_and_sums_are_those_of_pairs_of_reals(clipping: Any) -> None:
    model, x = made()
    grads = truth(model, x)
    norms = grads.norm(dim=1)
    C = norms.median().item()
    flash = GradSampleModuleFlashClipping(
        model, mode="one_by_one", max_grad_norm=C, clipping=clipping, loss_reduction="sum"
    )
    flash(x).square().sum().backward()
    torch.testing.assert_close(flash.get_norm_sample(), norms, rtol=1e-10, atol=0)
    coef = (C / (norms + 1e-6)).clamp(max=1) if clipping == "flat" else C / (norms + 0.01)
    expected = (coef[:, None] * grads).sum(0)
    found = flat(p.grad for p in model.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert model.modes.grad is not None and model.modes.grad.dtype == torch.cdouble


def private(model: nn.Module, x: Tensor, noise: float, bound: float) -> Any:
    return FlashPrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        data_loader=DataLoader(TensorDataset(x), batch_size=B),
        criterion=lambda y, _: y.square(),
        noise_multiplier=noise,
        max_grad_norm=bound,
        loss_reduction="sum",
        poisson_sampling=False,
        mode="one_by_one",
    )


@pytest.mark.filterwarnings("ignore:Batches are not drawn by Poisson sampling")
def test_noise_is_added_to_both_parts() -> None:
    torch.manual_seed(0)
    model = Fourier()
    model.modes = nn.Parameter(torch.zeros(64, 64, dtype=torch.cfloat))
    model.forward = lambda x: (x.sum((1, 2)) * model.modes.sum()).real  # type: ignore
    for part in (model.first, model.last):
        part.requires_grad_(False)
    wrapped, optimizer, _, _ = private(model, torch.randn(B, T, D), 2.0, 0.5)
    wrapped(torch.randn(B, T, D)).sum().backward()
    seen = []
    optimizer.attach_step_hook(lambda _: seen.append(model.modes.grad.clone()))
    optimizer.step()
    for values in (seen[0].real, seen[0].imag):
        assert float(values.std()) == pytest.approx(2.0 * 0.5 * (1 + ETA), rel=0.05)


def test_other_modes_offer_it() -> None:
    model, x = made()
    with raises("FC115", match='(?s)modes.*mode="one_by_one"'):
        GradSampleModuleFlashClipping(model)(x)
