"""Hostile samples: inputs and output gradients whose norm is easy to measure too small.

A layer's gradient for one sample is a sum over positions of products of an input row and an output
gradient row. An attack makes these rows: terms that nearly cancel, operands whose squares overflow
or underflow, single positions that count. :func:`product_rows` makes both operands of a linear
map, :func:`sum_rows` the rows of a plain sum (a bias, one row of an embedding).

Shape suffixes: ``T`` positions, ``d`` input features, ``p`` output features, ``n`` elements.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

#: Ways to make the rows of one sample.
KINDS = (
    "pair",  # every two positions cancel: (v, w) and (v, -w)
    "pair_and_one",  # the same, but for one position, which is all that is left
    "group",  # every three positions cancel after rounding: v1, v2, -(v1 + v2)
    "null",  # one operand lies in the null space of the other
    "one",  # one position counts, all others are padding
    "range",  # positions of very different magnitude in both operands
    "spike",  # one huge element in each operand
    "aligned",  # all positions are equal
    "ordinary",
)

#: How often each is drawn: what cancels in a way that rounding hides, most.
WEIGHTS = (4, 3, 3, 4, 2, 2, 1, 1, 1)

#: Values that no norm may come out of.
NON_FINITE = (math.inf, -math.inf, math.nan)


@dataclass(frozen=True)
class Attack:
    """One hostile sample, reproducible from its fields.

    Attributes:
        kind: one of :data:`KINDS`.
        T, d, p: positions, input features, output features.
        log_a: log10 of the largest input element.
        log_product: log10 of the largest term ``|a_t| |g_t|``, in units of the bound ``C``.
        left: what is left where terms cancel, relative to them, as a power of the rounding of the
            dtype: at 0.5 and beyond, rounding hides it in sums of squares. None for nothing.
        log_bound: log10 of ``C``.
        seed: of all values.
    """

    kind: str
    T: int
    d: int
    p: int
    log_a: float
    log_product: float
    left: float | None
    log_bound: float
    seed: int

    @property
    def bound(self) -> float:
        return 10.0**self.log_bound

    def remainder(self, dtype: torch.dtype) -> float:
        return 0.0 if self.left is None else torch.finfo(dtype).eps ** self.left

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def neighbour(self, seed: int) -> Attack:
        """An ordinary sample of the same shape, whose norm is around the bound."""
        near = random.Random(seed).uniform(-1, 1)
        return replace(self, kind="ordinary", log_a=0.0, log_product=near, left=None, seed=seed)


# -- drawing attacks ------------------------------------------------------------------------------

#: Shapes small enough for a search on a CPU; a few are long.
LENGTHS = (1, 2, 2, 3, 4, 6, 8, 16, 33, 64)
#: For Triton's interpreter, which takes a millisecond for every line of a kernel.
SHORT = (2, 2, 3, 4, 8)
LONG = (256, 1024, 4096)
FEATURES = (1, 2, 3, 5, 8, 16, 24)


def draw(rng: random.Random, *, lengths: tuple[int, ...] = LENGTHS) -> Attack:
    """A random attack."""
    # Most attacks lie where gradients could be in practice, some at the ends of fp32.
    extreme = rng.random() < 0.2
    return Attack(
        kind=rng.choices(KINDS, WEIGHTS)[0],
        T=rng.choice(lengths),
        d=rng.choice(FEATURES),
        p=rng.choice(FEATURES),
        log_a=rng.uniform(-20, 18) if extreme else rng.uniform(-2, 6),
        log_product=rng.uniform(-20, 36) if extreme else rng.uniform(0, 14),
        left=None if rng.random() < 0.25 else rng.uniform(0.3, 1.1),
        log_bound=rng.uniform(-3, 3),
        seed=rng.randrange(2**31),
    )


def mutated(attack: Attack, rng: random.Random) -> Attack:
    """A neighbour of an attack in the space that :func:`draw` draws from: for climbing."""
    step = rng.gauss(0, 1)
    change: dict[str, Any] = rng.choice(
        (
            {"log_a": min(18.0, max(-20.0, attack.log_a + 2 * step))},
            {"log_product": min(36.0, max(-20.0, attack.log_product + 2 * step))},
            {"log_bound": min(3.0, max(-3.0, attack.log_bound + step))},
            {
                "left": min(
                    1.2, max(0.1, (0.7 if attack.left is None else attack.left) + 0.2 * step)
                )
            },
            {"seed": rng.randrange(2**31)},
            {"kind": rng.choice(KINDS)},
            {"T": max(1, min(64, round(attack.T * 2**step)))},
            {"d": rng.choice(FEATURES), "p": rng.choice(FEATURES)},
        )
    )
    return replace(attack, **change)


def attacks(*, lengths: tuple[int, ...] = LENGTHS) -> st.SearchStrategy[Attack]:
    """The same as a Hypothesis strategy, which shrinks towards few positions and features."""
    return st.builds(
        Attack,
        kind=st.sampled_from(KINDS),
        T=st.sampled_from(tuple(dict.fromkeys(lengths))),
        d=st.sampled_from(FEATURES),
        p=st.sampled_from(FEATURES),
        log_a=st.floats(-20, 18),
        log_product=st.one_of(st.floats(-1, 14), st.floats(-20, 36)),
        left=st.one_of(st.none(), st.floats(0.3, 1.1)),
        log_bound=st.floats(-3, 3),
        seed=st.integers(0, 2**31 - 1),
    )


# -- making rows ----------------------------------------------------------------------------------


def product_rows(
    attack: Attack, dtype: torch.dtype, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Input ``[T, d]`` and output gradient ``[T, p]`` of one sample, finite in ``dtype``.

    Rows are made in float64 and rounded to ``dtype``: what cancels in exact arithmetic leaves the
    rounding of its terms.
    """
    gen = attack.generator() if generator is None else generator
    T = attack.T
    A, G = _normal(gen, T, attack.d), _normal(gen, T, attack.p)
    # Which operand carries the signs that cancel.
    sign_in_input = bool(torch.randint(0, 2, (), generator=gen))
    kind = attack.kind
    same, opposite = (G, A) if sign_in_input else (A, G)
    if kind in ("pair", "pair_and_one"):
        pairs = T - (kind == "pair_and_one")
        _pair(same[:pairs], opposite[:pairs])
    elif kind == "group":
        for t in range(0, T - 2, 3):
            same[t + 1], same[t + 2] = same[t], same[t]
            opposite[t + 2] = -(opposite[t] + opposite[t + 1])
        same[T - T % 3 :] = 0
    elif kind == "null":
        # Half of the time a bias sees nothing either.
        seen = torch.cat([A, torch.ones(T, 1, dtype=A.dtype)], 1) if attack.seed % 2 else A
        if seen.shape[1] < T:
            G -= seen @ torch.linalg.lstsq(seen, G).solution
        elif attack.p < T:
            A -= G @ torch.linalg.lstsq(G, A).solution
    elif kind == "one":
        keep = int(torch.randint(0, T, (), generator=gen))
        G[torch.arange(T) != keep] = 0
    elif kind == "range":
        scale = 10.0 ** (torch.rand(T, 1, generator=gen, dtype=torch.float64) * 12 - 6)
        A, G = A * scale, G / scale * (1 + _normal(gen, T, 1))
    elif kind == "spike":
        A[0, 0], G[-1, -1] = 1e6, 1e6
    elif kind == "aligned":
        A, G = A[:1].repeat(T, 1), G[:1].repeat(T, 1)
    if attack.left is not None and kind != "one":
        left = attack.remainder(dtype)
        A = A + left * _normal(gen, T, attack.d)
        G = G + left * _normal(gen, T, attack.p) * (G != 0).any(1, keepdim=True)
    A = A * (10.0**attack.log_a / _largest(A))
    terms = A.norm(dim=1) * G.norm(dim=1)
    G = G * (attack.bound * 10.0**attack.log_product / _largest(terms))
    if kind == "pair_and_one":
        # The last position has nothing to cancel with: small beside the terms, large beside C.
        level = 10.0 ** min(attack.log_product, 1.0 + 2 * (attack.left or 0.0))
        G[-1] *= level / 10.0**attack.log_product
    return _finite(A, dtype), _finite(G, dtype)


