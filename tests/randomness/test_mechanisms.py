"""Noise across steps: matrices, and sensitivities against every pattern of steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from flash_clipping.randomness.mechanisms import (
    BandedNoise,
    IndependentNoise,
    NoiseMechanism,
    OneStepNoise,
    prefix_error,
)

OPTIMISED = BandedNoise.optimised(4, 40)
ALL = [IndependentNoise(), BandedNoise(2), BandedNoise(4), OPTIMISED]
ALL += [OneStepNoise(0.3), OneStepNoise(0.9)]


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
def test_once(noise: NoiseMechanism) -> None:
    assert noise.sensitivity(6) == pytest.approx(np.linalg.norm(noise.column(6)))
    assert noise.sensitivity(0) == 0


def test_banded_coefficients_are_those_of_the_square_root_of_prefix_sums() -> None:
    root = matrix(BandedNoise(8), 8)
    assert np.allclose(root @ root, np.tril(np.ones((8, 8))), atol=1e-12)


def test_one_step_noise_is_the_inverse_of_its_matrix() -> None:
    inverse = np.eye(7) - 0.4 * np.eye(7, k=-1)
    assert np.allclose(matrix(OneStepNoise(0.4), 7) @ inverse, np.eye(7), atol=1e-12)


@pytest.mark.parametrize("make", [lambda: BandedNoise(1), lambda: BandedNoise(True)])
def test_too_few_diagonals(make: object) -> None:
    with pytest.raises(ValueError, match="2 or more"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_shares_outside(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        OneStepNoise(share)


def test_separations_outside() -> None:
    with pytest.raises(ValueError, match="separation"):
        OneStepNoise(0.5).sensitivity(4, 0)


def error_by_matrices(weights: np.ndarray, steps: int) -> float:
    """Of prefix sums, in the mean over steps, at a sensitivity of 1."""
    noise = BandedNoise(len(weights), weights=tuple(weights))
    spread = np.tril(np.ones((steps, steps))) @ np.linalg.inv(matrix(noise, steps))
    return float((spread**2).sum() / steps * noise.sensitivity(steps) ** 2)


@pytest.mark.parametrize(("count", "steps"), [(2, 2), (3, 30), (8, 60)])
def test_optimised_weights_are_better_and_nothing_near_them_is(count: int, steps: int) -> None:
    closed, found = BandedNoise(count).coefficients, BandedNoise.optimised(count, steps)
    weights = found.coefficients
    least = error_by_matrices(weights, steps)
    assert least < error_by_matrices(closed, steps)
    assert prefix_error(weights, steps)[0] == pytest.approx(least, rel=1e-12)
    for j in range(1, count):
        for change in (0.99, 1.01):
            other = weights.copy()
            other[j] *= change
            if (np.diff(other) <= 0).all():
                assert error_by_matrices(other, steps) > least * (1 - 1e-7)
    assert found.settings != BandedNoise(count).settings and found != BandedNoise(count)
    assert found.settings == BandedNoise.optimised(count, steps, memory="drawn_again").settings


def test_derivative_of_the_error() -> None:
    weights, step = np.array([1.0, 0.6, 0.2]), 1e-6
    slopes = prefix_error(weights, 20)[1]
    for j in (1, 2):
        change = step * np.eye(3)[j]
        up, down = (prefix_error(weights + s * change, 20)[0] for s in (1, -1))
        assert slopes[j] == pytest.approx((up - down) / (2 * step), rel=1e-6)


@pytest.mark.parametrize(
    "weights", [(1.0,), (0.9, 0.5), (1.0, -0.1), (1.0, 1.1), (1.0, float("nan"))]
)
def test_weights_without_a_known_sensitivity(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="sensitivities are not known"):
        BandedNoise(2, weights=weights)


def test_fewer_steps_than_diagonals_and_other_memories() -> None:
    with pytest.raises(ValueError, match="as many steps"):
        BandedNoise.optimised(4, 3)
    with pytest.raises(ValueError, match="drawn_again"):
        BandedNoise(2, "kept")  # type: ignore[arg-type]
