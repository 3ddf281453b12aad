"""Noise of integers: its law, exactly, and the sums that are rounded for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flash_clipping import (
    AdaptiveBound,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    PoissonSampling,
)
from flash_clipping.engine import wings
from flash_clipping.engine.optimizer import DistributedFlashDPOptimizer, FlashDPOptimizer
from flash_clipping.noise import discrete
from flash_clipping.noise.discrete import discrete_gaussian, discrete_grid, discrete_noisy_means
from flash_clipping.ops.error_bounds import ETA
from flash_clipping.randomness import Draw, Purpose, SecretStream
from flash_clipping.randomness.chacha import Keystream
from tests.support.errors import raises
from tests.support.private import Private

stats = pytest.importorskip("scipy.stats")

#: A test of chance fails once in a million times; with these keys, never.
RARE = 1 - 1e-6


def draw(number: int = 0) -> Draw:
    return Draw(bytes(range(32)), Purpose.SAMPLING, number)


def probabilities(bits: int, most: int) -> np.ndarray:
    """Of ``-most .. most``, by their definition."""
    weights = np.exp(-(np.arange(-most, most + 1) ** 2) / (2 * 4.0**bits))
    found: np.ndarray = weights / weights.sum()
    return found


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_integers_have_the_law_of_a_discrete_gaussian(bits: int) -> None:
    """Every integer, one by one."""
    count, most = 400_000, 20 << bits
    found = discrete_gaussian(draw(), count, bits).numpy()
    counts = np.bincount(found + most, minlength=2 * most + 1)
    expected = count * probabilities(bits, most)
    common = expected > 5
    chi2 = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert chi2 < stats.chi2.ppf(RARE, common.sum())
    assert counts[~common].sum() < expected[~common].sum() + 60


@pytest.mark.parametrize("bits", [20, 31])
def test_wide_discrete_gaussians_fill_intervals_equally(bits: int) -> None:
    """In 200 intervals of equal probability, and their lowest bits; the tails."""
    count = 400_000
    found = discrete_gaussian(draw(1), count, bits).numpy()
    places = (stats.norm.cdf((found + 0.5) / 2.0**bits) * 200).astype(int)
    for values, kinds in ((places, 200), (found & 7, 8)):
        counts = np.bincount(values, minlength=kinds)
        chi2 = ((counts - count / kinds) ** 2).sum() / (count / kinds)
        assert chi2 < stats.chi2.ppf(RARE, kinds - 1)
    beyond = (abs(found) > 3.5 * 2**bits).sum()
    assert abs(beyond - count * 4.6526e-4) < 5 * (count * 4.6526e-4) ** 0.5
    pairs = (found[1:] / 2.0**bits * (found[:-1] / 2.0**bits)).mean()
    assert abs(pairs) < 5 / count**0.5


@pytest.mark.parametrize(("n", "m"), [(0, 1), (1, 1), (2, 1), (3, 2), (5, 3), (2**40 - 1, 41)])
def test_coins_of_an_exponential(n: int, m: int) -> None:
    count = 200_000
    words = Keystream(draw(2))
    fell = discrete._exponential_coins(words, np.full(count, n, dtype=np.uint64), m).sum()
    rate = np.exp(-n / 2**m)
    assert abs(fell - count * rate) <= 5 * (count * rate * (1 - rate)) ** 0.5


@pytest.mark.parametrize("k", [2, 3, 5, 7, 8])
def test_bernoulli_draws_have_their_probability(k: int) -> None:
    count = 100_000
    fell = discrete._one_in(Keystream(draw(3)), k, count).sum()
    assert abs(fell - count / k) < 5 * (count / k * (1 - 1 / k)) ** 0.5


def test_discrete_gaussians_are_those_of_their_draw_and_nonce() -> None:
    def of(number: int = 0, **place: int) -> list[int]:
        found: list[int] = discrete_gaussian(draw(number), 50, 20, **place).tolist()
        return found

    assert of() == of()
    assert len({*map(tuple, (of(), of(1), of(tensor=1)))}) == 3
    assert len(discrete_gaussian(draw(), 0, 3)) == 0
    assert discrete_gaussian(draw(), 5, 3).dtype == torch.int64
    with raises("FC302", ValueError, match=r"bits: .*\[1, 31\]"):
        discrete_gaussian(draw(), 5, 32)


# -- steps -----------------------------------------------------------------------------------------


def private(**options: Any) -> Private:
    engine = FlashPrivacyEngine(accountant="discrete_gaussian")
    return Private(
        **{
            "engine": engine,
            "mechanism": PoissonSampling(noise_grid="exact"),
            "poisson_sampling": True,
            "lr": 0.0,
        }
        | options
    )


def test_exact_noise_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is released are whole cells: the rounded sums, and integers of the step's draw."""
    seen: list[tuple[Any, ...]] = []

    def noted(sums: list[Tensor], std: float, *args: Any, **kwargs: Any) -> Any:
        seen.append((([s.double() for s in sums]), std, *args, kwargs["draw"]))
        return discrete_noisy_means(sums, std, *args, **kwargs)

    monkeypatch.setattr(wings, "discrete_noisy_means", noted)
    made = private(max_grad_norm=0.3, noise_multiplier=2.0)
    made.step(7)
    sums, std, multiplier, divisor, draw = seen[0]
    assert (std, multiplier) == (pytest.approx(2.0 * 0.3 * (1 + ETA)), 2.0)
    elements = sum(s.numel() for s in sums)
    cell, bits = discrete_grid(std, multiplier, elements)
    for number, (p, summed) in enumerate(zip(made.plain.parameters(), sums, strict=True)):
        noise = discrete_gaussian(draw, summed.numel(), bits, tensor=number).view(summed.shape)
        cells = (summed / cell).round() + noise
        assert torch.allclose(p.grad.double(), cells * cell / divisor, rtol=1e-6, atol=0)
    assert made.engine.get_epsilon(1e-5) > 0


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("elements", [1, 40, 3000, 10**9])
def test_rounding_is_paid_for(multiplier: float, elements: int) -> None:
    """The noise is the multiplier times what one sample moves rounded sums by: half a cell on
    either side in every element is added. It costs a thousandth."""
    bound = 0.7
    cell, bits = discrete_grid(multiplier * bound, multiplier, elements)
    moved = bound / cell + elements**0.5
    assert 2**bits >= multiplier * moved and bits <= 31
    assert 2**bits * cell <= multiplier * bound * 1.001
    if elements > 3000:
        return
    generator = torch.Generator().manual_seed(0)
    draw, worst = SecretStream(key=bytes(32)).draw(Purpose.NOISE), 0.0
    for scale in (1.0, 1e4, 1e12):
        one = torch.randn(elements, generator=generator, dtype=torch.float64) * scale
        one = ((one / cell).floor() + 0.4999999) * cell  # where rounding moves most
        step = torch.randn(elements, generator=generator, dtype=torch.float64).sign()
        other = one + step * bound / elements**0.5
        rounded = [
            discrete_noisy_means(
                [x], multiplier * bound, multiplier, 1.0, draw=draw, dtypes=[torch.float64]
            )[0]
            for x in (one, other)
        ]
        distance = float(((rounded[0] - rounded[1]) / cell).norm())
        worst = max(worst, distance * multiplier / 2**bits)
    assert 0.5 < worst <= 1


