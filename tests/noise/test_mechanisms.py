"""Noise across steps: matrices, and sensitivities against every pattern of steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from flash_clipping.noise.mechanisms import (
    BandedInverseNoise,
    BandedNoise,
    BufferedNoise,
    IndependentNoise,
    NoiseMechanism,
)
from tests.support.errors import raises
from tests.support.pages import ROOT

OPTIMISED = BandedNoise.optimised(4, 40)
ALL = [IndependentNoise(), BandedNoise(2), BandedNoise(4), OPTIMISED]
ALL += [
    BandedInverseNoise(2, (0.3,)),
    BandedInverseNoise(2, (0.9,)),
    BandedInverseNoise(2),
    BandedInverseNoise(5),
]
ALL += [BandedInverseNoise.optimised(3, 40, 10), BufferedNoise((0.4,), (0.9,))]
ALL += [BufferedNoise((0.7, 0.3), (0.0, 0.5)), BufferedNoise.optimised(3, 40, 10)]


def matrix(noise: NoiseMechanism, steps: int) -> np.ndarray:
    column = noise.column(steps)
    return np.array(
        [[column[t - s] if t >= s else 0.0 for s in range(steps)] for t in range(steps)]
    )


def worst(noise: NoiseMechanism, steps: int, separation: int) -> float:
    """Over all patterns of steps that are so far apart, and all directions of gradients that are
    worst for entries that are not negative: the same."""
    c, found = matrix(noise, steps), 0.0
    for size in range(steps + 1):
        for pattern in itertools.combinations(range(steps), size):
            if all(b - a >= separation for a, b in itertools.pairwise(pattern)):
                found = max(found, float(np.linalg.norm(c[:, list(pattern)].sum(1))))
    return found


@pytest.mark.parametrize("separation", [1, 3, 4, 7])
@pytest.mark.parametrize("noise", ALL, ids=str)
def test_no_pattern_is_worse(noise: NoiseMechanism, separation: int) -> None:
    for steps in (1, 5, 10):
        found = noise.sensitivity(steps, separation)
        assert found == pytest.approx(worst(noise, steps, separation), rel=1e-12)


@pytest.mark.parametrize("noise", ALL, ids=str)
def test_gradients_in_other_directions_move_less(noise: NoiseMechanism) -> None:
    rng = np.random.default_rng(0)
    c = matrix(noise, 9)
    for _ in range(50):
        x = np.zeros((9, 3))
        gradients = rng.normal(size=(3, 3))
        x[[0, 4, 8]] = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
        assert np.linalg.norm(c @ x) <= noise.sensitivity(9, 4) * (1 + 1e-12)


@pytest.mark.parametrize("noise", ALL, ids=str)
def test_one_participation_has_the_norm_of_a_column(noise: NoiseMechanism) -> None:
    assert noise.sensitivity(6) == pytest.approx(np.linalg.norm(noise.column(6)))
    assert noise.sensitivity(0) == 0


def test_banded_coefficients_are_those_of_the_square_root_of_prefix_sums() -> None:
    root = matrix(BandedNoise(8), 8)
    assert np.allclose(root @ root, np.tril(np.ones((8, 8))), atol=1e-12)


def test_a_share_of_the_last_step_is_the_inverse_of_its_matrix() -> None:
    inverse = np.eye(7) - 0.4 * np.eye(7, k=-1)
    assert np.allclose(matrix(BandedInverseNoise(2, (0.4,)), 7) @ inverse, np.eye(7), atol=1e-12)


def error_by_matrices(noise: NoiseMechanism, steps: int, separation: int | None = None) -> float:
    """Of prefix sums, in the mean over steps, at a sensitivity of 1."""
    spread = np.tril(np.ones((steps, steps))) @ np.linalg.inv(matrix(noise, steps))
    return float((spread**2).sum() / steps * noise.sensitivity(steps, separation) ** 2)


@pytest.mark.parametrize("separation", [None, 7])
@pytest.mark.parametrize("noise", ALL, ids=str)
def test_errors_of_prefix_sums(noise: NoiseMechanism, separation: int | None) -> None:
    expected = error_by_matrices(noise, 50, separation)
    assert noise.error(50, separation) == pytest.approx(expected, rel=1e-9)


def test_errors_where_many_buffers_forget_alike() -> None:
    """Decays near one another and near 1, whose polynomials are the hardest."""
    noise = BufferedNoise((0.1,) * 5, (0.999, 0.9991, 0.9992, 0.9993, 0.9994))
    assert noise.error(400) == pytest.approx(error_by_matrices(noise, 400), rel=1e-6)


def test_a_banded_inverse_is_banded_and_that_of_the_root() -> None:
    inverse = np.linalg.inv(matrix(BandedInverseNoise(4), 9))
    root = np.linalg.inv(matrix(BandedNoise(9), 9))
    assert np.allclose(np.tril(inverse, -4), 0, atol=1e-12)
    assert np.allclose(inverse - np.tril(inverse, -4), root - np.tril(root, -4), atol=1e-12)


@pytest.mark.parametrize(
    "noise",
    [BandedInverseNoise(b) for b in (2, 3, 8, 32)]
    + [BandedInverseNoise(4, (0.6, 0.1, 0.1)), BandedInverseNoise.optimised(8, 2000, 50)]
    + [BufferedNoise((0.5, 0.5), (0.0, 0.999)), BufferedNoise.optimised(4, 2000)],
    ids=str,
)
def test_columns_never_grow_however_long_the_run(noise: NoiseMechanism) -> None:
    column = noise.column(5000)
    assert column[0] == 1 and (column >= -1e-15).all() and (np.diff(column) <= 1e-15).all()


@pytest.mark.parametrize(("count", "steps"), [(2, 2), (3, 30), (8, 60)])
def test_optimised_weights_are_better_and_nothing_near_them_is(count: int, steps: int) -> None:
    closed, found = BandedNoise(count), BandedNoise.optimised(count, steps)
    weights, least = found.coefficients, error_by_matrices(found, steps)
    assert least < error_by_matrices(closed, steps)
    for j in range(1, count):
        for change in (0.99, 1.01):
            other = weights.copy()
            other[j] *= change
            if (np.diff(other) <= 0).all():
                near = BandedNoise(count, weights=tuple(other))
                assert error_by_matrices(near, steps) > least * (1 - 1e-7)
    assert found != closed and repr(found) != repr(closed)


NAN, INF = float("nan"), float("inf")
UNKNOWN = "sensitivities are not known"
REFUSED: list[tuple[str, str, Callable[..., object], tuple[object, ...]]] = [
    *(("FC302", r"count: .*\[2, inf\)", BandedNoise, (count,)) for count in (1, True)),
    *(("FC302", r"count: .*\[2, inf\)", BandedInverseNoise, (count,)) for count in (1, True)),
    *(
        ("FC318", "none negative and not all 0", BandedInverseNoise, (2, (share,)))
        for share in (0.0, 1.1, -0.1, NAN)
    ),
    *(
        ("FC318", UNKNOWN, BandedInverseNoise, given)
        for given in (
            (2, (0.5, 0.1)), (3, (0.5, -0.1)), (2, (1.1,)), (2, (0.0,)), (3, (0.1, 0.9)),
            (2, (NAN,)), (2, (INF,)),
        )
    ),
    *(
        ("FC318", UNKNOWN, BufferedNoise, given)
        for given in (
            ((), ()), ((0.5,), (1.0,)), ((0.5,), (-0.1,)), ((0.0,), (0.5,)),
            ((0.6, 0.5), (0.1, 0.2)), ((0.5,), (0.5, 0.5)), ((NAN,), (0.5,)), ((0.5,), (NAN,)),
        )
    ),
    *(
        ("FC318", UNKNOWN, partial(BandedNoise, 2), (weights,))
        for weights in ((1.0,), (0.9, 0.5), (1.0, -0.1), (1.0, 1.1), (1.0, NAN))
    ),
    *(
        ("FC302", r"steps: .*\[4, inf\)", kind.optimised, (4, 3))
        for kind in (BandedNoise, BandedInverseNoise, BufferedNoise)
    ),
    ("FC302", r"buffers: .*\[1, inf\)", BufferedNoise.optimised, (0, 3)),
    ("FC302", "separation", BandedInverseNoise(2).sensitivity, (4, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("code", "words", "make", "given"), REFUSED)
def test_noise_without_a_known_sensitivity_is_refused(
    code: str, words: str, make: Callable[..., object], given: tuple[object, ...]
) -> None:
    with raises(code, ValueError, match=words):
        make(*given)


def test_many_diagonals_for_many_steps() -> None:
    """Rounding does not let a column grow that is all but flat."""
    found = BandedInverseNoise.optimised(32, 2000)
    assert found.error(2000) < BandedInverseNoise.optimised(8, 2000).error(2000)


#: Rows of the table on the page: what is in front of the comma of a cell, and behind it.
ROWS: dict[str, list[Callable[[int, int | None], NoiseMechanism]]] = {
    "`IndependentNoise()`": [lambda T, b: IndependentNoise()],
    "`BandedInverseNoise(2)`": [lambda T, b: BandedInverseNoise(2)],
    "`BandedNoise(8)`, `.optimised(8, T)`": [
        lambda T, b: BandedNoise(8),
        lambda T, b: BandedNoise.optimised(8, T),
    ],
    "`BandedInverseNoise(8)`, optimised": [
        lambda T, b: BandedInverseNoise(8),
        lambda T, b: BandedInverseNoise.optimised(8, T, b),
    ],
    "`BandedInverseNoise(32)`, optimised": [
        lambda T, b: BandedInverseNoise(32),
        lambda T, b: BandedInverseNoise.optimised(32, T, b),
    ],
    "`BufferedNoise`, 1 buffer, optimised": [lambda T, b: BufferedNoise.optimised(1, T, b)],
    "`BufferedNoise`, 3 buffers, optimised": [lambda T, b: BufferedNoise.optimised(3, T, b)],
}


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (len(ROWS[row]) - 1)) for row in ROWS]
)
def test_the_figures_of_the_page(row: str) -> None:
    page = (ROOT / "docs" / "correlated-noise.md").read_text(encoding="utf-8")
    runs = [(56, None), (56, 14), (400, 100), (2000, None), (2000, 200)]
    cells = [
        ", ".join(f"{make(T, b).error(T, b) ** 0.5:.2f}" for make in ROWS[row]) for T, b in runs
    ]
    assert f"| {row} | {' | '.join(cells)} |" in page
