"""A dataset of users with any number of rows, and a small model made private for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import Users
from tests.support.private import TwoLayers, made

#: Rows of 12 users with ids of any size, from one row to seven, in no order.
SIZES = (1, 2, 3, 1, 7, 2, 4, 1, 5, 2, 3, 5)
ROWS = sum(SIZES)
IDS = torch.tensor([100 - 7 * user for user, rows in enumerate(SIZES) for _ in range(rows)])[
    torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
]
BATCH = 6  # 6 steps in an epoch


def data(dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 6, generator=generator).to(dtype)
    return TensorDataset(x, torch.arange(ROWS))


def private(engine: Any = None, *, dataset: Any = None, loader: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = options.pop("model", None) or TwoLayers()
    loader = loader or DataLoader(dataset or data(), batch_size=BATCH)
    return made(model, loader, engine, **{"unit": Users(IDS)} | options)


def step(module: Any, optimizer: Any, criterion: Any, x: Tensor, rows: Tensor) -> Tensor:
    """A step; the norms that it clipped."""
    optimizer.zero_grad()
    criterion(module(x), rows % 3).backward()
    norms: Tensor = module.get_norm_sample()
    optimizer.step()
    return norms
