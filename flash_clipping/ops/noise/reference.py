"""Noise in float64 on the CPU: the readable form, and what the kernel is compared with.

Element ``i`` of a tensor takes normal ``i % 8`` of block ``i // 8`` of the tensor's nonce. A block
has 16 words of 32 bits. Four of them make two normals, by Box and Muller's method:

* the first two, as one number ``n`` of 64 bits (low word first), make the radius
  ``sqrt(-2 ln u)`` with ``u = (n + 1/4) / 2^64``: between 0 and 9.56;
* the other two, as a signed number ``a`` of 64 bits, make the angle ``2 pi a / 2^64``;
* the normals are radius times cosine, and radius times sine.

E elements, N blocks, P pairs of normals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator
from flash_clipping.randomness import Draw
from flash_clipping.randomness.chacha20 import BLOCK_WORDS, fill

#: Normals of a block.
PER_BLOCK = 8
#: Blocks that are drawn at a time: fewer cost calls, more do not stay in a cache.
CHUNK = 8192


def noisy_means(
    sums: Sequence[Tensor],
    std: float,
    divisor: float,
    draw: Draw,
    numbers: Sequence[tuple[int, int]],
    grid: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """``(sum + std * normal) / divisor``, of sums of one dtype on one device.

    ``numbers``: tensor and shard of each sum. ``grid``: what noisy sums are rounded to multiples
    of; 0 for none.
    """
    results = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in sums]
    flat = [summed.reshape(-1) for summed in sums]
    if sums[0].device.type == "cpu":
        for index, start, noise_E in _noise(sums, std, draw, numbers):
            part = slice(start, start + len(noise_E))
            noisy_E = torch.add(noise_E, flat[index][part], out=noise_E)
            _rounded_to(noisy_E, grid)
            out = results[index].view(-1)[part]
            if out.dtype == noisy_E.dtype:
                torch.div(noisy_E, divisor, out=out)
            else:
                out.copy_(noisy_E.div_(divisor))
        return results
    # In memory that a GPU copies from while the host goes on.
    drawn = [torch.empty(len(x), dtype=accumulator(x), pin_memory=x.is_cuda) for x in flat]
    for index, start, noise_E in _noise(sums, std, draw, numbers):
        drawn[index][start : start + len(noise_E)] = noise_E
    for noise, summed, result in zip(drawn, flat, results, strict=True):
        noisy = noise.to(summed.device, non_blocking=True).add_(summed)
        _rounded_to(noisy, grid)
        result.view(-1).copy_(noisy.div_(divisor))
    return results


def _rounded_to(noisy: Tensor, grid: float) -> None:
    """Round to multiples of ``grid``, in place; those beyond what the dtype tells apart are cut."""
    if grid:
        most = cells(noisy.dtype)
        noisy.mul_(1 / grid).clamp_(-most, most).round_().mul_(grid)


def cells(dtype: torch.dtype) -> float:
    """How many cells of a grid there are on either side of 0: their numbers are exact, and so are
    the halves between them."""
    return 2.0**51 if dtype == torch.float64 else 2.0**22


def _noise(
    sums: Sequence[Tensor], std: float, draw: Draw, numbers: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, Tensor]]:
    """Parts of all sums' noise: which sum, from which element on, and the noise in the sum's
    accumulator; its memory is used again for the next."""
    dtype = accumulator(sums[0])
    buffer = torch.empty(CHUNK * PER_BLOCK, dtype=dtype)
    for noise, pieces in _normals([summed.numel() for summed in sums], std, draw, numbers):
        if dtype != torch.float64:
            noise = buffer[: len(noise)].copy_(noise)
        for index, start, at, length in pieces:
            yield index, start, noise[at : at + length]


def _normals(
    sizes: Sequence[int], std: float, draw: Draw, numbers: Sequence[tuple[int, int]]
) -> Iterator[tuple[Tensor, list[tuple[int, int, int, int]]]]:
    """Chunks of noise in float64, and whose it is: index, first element, place, length. Small
    tensors share a chunk."""
    transform = _BoxMuller(std)
    words_N16 = torch.empty(CHUNK, BLOCK_WORDS, dtype=torch.int32)
    pieces: list[tuple[int, int, int, int]] = []
    used = 0
    for index, (size, (tensor, shard)) in enumerate(zip(sizes, numbers, strict=True)):
        start = 0
        while start < size:
            blocks = min(-(-(size - start) // PER_BLOCK), CHUNK - used)
            block = start // PER_BLOCK
            fill(words_N16[used : used + blocks], draw, tensor=tensor, shard=shard, first=block)
            length = min(blocks * PER_BLOCK, size - start)
            pieces.append((index, start, used * PER_BLOCK, length))
            start, used = start + length, used + blocks
            if used == CHUNK:
                yield transform(words_N16), pieces
                pieces, used = [], 0
    if used:
        yield transform(words_N16[:used]), pieces


class _BoxMuller:
    """Words to normals of some standard deviation, in memory that is used again."""

    def __init__(self, std: float) -> None:
        self._variance = std * std
        pairs = CHUNK * PER_BLOCK // 2
        self._radius, self._angle, self._cosine = torch.empty(3, pairs, dtype=torch.float64)
        self._normals = torch.empty(pairs, 2, dtype=torch.float64)

    def __call__(self, words_N16: Tensor) -> Tensor:
        """``[8 N]``, float64."""
        integers_P2 = words_N16.view(torch.int64).view(-1, 2)
        count = len(integers_P2)
        radius, angle, cosine = (x[:count] for x in (self._radius, self._angle, self._cosine))
        # From signed numbers, which are converted faster: the fraction is n / 2^64. To multiply by
        # a power of 2 is exact.
        radius.copy_(integers_P2[:, 0]).mul_(2.0**-64)
        radius.sub_(torch.floor(radius, out=cosine)).add_(2.0**-66)
        radius.log_().mul_(-2 * self._variance).sqrt_()
        angle.copy_(integers_P2[:, 1]).mul_(2 * math.pi * 2.0**-64)
        torch.cos(angle, out=cosine)
        normals_P2 = self._normals[:count]
        torch.mul(radius, cosine, out=normals_P2[:, 0])
        torch.mul(radius, angle.sin_(), out=normals_P2[:, 1])
        return normals_P2.view(-1)
