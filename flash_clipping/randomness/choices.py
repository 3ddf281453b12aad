"""Which ones are drawn: coin tosses and subsets, exact, from the words of a draw.

Shape suffixes: ``N`` those to choose from, ``K`` those that were chosen.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from flash_clipping.randomness.chacha20 import uniform_bits
from flash_clipping.randomness.stream import Draw

#: Words of 64 bits that are drawn at a time, and of a block.
_AT_A_TIME, _OF_BLOCK = 1 << 20, 8


def threshold(rate: float) -> int:
    """``floor(rate 2^64)``, exactly: so many of the words of 64 bits mean "drawn".

    Raises:
        ValueError: ``rate`` is no probability.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate: found {rate}; expected a probability, 0 to 1.")
    return int(Fraction(rate) * (1 << 64))


def coin_tosses(draw: Draw, count: int, rate: float, *, tensor: int = 0, shard: int = 0) -> Tensor:
    """``[N]``, bool: each true with probability ``floor(rate 2^64) / 2^64``, independently.

    That is ``rate`` rounded down, by less than ``2^-64``: never more than is accounted for.
    """
    below = threshold(rate)
    drawn_N = np.ones(count, dtype=bool)
    if below < 1 << 64:
        for start in range(0, count, _AT_A_TIME):
            end = min(count, start + _AT_A_TIME)
            bits = _unsigned(draw, end - start, tensor, shard, start // _OF_BLOCK)
            drawn_N[start:end] = bits < np.uint64(below)
    return torch.from_numpy(drawn_N)


def subset(draw: Draw, count: int, size: int, *, tensor: int = 0, shard: int = 0) -> Tensor:
    """``[K]``, int64: ``size`` of the numbers below ``count``, in random order.

    Every ordered choice has the same probability: they are those with the least of ``count`` words
    of 64 bits, which are drawn again where two of them are equal.

    Raises:
        ValueError: ``size`` is not between 0 and ``count``.
    """
    if not 0 <= size <= count:
        raise ValueError(f"subset: found a size of {size}; expected 0 to {count}.")
    blocks = -(-count // _OF_BLOCK)
    first = 0
    while True:
        keys_N = _unsigned(draw, count, tensor, shard, first)
        order_N = np.argsort(keys_N, kind="stable")
        ordered_N = keys_N[order_N]
        if (ordered_N[1:] != ordered_N[:-1]).all():
            return torch.from_numpy(order_N[:size].astype(np.int64))
        first += blocks


def _unsigned(draw: Draw, count: int, tensor: int, shard: int, first: int) -> np.ndarray:
    bits = uniform_bits(draw, count, tensor=tensor, shard=shard, first=first)
    found: np.ndarray = bits.numpy().view(np.uint64)
    return found
