"""Training by graphs: the same as without, and the same errors."""

from __future__ import annotations

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine, GraphedStep
from tests.support.errors import raises
from tests.support.graphs import PlayedByHand, assert_same_tensors, batches, small_network, warmed
from tests.support.models import squared_loss


def train(graphed: bool, physical: int, noise: float) -> tuple[list[Tensor], int]:
    """Some epochs under the engine, with batches that are cut into smaller ones.

    Returns:
        Parameters and losses; how many steps were replays.
    """
    plain = small_network()
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(48, 5, 6, generator=generator))
    model, optimizer, _, loader = FlashPrivacyEngine(seed=4).make_private(
        module=plain,
        optimizer=torch.optim.Adam(plain.parameters(), lr=0.05),
        criterion=nn.MSELoss(),
        data_loader=DataLoader(data, batch_size=16),
        noise_multiplier=noise,
        max_grad_norm=0.5,
    )

    def step(x: Tensor) -> Tensor:
        loss = squared_loss(model, (x,)).mean()
        loss.backward()
        return loss

    take = PlayedByHand(step, model) if graphed else step
    losses = []
    for _ in range(4):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
        ) as small:
            for (x,) in small:
                optimizer.zero_grad()
                losses.append(take(x).detach())
                optimizer.step()
    replays = take.replays if isinstance(take, GraphedStep) else 0
    return [*plain.state_dict().values(), *losses], replays


@pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")
@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize("physical", [4, 64])
def test_training_with_poisson_batches(physical: int, noise: float) -> None:
    found, replays = train(True, physical, noise)
    assert_same_tensors(found, train(False, physical, noise)[0])
    # Whole batches are of other sizes almost every time.
    assert replays >= 30 if physical == 4 else replays <= 3


def test_a_step_without_zero_grad_is_refused_as_without_graphs() -> None:
    """The optimizer's mark on a sum that it has used is not lost with a copy of it."""
    plain = small_network()
    model, optimizer, _, _ = FlashPrivacyEngine().make_private(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        criterion=nn.MSELoss(),
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 5, 6)), batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
    )
    step = PlayedByHand(lambda x: squared_loss(model, (x,)).mean().backward(), model)
    for x in batches(6):
        optimizer.zero_grad()
        step(x)
        optimizer.step()
    step(x)
    assert step.replays == 4
    with raises("FC532", ValueError):
        optimizer.step()


def test_a_second_backward_per_poisson_batch_is_refused() -> None:
    graphed, _ = warmed()
    graphed.model.forbid_grad_accumulation()
    graphed.results(batches(1)[0])
    with raises("FC510", ValueError):
        graphed.step(batches(1)[0])