def sum_rows(
    attack: Attack,
    n: int,
    dtype: torch.dtype,
    generator: torch.Generator | None = None,
    *,
    scale: float = 1.0,
) -> Tensor:
    """Rows ``[T, n]`` of a sum over positions, the largest of them ``scale`` times what is asked
    for, finite in ``dtype``."""
    gen = attack.generator() if generator is None else generator
    T, kind = attack.T, attack.kind
    G = _normal(gen, T, n)
    if kind in ("pair", "pair_and_one"):
        pairs = T - (kind == "pair_and_one")
        _pair(torch.empty_like(G[:pairs]), G[:pairs])
    elif kind == "group":
        for t in range(0, T - 2, 3):
            G[t + 2] = -(G[t] + G[t + 1])
        G[T - T % 3 :] = 0
    elif kind == "null":
        G -= G.mean(0) if T > 1 else 0
    elif kind == "one":
        G[1:] = 0
    elif kind == "range":
        G *= 10.0 ** (torch.rand(T, 1, generator=gen, dtype=torch.float64) * 12 - 6)
        G[-1] -= G.sum(0) if T > 1 else 0
    elif kind == "spike":
        G[0, 0] = 1e6
    elif kind == "aligned":
        G = G[:1].repeat(T, 1)
    if attack.left is not None:
        G = G + attack.remainder(dtype) * _normal(gen, T, n) * (G != 0).any(1, keepdim=True)
    G = G * (scale * attack.bound * 10.0**attack.log_product / _largest(G.norm(dim=1)))
    if kind == "pair_and_one":
        G[-1] *= 10.0 ** min(0.0, 1.0 - attack.log_product)
    return _finite(G, dtype)


def groups_of_ids(attack: Attack, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Ids ``[T]`` so that the rows which cancel in :func:`sum_rows` meet at one id."""
    t = torch.arange(attack.T)
    first = int(torch.randint(0, vocabulary, (), generator=generator))
    if attack.kind == "pair" and attack.seed % 2:
        return (t // 2 + first) % vocabulary
    if attack.kind == "group" and attack.seed % 2:
        return (t // 3 + first) % vocabulary
    if attack.kind == "ordinary":
        return torch.randint(0, vocabulary, (attack.T,), generator=generator)
    return torch.full((attack.T,), first)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _largest(x: Tensor) -> float:
    return max(x.abs().max().item(), 1e-300)


def _pair(same: Tensor, opposite: Tensor) -> None:
    even = len(same) // 2 * 2
    same[1:even:2] = same[0:even:2]
    opposite[1:even:2] = -opposite[0:even:2]
    if even < len(same):
        opposite[even:] = 0


def _finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype``, with everything scaled down together if it would overflow."""
    largest = torch.finfo(dtype).max / 8
    if (top := _largest(x)) > largest:
        x = x * (largest / top)
    return x.to(dtype)
