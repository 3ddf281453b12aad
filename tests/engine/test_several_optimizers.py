"""Several optimizers of one private model: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import SeveralOptimizers
from tests.support.errors import raises
from tests.support.private import made

LARGE = 1e9

pytestmark = pytest.mark.filterwarnings("ignore:Batches are not drawn by Poisson sampling")


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def optimizers_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(4, 6).double(), torch.randint(0, 3, (4,))) for _ in range(5)]


def private(model: nn.Module, optimizer: Any, noise: float = 0.0) -> Any:
    x, y = map(torch.cat, zip(*batches(), strict=True))
    options = {"noise_multiplier": noise, "max_grad_norm": LARGE, "poisson_sampling": False}
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    return made(model, loader, optimizer=optimizer, **options)


def trained(model: nn.Module, optimizer: Any, criterion: Any) -> list[Tensor]:
    for x, y in batches():
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_training_is_that_of_the_plain_optimizers() -> None:
    plain = model_of()
    first, second = optimizers_of(plain)

    class Both:
        def zero_grad(self) -> None:
            plain.zero_grad()

        def step(self) -> None:
            first.step()
            second.step()

    expected = trained(plain, Both(), F.cross_entropy)
    twin = model_of()
    model, optimizer, criterion, _ = private(twin, SeveralOptimizers(*optimizers_of(twin)))
    found = trained(model, optimizer, criterion)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_noise_is_added_to_all_before_any_steps() -> None:
    twin = model_of()
    model, optimizer, criterion, _ = private(twin, SeveralOptimizers(*optimizers_of(twin)), 1e-3)
    before = [p.detach().clone() for p in twin.parameters()]
    x, y = batches()[0]
    criterion(model(x), y).backward()
    with raises("FC539"):
        optimizer.original_optimizer.optimizers[1].step()
    optimizer.step()
    # C is so large that noise is all that is seen.
    moved = [(p - q).abs().amax() for p, q in zip(twin.parameters(), before, strict=True)]
    assert all(moved[n] > 1e3 for n in (0, 2)) and all(moved[n] > 0 for n in (1, 3))


def test_state_is_saved_and_loaded() -> None:
    model = model_of()
    wrapped, optimizer, criterion, _ = private(model, SeveralOptimizers(*optimizers_of(model)))
    trained(wrapped, optimizer, criterion)
    state = copy.deepcopy(optimizer.state_dict())
    again = copy.deepcopy(wrapped.to_standard_module())
    wrapped, other, criterion, _ = private(again, SeveralOptimizers(*optimizers_of(again)))
    other.load_state_dict(state)
    inner = other.original_optimizer.optimizers
    assert all(
        inner[0].state[p]["momentum_buffer"].any() for p in again.parameters() if p.dim() == 2
    )
    assert all(inner[1].state[p]["step"] == 5 for p in again.parameters() if p.dim() != 2)


def test_what_is_refused() -> None:
    model = model_of()
    first, second = optimizers_of(model)
    with pytest.raises(ValueError, match="parameter"):
        SeveralOptimizers(first, torch.optim.SGD(model.parameters(), lr=0.1))
    with raises("FC541", ValueError):
        SeveralOptimizers(first, second).add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with raises("FC534", ValueError):
        rest = [p for p in model.parameters() if p.dim() != 2]
        private(model, SeveralOptimizers(first, torch.optim.SparseAdam(rest)))
    with raises("FC535", ValueError):
        private(model, first)
