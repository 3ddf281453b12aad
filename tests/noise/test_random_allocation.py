"""Random allocation: what is drawn, and its ε against moments, quadrature and chance."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flash_clipping import PoissonSampling, RandomAllocation, Shuffled
from flash_clipping.engine.accounting import ADD_OR_REMOVE, Mechanism, least_noise
from flash_clipping.noise import releases
from flash_clipping.noise.accountants import PldAccountant, releases_of
from flash_clipping.noise.process import OrderedSampler
from flash_clipping.noise.releases import (
    Release,
    allocation_losses,
    epsilon_by_pld,
    grid_step,
)
from flash_clipping.randomness import Purpose, SecretStream
from flash_clipping.randomness.choices import allocations
from tests.noise.training import private, step
from tests.support.errors import raises

pytest.importorskip("dp_accounting")
stats = pytest.importorskip("scipy.stats")


# -- the privacy loss ------------------------------------------------------------------------------


@cache
def losses(noise: float, steps: int) -> Any:
    return allocation_losses(noise, steps, grid_step(noise, steps))


def delta_by_quadrature(noise: float, epsilon: float) -> tuple[float, float]:
    """Of two steps: where the sample is removed, and where it is added."""
    at = np.linspace(-9 * noise - 1, 9 * noise + 2, 1201)
    without, within = (stats.norm.pdf(at, mean, noise) for mean in (0, 1))
    q, p = np.outer(without, without), np.outer(without, within)
    p = (p + p.T) / 2
    area = (at[1] - at[0]) ** 2
    pairs = (p, q), (q, p)
    removed, added = (np.maximum(a - math.exp(epsilon) * b, 0).sum() * area for a, b in pairs)
    return float(removed), float(added)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_two_steps_by_quadrature(noise: float) -> None:
    for epsilon in (0.1, 0.5, 1.0, 2.0):
        exact = delta_by_quadrature(noise, epsilon)
        pair = losses(noise, 2)
        found = (p.get_delta_for_epsilon(epsilon) for p in (pair._pmf_remove, pair._pmf_add))
        for ours, true in zip(found, exact, strict=True):
            assert true - 1e-9 <= ours <= 1.01 * true + 1e-9


@pytest.mark.parametrize(("noise", "steps"), [(0.6, 50), (1.0, 7), (1.0, 1000), (20.0, 64)])
def test_moments_are_those_of_a_mean_of_lognormals_and_never_less(noise: float, steps: int) -> None:
    """``E_Q[S^2]`` and ``E_Q[S^3]``, which are convex as well: rounding adds to them, next to
    nothing."""
    s = releases._mean_of_lognormals(noise, steps, grid_step(noise, steps))
    value = np.exp(np.arange(s.low, s.high + 1) * s.h)
    u = [math.exp(n * (n - 1) / 2 / noise**2) for n in range(4)]  # moments of one of them
    second = u[2] / steps + (1 - 1 / steps)
    third = u[3] + 3 * (steps - 1) * u[2] + (steps - 1) * (steps - 2)
    third /= steps**2
    rounding = 1e-14 * steps
    assert s.mass_K.sum() == pytest.approx(1, abs=rounding)
    assert s.under_P.sum() == pytest.approx(1, abs=rounding)
    for power, exact in ((2, second), (3, third)):
        found = float((s.mass_K * value**power).sum())
        assert 1 - rounding <= (found - 1) / (exact - 1) <= 1.01


def test_one_step_is_a_gaussian() -> None:
    for noise, times in ((1.0, 1), (0.8, 3), (5.0, 40)):
        found = epsilon_by_pld((Release(noise, times, "one_of", size=1),), 1e-5)
        exact = epsilon_by_pld((Release(noise, times),), 1e-5)
        assert exact <= found <= 1.001 * exact


@pytest.mark.parametrize(
    ("noise", "steps", "epochs"), [(1.0, 100, 10), (0.6, 50, 5), (2.0, 20, 30), (1.0, 8, 1)]
)
def test_at_most_what_poisson_batches_cost_and_one_gaussian(
    noise: float, steps: int, epochs: int
) -> None:
    found = epsilon_by_pld((Release(noise, epochs, "one_of", size=steps),), 1e-5)
    poisson = epsilon_by_pld((Release(noise, epochs * steps, "poisson", 1 / steps),), 1e-5)
    assert 0.5 * poisson < found <= poisson
    assert found < epsilon_by_pld((Release(noise, epochs),), 1e-5)


def test_the_numbers_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text(encoding="utf-8")
    runs = [
        Release(1.0, 10, "one_of", size=100),
        Release(1.0, 1000, "poisson", 0.01),
        Release(1.0, 10),
    ]
    found = [epsilon_by_pld((run,), 1e-5) for run in runs]
    assert "| ε = {:.2f} | ε = {:.2f} | ε = {:.2f} |".format(*found) in page


def test_a_shuffled_epoch_has_every_sample_once() -> None:
    stream = SecretStream(key=bytes(32))
    found: Any = Shuffled().sampler(num_samples=52, sample_rate=0.2, steps=5, stream=stream)
    epochs = []
    for _ in range(2):
        epochs.append([*found])
        found.taken += 5
        assert sorted(i for batch in epochs[-1] for i in batch) == [*range(52)]
        assert sorted(len(batch) for batch in epochs[-1]) == [10, 10, 10, 11, 11]
    assert epochs[0] != epochs[1]


def accountant(process: Mechanism, *history: tuple[float, int]) -> PldAccountant:
    found = PldAccountant()
    found.follow(process)
    for noise, steps in history:
        for _ in range(steps):
            found.step(noise_multiplier=noise, sample_rate=1 / process.cycle)
    return found


def test_rounds_are_counted_in_full() -> None:
    once = RandomAllocation().on(cycle=20)
    assert once.relation == ADD_OR_REMOVE
    for steps, rounds in ((1, 1), (20, 1), (21, 2), (60, 3)):
        assert once.releases(1.0, 0.05, steps) == Release(1.0, rounds, "one_of", size=20)
    thrice = RandomAllocation(participations=3).on(cycle=20)
    assert thrice.releases(1.0, 0.05, 61) == Release(1.0, 6, "one_of", size=20)
    # A run that goes on from a checkpoint begins a round of its own.
    resumed = accountant(once, (1.0, 10))
    resumed.load_state_dict(resumed.state_dict())
    resumed.step(noise_multiplier=1.0, sample_rate=0.05)
    assert [steps for *_, steps in resumed.history] == [10, 1] and len(resumed) == 11


def test_next_to_no_noise_is_infinite_or_more_than_anything() -> None:
    process = RandomAllocation().on(cycle=20)
    assert accountant(process, (0.001, 1)).get_epsilon(1e-5) > 1e5
    assert accountant(process, (0.0, 1)).get_epsilon(1e-5) == math.inf


@pytest.mark.parametrize("mechanism", [RandomAllocation(), Shuffled()], ids=str)
def test_noise_changes_between_rounds_only(mechanism: Mechanism) -> None:
    found = accountant(mechanism.on(cycle=4), (1.0, 4), (2.0, 6))
    with raises("FC522", match="step 2.*4"):
        found.step(noise_multiplier=1.0, sample_rate=0.25)
    assert found.history == [(1.0, 0.25, 4), (2.0, 0.25, 6)]


# -- what is drawn ---------------------------------------------------------------------------------


def test_every_set_of_steps_is_as_probable() -> None:
    chosen_NK = allocations(SecretStream(key=bytes(32)).draw(Purpose.SAMPLING), 60_000, 5, 2)
    counts = Counter(tuple(sorted(pair)) for pair in chosen_NK.tolist())
    assert len(counts) == 10 and all(a != b for a, b in counts)
    assert max(abs(n - 6000) for n in counts.values()) < 5 * 6000**0.5
    with raises("FC302", ValueError, match="found 6; expected a whole number"):
        allocations(SecretStream(key=bytes(32)).draw(Purpose.SAMPLING), 3, 5, 6)


def sampler(participations: int = 1, **options: Any) -> OrderedSampler:
    options = {"num_samples": 50, "sample_rate": 0.2, "steps": 5} | options
    stream = SecretStream(key=bytes(32))
    found: Any = RandomAllocation(participations).sampler(stream=stream, **options)
    assert isinstance(found, OrderedSampler)
    return found


@pytest.mark.parametrize("participations", [1, 3])
def test_every_sample_takes_part_so_often_in_every_round(participations: int) -> None:
    found = sampler(participations)
    rounds = []
    for _ in range(2):
        steps = []
        for _ in range(participations):
            for batch in found:
                assert len(set(batch)) == len(batch)
                steps.append(batch)
                found.taken += 1
        rounds.append(steps)
        assert Counter(i for batch in steps for i in batch) == dict.fromkeys(
            range(50), participations
        )
    assert rounds[0] != rounds[1] and len({len(batch) for batch in rounds[0]}) > 1
    assert len(found._kept) <= 2


# -- with an engine --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mechanism", "release"),
    [
        (RandomAllocation(), Release(1.0, 2, "one_of", size=5)),
        (RandomAllocation(participations=2), Release(1.0, 2, "one_of", size=5)),
        (Shuffled(), Release(1.0 / 2**0.5)),
    ],
)
def test_training_draws_samples_once_a_round(mechanism: Mechanism, release: Release) -> None:
    engine, module, optimizer, loader = private(mechanism)
    epochs = []
    for _ in range(2):
        epochs.append([])
        for x, rows in loader:
            step(module, optimizer, x)
            epochs[-1].append(rows.tolist())
    assert epochs[0] != epochs[1]
    assert Counter(row for epoch in epochs for b in epoch for row in b) == dict.fromkeys(
        range(30), 2
    )
    assert optimizer.expected_batch_size == 6
    assert engine.accountant.history == [(1.0, 0.2, 10)]
    assert releases_of(engine.accountant) == (release,)
    assert engine.get_epsilon(1e-3) == pytest.approx(epsilon_by_pld((release,), 1e-3))


def test_a_checkpoint_of_the_middle_of_a_round_begins_another() -> None:
    engine, module, optimizer, loader = private(RandomAllocation())
    batches = iter(loader)
    for _ in range(3):
        step(module, optimizer, next(batches)[0])
    engine.accountant.load_state_dict(engine.accountant.state_dict())
    with raises("FC512", match="0 .* with batch 3"):
        step(module, optimizer, next(batches)[0])
    optimizer.noise_multiplier = 2.0
    seen: Counter[int] = Counter()
    for x, rows in loader:
        step(module, optimizer, x)
        seen.update(rows.tolist())
    assert seen == dict.fromkeys(range(30), 1)
    assert engine.accountant.history == [(1.0, 0.2, 3), (2.0, 0.2, 5)]


def test_a_step_that_is_refused_is_none() -> None:
    """In the middle of a round, with other noise; with the noise of the round it goes on."""
    engine, module, optimizer, loader = private(RandomAllocation())
    batches = iter(loader)
    step(module, optimizer, next(batches)[0])
    x = next(batches)[0]
    before = module._module.weight.clone()
    optimizer.noise_multiplier = 2.0
    with raises("FC522"):
        step(module, optimizer, x)
    assert torch.equal(module._module.weight, before) and len(engine.accountant) == 1
    optimizer.noise_multiplier = 1.0
    step(module, optimizer, x)
    assert engine.accountant.history == [(1.0, 0.2, 2)]


@pytest.mark.parametrize("mechanism", [RandomAllocation(), PoissonSampling(max_batch_size=20)])
def test_two_backwards_of_one_batch_are_no_step(mechanism: Mechanism) -> None:
    """A loop that allows them would release twice what a sample is accounted for."""
    engine, module, optimizer, loader = private(mechanism)
    module.allow_grad_accumulation()
    x, _ = next(iter(loader))
    for _ in range(2):
        module(x).square().sum().backward()
    with raises("FC512", match="found a step of 2 batches"):
        optimizer.step()
    assert not engine.accountant.history


def test_a_target_finds_its_noise() -> None:
    planner = accountant(RandomAllocation().on(cycle=20))
    target = {"target_epsilon": 2.0, "target_delta": 1e-5}
    noise = least_noise(planner, **target, sample_rate=0.05, steps=60, epsilon_tolerance=0.05)
    found = epsilon_by_pld((Release(noise, 3, "one_of", size=20),), 1e-5)
    assert 1.95 <= found <= 2.0


def test_opacus_accountants_do_not_know_it() -> None:
    with raises("FC316", ValueError, match="RandomAllocation.*accountant='prv'"):
        private(RandomAllocation(), accountant="prv")
