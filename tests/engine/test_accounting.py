"""ε of what Opacus' accountants do not know, against distributions by hand and known formulas."""

from __future__ import annotations

import copy
import itertools
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp

from flash_clipping import (
    CyclicPoisson,
    FixedOrder,
    FlashPrivacyEngine,
    PoissonRows,
    PoissonSampling,
    RandomAllocation,
    Shuffled,
    Users,
)
from flash_clipping.engine.accounting import (
    ZERO_OUT,
    FeasiblePrvAccountant,
    Mechanism,
    StepsOfRdpAccountant,
    least_noise,
)
from flash_clipping.noise import releases
from flash_clipping.noise.accountants import DiscreteGaussianAccountant, PldAccountant
from flash_clipping.noise.mechanisms import (
    BandedInverseNoise,
    BandedNoise,
    BufferedNoise,
    IndependentNoise,
)
from tests.support.errors import raises

pytest.importorskip("dp_accounting")
stats = pytest.importorskip("scipy.stats")
special = pytest.importorskip("scipy.special")


def accountant(process: Mechanism, *history: tuple[float, float, int]) -> PldAccountant:
    found = PldAccountant()
    found.follow(process)
    for noise, rate, steps in history:
        for _ in range(steps):
            found.step(noise_multiplier=noise, sample_rate=rate)
    return found


HISTORIES = [
    [(1.0, 0.01, 1)],
    [(4.5, 1 / 3, 120)],
    [(1.2, 1.0, 3)],
    [(1.0, 0.05, 20), (1.5, 0.05, 30), (1.0, 0.01, 50)],
]


@pytest.mark.parametrize(
    ("history", "delta"), zip(HISTORIES, [1e-5, 1e-7, 1e-5, 1e-7], strict=True)
)
def test_epsilon_is_that_of_opacus(history: list[tuple[float, float, int]], delta: float) -> None:
    """Also where a step's cost was computed for an epsilon before."""
    for ours, theirs in (
        (FeasiblePrvAccountant(), PRVAccountant()),
        (StepsOfRdpAccountant(), RDPAccountant()),
    ):
        for more in (0, 1):
            ours.history = theirs.history = [(n, q, steps + more) for n, q, steps in history]
            assert ours.get_epsilon(delta) == theirs.get_epsilon(delta)


def densities(values: list[float], rate: float, kept: int, sigma: float, at: Any) -> Any:
    """Of the noisy sum of a truncated Poisson batch of samples with these values."""
    total = np.zeros_like(at)
    for mask in itertools.product([0, 1], repeat=len(values)):
        drawn = [v for v, m in zip(values, mask, strict=True) if m]
        p = math.prod(rate if m else 1 - rate for m in mask)
        subsets = list(itertools.combinations(drawn, min(kept, len(drawn))))
        for subset in subsets:
            total += p / len(subsets) * stats.norm.pdf(at, sum(subset), sigma)
    return total


@pytest.fixture
def _coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """ε is an upper bound on any grid."""
    monkeypatch.setattr(releases, "LOSS_GRID", 1e-2)


@pytest.mark.usefixtures("_coarse")
@pytest.mark.parametrize("kept", [1, 2])
def test_truncation_costs_at_least_what_it_tells(kept: int) -> None:
    """Removing a sample makes room for another, which may pull the other way."""
    rate, sigma = 0.5, 1.0
    at = np.linspace(-12, 12, 20001)
    with_it = densities([1.0, -1.0, -1.0, -1.0], rate, kept, sigma, at)
    without = densities([-1.0, -1.0, -1.0], rate, kept, sigma, at)
    process = PoissonSampling(max_batch_size=kept).on(4)
    for epsilon in (0.5, 3.0):
        exact = max(
            np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), at)
            for p, q in ((with_it, without), (without, with_it))
        )
        assert accountant(process, (sigma, rate, 1)).get_epsilon(exact) >= epsilon - 1e-3
    # An accountant that knows nothing of truncation promises too much.
    if kept == 1:
        assert accountant(PoissonSampling(), (sigma, rate, 1)).get_epsilon(exact) < epsilon


def gaussian(mu: float, delta: float = 1e-5) -> float:
    """ε of a Gaussian mechanism with sensitivity ``mu`` (Balle and Wang 2018, theorem 8)."""
    low, high = 0.0, 1e4
    for _ in range(200):
        e = (low + high) / 2
        log_second = e + stats.norm.logcdf(-mu / 2 - e / mu)
        found = stats.norm.cdf(mu / 2 - e / mu) - math.exp(min(log_second, 0.0))
        low, high = (e, high) if found > delta else (low, e)
    return high


