"""Gaussian noise from a secret stream, and scaling, of many sums in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from flash_clipping.errors import FlashClippingError, InvalidValue
from flash_clipping.ops.noise import reference
from flash_clipping.ops.runtime.backend import resolve, run
from flash_clipping.randomness import Draw
from flash_clipping.randomness.chacha import MOST_BLOCKS

#: How noisy sums are kept to a grid: not; rounded to it; by rounded sums and discrete noise.
NoiseGrid: TypeAlias = bool | Literal["exact"]

#: Elements of a tensor: a nonce has normals for no more.
MOST_ELEMENTS = MOST_BLOCKS * reference.PER_BLOCK


def noisy_means(
    sums: Sequence[Tensor],
    std: float,
    divisor: float,
    *,
    draw: Draw,
    tensors: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    grid: bool = False,
    gate: Tensor | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """``(sum + N(0, std^2)) / divisor`` of each: fresh, contiguous tensors of the sums' shapes.

    Noise is made of ChaCha's words (RFC 8439) with the draw's number of rounds; ``reference.py``
    says which element takes which. It is added in fp32 (fp64 for fp64), divided, and rounded once.

    Args:
        sums: clipped sums, of any shapes, dtypes and devices; kernels take a launch for each dtype
            and device (of up to 256 tensors).
        std: standard deviation of the noise on a sum; 0 adds none and takes no words.
        divisor: what the noisy sums are divided by (the expected batch size, or 1).
        draw: whose words. Each draw is for one call of this function.
        tensors, shards: numbers of each sum, by which its words are known among the draw's; by
            default the tensors are counted and every shard is 0.
        dtypes: those of the results; the sums' own if left out.
        grid: round noisy sums to multiples of :func:`grid_of`, before they are divided.
        gate: ``[]``, bool: where it is false, the sums count as 0, whatever they hold.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises:
        ValueError: two sums with one number; a sum with more elements than a nonce has normals.
        FlashClippingError: the noise would be captured as a part of a CUDA graph.

    Guarantees:
        The same draw gives the same normals on every device, up to the rounding of functions
        (fp32 in the kernel). No generator of PyTorch's is read, and no device is waited for.
    """
    wanted = [summed.dtype for summed in sums] if dtypes is None else list(dtypes)
    if std == 0:
        sums = gated(sums, gate)
        return [(summed / divisor).to(dtype) for summed, dtype in zip(sums, wanted, strict=True)]
    numbers = _numbers(sums, tensors, shards)
    results: dict[int, Tensor] = {}
    together: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
    for index, (summed, dtype) in enumerate(zip(sums, wanted, strict=True)):
        if summed.numel():
            together.setdefault((summed.device, summed.dtype, dtype), []).append(index)
        else:
            results[index] = torch.empty_like(summed, dtype=dtype)
    for (device, summed_dtype, dtype), members in together.items():
        refuse_capture(device)
        some = [sums[index] for index in members]
        if resolve(backend, some[0]) == "triton":
            some = [summed.contiguous() for summed in some]
        of_some = [numbers[index] for index in members]
        cell = grid_of(std, summed_dtype) if grid else 0.0
        near = None if gate is None else gate.to(device, non_blocking=True)
        operands = some, std, divisor, draw, of_some, cell, dtype, near
        noisy = run(reference.noisy_means, backend, some[0], *operands)
        results.update(zip(members, noisy, strict=True))
    return [results[index] for index in range(len(sums))]


def gated(sums: Sequence[Tensor], gate: Tensor | None) -> list[Tensor]:
    """Sums that a gate lets through, or zeros; without one the sums themselves."""
    if gate is None:
        return [*sums]
    return [torch.where(gate.to(x.device, non_blocking=True), x, 0) for x in sums]


def grid_of(std: float, dtype: torch.dtype) -> float:
    """The distance of a grid's points: the power of 2 that is 256 to 512 times smaller than the
    noise's standard deviation, or 2^24 to 2^25 times for fp64. It depends on nothing else."""
    finer = 24 if dtype == torch.float64 else 8
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - finer)


def refuse_capture(device: torch.device) -> None:
    """Raise where noise for this device would become a part of a CUDA graph."""
    if device.type == "cuda" and is_current_stream_capturing():
        raise FlashClippingError(
            "FC701 Noise is being captured as a part of a CUDA graph, whose replays would all add "
            "the same. Capture forward and backward (flash_clipping.GraphedStep), and call "
            "optimizer.step() outside."
        )


def _numbers(
    sums: Sequence[Tensor], tensors: Sequence[int] | None, shards: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Tensor and shard of each sum, no two alike."""
    tensors = range(len(sums)) if tensors is None else tensors
    shards = [0] * len(sums) if shards is None else shards
    numbers = list(zip(tensors, shards, strict=True))
    if len({*numbers}) < len(sums) or len(numbers) != len(sums):
        raise InvalidValue(
            f"FC312 noisy_means: found {len(sums)} sums with {len({*numbers})} different numbers "
            "of tensor and shard; expected one for each: two with one number get the same noise."
        )
    for summed in sums:
        if summed.numel() > MOST_ELEMENTS:
            raise InvalidValue(
                f"FC304 noisy_means: found a sum with {summed.numel()} elements; expected "
                f"{MOST_ELEMENTS} at most, or noise would repeat within it. Split the parameter."
            )
    return numbers
