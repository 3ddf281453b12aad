"""Standard normals from the words of a draw, by Box and Muller, in float64 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flash_clipping.randomness.chacha20 import uniform_bits
from flash_clipping.randomness.stream import Draw


def standard_normals(draw: Draw, like: Sequence[Tensor]) -> list[Tensor]:
    """Independent normals: for each tensor one of its shape, in fp32 (float64 for float64), on its
    device. The same draw gives the same normals.

    Two words of 64 bits make two normals. Their distance from 0 goes up to 9.6.
    """
    return [_of_tensor(draw, index, tensor) for index, tensor in enumerate(like)]


def _of_tensor(draw: Draw, index: int, like: Tensor) -> Tensor:
    count = like.numel()
    words = uniform_bits(draw, 2 * -(-count // 2), tensor=index).numpy().view(np.uint64)
    radius_words, angle_words = words[0::2], words[1::2]
    # (n + 1/4) 2^-64: never 0.
    uniform = (radius_words.astype(np.float64) + 0.25) * 2.0**-64
    radius = np.sqrt(-2 * np.log(np.minimum(uniform, 1.0)))
    angle = angle_words.astype(np.float64) * (2 * math.pi * 2.0**-64)
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    flat = torch.from_numpy(pairs.reshape(-1)[:count])
    return flat.view(like.shape).to(device=like.device, dtype=dtype)
