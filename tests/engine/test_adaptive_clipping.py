"""A bound that moves with a quantile of the norms: between logical steps only, and accounted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from opacus.schedulers import LambdaNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager

from flash_clipping import AdaptiveBound, FlashPrivacyEngine
from flash_clipping.randomness import Draw, Purpose
from tests.support.errors import raises
from tests.support.private import SLACK, Private, Released, data

ADAPTIVE: dict[str, Any] = {
    "clipping": AdaptiveBound(0.5, 1e-3, 1e3, clipbound_learning_rate=2.0),
    "max_grad_norm": 1.0,
    "batch_size": 64,
    "noise_multiplier": 0.5,
}


def private_part(multiplier: float, batch_size: float) -> float:
    """The sum's share of the noise multiplier (Andrew et al. 2021, Theorem 1)."""
    return (multiplier**-2 - (batch_size / 10) ** -2) ** -0.5


def test_the_bound_stays_within_a_logical_step(released: Released) -> None:
    """It moved with every micro-batch, and noise was for the last."""
    private = Private(**ADAPTIVE)
    bounds, largest = [], 0.0
    torch.manual_seed(1)
    with BatchMemoryManager(
        data_loader=private.loader, max_physical_batch_size=8, optimizer=private.optimizer
    ) as loader:
        for x, _ in loader:
            private.optimizer.zero_grad()
            (100 * private.model(x).square().sum(1).mean()).backward()
            norms = private.wrapper.get_norm_sample()
            coef = private.wrapper.get_clipping_coef()
            bounds.append(private.wrapper.max_grad_norm)
            largest = max(largest, (norms * coef).max().item())
            private.optimizer.step()
    assert len(bounds) == 8 and set(bounds) == {1.0}
    assert private.optimizer.max_grad_norm != 1.0  # afterwards
    std = released.releases[-1][1]
    # How far one sample moves the sum, in units of what the noise is for.
    assert largest * private_part(0.5, 64) / std <= SLACK
    assert std == pytest.approx(private_part(0.5, 64) * 1.0)


@pytest.mark.parametrize("multiplier", [0.5, 2.0])
@pytest.mark.parametrize("parts", [1, 4])
def test_sum_and_count_cost_what_is_accounted(
    multiplier: float,
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
    released: Released,
) -> None:
    """One count over the whole logical batch, by the expected size: the drawn one is private."""
    import flash_clipping.engine.optimizer

    stds: list[float] = []
    of_sums = flash_clipping.engine.optimizer.noisy_means

    def noise(sums: list[torch.Tensor], std: float, *args: Any, draw: Draw, **options: Any) -> Any:
        if draw.purpose != Purpose.COUNT:
            return of_sums(sums, std, *args, draw=draw, **options)
        stds.append(std)
        assert sums[0].dtype == torch.float64 and args == (1.0,)
        return [sums[0] + 2.0]

    monkeypatch.setattr(flash_clipping.engine.optimizer, "noisy_means", noise)
    private = Private(**{**ADAPTIVE, "noise_multiplier": multiplier})
    drawn = 40  # of an expected 64
    for part in range(parts):
        private.optimizer.signal_skip_step(part < parts - 1)
        private.optimizer.zero_grad()
        x = data().tensors[0][part * drawn // parts : (part + 1) * drawn // parts]
        scale = torch.where(torch.arange(len(x)) % 2 == 0, 100.0, 1e-12)  # half are clipped
        (scale * private.model(x).square().sum(1)).mean().backward()
        private.optimizer.step()
    assert stds == [64 / 20]
    fraction = 0.5 + 2.0 / 64  # centred: 20 of 40 count +1/2, and 2 are noise
    expected = math.exp(-2.0 * (fraction - 0.5))
    assert private.optimizer.max_grad_norm == pytest.approx(expected)
    assert private.wrapper.max_grad_norm == private.optimizer.max_grad_norm
    (_, std) = released.releases[-1]
    of_sum, of_count = std / 1.0, 2 * stds[0]
    assert (of_sum**-2 + of_count**-2) ** -0.5 == pytest.approx(multiplier)
    assert private.engine.accountant.history == [(multiplier, pytest.approx(1.0), 1)]


def test_a_noise_scheduler_is_followed(released: Released) -> None:
    """1.01 was drawn while 8 was accounted."""
    moving = AdaptiveBound(min_clipbound=1e-3, max_clipbound=1.0)
    private = Private(**ADAPTIVE | {"clipping": moving, "noise_multiplier": 1.0})
    scheduler = LambdaNoise(private.optimizer, noise_lambda=lambda epoch: [1, 2, 5][epoch])
    for _ in range(3):
        bound = private.optimizer.max_grad_norm
        private.step(samples=64)
        drawn = released.releases[-1][1] / bound
        accounted = private.engine.accountant.history[-1][0]
        assert drawn == pytest.approx(private_part(accounted, 64))
        assert drawn >= accounted
        if len(released.releases) < 3:
            scheduler.step()
    private.optimizer.noise_multiplier = 8.0  # more than 64 / 10
    private.optimizer.zero_grad()
    private.backward(samples=64)
    with raises("FC321", match=r"expected more than 80 samples"):
        private.optimizer.step()


@pytest.mark.filterwarnings("ignore::flash_clipping.randomness.SeededNoiseWarning")
def test_any_loss_moves_the_bound() -> None:
    bounds = []
    for own_loss in (True, False):
        private = Private(**ADAPTIVE, engine=FlashPrivacyEngine(accountant="rdp", seed=2))
        x, y = data().tensors
        loss = private.criterion(private.model(x), y)
        if own_loss:
            loss = torch.nn.functional.cross_entropy(private.model(x), y)
        loss.backward()
        private.optimizer.step()
        bounds.append(private.optimizer.max_grad_norm)
    assert bounds[0] == bounds[1] != 1.0


def test_error_settings() -> None:
    with raises("FC321", ValueError, match="expected min_clipbound <= max_clipbound"):
        AdaptiveBound(min_clipbound=2.0, max_clipbound=1.0)
