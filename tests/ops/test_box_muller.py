"""Normals in fp32, from words that are hard: errors against float64 everywhere, and the words."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from flash_clipping.ops.runtime.backend import is_interpreting
from flash_clipping.randomness import Draw, Purpose
from flash_clipping.randomness.chacha import words
from tests.randomness.test_stream import published

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from flash_clipping.ops.noise.box_muller import _radius, _turned  # noqa: E402
from flash_clipping.ops.noise.triton import key_words, words as kernel_words  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@triton.jit
def _functions_kernel(words_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    low, high = tl.load(words_ptr + at).to(tl.uint32), tl.load(words_ptr + N + at).to(tl.uint32)
    tl.store(out_ptr + at, _radius(low, high))
    sign, cos, sin = _turned(tl.full((N,), 1.0, tl.float32), low, high)
    tl.store(out_ptr + N + at, sign * cos)
    tl.store(out_ptr + 2 * N + at, sign * sin)


@triton.jit
def _words_kernel(table_ptr, out_ptr, N: tl.constexpr, ROUNDS: tl.constexpr):
    at = tl.arange(0, N)
    counter = (tl.load(table_ptr) + at).to(tl.uint32)
    n0 = tl.load(table_ptr + 1).to(tl.uint32)
    n1 = tl.load(table_ptr + 2).to(tl.uint32)
    n2 = tl.load(table_ptr + 3).to(tl.uint32)
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = kernel_words(
        key_words(table_ptr + 4), counter, n0, n1, n2, ROUNDS
    )
    row = out_ptr + 16 * at
    tl.store(row, w0), tl.store(row + 1, w1), tl.store(row + 2, w2), tl.store(row + 3, w3)
    tl.store(row + 4, w4), tl.store(row + 5, w5), tl.store(row + 6, w6), tl.store(row + 7, w7)
    tl.store(row + 8, w8), tl.store(row + 9, w9), tl.store(row + 10, w10), tl.store(row + 11, w11)
    tl.store(row + 12, w12), tl.store(row + 13, w13), tl.store(row + 14, w14)
    tl.store(row + 15, w15)


def skip_unless_runnable(device: str) -> None:
    if device == "cpu" and not is_interpreting():
        pytest.skip("kernels are compiled for the GPU in this run")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounds", [20, 12])
@pytest.mark.parametrize("first", [0, 1, 2**31 - 3, 2**32 - 4])
def test_words_are_those_on_the_cpu(first: int, rounds: int, device: str) -> None:
    """Up to the last counter; the CPU's pass the published vectors."""
    skip_unless_runnable(device)
    of = Draw(bytes(range(200, 232)), Purpose.COUNT, 2**32 - 1, rounds)
    tensor, shard = 2**32 - 2, 2**24 - 1
    key = np.frombuffer(of.key, dtype=np.int64)
    table = torch.tensor([first, *of.nonce(tensor, shard), *key.tolist()], device=device)
    out = torch.empty(4, 16, dtype=torch.int32, device=device)
    _words_kernel[(1,)](table, out, N=4, ROUNDS=rounds)
    assert torch.equal(out.cpu(), words(of, 4, tensor=tensor, shard=shard, first=first))


@pytest.mark.parametrize("device", DEVICES)
@published
def test_published_vectors(
    rounds: int, key: bytes, counter: int, nonce: str, expected: str, device: str
) -> None:
    skip_unless_runnable(device)
    three = np.frombuffer(bytes.fromhex(nonce), dtype=np.uint32).tolist()
    numbers = [counter, *three, *np.frombuffer(key, dtype=np.int64).tolist()]
    out = torch.empty(1, 16, dtype=torch.int32, device=device)
    _words_kernel[(1,)](torch.tensor(numbers, device=device), out, N=1, ROUNDS=rounds)
    assert out.cpu().numpy().tobytes().hex() == expected


def hard_numbers() -> np.ndarray:
    """Near 0, near 1, near the root of 1/2, near every eighth of a turn, at every magnitude."""
    ends = [0, 1 << 64, round(math.sqrt(0.5) * (1 << 64))]
    ends += [i << 61 for i in range(1, 8)]
    near = {end + sign * ((1 << k) + d) for end in ends for sign in (-1, 1) for k in range(63)
            for d in (-1, 0, 1)}  # fmt: skip
    near |= {end + d for end in ends for d in range(-4, 5)}
    rng = np.random.default_rng(0)
    some = rng.integers(0, 1 << 64, 4096, dtype=np.uint64) >> rng.integers(0, 64, 4096, np.uint64)
    flipped = [(1 << 64) - 1 - int(n) for n in some]
    found = sorted({n for n in near if 0 <= n < 1 << 64} | {int(n) for n in some} | {*flipped})
    size = 1 << (len(found) - 1).bit_length()
    return np.array(found + [0] * (size - len(found)), dtype=np.uint64)


def exact_radius(n: int) -> float:
    """With 60 digits."""
    with localcontext() as context:
        context.prec = 60
        u = (Decimal(n) + Decimal("0.25")) / (1 << 64)
        return float((-2 * u.ln()).sqrt())


def exact_turn(n: int) -> tuple[float, float]:
    """Reduced to an eighth of a turn as an integer; float64 is exact enough there."""
    quarter, rest = ((n + (1 << 61)) >> 62) % 4, (n + (1 << 61)) % (1 << 62) - (1 << 61)
    x = 2 * math.pi * (rest / 2**64)
    c, s = math.cos(x), math.sin(x)
    return [(c, s), (-s, c), (-c, -s), (s, -c)][quarter]


@pytest.mark.parametrize("device", DEVICES)
def test_errors_of_radius_sine_and_cosine(device: str) -> None:
    """Relative ones, below what ``box_muller.py`` says, also near 0; the radius reaches 9.56."""
    skip_unless_runnable(device)
    numbers = hard_numbers()
    halves = torch.from_numpy(numbers.view(np.uint32).astype(np.int64).reshape(-1, 2).T.copy())
    out = torch.empty(3, len(numbers), device=device)
    _functions_kernel[(1,)](halves.to(device), out, N=len(numbers))
    integers = [int(n) for n in numbers]
    turns = [exact_turn(n) for n in integers]
    exact = torch.tensor(
        [[exact_radius(n) for n in integers], *([turn[k] for turn in turns] for k in (0, 1))],
        dtype=torch.float64,
    )
    found = out.double().cpu()
    at_zero = exact == 0
    errors = torch.where(at_zero, 0.0, (found - exact).abs() / exact.abs())
    # Of the last place of pi/2's cosine nothing is left in float64; there it is 0 here.
    errors[exact.abs() < 1e-16] = 0
    bound = 2.0**-22 if device == "cpu" else 2.0**-21
    assert errors.max() < bound, errors.amax(1).log2()
    assert found[0].max() > 9.56 and found[0].min() > 0
    assert exact[0].max() == pytest.approx(math.sqrt(2 * 66 * math.log(2)))
