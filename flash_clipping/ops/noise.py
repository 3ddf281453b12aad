"""Gaussian noise, accumulation and scaling of one gradient in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_clipping.ops import noise_torch
from flash_clipping.ops.backend import resolve, run


def noisy_mean(
    summed: Tensor,
    std: float,
    divisor: float,
    *,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> Tensor:
    """``(summed + N(0, std^2)) / divisor``: a fresh tensor of ``summed``'s shape and dtype.

    Computed in fp32 (fp64 for fp64) and rounded once.

    Args:
        summed: the clipped sum, any shape.
        std: standard deviation of the noise on the sum; 0 adds none and draws nothing.
        divisor: what the noisy sum is divided by (the expected batch size, or 1).
        generator: source of randomness; ``None`` is the device's default generator. The Triton
            kernel draws from the default CUDA generator only (its own Philox counters, advanced
            on the generator as any CUDA kernel advances them); a generator of the user's own is
            used through ``torch.normal``.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.
    """
    if std == 0:
        return summed / divisor
    if generator is not None or not summed.is_cuda or not summed.is_contiguous():
        backend = "torch" if resolve(backend, summed) == "triton" else backend
    return run(noise_torch.noisy_mean, backend, summed, summed, std, divisor, generator)
