"""Noise through ``torch.normal``: readable, and for any generator."""

from __future__ import annotations

import torch
from torch import Tensor


def noisy_mean(
    summed: Tensor, std: float, divisor: float, generator: torch.Generator | None
) -> Tensor:
    """``(summed + N(0, std^2)) / divisor``."""
    dtype = torch.float64 if summed.dtype == torch.float64 else torch.float32
    noise = torch.empty(summed.shape, dtype=dtype, device=summed.device)
    noise.normal_(0.0, std, generator=generator)
    return noise.add_(summed).div_(divisor).to(summed.dtype)