#: ``inv(C)`` of a run of 10 steps, of three diagonals.
INVERSE = np.eye(10) - 0.5 * np.eye(10, k=-1) - 0.125 * np.eye(10, k=-2)


@pytest.mark.parametrize(
    ("noise", "matrix"),
    [
        (IndependentNoise(), np.eye(10)),
        (BandedNoise(3), np.eye(10) + 0.5 * np.eye(10, k=-1) + 0.375 * np.eye(10, k=-2)),
        (BandedInverseNoise(2), sum(0.5**j * np.eye(10, k=-j) for j in range(10))),
        (BandedInverseNoise(3), np.linalg.inv(INVERSE)),
        (
            BufferedNoise((0.4, 0.1), (0.9, 0.5)),
            np.eye(10)
            + sum((0.4 * 0.9**j + 0.1 * 0.5**j) * np.eye(10, k=-j - 1) for j in range(10)),
        ),
    ],
)
def test_fixed_order_is_one_gaussian(noise: Any, matrix: np.ndarray) -> None:
    """Of the norm of those columns in whose steps a sample takes part: 0, 4 and 8."""
    process = FixedOrder(noise).on(40, 4)
    squared = float((matrix[:, [0, 4, 8]].sum(1) ** 2).sum())
    found = accountant(process, (2.0, 0.25, 10)).get_epsilon(1e-5)
    assert found == pytest.approx(gaussian(squared**0.5 / 2.0), rel=1e-6)
    assert process.relation == ZERO_OUT
    # A resumed run knows nothing of the noise before: two releases.
    resumed = accountant(process, (2.0, 0.25, 10))
    resumed.load_state_dict(resumed.state_dict())
    for _ in range(10):
        resumed.step(noise_multiplier=2.0, sample_rate=0.25)
    assert [steps for *_, steps in resumed.history] == [10, 10]
    assert resumed.get_epsilon(1e-5) == pytest.approx(gaussian((2 * squared) ** 0.5 / 2), rel=1e-6)


def test_amplified_noise_is_a_composition_of_sampled_gaussians() -> None:
    noise = BandedNoise(4)
    process = CyclicPoisson(noise).on(80, 20)
    found = accountant(process, (1.5, 0.05, 10)).get_epsilon(1e-5)
    norm = float(np.linalg.norm(noise.coefficients))
    expected = accountant(PoissonSampling(), (1.5 / norm, 0.2, 3)).get_epsilon(1e-5)
    assert found == pytest.approx(expected, rel=1e-9)


def test_no_noise_promises_nothing_and_no_steps_cost_nothing() -> None:
    assert accountant(PoissonSampling(), (0.0, 0.1, 1)).get_epsilon(1e-5) == math.inf
    assert PldAccountant().get_epsilon(1e-5) == 0


@pytest.mark.usefixtures("_coarse")
@pytest.mark.parametrize(
    ("sampled", "reach"),
    [
        (releases.Release(0.099, 3, "poisson", 0.1), 1),
        (releases.Release(0.099, 3, "one_of", size=5), 1),
        (releases.Release(0.199, 3, "truncated", 0.1, 5, 50), 2),
        (releases.Release(0.399, 3, "rows", 0.1, 4), 4),
    ],
)
def test_next_to_no_noise_costs_at_most_one_gaussian(sampled: releases.Release, reach: int) -> None:
    """Where distributions of privacy losses would not fit in memory; and that is more."""
    found = releases.epsilon_by_pld((sampled,), 1e-5)
    assert found == pytest.approx(gaussian(3**0.5 * reach / sampled.noise_multiplier), rel=1e-6)
    tiny = replace(sampled, noise_multiplier=1e-4)
    assert math.isfinite(
        releases.epsilon_by_pld(
            (
                tiny,
                releases.Release(1.0),
            ),
            1e-5,
        )
    )
    more = replace(sampled, noise_multiplier=0.1001 * reach)
    assert releases.epsilon_by_pld((more,), 1e-5) < 1.001 * found


