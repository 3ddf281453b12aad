"""Whether normals are normal: moments, tails, bins, and what is correlated with what.

Every figure is a number of standard errors. Those of counts are of the square roots of counts,
whose spread is the same for large and for small expectations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flash_clipping.ops.noise import noisy_means
from flash_clipping.randomness import Draw

BINS = 1000
TAILS = (3, 4, 5, 6, 7)
LAGS = (1, 2, 3, 4, 7, 8, 16)
#: Lowest bits of fp32's mantissa that are looked at: would rounding leave a trace, it is there.
LOW_BITS = 3
#: Normals that are drawn at a time, of each of two tensors.
CHUNK = {"cpu": 1 << 19, "cuda": 1 << 25}


@dataclass
class Row:
    """One figure: what was found, what was expected, and their difference in standard errors."""

    name: str
    found: float
    expected: float
    errors: float


@dataclass
class Statistics:
    """Sums over all normals that were drawn.

    Attributes:
        count: how many normals.
        largest: of their absolute values.
    """

    count: int = 0
    pairs: int = 0
    largest: float = 0.0
    moments: list[float] = field(default_factory=lambda: [0.0] * 4)
    tails: list[int] = field(default_factory=lambda: [0] * len(TAILS))
    serial: list[float] = field(default_factory=lambda: [0.0] * len(LAGS))
    serial_counts: list[int] = field(default_factory=lambda: [0] * len(LAGS))
    squares: float = 0.0
    cross: float = 0.0
    cross_squares: float = 0.0
    bins: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.int64))
    low_bits: Tensor = field(default_factory=lambda: torch.zeros(1 << LOW_BITS, dtype=torch.int64))

    @classmethod
    def of(cls, draw: Draw, draws: int, device: str = "cpu") -> Statistics:
        """Of about so many normals as the optimizer adds them: two tensors at a time, which differ
        in the shard's number, are looked at together."""

        def parts() -> Iterable[tuple[Tensor, Tensor]]:
            size = min(CHUNK[torch.device(device).type], draws // 2)
            zeros = [torch.zeros(size, device=device)] * 2
            for tensor in range(max(1, draws // (2 * size))):
                numbers = {"tensors": [tensor, tensor], "shards": [0, 1]}
                yield tuple(noisy_means(zeros, 1.0, 1.0, draw=draw, **numbers))

        return cls.of_normals(parts())

    @classmethod
    def of_normals(cls, parts: Iterable[tuple[Tensor, Tensor]]) -> Statistics:
        """Of pairs of tensors ``[n]`` that should be independent normals, all of them."""
        found = cls()
        for x, y in parts:
            found._add(x), found._add(y)
            found._add_pair(x.double(), y.double())
        return found

    def _add(self, drawn: Tensor) -> None:
        x = drawn.double()
        n = x.numel()
        self.count += n
        size = x.abs()
        self.largest = max(self.largest, size.max().item())
        square = x * x
        for k, power in enumerate((x, square, square * x, square * square)):
            self.moments[k] += power.sum().item()
        self.tails = [c + int((size > t).sum()) for c, t in zip(self.tails, TAILS, strict=True)]
        places = torch.special.ndtr(x).mul_(BINS).long().clamp_(0, BINS - 1)
        self.bins += torch.bincount(places, minlength=BINS).cpu()
        for k, lag in enumerate(LAGS):
            self.serial[k] += torch.dot(x[lag:], x[:-lag]).item()
            self.serial_counts[k] += n - lag
        square -= 1
        self.squares += torch.dot(square[1:], square[:-1]).item()
        bits = drawn.float().view(torch.int32)[(size >= 0.5) & (size < 2)] & ((1 << LOW_BITS) - 1)
        self.low_bits += torch.bincount(bits, minlength=1 << LOW_BITS).cpu()

    def _add_pair(self, x: Tensor, y: Tensor) -> None:
        self.pairs += x.numel()
        self.cross += torch.dot(x, y).item()
        self.cross_squares += torch.dot(x * x - 1, y * y - 1).item()

    def rows(self) -> list[Row]:
        n = self.count
        mean, square, third, fourth = (total / n for total in self.moments)
        found = [
            Row("mean", mean, 0, mean * n**0.5),
            Row("variance", square, 1, (square - 1) * (n / 2) ** 0.5),
            Row("third moment", third, 0, third * (n / 15) ** 0.5),
            Row("fourth moment", fourth, 3, (fourth - 3) * (n / 96) ** 0.5),
        ]
        for beyond, count in zip(TAILS, self.tails, strict=True):
            expected = n * math.erfc(beyond / 2**0.5)
            errors = 2 * ((count + 3 / 8) ** 0.5 - (expected + 3 / 8) ** 0.5)
            found.append(Row(f"tails beyond {beyond}", count, expected, errors))
        found.append(_chi_square(f"chi-square of {BINS} bins", self.bins))
        found.append(_chi_square(f"chi-square of the lowest {LOW_BITS} bits", self.low_bits))
        for lag, total, count in zip(LAGS, self.serial, self.serial_counts, strict=True):
            name = f"serial correlation, {lag} apart"
            found.append(Row(name, total / count, 0, total / count**0.5))
        name, errors = "serial correlation of squares", self.squares / (4 * n) ** 0.5
        found.append(Row(name, self.squares / n / 2, 0, errors))
        pairs = self.pairs
        found.append(
            Row("cross-stream correlation", self.cross / pairs, 0, self.cross / pairs**0.5)
        )
        name, errors = (
            "cross-stream correlation of squares",
            self.cross_squares / (4 * pairs) ** 0.5,
        )
        found.append(Row(name, self.cross_squares / pairs / 2, 0, errors))
        return found

    def worst(self, name: str = "") -> float:
        """The largest number of standard errors, of figures whose name begins so."""
        return max(abs(row.errors) for row in self.rows() if row.name.startswith(name))


def _chi_square(name: str, counts: Tensor) -> Row:
    """Of counts that should be equal."""
    expected, degrees = counts.sum().item() / len(counts), len(counts) - 1
    found = ((counts.double() - expected).square().sum() / max(expected, 1e-9)).item()
    return Row(name, found, degrees, (found - degrees) / (2 * degrees) ** 0.5)
