"""Batches and noise as Opacus draws them, so that trainings by both can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_clipping.engine import optimizer
from flash_clipping.engine.sampling import samplers
from flash_clipping.ops.error_bounds import ETA


def _places(self: samplers.PoissonSampler, draw: Any) -> Tensor:
    return (torch.rand(self.num_samples) < self.sample_rate).nonzero().flatten()


def _noisy_means(
    sums: Sequence[Tensor], std: float, divisor: float, *, dtypes: Any, **options: Any
) -> list[Tensor]:
    of_opacus = std / (1 + ETA)  # Opacus draws for C, the library for C (1 + ETA)
    noises = [torch.normal(0.0, of_opacus, x.shape) if std else torch.zeros_like(x) for x in sums]
    noisy = [(x + noise) / divisor for x, noise in zip(sums, noises, strict=True)]
    return [x.to(dtype) for x, dtype in zip(noisy, dtypes, strict=True)]


def use_randomness_of_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on ``torch.manual_seed`` decides what is drawn, in the order of Opacus."""
    monkeypatch.setattr(samplers.PoissonSampler, "_places", _places)
    monkeypatch.setattr(optimizer, "noisy_means", _noisy_means)
