"""What pages say of where noise ends, and of batches that are filled up to one size."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "noise.md"


def tail(t: float) -> float:
    """Probability that a normal is above ``t``."""
    return math.erfc(t / math.sqrt(2)) / 2


def test_the_page_on_noise_tells_what_an_end_of_noise_gives_away() -> None:
    """Outputs beyond the end of noise, which one sample moves by ``1/z``."""
    rows = re.findall(r"^\| ([\d.]+) σ [^|]*\|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) == 3
    ends = (math.sqrt(2 * 24 * math.log(2)), 6.7, math.sqrt(2 * 66 * math.log(2)))
    for end, (written, cells) in zip(ends, rows, strict=True):
        assert end == pytest.approx(float(written), abs=0.01)
        for z, cell in zip((2, 1, 0.6, 0.4), cells.split("|"), strict=True):
            assert float(cell) == pytest.approx(tail(end - 1 / z) - tail(end), rel=0.04)


def test_batches_of_one_size_that_is_large_enough_cost_little() -> None:
    """``q N + 4 sqrt(q N)`` of docs/sampling.md."""
    pytest.importorskip("dp_accounting")
    from opacus.accountants import PRVAccountant

    from flash_clipping.noise.accountants import PldAccountant
    from flash_clipping.noise.process import PoissonSampling

    history = [(1.2, 0.25, 8)]
    poisson, one_size = PRVAccountant(), PldAccountant()
    poisson.history = one_size.history = history
    one_size.process = PoissonSampling(max_batch_size=140).on(400)
    epsilon = poisson.get_epsilon(1e-5)
    assert one_size.get_epsilon(1e-5) == pytest.approx(epsilon, rel=0.01)
