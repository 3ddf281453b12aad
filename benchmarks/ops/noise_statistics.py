"""Whether normals are normal: moments, tails, bins, and what is correlated with what.

Every figure is a number of standard errors. Those of tails are of the square roots of counts, whose
spread is the same for large and for small expectations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from scipy import stats
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

MOMENTS = ("mean", "variance", "third moment", "fourth moment")
SERIAL, SERIAL_SQUARES = "serial correlation, {} apart", "serial correlation of squares"
CROSS, CROSS_SQUARES = "cross-stream correlation", "cross-stream correlation of squares"
#: Figures that are means: what is expected, and the variance of one term.
MEANS: dict[str, tuple[int, int]] = {
    **dict(zip(MOMENTS, [(0, 1), (1, 2), (0, 15), (3, 96)], strict=True)),
    **dict.fromkeys(map(SERIAL.format, LAGS), (0, 1)),
    **dict.fromkeys((SERIAL_SQUARES, CROSS, CROSS_SQUARES), (0, 1)),
}


@dataclass
class Row:
    """One figure: what was found, what was expected, and their difference in standard errors."""

    name: str
    found: float
    expected: float
    errors: float


class Statistics:
    """Sums over pairs of tensors ``[n]`` that should be independent normals, all of them.

    Attributes:
        count: how many normals.
        largest: of their absolute values.
    """

    def __init__(self, parts: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.count, self.largest = 0, 0.0
        self._sums, self._terms = dict.fromkeys(MEANS, 0.0), dict.fromkeys(MEANS, 0)
        self._tails = dict.fromkeys(TAILS, 0)
        self._bins = torch.zeros(BINS, dtype=torch.int64)
        self._low_bits = torch.zeros(1 << LOW_BITS, dtype=torch.int64)
        for x, y in parts:
            self._add(x), self._add(y)
            self._add_product(CROSS, x.double(), y.double())
            self._add_product(CROSS_SQUARES, _squares(x.double()), _squares(y.double()))

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

        return cls(parts())

    def _add_product(self, name: str, x: Tensor, y: Tensor) -> None:
        self._sums[name] += torch.dot(x, y).item()
        self._terms[name] += len(x)

    def _add(self, drawn: Tensor) -> None:
        x = drawn.double()
        size, squares = x.abs(), _squares(x)
        self.count += len(x)
        self.largest = max(self.largest, size.max().item())
        for power, name in enumerate(MOMENTS):
            self._add_product(name, x, x**power)
        for lag in LAGS:
            self._add_product(SERIAL.format(lag), x[lag:], x[:-lag])
        self._add_product(SERIAL_SQUARES, squares[1:], squares[:-1])
        for beyond in TAILS:
            self._tails[beyond] += int((size > beyond).sum())
        places = torch.special.ndtr(x).mul_(BINS).long().clamp_(0, BINS - 1)
        self._bins += torch.bincount(places, minlength=BINS).cpu()
        bits = drawn.float().view(torch.int32)[(size >= 0.5) & (size < 2)] & ((1 << LOW_BITS) - 1)
        self._low_bits += torch.bincount(bits, minlength=1 << LOW_BITS).cpu()

    def rows(self) -> list[Row]:
        found = []
        for name, (expected, variance) in MEANS.items():
            n = self._terms[name]
            mean = self._sums[name] / n
            found.append(Row(name, mean, expected, (mean - expected) * (n / variance) ** 0.5))
        for beyond, count in self._tails.items():
            expected = self.count * 2 * stats.norm.sf(beyond)
            errors = 2 * ((count + 3 / 8) ** 0.5 - (expected + 3 / 8) ** 0.5)
            found.append(Row(f"tails beyond {beyond}", count, expected, errors))
        lowest = f"the lowest {LOW_BITS} bits"
        for name, counts in ((f"{BINS} bins", self._bins), (lowest, self._low_bits)):
            square, degrees = stats.chisquare(counts).statistic, len(counts) - 1
            errors = (square - degrees) / (2 * degrees) ** 0.5
            found.append(Row(f"chi-square of {name}", square, degrees, errors))
        return found

    def worst(self, name: str = "") -> float:
        """The largest number of standard errors, of figures whose name begins so."""
        return max(abs(row.errors) for row in self.rows() if row.name.startswith(name))


def _squares(x: Tensor) -> Tensor:
    """Of normals: less their mean, in units of their deviation."""
    return (x * x - 1) / 2**0.5
