"""Noise in float64 on the CPU: the readable form, and what the kernel is compared with.

Element ``i`` of a tensor takes normal ``i % 8`` of block ``i // 8`` of the tensor's nonce. A block
has 16 words of 32 bits. Four of them make two normals, by Box and Muller's method:

* the first two, as one number ``n`` of 64 bits (low word first), make the radius
  ``sqrt(-2 ln u)`` with ``u = (n + 1/4) / 2^64``: between 0 and 9.56;
* the other two, as a signed number ``a`` of 64 bits, make the angle ``2 pi a / 2^64``;
* the normals are radius times cosine, and radius times sine.

All of it is computed in float64; noise for fp32 is rounded once. What PyTorch is slow at, for calls
cost as much as thousands of elements, is left to NumPy, in the same memory.

E elements, N blocks, P pairs of normals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator
from flash_clipping.randomness import Draw
from flash_clipping.randomness.chacha20 import BLOCK_WORDS, Keystream

#: Normals of a block.
PER_BLOCK = 8
#: Blocks that are drawn at a time: fewer cost calls, more do not stay in a cache.
CHUNK = 6144


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
            noisy_E, out_E = noise_E.numpy(), results[index].view(-1)[part]
            with np.errstate(all="ignore"):  # sums may be anything
                noisy_E += flat[index][part].to(dtype=noise_E.dtype).numpy()
                _rounded_to(noise_E, grid)
                if out_E.dtype == noise_E.dtype:
                    np.divide(noisy_E, divisor, out=out_E.numpy())
                else:
                    noisy_E /= divisor
                    out_E.copy_(noise_E)
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
    """Cells of a grid on either side of 0: their numbers are exact, and so are the halves
    between."""
    return 2.0**51 if dtype == torch.float64 else 2.0**22


def _noise(
    sums: Sequence[Tensor], std: float, draw: Draw, numbers: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, Tensor]]:
    """Parts of all sums' noise: which sum, its first element, and the noise in the sum's
    accumulator, in memory that is used again for the next part."""
    transform = _BoxMuller(std, accumulator(sums[0]))
    for words_N16, pieces in _words([summed.numel() for summed in sums], draw, numbers):
        noise = transform(words_N16)
        for index, start, at, length in pieces:
            yield index, start, noise[at : at + length]


def _words(
    sizes: Sequence[int], draw: Draw, numbers: Sequence[tuple[int, int]]
) -> Iterator[tuple[Tensor, list[tuple[int, int, int, int]]]]:
    """Chunks of words, and whose their normals are: index, first element, place, length."""
    words_N16 = torch.empty(CHUNK, BLOCK_WORDS, dtype=torch.int32)
    pieces: list[tuple[int, int, int, int]] = []
    used = 0
    for index, (size, (tensor, shard)) in enumerate(zip(sizes, numbers, strict=True)):
        start, keystream = 0, Keystream(draw, tensor=tensor, shard=shard)
        while start < size:
            blocks = min(-(-(size - start) // PER_BLOCK), CHUNK - used)
            keystream.fill(words_N16[used : used + blocks])
            length = min(blocks * PER_BLOCK, size - start)
            pieces.append((index, start, used * PER_BLOCK, length))
            start, used = start + length, used + blocks
            if used == CHUNK:
                yield words_N16, pieces
                pieces, used = [], 0
    if used:
        yield words_N16[:used], pieces


class _BoxMuller:
    """Words to normals of some standard deviation, in memory that is used again."""

    def __init__(self, std: float, dtype: torch.dtype) -> None:
        self._variance = std * std
        pairs = CHUNK * PER_BLOCK // 2
        # Rows a power of 2 apart may want the same lines of a cache.
        self._memory = torch.empty(3, pairs + 64, dtype=torch.float64)
        self._normals = torch.empty(pairs, 2, dtype=dtype)

    def __call__(self, words_N16: Tensor) -> Tensor:
        """``[8 N]``, in ``dtype``; the next call overwrites it."""
        integers_P2 = words_N16.numpy().view(np.int64).reshape(-1, 2)
        count = len(integers_P2)
        in_torch = self._memory[:, :count]
        x, other, radius = in_torch.numpy()
        normals_P2 = self._normals[:count]
        cosines, sines = normals_P2.numpy().T
        # From signed numbers, which are converted faster: the fraction is n / 2^64. To multiply by
        # a power of 2 is exact.
        x[:] = integers_P2[:, 0]
        x *= 2.0**-64
        x -= np.floor(x, out=other)
        x += 2.0**-66
        torch.log(in_torch[0], out=in_torch[0])
        x *= -2 * self._variance
        np.sqrt(x, out=radius)
        x[:] = integers_P2[:, 1]
        x *= 2 * math.pi * 2.0**-64
        # Assignments round. One function at a time: what it leaves is still in the cache.
        torch.cos(in_torch[0], out=in_torch[1])
        other *= radius
        cosines[:] = other
        torch.sin(in_torch[0], out=in_torch[0])
        x *= radius
        sines[:] = x
        return normals_P2.view(-1)
