"""Training through an engine, Opacus' or this library's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def digits() -> TensorDataset:
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    return TensorDataset(x, torch.tensor(labels))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.Tanh(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


class EngineTraining:
    """A model, its optimizer and its data, private by whichever engine and mode."""

    def __init__(
        self,
        engine: PrivacyEngine,
        make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        *,
        model: nn.Module | None = None,
        dataset: TensorDataset | None = None,
        batch_size: int = 128,
        lr: float = 0.1,
        **options: Any,
    ):
        self.engine = engine
        self.plain = model if model is not None else network()
        options = {"max_grad_norm": 0.5, "noise_multiplier": 0.0} | options
        make = engine.make_private
        if "target_epsilon" in options:
            del options["noise_multiplier"]
            make = engine.make_private_with_epsilon
        self.criterion: Any = nn.CrossEntropyLoss(reduction=options.get("loss_reduction", "mean"))
        private = make(
            module=self.plain,
            optimizer=make_optimizer(self.plain.parameters(), lr=lr),
            data_loader=DataLoader(dataset or digits(), batch_size=batch_size),
            criterion=self.criterion,
            **options,
        )
        self.wrapper, self.optimizer, self.loader = private[0], private[1], private[-1]
        if len(private) == 4:
            self.criterion = private[2]
        wraps = options.get("wrap_model", True)
        self.model = self.wrapper if wraps else self.plain

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.model(x), y).backward()
        self.optimizer.step()

    def steps(self, count: int, seed: int = 1) -> EngineTraining:
        torch.manual_seed(seed)
        done = 0
        while done < count:
            for x, y in self.loader:
                self.step(x, y)
                done += 1
                if done == count:
                    break
        return self

    def state(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.plain.state_dict().items()}


def assert_states_close(
    found: EngineTraining, expected: EngineTraining, tolerance: float = 1e-5
) -> None:
    for name, value in expected.state().items():
        torch.testing.assert_close(
            found.state()[name], value, atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
