"""Gaussian noise from a secret stream, and scaling, of many sums in one pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from flash_clipping.errors import FlashClippingError
from flash_clipping.ops.noise import reference
from flash_clipping.ops.runtime.backend import resolve, run
from flash_clipping.randomness import Draw
from flash_clipping.randomness.chacha20 import MOST_BLOCKS

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
    backend: str = "auto",
) -> list[Tensor]:
    """``(sum + N(0, std^2)) / divisor`` of each: fresh, contiguous tensors of the sums' shapes.

    Noise is made of ChaCha20's words (RFC 8439); ``reference.py`` says which element takes which.
    It is added in fp32 (fp64 for fp64), divided, and rounded once to the wanted dtype.

    Args:
        sums: clipped sums, of any shapes, dtypes and devices. Those that kernels can serve take
            one launch for each dtype and device (of up to 256 tensors).
        std: standard deviation of the noise on a sum; 0 adds none and takes no words.
        divisor: what the noisy sums are divided by (the expected batch size, or 1).
        draw: whose words. Each draw is for one call of this function.
        tensors, shards: numbers of each sum, by which its words are known among the draw's; by
            default the tensors are counted and every shard is 0.
        dtypes: those of the results; the sums' own if left out.
        grid: round noisy sums to multiples of :func:`grid_of`, before they are divided.
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
        return [(summed / divisor).to(dtype) for summed, dtype in zip(sums, wanted, strict=True)]
    numbers = _numbers(sums, tensors, shards)
    results: list[Tensor | None] = [None] * len(sums)
    together: dict[tuple[torch.device, torch.dtype, torch.dtype], list[int]] = {}
    for index, (summed, dtype) in enumerate(zip(sums, wanted, strict=True)):
        if summed.numel():
            together.setdefault((summed.device, summed.dtype, dtype), []).append(index)
        else:
            results[index] = torch.empty_like(summed, dtype=dtype)
    for (device, summed_dtype, dtype), members in together.items():
        if device.type == "cuda" and is_current_stream_capturing():
            raise FlashClippingError(
                "Noise is being captured as a part of a CUDA graph, whose replays would all add "
                "the same. Capture forward and backward (flash_clipping.GraphedStep), and call "
                "optimizer.step() outside."
            )
        some = [sums[index] for index in members]
        if resolve(backend, some[0]) == "triton":
            some = [summed.contiguous() for summed in some]
        noisy = run(
            reference.noisy_means,
            backend,
            some[0],
            some,
            std,
            divisor,
            draw,
            [numbers[index] for index in members],
            grid_of(std, summed_dtype) if grid else 0.0,
            dtype,
        )
        for index, result in zip(members, noisy, strict=True):
            results[index] = result
    return [result for result in results if result is not None]


def grid_of(std: float, dtype: torch.dtype) -> float:
    """The distance of a grid's points: the power of 2 that is 256 to 512 times smaller than the
    noise's standard deviation, or 2^24 to 2^25 times for fp64. It depends on nothing else."""
    finer = 24 if dtype == torch.float64 else 8
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - finer)


def _numbers(
    sums: Sequence[Tensor], tensors: Sequence[int] | None, shards: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Tensor and shard of each sum, no two alike."""
    tensors = range(len(sums)) if tensors is None else tensors
    shards = [0] * len(sums) if shards is None else shards
    numbers = list(zip(tensors, shards, strict=True))
    if len({*numbers}) < len(sums) or len(numbers) != len(sums):
        raise ValueError(
            f"noisy_means: found {len(sums)} sums with {len({*numbers})} different numbers of "
            "tensor and shard; expected one for each: two with one number get the same noise."
        )
    for summed in sums:
        if summed.numel() > MOST_ELEMENTS:
            raise ValueError(
                f"noisy_means: found a sum with {summed.numel()} elements; expected "
                f"{MOST_ELEMENTS} at most, or noise would repeat within it. Split the parameter."
            )
    return numbers
