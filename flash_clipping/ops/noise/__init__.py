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
from flash_clipping.randomness.choices import MOST_BITS, discrete_gaussian

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
        _refuse_capture(device)
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


#: Cells of the grid of discrete noise on either side of 0.
_MOST_DISCRETE_CELLS = 2.0**45


def discrete_noisy_means(
    sums: Sequence[Tensor],
    std: float,
    multiplier: float,
    divisor: float,
    *,
    draw: Draw,
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """``(round(sum / cell) + N) cell / divisor`` of each, with integers ``N`` of a discrete
    Gaussian, drawn exactly (:func:`flash_clipping.randomness.choices.discrete_gaussian`).

    Args:
        sums: the clipped sums of all parameters, whole: of fp32 or fp64, on any device.
        std: standard deviation that the noise would have if sums were not rounded.
        multiplier: that of the noise, which steps are accounted with.

    Raises:
        ValueError: rounding would count for too much: see :func:`discrete_grid`.
        FlashClippingError: the noise would be captured as a part of a CUDA graph.

    Guarantees:
        What is released are multiples of a cell that depends on ``std``, ``multiplier`` and the
        number of elements alone; the noise is ``multiplier`` times as large as all that one sample
        moves the rounded sums by, if it moves the sums by ``std / multiplier`` at most. No device
        is waited for.
    """
    if std == 0:
        return [(x / divisor).to(dtype) for x, dtype in zip(sums, dtypes, strict=True)]
    cell, bits = discrete_grid(std, multiplier, sum(x.numel() for x in sums))
    results = []
    for number, (summed, dtype) in enumerate(zip(sums, dtypes, strict=True)):
        _refuse_capture(summed.device)
        noise = discrete_gaussian(draw, summed.numel(), bits, tensor=number).view(summed.shape)
        if summed.is_cuda:
            noise = noise.pin_memory().to(summed.device, non_blocking=True)
        cells = (summed.double() / cell).clamp_(-_MOST_DISCRETE_CELLS, _MOST_DISCRETE_CELLS)
        # Both are integers below 2^53, and so is their sum: exact. NaN stays what it is.
        noisy = cells.round_().add_(noise.double())
        results.append(noisy.mul_(cell / divisor).to(dtype))
    return results


def discrete_grid(std: float, multiplier: float, elements: int) -> tuple[float, int]:
    """The cell's size, and the bits of the noise's standard deviation in cells, a power of 2.

    Rounding to the nearest cell moves two sums of ``d`` elements by half a cell each in every
    element, apart from each other by ``sqrt(d)`` cells at most; 1 % more than that is counted,
    for the division in fp64 (sums below 2^45 cells, of which it errs by less than 1/128). Cells are
    so small that this is at most ``2^-10`` of what a sample moves the sum by, and the noise is so
    much larger that its multiplier is right for both together.

    Raises:
        ValueError: the noise would need more than 31 bits.
    """
    rounding = 1.01 * multiplier * math.sqrt(elements)  # times 2^-bits: in what a sample moves
    bits = max(8, math.ceil(math.log2(rounding * 2.0**10)))
    if bits > MOST_BITS:
        raise InvalidValue(
            f"noise_grid='exact': found {elements} elements with a noise multiplier of "
            f"{multiplier}; expected 2^{MOST_BITS - 10} at most for the product of the multiplier "
            "and the root of their number: to round them would move the sum by too much. Train "
            "fewer parameters, or use noise_grid=True."
        )
    return std / (1 - math.ldexp(rounding, -bits)) * 2.0**-bits, bits


def _refuse_capture(device: torch.device) -> None:
    if device.type == "cuda" and is_current_stream_capturing():
        raise FlashClippingError(
            "Noise is being captured as a part of a CUDA graph, whose replays would all add "
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
            f"noisy_means: found {len(sums)} sums with {len({*numbers})} different numbers of "
            "tensor and shard; expected one for each: two with one number get the same noise."
        )
    for summed in sums:
        if summed.numel() > MOST_ELEMENTS:
            raise InvalidValue(
                f"noisy_means: found a sum with {summed.numel()} elements; expected "
                f"{MOST_ELEMENTS} at most, or noise would repeat within it. Split the parameter."
            )
    return numbers
