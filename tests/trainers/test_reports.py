"""What is reported of ε and δ."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine, LargeDeltaWarning, Users
from tests.support.errors import warns
from tests.support.trainers import trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
]


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


def test_epsilon_is_computed_once_for_so_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = trainer(tmp_path, num_train_epochs=1)
    ask, asked = private.run.engine.accountant.get_epsilon, []
    monkeypatch.setattr(
        private.run.engine.accountant,
        "get_epsilon",
        lambda delta: asked.append(private.run.steps) or ask(delta),
    )
    assert private.epsilon == 0.0 and not asked
    private.train()
    logged = [log["epsilon"] for log in private.state.log_history if "epsilon" in log]
    assert logged[-1] == private.epsilon == ask(private.privacy.target_delta)
    assert asked == sorted({*asked})


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
