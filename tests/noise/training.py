"""A small model made private with a mechanism, of 30 samples in five batches, and steps of it."""

from __future__ import annotations

from typing import Any

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine

SIZE, BATCHES = 30, 5


def private(mechanism: Any, workers: int = 0, accountant: str = "pld", **options: Any) -> Any:
    """Engine, module, optimizer, and a loader of samples with their numbers."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    engine = FlashPrivacyEngine(accountant=accountant)
    data = TensorDataset(torch.randn(SIZE, 4), torch.arange(SIZE))
    module, optimizer, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        criterion=nn.CrossEntropyLoss(reduction="sum"),
        data_loader=DataLoader(data, batch_size=SIZE // BATCHES, num_workers=workers),
        loss_reduction="sum",
        mechanism=mechanism,
        **{"noise_multiplier": 1.0, "max_grad_norm": 0.5} | options,
    )
    return engine, module, optimizer, loader


def step(module: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).square().sum().backward()
    optimizer.step()


def in_parts(loader: Any, optimizer: Any, samples: int) -> Any:
    """Batches in parts of at most so many samples."""
    return BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=samples, optimizer=optimizer
    ).__enter__()