@pytest.mark.usefixtures("_coarse")
@pytest.mark.parametrize(
    "process",
    [
        PoissonSampling(max_batch_size=10).on(50),
        FixedOrder(BandedInverseNoise(2, (0.4,))).on(50, 5),
    ],
)
def test_the_noise_for_a_target(process: Mechanism) -> None:
    planner = accountant(process)
    options = {"target_epsilon": 3.0, "target_delta": 1e-4, "sample_rate": 0.2}
    found = least_noise(planner, **options, steps=20, epsilon_tolerance=0.1)
    assert 2.9 <= accountant(process, (found, 0.2, 20)).get_epsilon(1e-4) <= 3.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CyclicPoisson(BandedInverseNoise(2)), "expected BandedNoise"),
        (lambda: CyclicPoisson(BandedInverseNoise(3)), "CyclicPoisson: found noise=BandedInverse"),
        (lambda: CyclicPoisson(BufferedNoise((0.5,), (0.5,))), "found noise=BufferedNoise"),
        (lambda: CyclicPoisson(), "CyclicPoisson: found noise=IndependentNoise"),
        (lambda: CyclicPoisson(BandedNoise(5)).on(40, 4), "4 batches"),
        (lambda: FixedOrder(BandedNoise(5)).on(40, 4), "4 batches"),
        (lambda: FixedOrder("banded"), "found noise=banded"),
        (lambda: FixedOrder(BandedInverseNoise(2), noise_grid=True), "noise_grid: .*taken back"),
        (lambda: Shuffled(noise_grid="exact"), r"noise_grid: .*expected one of \(False, True\)"),
        (lambda: PoissonSampling(noise_grid="fine"), "noise_grid: .*'exact'"),
        (lambda: PoissonSampling(4, noise_grid="exact"), "noise_grid: found 'exact'"),
        (lambda: RandomAllocation(0), r"found 0; .* in \[1, inf\)"),
        (lambda: RandomAllocation().on(40, 4, unit=Users([0] * 40)), "samples of the dataset only"),
        (lambda: PoissonRows().on(40, 4), r"PoissonRows: .*\n    unit=Users\(ids, max_rows=8\)"),
        (lambda: PoissonRows().on(40, 4, unit=Users([0] * 40)), "expected the most rows of a user"),
    ],
)
def test_what_does_not_match_is_refused(make: Any, message: str) -> None:
    with raises("FC281|FC301|FC302|FC316", ValueError, match=message):
        make()


def test_one_engine_accounts_for_one_process() -> None:
    found = accountant(PoissonSampling(max_batch_size=4).on(40), (1.0, 0.1, 2))
    with raises("FC562", ValueError):
        found.follow(PoissonSampling())
    other = accountant(FixedOrder().on(40, 4))
    with raises("FC562", ValueError):
        other.load_state_dict(found.state_dict())


def test_one_engine_makes_one_model_private_where_steps_are_not_alike() -> None:
    ordered = FixedOrder(BandedInverseNoise(2, (0.9,))).on(64, 8)
    for first, second in (
        (ordered, ordered),
        (ordered, PoissonSampling()),
        (PoissonSampling(), ordered),
    ):
        found = accountant(first)
        found.follow(first)  # a call that failed
        found.is_used = True
        with raises("FC562", ValueError):
            found.follow(second)
    ordinary = accountant(PoissonSampling())
    ordinary.is_used = True
    ordinary.follow(PoissonSampling())


def test_truncated_batches_are_accounted_for_both_neighbours() -> None:
    found = PoissonSampling(max_batch_size=9).on(50, 5).releases(1.0, 0.2, 3)
    assert found == releases.Release(1.0, 3, "truncated", 0.2, 9, 50)
    epsilons = [
        replace(found, samples=samples).losses(releases.LOSS_GRID).get_epsilon_for_delta(1e-5)
        for samples in (50, 51)
    ]
    assert releases.epsilon_by_pld((found,), 1e-5) == max(epsilons) and epsilons[0] != epsilons[1]


# -- discrete noise --------------------------------------------------------------------------------


