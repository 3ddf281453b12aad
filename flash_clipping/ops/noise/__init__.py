"""Gaussian noise and scaling of the gradients of many parameters in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.noise import reference
from flash_clipping.ops.runtime.backend import resolve, run


def noisy_means(
    sums: Sequence[Tensor],
    std: float,
    divisor: float,
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """``(sum + N(0, std^2)) / divisor`` of each: fresh tensors of the sums' shapes.

    Computed in fp32 (fp64 for fp64) and rounded once, to the wanted dtype.

    Args:
        sums: clipped sums, of any shapes, dtypes and devices. Those that kernels can serve take
            one launch for each dtype and device (of up to 256 tensors).
        std: standard deviation of the noise on a sum; 0 adds none and draws nothing.
        divisor: what the noisy sums are divided by (the expected batch size, or 1).
        dtypes: those of the results; the sums' own if left out.
        generator: source of randomness, used in the order of the sums; ``None`` is the device's
            default generator. The Triton kernel draws from the default CUDA generator only (its
            own Philox counters, advanced on the generator as any CUDA kernel advances them); a
            generator of the user's own is used through ``torch.normal``.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.
    """
    wanted = [summed.dtype for summed in sums] if dtypes is None else list(dtypes)
    if std == 0:
        return [(summed / divisor).to(dtype) for summed, dtype in zip(sums, wanted, strict=True)]
    results: list[Tensor | None] = [None] * len(sums)
    together: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
    for index, (summed, dtype) in enumerate(zip(sums, wanted, strict=True)):
        if generator is None and summed.is_cuda and summed.is_contiguous() and summed.numel():
            together.setdefault((summed.device, summed.dtype, dtype), []).append(index)
            continue
        way = "torch" if resolve(backend, summed) == "triton" else backend
        (results[index],) = run(
            reference.noisy_means, way, summed, [summed], std, divisor, generator, dtype
        )
    for (_, _, dtype), members in together.items():
        some = [sums[index] for index in members]
        noisy = run(reference.noisy_means, backend, some[0], some, std, divisor, generator, dtype)
        for index, result in zip(members, noisy, strict=True):
            results[index] = result
    return [result for result in results if result is not None]
