"""Noise across steps, as the optimizer adds it: covariance, order of batches, refusals."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flash_clipping import (
    CyclicPoisson,
    FixedOrder,
    RandomAllocation,
    Shuffled,
)
from flash_clipping.engine.grad_ledger import sensitivity_of
from flash_clipping.noise.correlated import CorrelatedNoise
from flash_clipping.noise.mechanisms import (
    BandedInverseNoise,
    BandedNoise,
    BufferedNoise,
    IndependentNoise,
    NoiseMechanism,
)
from flash_clipping.randomness import SecretStream
from tests.noise.training import BATCHES, SIZE, in_parts, private, step
from tests.support.errors import raises

pytest.importorskip("dp_accounting")
ALL = [BandedNoise(2), BandedNoise(4), BandedInverseNoise(2, (0.6,))]
ALL += [BandedNoise(3), BandedNoise.optimised(3, 10), BandedInverseNoise(4)]
ALL += [BufferedNoise((0.3, 0.2), (0.5, 0.95))]


class Rows:
    """Rows of noise of one stream, step by step."""

    def __init__(self, noise: NoiseMechanism):
        self.noise = CorrelatedNoise(noise, lambda batch: None)
        self.stream = SecretStream(key=bytes(32))

    def __call__(self, sums: list[Tensor]) -> list[Tensor]:
        return self.noise.next(sums, self.stream)


def inverse(noise: NoiseMechanism, steps: int) -> np.ndarray:
    column = noise.column(steps)
    c = [[column[t - s] if t >= s else 0.0 for s in range(steps)] for t in range(steps)]
    return np.linalg.inv(np.array(c))


@pytest.mark.parametrize("noise", ALL, ids=str)
def test_covariance_over_steps_is_that_of_the_matrix(noise: NoiseMechanism) -> None:
    """Of the noise that is added, over 8 steps, against the matrix; and of its elements, none."""
    steps, elements = 8, 20000
    source = Rows(noise)
    sums = [torch.zeros(elements - 9, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)]
    rows = [torch.cat([w.flatten() for w in source(sums)]).numpy() for _ in range(steps)]
    found = np.stack(rows)
    expected = inverse(noise, steps) @ inverse(noise, steps).T
    assert abs(found @ found.T / elements - expected).max() < 6 * expected.max() / elements**0.5
    assert abs((found[:, 1:] * found[:, :-1]).mean(1)).max() < 6 * expected.max() / elements**0.5


@pytest.mark.parametrize("noise", ALL, ids=str)
def test_noise_is_taken_back_exactly(noise: NoiseMechanism) -> None:
    """C times what is added is the independent noise again, which is of the stream's draws."""
    source = Rows(noise)
    plain = Rows(IndependentNoise())
    sums = [torch.zeros(50, dtype=torch.float64)]
    added = np.stack([source(sums)[0].numpy() for _ in range(9)])
    z = np.stack([plain(sums)[0].numpy() for _ in range(9)])
    assert np.allclose(np.linalg.inv(inverse(noise, 9)) @ added, z, atol=1e-12)


# -- with an engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [IndependentNoise(), *ALL], ids=str)
def test_training_adds_the_noise_that_was_accounted_for(noise: NoiseMechanism) -> None:
    """The sums with the noise that was accounted for, and batches of every epoch alike."""
    engine, module, optimizer, loader = private(FixedOrder(noise))
    epochs = []
    for _ in range(2):
        epochs.append([])
        for x, rows in loader:
            optimizer.zero_grad()
            module(x).square().sum().backward()
            sums = [p.grad.clone() for p in module.parameters()]
            optimizer.step()
            noises = [p.grad - s for p, s in zip(module.parameters(), sums, strict=True)]
            assert all(n.abs().max() > 0 for n in noises)
            epochs[-1].append(sorted(rows.tolist()))
    assert epochs[0] == epochs[1] and sorted(sum(epochs[0], [])) == [*range(SIZE)]
    assert engine.accountant.history == [(1.0, 0.2, 10)]
    sensitivity = noise.sensitivity(10, BATCHES)
    dp = pytest.importorskip("dp_accounting")
    expected = dp.get_epsilon_gaussian(1.0 / sensitivity, 1e-5)
    assert engine.get_epsilon(1e-5) == pytest.approx(expected)


def test_noise_has_the_standard_deviation_that_was_asked_for() -> None:
    _, module, optimizer, loader = private(FixedOrder(BandedInverseNoise(2)), noise_multiplier=4.0)
    drawn: list[Tensor] = []
    real = optimizer.correlated.next
    optimizer.correlated.next = lambda *given: drawn.append(real(*given)) or drawn[-1]
    x, _ = next(iter(loader))
    module(x).square().sum().backward()
    sums = [p.grad.clone() for p in module.parameters()]
    optimizer.step()
    for p, s, z in zip(module.parameters(), sums, drawn[0], strict=True):
        assert torch.allclose(p.grad, s + 4.0 * sensitivity_of(0.5) * z, atol=1e-6)


