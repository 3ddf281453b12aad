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
)

ALL = [IndependentNoise(), BandedNoise(2), BandedNoise(4), OneStepNoise(0.3), OneStepNoise(0.9)]


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
