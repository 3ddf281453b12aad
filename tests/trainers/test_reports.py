"""What is reported of a training."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine, LargeDeltaWarning, Users
from flash_clipping.trainers.dashboard import ClippingStatistics, PrivacyDashboard, line
from tests.support.errors import raises, warns
from tests.support.trainers import trainer


def made(accountant: str = "rdp", **settings: Any) -> Any:
    engine = FlashPrivacyEngine(accountant=accountant)
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.randn(20, 3), torch.randint(2, (20,)))
    make = engine.make_private_with_epsilon if "target_delta" in settings else engine.make_private
    returned = make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=5),
        max_grad_norm=1.0,
        **settings,
    )
    return engine, returned


def step(returned: Any) -> None:
    model, optimizer, loader = returned
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("accountant", ["prv", "rdp", "gdp"])
def test_epsilon_is_a_number_and_nothing_else_is_said(accountant: str) -> None:
    engine, returned = made(accountant, noise_multiplier=1.0)
    step(returned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(engine.get_epsilon(1e-5)) is float


def test_epsilon_in_logs(tmp_path: Path, capsys: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Optimal order")
        private = trainer(
            tmp_path,
            of_privacy={"noise_multiplier": None, "target_epsilon": 3.0, "accountant": "prv"},
            max_steps=2,
        )
        private.train()
    logs = [entry for entry in private.state.log_history if "epsilon" in entry]
    assert [type(entry["epsilon"]) for entry in logs] == [float, float]
    assert "np.float64" not in capsys.readouterr().out


def test_delta_of_an_engine() -> None:
    """Of 20 samples: before training where it is given, otherwise when ε is asked for; once."""
    with warns("FC564", LargeDeltaWarning, match=r"0\.05 for 20 samples.*delta=0\.005"):
        made(target_epsilon=3.0, target_delta=0.05, epochs=1, epsilon_tolerance=1.0)
    with warns("FC564", LargeDeltaWarning):
        made("pld", target_epsilon=3.0, target_delta=0.05, epochs=1, epsilon_tolerance=1.0)
    engine, returned = made(noise_multiplier=1.0)
    step(returned)
    with warns("FC564", LargeDeltaWarning):
        engine.get_epsilon(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LargeDeltaWarning)
        engine.get_epsilon(0.1)
        engine.get_epsilon(0.049)


def test_delta_of_a_trainer(tmp_path: Path) -> None:
    private = trainer(tmp_path, of_privacy={"target_delta": 0.05}, max_steps=1)
    private.get_train_dataloader()
    with warns("FC564", LargeDeltaWarning, match="for 20 samples"):
        private.optimizer = private.accelerator.prepare(private.create_optimizer())
        private.create_scheduler(1)  # before the first step
    assert private.run.steps == 0


def test_delta_of_users() -> None:
    users = torch.arange(20) // 4
    engine, returned = made(noise_multiplier=1.0, unit=Users(users))
    step(returned)
    with warns("FC564", LargeDeltaWarning, match="for 5 samples"):
        engine.get_epsilon(0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LargeDeltaWarning)
        engine.get_epsilon(0.19)


def test_trainers_report_what_the_engine_does(tmp_path: Path) -> None:
    private = trainer(tmp_path, max_steps=2, of_privacy={"seed": None})
    private.train()
    report = private.report()
    assert report == private.run.engine.report(1e-3)
    assert report["delta"] == 1e-3 and report["parts"][0]["steps"] == 2
    assert json.loads(json.dumps(report)) == report


def private(**options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    engine = options.pop("engine", None) or FlashPrivacyEngine(accountant="gdp")
    data = TensorDataset(torch.randn(24, 4), torch.randint(0, 2, (24,)))
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=options.pop("max_grad_norm", 0.5),
        **options,
    )
    return engine, *made


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("local_scalar_dense", "_to_copy", "nonzero")):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_grad_norm", [0.5, [0.1, 50.0, 0.1, 50.0]], ids=["flat", "per layer"])
def test_what_it_says(max_grad_norm: Any) -> None:
    clipping = "per_layer" if isinstance(max_grad_norm, list) else "flat"
    engine, model, optimizer, criterion, loader = private(
        max_grad_norm=max_grad_norm, clipping=clipping
    )
    statistics = ClippingStatistics(model)
    norms, shares, lines = [], [], []
    dashboard = PrivacyDashboard(engine, model, delta=1e-3, every=2, show=lines.append)
    assert dashboard.values() == {}
    with dashboard:
        for x, y in loader:  # four steps, and one more
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            norms.append(model.get_norm_sample())
            coef = model.get_clipping_coef()
            shares.append((coef if coef.dim() == 2 else coef[None]).min(0).values < 1)
            with Waits() as waits:
                statistics.note_backward()
            assert waits.count == 0
            dashboard.update()
            optimizer.step()
            if len(norms) == 3:
                break
    with Waits() as waits:
        reading = statistics.read()
    assert waits.count <= 3  # of which rows count, and two numbers at once
    assert reading.samples == sum(map(len, norms))
    assert reading.median_norm == pytest.approx(torch.cat(norms).median().item())
    assert reading.clipped_share == pytest.approx(torch.cat(shares).float().mean().item())
    assert [text.split("   ")[0] for text in lines] == ["step 2", "step 3"]
    assert f"ε = {engine.get_epsilon(1e-3):.2f}" in lines[1]
    assert lines[0].endswith("(ε: add or remove one sample)") and "(ε" not in lines[1]
    values = dashboard.values()
    assert values["step"] == 3 and values["epsilon"] == engine.get_epsilon(1e-3)
    assert values["median_norm"] == pytest.approx(norms[2].median().item())
    assert values["clipped_share"] == pytest.approx(shares[2].float().mean().item())
    assert values["samples_per_second"] > 0
    first = torch.cat(shares[:2]).float().mean().item()
    assert f"clipped {first:.0%}" in lines[0]


@pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")
@pytest.mark.parametrize("of", ["nobody", "engine"])
def test_reports_name_relation_and_seed(of: str) -> None:
    """Loudly, in every line that has an ε."""
    engine, model, optimizer, criterion, loader = private(
        **{"engine": FlashPrivacyEngine(accountant="gdp", seed=41)} if of == "engine" else {},
    )
    lines: list[str] = []
    with PrivacyDashboard(engine, model, delta=1e-3, every=1, show=lines.append) as dashboard:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            dashboard.update()
            optimizer.step()
    summary = engine.summary(1e-3)
    assert summary.startswith(f"ε = {engine.get_epsilon(1e-3):.4g} at δ = 0.001 (add or remove one")
    assert len(lines) > 1
    seed = {"nobody": None, "engine": 41}[of]
    for text in (*lines, summary):
        assert ("SEEDED" in text) == (seed is not None)
        assert seed is None or f"SEEDED ({seed}): NO ε HOLDS" in text


def test_parts_of_a_logical_batch_are_one_step() -> None:
    engine, model, optimizer, criterion, loader = private()
    lines: list[str] = []
    parts = 0
    with (
        BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as physical,
        PrivacyDashboard(engine, model, delta=1e-3, every=1, show=lines.append) as dashboard,
    ):
        for x, y in physical:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            dashboard.update()
            optimizer.step()
            parts += 1
    assert parts > 4
    assert [text.split("   ")[0] for text in lines] == [f"step {n}" for n in range(1, 5)]


def test_no_samples() -> None:
    _, model, *_ = private()
    reading = ClippingStatistics(model).read()
    assert (reading.samples, reading.samples_per_second) == (0, 0.0)
    assert "clipped nan%" in line(1, 0.5, reading)
    with raises("FC302", ValueError, match="every: found 0"):
        PrivacyDashboard(None, model, delta=1e-3, every=0)
