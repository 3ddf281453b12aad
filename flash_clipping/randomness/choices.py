"""Which ones are drawn, exactly, from the words of a draw: coin tosses, subsets, and the integers
of a discrete Gaussian.

Shape suffixes: ``N`` those to choose from, ``K`` those that were chosen.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from flash_clipping.errors import InvalidValue
from flash_clipping.randomness.chacha import Keystream
from flash_clipping.randomness.stream import Draw

#: Words of 64 bits that are drawn at a time: whole blocks.
_AT_A_TIME = 1 << 20


def threshold(rate: float) -> int:
    """``floor(rate 2^64)``, exactly: so many of the words of 64 bits mean "drawn".

    Raises:
        ValueError: ``rate`` is no probability.
    """
    if not 0 <= rate <= 1:
        raise InvalidValue(f"rate: found {rate}; expected a probability, 0 to 1.")
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
    if not 0 <= size <= count:
        raise InvalidValue(f"subset: found a size of {size}; expected 0 to {count}.")
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
    if not 1 <= times <= steps:
        raise InvalidValue(f"allocations: found {times} of {steps}; expected 1 to {steps}.")
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


# -- integers with the law of a discrete Gaussian --------------------------------------------------

#: The most bits of a discrete Gaussian's standard deviation: squares of its parts fit in 63.
MOST_BITS = 31
_EXACT_AT_A_TIME = 1 << 15


def discrete_gaussian(
    draw: Draw, count: int, bits: int, *, tensor: int = 0, shard: int = 0
) -> Tensor:
    """``[N]``, int64: each ``y`` with probability proportional to ``exp(-y^2 / (2 S^2))``, with
    ``S = 2^bits``, independently: exactly, as far as the words are uniform.

    Only integers are computed with. Coins that fall with probability ``exp(-n / 2^m)`` are made of
    coins with rational probabilities (Canonne, Kamath and Steinke 2020, arXiv 2004.00010,
    algorithm 1); whole standard deviations and their rest are drawn apart and taken together with
    the probability that is left (Karney 2016, arXiv 1303.6257, algorithm N): with ``u = U / S``,
    ``exp(-(v + u)^2 / 2) = exp(-v^2 / 2) exp(-u v) exp(-u^2 / 2)``.

    Raises:
        ValueError: ``bits`` that are not 1 to 31; more words than a nonce has.

    Guarantees:
        How long it takes depends on the words, and on nothing else: not on data.
    """
    if not 1 <= bits <= MOST_BITS:
        raise InvalidValue(f"discrete_gaussian: found {bits} bits; expected 1 to {MOST_BITS}.")
    words = Keystream(draw, tensor=tensor, shard=shard)
    found_N = np.empty(count, dtype=np.int64)
    for start in range(0, count, _EXACT_AT_A_TIME):
        part = found_N[start : start + _EXACT_AT_A_TIME]
        left = np.arange(len(part))
        while len(left):
            values, are_taken = _proposals(words, len(left), bits)
            part[left[are_taken]] = values[are_taken]
            left = left[~are_taken]
    return torch.from_numpy(found_N)


def _proposals(words: Keystream, count: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Values, and which of them may be taken."""
    halves = np.ones(count, dtype=np.uint64)
    whole = np.zeros(count, dtype=np.int64)  # v, geometric: each is exp(-1/2) times the one before
    alive = np.arange(count)
    while len(alive):
        alive = alive[_exponential_coins(words, halves[: len(alive)], 1)]
        whole[alive] += 1
    # exp(-v^2 / 2) = exp(-1/2)^v exp(-1)^(v (v - 1) / 2)
    taken = _often(words, 2 * halves, 1, whole * (whole - 1) // 2)
    random = words.take(count)
    rest = random >> np.uint64(64 - bits)  # U
    is_negative = (random & np.uint64(1)).astype(bool)
    taken &= ~(is_negative & (whole == 0) & (rest == 0))  # 0 has one sign
    chosen = taken.nonzero()[0]
    rest, whole = rest[chosen], whole[chosen]
    keep = _exponential_coins(words, rest * rest, 2 * bits + 1)
    keep &= _often(words, rest, bits, whole)
    taken[chosen] = keep
    values = np.zeros(count, dtype=np.int64)
    values[chosen] = (whole << bits) + rest.astype(np.int64)
    return np.where(is_negative, -values, values), taken


def _often(words: Keystream, n: np.ndarray, m: int, times: np.ndarray) -> np.ndarray:
    """Whether so many coins of probability ``exp(-n / 2^m)`` each all fall well."""
    found = np.ones(len(n), dtype=bool)
    alive, number = (times > 0).nonzero()[0], 0
    while len(alive):
        fell = _exponential_coins(words, n[alive], m)
        found[alive[~fell]] = False
        number += 1
        alive = alive[fell & (times[alive] > number)]
    return found


def _exponential_coins(words: Keystream, n: np.ndarray, m: int) -> np.ndarray:
    """Each true with probability ``exp(-n / 2^m)``; ``n``: uint64, 0 to ``2^m``; ``m``: 1 to 63.

    The first ``k`` for which a coin of probability ``n / (2^m k)`` falls the other way is odd with
    this probability: that is the exponential's series.
    """
    found = np.empty(len(n), dtype=bool)
    alive, k = np.arange(len(n)), 1
    while len(alive):
        fell = (words.take(len(alive)) >> np.uint64(64 - m)) < n[alive]
        if k > 1:
            fell[fell] = _one_in(words, k, int(fell.sum()))
        found[alive[~fell]] = k % 2
        alive, k = alive[fell], k + 1
    return found


def _one_in(words: Keystream, k: int, count: int) -> np.ndarray:
    """Each true with probability ``1 / k``; ``k``: 2 or more."""
    bits = (k - 1).bit_length()
    found = words.take(count) >> np.uint64(64 - bits)
    while len(beyond := (found >= k).nonzero()[0]):
        found[beyond] = words.take(len(beyond)) >> np.uint64(64 - bits)
    return found == 0
