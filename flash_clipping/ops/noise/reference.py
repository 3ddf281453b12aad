"""Noise through ``torch.normal``: readable, and for any generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator


def noisy_means(
    sums: Sequence[Tensor],
    std: float,
    divisor: float,
    generator: torch.Generator | None,
    dtype: torch.dtype,
) -> list[Tensor]:
    """``(sum + N(0, std^2)) / divisor``, drawn in the order of the sums."""
    results = []
    for summed in sums:
        noise = torch.empty(summed.shape, dtype=accumulator(summed), device=summed.device)
        noise.normal_(0.0, std, generator=generator)
        results.append(noise.add_(summed).div_(divisor).to(dtype))
    return results
