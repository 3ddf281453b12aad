"""Which ones are drawn, exactly, from the words of a draw: coin tosses and subsets.

Shape suffixes: ``N`` those to choose from, ``K`` those that were chosen.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from flash_clipping.errors import checked_number
from flash_clipping.randomness.chacha import Keystream
from flash_clipping.randomness.stream import Draw

#: Words of 64 bits that are drawn at a time: whole blocks.
_AT_A_TIME = 1 << 20


def threshold(rate: float) -> int:
    """``floor(rate 2^64)``, exactly: so many of the words of 64 bits mean "drawn".

    Raises:
        ValueError: ``rate`` is no probability.
    """
    checked_number("rate", rate, "[0, 1]", example=0.01)
    return int(Fraction(rate) * (1 << 64))


def coin_tosses(draw: Draw, count: int, rate: float, *, tensor: int = 0, shard: int = 0) -> Tensor:
    """``[N]``, bool: each true with probability ``floor(rate 2^64) / 2^64``, independently.

    That is ``rate`` rounded down, by less than ``2^-64``: never more than is accounted for.
    """
    below = threshold(rate)
    drawn_N = np.ones(count, dtype=bool)
    if below < 1 << 64:
        words = Keystream(draw, tensor=tensor, shard=shard)
        for start in range(0, count, _AT_A_TIME):
            end = min(count, start + _AT_A_TIME)
            drawn_N[start:end] = words.take(end - start) < np.uint64(below)
    return torch.from_numpy(drawn_N)


def subset(draw: Draw, count: int, size: int, *, tensor: int = 0) -> Tensor:
    """``[K]``, int64: ``size`` of the numbers below ``count``, in random order.

    Every ordered choice has the same probability: they are those with the least of ``count`` words
    of 64 bits, which are drawn again where two of them are equal.

    Raises:
        ValueError: ``size`` is not between 0 and ``count``.
    """
    checked_number("size", size, f"[0, {count}]", example=count, whole=True)
    words = Keystream(draw, tensor=tensor)
    while True:
        keys_N = words.take(count)
        order_N = np.argsort(keys_N, kind="stable")
        ordered_N = keys_N[order_N]
        if (ordered_N[1:] != ordered_N[:-1]).all():
            return torch.from_numpy(order_N[:size].astype(np.int64))


def allocations(draw: Draw, count: int, steps: int, times: int) -> Tensor:
    """``[N, K]``, int32: for each of ``count`` samples ``times`` different numbers below ``steps``.

    Every set of them has the same probability, exactly, and samples are independent. Floyd's
    algorithm: for ``j`` from ``steps - times`` on a number of ``0 .. j`` is drawn, and ``j`` itself
    taken where that one is taken already. Number ``k`` is made of the words of tensor ``k``.

    Raises:
        ValueError: ``times`` is not between 1 and ``steps``.
    """
    checked_number("times", times, f"[1, {steps}]", example=1, whole=True)
    chosen_NK = np.empty((count, times), dtype=np.int32)
    for k, j in enumerate(range(steps - times, steps)):
        found_N = _below(Keystream(draw, tensor=k), count, j + 1).astype(np.int32)
        is_taken_N = (chosen_NK[:, :k] == found_N[:, None]).any(1)
        chosen_NK[:, k] = np.where(is_taken_N, np.int32(j), found_N)
    return torch.from_numpy(chosen_NK)


def _below(words: Keystream, count: int, bound: int) -> np.ndarray:
    """``[N]``, uint64: uniform numbers below ``bound``; words that would favour some are drawn
    again."""
    words_N, surplus = words.take(count), (1 << 64) % bound
    while surplus and (again := words_N >= np.uint64((1 << 64) - surplus)).any():
        words_N[again] = words.take(int(again.sum()))
    return words_N % np.uint64(bound)
