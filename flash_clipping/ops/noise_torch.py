"""Noise through ``torch.normal``: readable, and for any generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def noisy_means(
    sums: Sequence[Tensor], std: float, divisor: float, generator: torch.Generator | None
) -> list[Tensor]:
    """``(sum + N(0, std^2)) / divisor``, drawn in the order of the sums."""
    results = []
    for summed in sums:
        dtype = torch.float64 if summed.dtype == torch.float64 else torch.float32
        noise = torch.empty(summed.shape, dtype=dtype, device=summed.device)
        noise.normal_(0.0, std, generator=generator)
        results.append(noise.add_(summed).div_(divisor).to(summed.dtype))
    return results
