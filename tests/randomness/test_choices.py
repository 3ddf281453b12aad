"""Coin tosses and subsets: exact probabilities, independence, and what their words are."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from flash_clipping.randomness import Draw, Purpose, choices
from flash_clipping.randomness.chacha import Keystream
from flash_clipping.randomness.choices import coin_tosses, subset, threshold
from tests.support.errors import raises

stats = pytest.importorskip("scipy.stats")

#: A test of chance fails once in a million times; with these keys, never.
RARE = 1 - 1e-6


def draw(number: int = 0) -> Draw:
    return Draw(bytes(range(32)), Purpose.SAMPLING, number)


def table(steps: int, count: int, rate: float, **place: int) -> np.ndarray:
    """[steps, count], bool."""
    return np.stack([coin_tosses(draw(i), count, rate, **place).numpy() for i in range(steps)])


@pytest.mark.parametrize("rate", [0.0, 1.0, 0.5, 1 / 3, 1 / 93, 1.25 * 2.0**-24, 2.0**-70, 0.9999])
def test_thresholds_are_the_rate_rounded_down(rate: float) -> None:
    found = Fraction(threshold(rate), 1 << 64)
    assert 0 <= Fraction(rate) - found < Fraction(1, 1 << 64)


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_what_is_no_probability_is_refused(rate: float) -> None:
    with raises("FC302", ValueError, match=r"expected a number in \[0, 1\]"):
        threshold(rate)


def test_words_below_the_threshold_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 64 bits are compared, without a sign; equality is not below."""
    rate = 0.75 + 2.0**-53
    edge = threshold(rate)
    words = np.array([0, edge - 1, edge, edge + 1, (1 << 64) - 1, 1 << 63], dtype=np.uint64)
    monkeypatch.setattr(Keystream, "take", lambda *_: words)
    assert coin_tosses(draw(), 6, rate).tolist() == [True, True, False, False, False, True]
    assert coin_tosses(draw(), 6, 1.0).all() and not coin_tosses(draw(), 6, 2.0**-70).any()


@pytest.mark.parametrize("rate", [0.03, 0.5, 0.9])
def test_sizes_are_binomial_and_tosses_fair(rate: float) -> None:
    steps, count = 4000, 40
    drawn = table(steps, count, rate)
    sizes = np.bincount(drawn.sum(1), minlength=count + 1)
    expected = steps * stats.binom.pmf(np.arange(count + 1), count, rate)
    common = expected > 5
    chi2 = ((sizes - expected)[common] ** 2 / expected[common]).sum()
    assert chi2 < stats.chi2.ppf(RARE, common.sum())
    per_sample = drawn.sum(0) - steps * rate
    assert (per_sample**2).sum() / (steps * rate * (1 - rate)) < stats.chi2.ppf(RARE, count)


@pytest.mark.parametrize("other", ["next sample", "next step", "other shard"])
def test_tosses_are_independent(other: str) -> None:
    """Of two at a time all four outcomes are as frequent as they should be."""
    rate, steps = 0.3, 1500
    first = table(steps, 80, rate)
    if other == "next sample":
        second, first = first[:, 1:], first[:, :-1]
    elif other == "next step":
        second, first = first[1:], first[:-1]
    else:
        second = table(steps, 80, rate, shard=1)
    pairs = np.bincount((2 * first + second).ravel(), minlength=4)
    expected = first.size * np.array([0.49, 0.21, 0.21, 0.09])
    assert ((pairs - expected) ** 2 / expected).sum() < stats.chi2.ppf(RARE, 3)


def test_long_draws_are_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = coin_tosses(draw(), 1000, 0.3)
    monkeypatch.setattr(choices, "_AT_A_TIME", 64)
    assert torch.equal(coin_tosses(draw(), 1000, 0.3), whole)
    assert torch.equal(coin_tosses(draw(), 500, 0.3), whole[:500])


def test_subsets_are_equally_likely_in_every_order() -> None:
    drawn = [tuple(subset(draw(i), 5, 3).tolist()) for i in range(6000)]
    kinds, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(kinds) == 60
    assert ((counts - 100) ** 2 / 100).sum() < stats.chi2.ppf(RARE, 59)


def test_equal_words_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order would favour the first."""
    real, asked = Keystream.take, []

    def take(words: Keystream, count: int) -> np.ndarray:
        asked.append(words._next)
        found = real(words, count)
        return found // np.uint64(2**63) if len(asked) == 1 else found

    monkeypatch.setattr(Keystream, "take", take)
    assert sorted(subset(draw(), 20, 20).tolist()) == [*range(20)]
    assert asked == [0, 3]  # other blocks of the nonce


@pytest.mark.parametrize("size", [-1, 6])
def test_subsets_of_no_size(size: int) -> None:
    with raises("FC302", ValueError, match=r"expected a whole number in \[0, 5\]"):
        subset(draw(), 5, size)
    assert subset(draw(), 0, 0).tolist() == []


def test_no_word_is_used_beyond_a_nonces_last() -> None:
    words = Keystream(draw(), first=(1 << 32) - 1)
    words.take(8)
    with raises("FC304", ValueError):
        words.take(1)
