"""Rows that are drawn one by one, with an ε for whole units."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from flash_clipping import (
    Documents,
    FlashPrivacyEngine,
    PoissonRows,
    PoissonSampling,
    RandomAllocation,
    Users,
)
from flash_clipping.engine.accounting import ADD_OR_REMOVE
from flash_clipping.noise import releases
from flash_clipping.noise.accountants import releases_of
from flash_clipping.noise.process import RowsOfUnitsSampler
from flash_clipping.noise.releases import Release, epsilon_by_pld
from flash_clipping.randomness import SecretStream
from tests.support.errors import raises
from tests.support.pages import ROOT
from tests.support.users import BATCH, IDS, ROWS, SIZES, private, step

pytest.importorskip("dp_accounting")
stats = pytest.importorskip("scipy.stats")

RATE, SIGMA = 0.3, 1.5


def deltas(p: np.ndarray, q: np.ndarray, area: float, epsilon: float) -> tuple[float, float]:
    removed, added = (
        float(np.maximum(a - math.exp(epsilon) * b, 0).sum() * area) for a, b in ((p, q), (q, p))
    )
    return removed, added


@pytest.fixture(autouse=True)
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """ε is an upper bound on any grid; on a fine one it takes seconds."""
    monkeypatch.setattr(releases, "LOSS_GRID", 1e-2)


@cache
def losses(rows: int) -> Any:
    return Release(SIGMA, 1, "rows", RATE, rows).losses(5e-3)


def found_deltas(rows: int, epsilon: float) -> tuple[float, float]:
    pair = losses(rows)
    return tuple(p.get_delta_for_epsilon(epsilon) for p in (pair._pmf_remove, pair._pmf_add))


@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("epsilon", [0.1, 1.5])
def test_one_step_is_a_mixture_of_gaussians(rows: int, epsilon: float) -> None:
    at = np.linspace(-15, 25, 20_001)
    drawn = stats.binom.pmf(range(rows + 1), rows, RATE)
    p = sum(w * stats.norm.pdf(at, n, SIGMA) for n, w in enumerate(drawn))
    exact = deltas(p, stats.norm.pdf(at, 0, SIGMA), at[1] - at[0], epsilon)
    assert found_deltas(rows, epsilon) == pytest.approx(exact, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("cosine", [1.0, 0.3])
def test_rows_in_any_direction_tell_no_more(cosine: float) -> None:
    """Two rows of a unit, whose gradients are as long as the bound."""
    at = np.linspace(-9, 11, 2001)
    sine = (1 - cosine**2) ** 0.5

    def noise_around(u: float, v: float) -> np.ndarray:
        return np.outer(stats.norm.pdf(at, v, SIGMA), stats.norm.pdf(at, u, SIGMA))

    q, r = noise_around(0, 0), RATE
    p = (1 - r) ** 2 * q + r * (1 - r) * (noise_around(1, 0) + noise_around(cosine, sine))
    p += r**2 * noise_around(1 + cosine, sine)
    for epsilon in (0.1, 0.5, 1.0):
        exact = deltas(p, q, (at[1] - at[0]) ** 2, epsilon)
        for true, found in zip(exact, found_deltas(2, epsilon), strict=True):
            assert true <= found * (1 + 1e-5) + 1e-9
            assert cosine < 1 or found <= true * 1.001 + 1e-9


def test_one_row_of_each_unit_is_a_sample() -> None:
    process = PoissonRows().on(cycle=20, unit=Users([0], max_rows=1))
    rows = epsilon_by_pld((process.releases(1.0, 0.05, 40),), 1e-5)
    assert rows == pytest.approx(
        epsilon_by_pld((PoissonSampling().releases(1.0, 0.05, 40),), 1e-5), rel=1e-6
    )
    more = PoissonRows().on(cycle=20, unit=Users([0], max_rows=4))
    assert epsilon_by_pld((more.releases(1.0, 0.05, 40),), 1e-5) > 1.5 * rows
    assert more.relation == "add or remove one unit, of 4 rows at most" != ADD_OR_REMOVE


def test_rows_are_drawn_with_the_rate_and_never_more_of_a_unit() -> None:
    q, draws = 1 / 6, 4000
    units = Users(IDS, max_rows=3)
    sampler = RowsOfUnitsSampler(
        units=units, sample_rate=q, steps=draws, stream=SecretStream(seed=0)
    )
    assert sampler.num_samples == sum(min(size, 3) for size in SIZES)
    seen: Counter[int] = Counter(row for batch in sampler for row in batch)
    assert len(seen) == sampler.num_samples
    assert max(Counter(IDS[[*seen]].tolist()).values()) == 3
    for count in seen.values():
        assert abs(count - draws * q) < 5 * (draws * q * (1 - q)) ** 0.5


def test_training() -> None:
    engine = FlashPrivacyEngine(accountant="pld")
    options: dict[str, Any] = {"mechanism": PoissonRows(), "unit": Users(IDS, max_rows=3)}
    module, optimizer, criterion, loader = private(engine, **options)
    for x, rows in loader:
        optimizer.zero_grad()
        criterion(module(x), rows % 3).backward()
        assert module.get_norm_sample().shape == (len(x),)  # rows are clipped, not units
        optimizer.step()
    kept = sum(min(size, 3) for size in SIZES)
    assert optimizer.expected_batch_size == pytest.approx(kept / (ROWS / BATCH))
    assert releases_of(engine.accountant) == (Release(1.0, 6, "rows", 1 / 6, 3),)
    assert engine.get_epsilon(1e-3) == pytest.approx(
        epsilon_by_pld((Release(1.0, 6, "rows", 1 / 6, 3),), 1e-3)
    )
    step(module, optimizer, criterion, *next(iter(loader)))
    assert "one unit, of 3 rows" in engine.summary(1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unit": Users(IDS)}, "expected the most rows of a user"),
        ({"unit": None}, "expected the most rows of a user"),
        ({"unit": Documents("item")}, "expected the most rows of a user"),
        ({"accountant": "prv"}, "accountant='prv'"),
        ({"mechanism": RandomAllocation()}, "RandomAllocation.*with unit=Users"),
    ],
)
def test_what_does_not_go_with_it(options: dict[str, Any], words: str) -> None:
    engine = FlashPrivacyEngine(accountant=options.pop("accountant", "pld"))
    with raises("FC281|FC316", ValueError, match=words):
        private(engine, **{"mechanism": PoissonRows(), "unit": Users(IDS, max_rows=3)} | options)


@pytest.mark.parametrize(
    "units",
    [
        [[1], *([2] for _ in range(ROWS - 1))],
        [7, (1, 2), *range(ROWS - 2)],
        torch.zeros(ROWS, 2, dtype=torch.long),
        np.zeros((ROWS, 2), dtype=int),
    ],
)
def test_several_owners_of_a_row_are_refused(units: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Users(units)


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_owners_do_not_change_with_what_was_given(kind: Any) -> None:
    given = kind([5, 5, 7])
    users = Users(given)
    given[:] = 0
    assert users.by_row.tolist() == [0, 0, 1]


@pytest.mark.slow
def test_the_figures_of_the_page_on_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the grid is fine here
    page = (ROOT / "docs" / "units.md").read_text(encoding="utf-8")
    runs = [[Release(1.0, 1000, "rows", 0.01, rows)] for rows in (1, 2, 4, 8)]
    assert (
        "| ε | {:.2f} | {:.2f} | {:.2f} | {:.2f} |".format(
            *(epsilon_by_pld(tuple(run), 1e-5) for run in runs)
        )
        in page
    )
