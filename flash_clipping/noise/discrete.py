"""Noise of integers on sums that are rounded: a discrete Gaussian, drawn exactly.

Shape suffix: ``N`` integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flash_clipping.errors import InvalidValue, checked_number
from flash_clipping.ops.noise import refuse_capture
from flash_clipping.randomness import Draw
from flash_clipping.randomness.chacha import Keystream

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
    Gaussian, drawn exactly (:func:`discrete_gaussian`).

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
        refuse_capture(summed.device)
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
            f"FC317 noise_grid='exact': found {elements} elements with a noise multiplier of "
            f"{multiplier}; expected 2^{MOST_BITS - 10} at most for the product of the multiplier "
            "and the root of their number: to round them would move the sum by too much. Train "
            "fewer parameters, or use noise_grid=True."
        )
    return std / (1 - math.ldexp(rounding, -bits)) * 2.0**-bits, bits


# -- integers with the law of a discrete Gaussian --------------------------------------------------

#: The most bits of a discrete Gaussian's standard deviation: squares of its parts fit in 63.
MOST_BITS = 31
_EXACT_AT_A_TIME = 1 << 15


def discrete_gaussian(draw: Draw, count: int, bits: int, *, tensor: int = 0) -> Tensor:
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
    checked_number("bits", bits, f"[1, {MOST_BITS}]", 8, whole=True)
    words = Keystream(draw, tensor=tensor)
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
    is_first: np.ndarray = found == 0
    return is_first
