"""What is released, for the tests that look at it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_clipping.integration.samplers import PoissonSampler
from tests.support.private import Released


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> Released:
    return Released(monkeypatch)


@pytest.fixture
def draws_of_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are those that Opacus' sampler draws from PyTorch's generator, to compare with it."""

    def places(self: PoissonSampler, draw: object) -> Tensor:
        return (torch.rand(self.num_samples) < self.sample_rate).nonzero().flatten()

    monkeypatch.setattr(PoissonSampler, "_places", places)