def test_discrete_noise_has_its_deviation_and_outputs_are_bounded() -> None:
    draw = SecretStream(key=bytes(32)).draw(Purpose.NOISE)
    sums = [torch.zeros(100_000), torch.tensor([float("inf"), -1e30, float("nan")])]
    found, wild = discrete_noisy_means(
        sums, 3.0, 1.5, 2.0, draw=draw, dtypes=[torch.float64, torch.float32]
    )
    assert abs(float(found.std()) - 1.5) < 6 * 1.5 / (2 * 100_000) ** 0.5
    cell, _ = discrete_grid(3.0, 1.5, 100_003)
    assert wild[:2].tolist() == pytest.approx([2.0**45 * cell / 2, -(2.0**45) * cell / 2])
    assert wild[2].isnan() and wild.dtype == torch.float32
    (plain,) = discrete_noisy_means(
        [torch.ones(3)], 0.0, 0.0, 2.0, draw=draw, dtypes=[torch.float32]
    )
    assert plain.tolist() == [0.5] * 3


def test_exact_noise_is_refused_where_it_is_not_accounted_for() -> None:
    for name in ("prv", "rdp", "gdp", "pld"):
        with raises("FC316", ValueError, match="accountant='discrete_gaussian'"):
            private(engine=FlashPrivacyEngine(accountant=name))
    for options, message in (
        ({"poisson_sampling": False}, "poisson_sampling=False"),
        ({"mechanism": PoissonSampling(max_batch_size=20)}, "accountant='pld'"),
        ({"clipping": AdaptiveBound(0.5, 1e-3, 10.0, 0.1)}, "continuous"),
    ):
        with raises("FC316", ValueError, match=message):
            private(**options)
    given: Any = dict.fromkeys(("noise_multiplier", "max_grad_norm", "expected_batch_size"), 1.0)
    whole, shard = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    shard.placements = ()  # as of a DTensor
    for cls, param in ((FlashDPOptimizer, shard), (DistributedFlashDPOptimizer, whole)):
        with raises("FC317", NotImplementedError):
            cls(torch.optim.SGD([param]), noise_grid="exact", **given)
    model = GradSampleModuleFlashClipping(nn.Linear(3, 1))
    optimizer = FlashDPOptimizer(
        torch.optim.SGD([*model.parameters()]), noise_grid="exact", **given
    )
    vars(model)["_sharded"] = object()  # other layers, which are frozen, are cut over processes
    with raises("FC317", NotImplementedError):
        optimizer.follow(model)
    with raises("FC317", ValueError):
        discrete_grid(1.0, 1e4, 10**9)