def test_groups_of_cyclic_batches_take_turns() -> None:
    _, module, optimizer, loader = private(CyclicPoisson(BandedNoise(2)))
    number, sizes = 0, []
    for _ in range(30):
        for x, rows in loader:
            assert ((rows % 2) == number % 2).all()
            sizes.append(len(rows))
            step(module, optimizer, x)
            number += 1
    # 15 samples of a group, each with probability 2 / 5.
    assert abs(np.mean(sizes) - 6) < 5 * (15 * 0.4 * 0.6 / len(sizes)) ** 0.5


@pytest.mark.parametrize(
    ("mechanism", "draws"), [(FixedOrder(BandedNoise(2)), 0), (RandomAllocation(), 1)]
)
def test_steps_on_other_batches_are_refused(mechanism: Any, draws: int) -> None:
    """Correlated noise is not drawn; of independent noise one draw is never used."""
    engine, module, optimizer, loader = private(mechanism)
    batches = iter(loader)
    next(batches)
    x, _ = next(batches)
    with raises("FC512", match="0 .* with batch 1"):
        step(module, optimizer, x)
    assert not engine.accountant.history
    assert optimizer.stream.state_dict()["draws"] == draws
    for x, _ in loader:
        step(module, optimizer, x)
        with raises("FC512", match="1"):
            step(module, optimizer, x)
        break


@pytest.mark.parametrize(
    ("change", "code"),
    [("noise_multiplier", "FC522"), ("max_grad_norm", "FC522"), ("parameters", "FC523")],
)
def test_changes_between_steps_are_refused(change: str, code: str) -> None:
    _, module, optimizer, loader = private(FixedOrder(BandedInverseNoise(2)))
    batches = iter(loader)
    step(module, optimizer, next(batches)[0])
    if change == "noise_multiplier":
        optimizer.noise_multiplier = 2.0
    elif change == "max_grad_norm":
        optimizer.max_grad_norm = 0.7
    else:
        module._module.bias.requires_grad_(False)
    with raises(code):
        step(module, optimizer, next(batches)[0])


def test_copies_are_refused() -> None:
    _, module, optimizer, loader = private(FixedOrder(BandedNoise(2)))
    with raises("FC537"):
        copy.deepcopy(optimizer.correlated)


def test_parts_of_a_batch_are_one_step() -> None:
    """Of ``BatchMemoryManager``: batches, noise and accounting are those of whole batches. A loop
    that was left in the midst of a batch begins it anew."""
    engine, module, optimizer, loader = private(FixedOrder(BandedInverseNoise(2)))
    batches: list[list[int]] = [[]]
    for stop in (3, 100):  # each batch has two parts
        batches[-1] = []
        for number, (x, rows) in enumerate(in_parts(loader, optimizer, 4)):
            if number == stop:
                break
            assert len(rows) == 3
            step(module, optimizer, x)
            batches[-1] += rows.tolist()
            if not optimizer._is_last_step_skipped:
                batches.append([])
    whole = [sorted(rows.tolist()) for _, rows in loader]  # from the next, batch 6, on
    assert [sorted(batch) for batch in batches[:-1]] == [whole[(t - 6) % 5] for t in range(6)]
    assert engine.accountant.history == [(1.0, 0.2, 6)]
    assert optimizer.stream.state_dict()["draws"] == 6


def test_workers_of_parts_are_refused() -> None:
    """Nobody would say in this process which step a part belongs to."""
    _, module, optimizer, loader = private(FixedOrder(BandedInverseNoise(2)), workers=1)
    for x, _ in in_parts(loader, optimizer, 4):
        with raises("FC244"):
            step(module, optimizer, x)
        break


@pytest.mark.parametrize(
    "mechanism",
    [FixedOrder(), Shuffled(), CyclicPoisson(BandedNoise(2)), RandomAllocation()],
    ids=lambda mechanism: type(mechanism).__name__,
)
def test_processes_have_parts_of_the_batch_of_one(mechanism: Any) -> None:
    """Of one key; none has more than one sample more than another."""
    options: dict[str, Any] = {"num_samples": 50, "sample_rate": 0.2, "steps": 5}
    alone, *parts = (
        mechanism.on(50, 5).sampler(**options, **part, stream=SecretStream(key=bytes(32)))
        for part in ({}, *({"rank": rank, "world_size": 3} for rank in range(3)))
    )
    for whole, *own in zip(alone, *parts, strict=True):
        assert sorted(sum(own, [])) == sorted(whole) and whole
        assert max(map(len, own)) - min(map(len, own)) <= 1