def discrete_pair(moved: int, deviation: float, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the probabilities of one step's outputs without and with a sample, number by
    number, by their definition."""
    x = np.arange(-60 * int(deviation), 60 * int(deviation) + 1)
    without, other = -(x**2) / (2 * deviation**2), -((x - moved) ** 2) / (2 * deviation**2)
    without, other = without - special.logsumexp(without), other - special.logsumexp(other)
    with np.errstate(divide="ignore"):
        return without, np.logaddexp(np.log(1 - rate) + without, np.log(rate) + other)


@pytest.mark.parametrize("rate", [0.01, 0.3, 1.0])
@pytest.mark.parametrize(("moved", "deviation"), [(1, 1.0), (3, 2.0), (4, 4.0), (1, 8.0)])
def test_discrete_noise_costs_what_is_accounted(moved: int, deviation: float, rate: float) -> None:
    """Rényi divergences of both directions against sums over integers, and the exact δ of a step
    and of two against the accountant's ε."""
    without, sampled = discrete_pair(moved, deviation, rate)
    multiplier = deviation / moved
    for order in (2, 3, 8, 20):
        formula = compute_rdp(q=rate, noise_multiplier=multiplier, steps=1, orders=[order])[0]
        for p, q in ((sampled, without), (without, sampled)):
            exact = special.logsumexp(order * p - (order - 1) * q) / (order - 1)
            assert exact <= formula * (1 + 1e-9) + 1e-12
            if p is sampled:
                assert exact == pytest.approx(formula, rel=1e-6)
    without, sampled = np.exp(without), np.exp(sampled)
    for steps in (1, 2):
        p, q = without, sampled
        if steps == 2:
            p, q = np.outer(p, p), np.outer(q, q)
        found = DiscreteGaussianAccountant()
        found.history = [(multiplier, rate, steps)]
        for delta in (1e-3, 1e-6):
            factor = math.exp(found.get_epsilon(delta))
            assert np.maximum(p - factor * q, 0).sum() <= delta
            assert np.maximum(q - factor * p, 0).sum() <= delta


def test_discrete_noise_is_accounted_for_at_whole_orders() -> None:
    found, gaussian_noise = DiscreteGaussianAccountant(), RDPAccountant()
    for steps in (found, gaussian_noise):
        for _ in range(50):
            steps.step(noise_multiplier=1.2, sample_rate=0.1)
    assert gaussian_noise.get_epsilon(1e-5) <= found.get_epsilon(1e-5)
    assert found.get_epsilon(1e-5) < 1.1 * gaussian_noise.get_epsilon(1e-5)
    assert all(order == int(order) >= 2 for order in found.DEFAULT_ALPHAS)
    for alphas in ([2.5], [1], [2, 3.1]):
        with raises("FC563", ValueError):
            found.get_epsilon(1e-5, alphas=alphas)
    found.step(noise_multiplier=0.0, sample_rate=0.1)
    assert found.get_epsilon(1e-5) == math.inf
    assert DiscreteGaussianAccountant().get_epsilon(1e-5) == 0
    assert FlashPrivacyEngine(accountant="discrete_gaussian").accountant.mechanism() == (
        "discrete_gaussian"
    )


# -- going back to a checkpoint --------------------------------------------------------------------


def counted(name: str, steps: int, noise: float = 1.0) -> Any:
    """Steps as an optimizer's hook counts them."""
    found = FlashPrivacyEngine(accountant=name).accountant
    more(found, steps, noise)
    return found


def more(accountant: Any, steps: int, noise: float = 1.0) -> None:
    for _ in range(steps):
        accountant.step(noise_multiplier=noise, sample_rate=0.1)


@pytest.mark.parametrize("name", ["prv", "rdp", "gdp", "pld", "discrete_gaussian"])
@pytest.mark.filterwarnings("ignore:GDP accounting")
def test_going_back_to_a_checkpoint_is_refused_and_forgets_no_step(name: str) -> None:
    accountant = counted(name, 3)
    early = accountant.state_dict()
    accountant.load_state_dict(copy.deepcopy(early))  # nothing would be forgotten
    more(accountant, 4)
    other = counted(name, 9).state_dict()
    for state in (early, other):
        with raises("FC581", ValueError, match="7 steps"):
            accountant.load_state_dict(copy.deepcopy(state))
        assert accountant.history == [(1.0, 0.1, 7)]


@pytest.mark.parametrize("name", ["rdp", "pld"])
def test_another_process_goes_on_as_it_was(name: str) -> None:
    """In whatever noise, also from a state that was written as text."""
    first = counted(name, 5)
    more(first, 3, noise=0.7)
    for state in (first.state_dict(), json.loads(json.dumps(first.state_dict()))):
        second = FlashPrivacyEngine(accountant=name).accountant
        second.load_state_dict(state)
        assert second.history == [(1.0, 0.1, 5), (0.7, 0.1, 3)] == first.history
        more(second, 2)
        assert len(second) == 10 and len(first) == 8
