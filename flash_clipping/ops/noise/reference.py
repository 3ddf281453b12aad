"""Noise in float64 on the CPU: the readable form, and what the kernel is compared with.

Element ``i`` of a tensor takes normal ``i % 8`` of block ``i // 8`` of the tensor's nonce. A block
has 16 words of 32 bits. Four of them make two normals, by Box and Muller's method:

* the first two, as one number ``n`` of 64 bits (low word first), make the radius
  ``sqrt(-2 ln u)`` with ``u = (n + 1/4) / 2^64``: between 0 and 9.56;
* the other two, as a signed number ``a`` of 64 bits, make the angle ``2 pi a / 2^64``;
* the normals are radius times cosine, and radius times sine.

All of it is computed in float64; noise for fp32 is rounded once.

E elements, N blocks, P pairs of normals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flash_clipping.ops.runtime.shapes import accumulator
from flash_clipping.randomness import Draw
from flash_clipping.randomness.chacha import BLOCK_WORDS, Keystream

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
    gate: Tensor | None = None,
) -> list[Tensor]:
    """``(sum + std * normal) / divisor``, of sums of one dtype on one device. ``numbers``: tensor
    and shard of each sum. ``grid``: what noisy sums are rounded to multiples of; 0 for none.
    ``gate``: where it is false, sums count as 0."""
    words_N16 = torch.empty(CHUNK, BLOCK_WORDS, dtype=torch.int32)
    means = []
    for summed, (tensor, shard) in zip(sums, numbers, strict=True):
        # In memory that a GPU copies from while the host goes on.
        noise = torch.empty(
            summed.shape, dtype=accumulator(summed), pin_memory=summed.device.type == "cuda"
        )
        keystream = Keystream(draw, tensor=tensor, shard=shard)
        for part_E in noise.view(-1).split(CHUNK * PER_BLOCK):
            blocks_N16 = words_N16[: -(-len(part_E) // PER_BLOCK)]
            keystream.fill(blocks_N16)
            part_E.copy_(normals(blocks_N16, std)[: len(part_E)])
        if gate is not None:
            summed = torch.where(gate, summed, 0)
        noisy = noise.to(summed.device, non_blocking=True).add_(summed)
        if grid:  # what is beyond the numbers that the dtype tells apart is cut
            most = cells(noisy.dtype)
            noisy.mul_(1 / grid).clamp_(-most, most).round_().mul_(grid)
        means.append(noisy.div_(divisor).to(dtype))
    return means


def cells(dtype: torch.dtype) -> float:
    """Cells of a grid on either side of 0: their numbers are exact, and so are the halves
    between."""
    return 2.0**51 if dtype == torch.float64 else 2.0**22


def normals(words_N16: Tensor, std: float) -> Tensor:
    """``[8 N]``, float64: normals of this standard deviation, from blocks of words."""
    integers_P2 = words_N16.view(torch.int64).view(-1, 2)
    # From signed numbers, which are converted faster: the fraction is n / 2^64. To multiply by a
    # power of 2 is exact.
    u_P = integers_P2[:, 0].double().mul_(2.0**-64)
    u_P.sub_(u_P.floor()).add_(2.0**-66)
    radius_P = u_P.log_().mul_(-2 * std * std).sqrt_()
    angle_P = integers_P2[:, 1].double().mul_(2 * math.pi * 2.0**-64)
    return torch.stack([angle_P.cos(), angle_P.sin_()], 1).mul_(radius_P.unsqueeze(1)).view(-1)
