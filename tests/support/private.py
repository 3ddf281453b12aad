"""A small model made private, and what is released of it.

What is released is looked at where noise is drawn: the sums, and the noise's standard deviation.
Gradients are large, so that every sample is clipped and a batch of one moves the sum by exactly its
bound; ``Released.ratio`` is that, in units of what the noise is for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flash_clipping.engine.optimizer
from flash_clipping import FlashPrivacyEngine
from flash_clipping.ops.error_bounds import ETA
from flash_clipping.randomness import Purpose

SLACK = 1 + 1e-4


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Released:
    """What noise was added to: norm of the sums, and the noise multiplier times the bound that the
    noise is for, release by release. Noise is drawn for ``C (1 + ETA)``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.releases: list[tuple[float, float]] = []
        self.sums: list[list[Tensor]] = []
        real = flash_clipping.engine.optimizer.noisy_means

        def noisy_means(sums: list[Tensor], std: float, *args: Any, **kwargs: Any) -> Any:
            if kwargs["draw"].purpose == Purpose.COUNT:
                return real(sums, std, *args, **kwargs)
            total = torch.cat([s.double().flatten() for s in sums]).norm().item()
            self.releases.append((total, std / (1 + ETA)))
            self.sums.append([s.clone() for s in sums])
            return real(sums, std, *args, **kwargs)

        monkeypatch.setattr(flash_clipping.engine.optimizer, "noisy_means", noisy_means)

    def ratio(self, multiplier: float = 1.0) -> float:
        norm, std = self.releases[-1]
        return norm * multiplier / std


def made(model: nn.Module, loader: Any, engine: Any = None, **options: Any) -> Any:
    """What ``make_private`` returns for this model and its data: by default a classifier, whose
    parameters SGD moves."""
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "criterion": nn.CrossEntropyLoss()}
    given |= {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)} | options
    engine = engine or FlashPrivacyEngine(accountant="rdp")
    return engine.make_private(module=model, data_loader=loader, **given)


class Private:
    """A small model made private."""

    def __init__(self, model: nn.Module | None = None, **options: Any):
        torch.manual_seed(0)
        self.plain = TwoLayers() if model is None else model
        self.engine = options.pop("engine", None) or FlashPrivacyEngine(accountant="rdp")
        options = {"max_grad_norm": 0.1, "poisson_sampling": False} | options
        size = options.pop("batch_size", 16)
        parameters = options.pop("parameters", None) or self.plain.parameters()
        lr = options.pop("lr", 0.1)
        plain = options.pop("optimizer", None) or torch.optim.SGD(parameters, lr=lr)
        loader = DataLoader(data(), batch_size=size)
        private = made(self.plain, loader, self.engine, optimizer=plain, **options)
        self.wrapper, self.optimizer, self.criterion, self.loader = private
        self.model = self.wrapper if options.get("wrap_model", True) else self.plain

    def backward(self, samples: int = 1, start: int = 0) -> None:
        x = data().tensors[0][start : start + samples]
        (100 * self.model(x).square().sum(1).mean()).backward()

    def step(self, samples: int = 1) -> None:
        self.optimizer.zero_grad()
        self.backward(samples)
        self.optimizer.step()


def data(size: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 6, generator=generator) * 30
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=generator))
