"""Noise: the right distribution, fresh at every call, and from the generator it should be from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flash_clipping.ops.noise import noisy_means
from flash_clipping.ops.runtime.backend import is_interpreting

try:
    import triton
    import triton.language as tl

    from flash_clipping.ops.noise import triton as noise_triton
    from flash_clipping.ops.noise.triton import _noisy_block, _number_of, _pair, _words
except ImportError:
    pass
else:

    @triton.jit
    def _block_kernel(summed_ptr, out_ptr, numbers_ptr, BLOCK: tl.constexpr):
        seed = tl.load(numbers_ptr)
        offset = tl.load(numbers_ptr + 1)
        high, low = _number_of(tl.load(numbers_ptr + 2), BLOCK // 8)
        args = (summed_ptr, out_ptr, BLOCK, low, 1.1774100225154747, 1.0, seed, offset, high)
        _noisy_block(*args, tl.float32, tl.float32, True, True, False, BLOCK)

    @triton.jit
    def _words_kernel(numbers_ptr, out_ptr, FAST: tl.constexpr):
        seed = tl.load(numbers_ptr)
        c1 = tl.load(numbers_ptr + 1).to(tl.uint32)
        c2 = tl.load(numbers_ptr + 2).to(tl.uint32)
        c3 = tl.load(numbers_ptr + 3).to(tl.uint32)
        at = tl.arange(0, 128)
        c0 = (at.to(tl.int64) + 4294967168).to(tl.uint32)  # up to 2^32 - 1
        w0, w1, w2, w3 = _words(seed, c0, c1, c2, c3, FAST)
        tl.store(out_ptr + at, w0.to(tl.int64))
        tl.store(out_ptr + 128 + at, w1.to(tl.int64))
        tl.store(out_ptr + 256 + at, w2.to(tl.int64))
        tl.store(out_ptr + 384 + at, w3.to(tl.int64))

    @triton.jit
    def _radius_kernel(words_ptr, out_ptr):
        at = tl.arange(0, 4)
        words = tl.load(words_ptr + at).to(tl.uint32)
        radius, _ = _pair(words, tl.zeros_like(words), -1.1774100225154747, False)
        tl.store(out_ptr + at, radius)


STD, DIVISOR = 3.0, 8.0


def noisy_mean(summed: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    (result,) = noisy_means([summed], *args, **kwargs)
    return result


def assert_normal(noise: Tensor, std: float) -> None:
    """Mean, variance, tails and neighbours, each at five standard errors."""
    z = noise.double().cpu().flatten() / std
    n = z.numel()
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.square().mean() - 1) < 5 * math.sqrt(2 / n)
    assert abs(z.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)
    for bound, probability in ((1.0, 0.317311), (2.0, 0.0455003), (3.0, 0.0026998)):
        found = (z.abs() > bound).double().mean()
        assert abs(found - probability) < 5 * math.sqrt(probability / n)
    for lag in (1, 2, 3, 4):
        assert abs((z[lag:] * z[:-lag]).mean()) < 5 / math.sqrt(n - lag)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cpu_noise(dtype: torch.dtype) -> None:
    summed = torch.linspace(-1, 1, 100_000, dtype=dtype)
    for generator in (None, torch.Generator().manual_seed(1)):
        first = noisy_mean(summed, STD, DIVISOR, generator=generator)
        again = noisy_mean(summed, STD, DIVISOR, generator=generator)
        assert first.dtype == dtype
        assert_normal(first * DIVISOR - summed, STD)
        assert_normal(first - again, STD / DIVISOR * math.sqrt(2))


def test_no_noise_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    summed = torch.randn(7)
    assert torch.equal(noisy_mean(summed, 0.0, 4.0, generator=generator), summed / 4.0)
    assert torch.equal(generator.get_state(), before)


interpreted = pytest.mark.skipif(
    not is_interpreting(), reason="kernels are compiled for the GPU in this run"
)


def words_of(seed: int, counters: list[np.ndarray]) -> list[np.ndarray]:
    """Philox-4x32-10 in 64-bit integers, as the paper defines it."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counters
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        k0, k1 = np.uint64(keys[0]), np.uint64(keys[1])
        c0, c2 = (second >> shift) ^ c1 ^ k0, (first >> shift) ^ c3 ^ k1
        c1, c3 = second & low, first & low
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return [c0, c1, c2, c3]


def normals_of(seed: int, offset: int, block: int, itemsize: int = 4) -> np.ndarray:
    """What a block of a launch draws: 32 bytes for each of 128 threads, whose number goes on from
    block to block, by a counter for every four elements; 16 bytes of a thread lie together, the
    other 16 in the second half of the block."""
    thread = np.uint64(block * 128) + np.arange(128, dtype=np.uint64)
    low, high = thread & np.uint64(0xFFFFFFFF), thread >> np.uint64(32)
    c1, c3 = np.full_like(thread, offset & 0xFFFFFFFF), np.full_like(thread, offset >> 32)
    halves, calls = [], 4 // itemsize
    for half in (0, 1):
        normals = []
        for call in range(calls * half, calls * (half + 1)):
            words = words_of(seed, [low, c1, high * np.uint64(2 * calls) + np.uint64(call), c3])
            for u, v in (words[:2], words[2:]):
                radius = np.sqrt(-2 * np.log((u.astype(float) + 0.5) / 2**32))
                angle = 2 * np.pi * (v >> np.uint64(9)).astype(float) / 2**23 - np.pi
                normals += [radius * np.cos(angle), radius * np.sin(angle)]
        halves.append(np.stack(normals, 1).reshape(-1))
    return np.concatenate(halves)


@interpreted
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_element_has_a_counter_of_its_own(itemsize: int) -> None:
    """In a launch over many tensors, against Philox and Box and Muller in float64."""
    sizes = (1, 4, 2047, 2048, 2049, 8191, 8192, 8193, 20000)
    dtype = torch.float32 if itemsize == 4 else torch.float16
    sums = [torch.zeros(n, dtype=dtype) for n in sizes]
    found = noise_triton.draw(sums, 1.0, 1.0, seed=11, offset=12)
    size, blocks, block = 128 * 32 // itemsize, noise_triton.BLOCKS[itemsize], 0
    key = (11 ^ noise_triton._KEY) & 0x7FFFFFFFFFFFFFFF
    for noise in found:
        parts = -(-noise.numel() // size)
        normals = [normals_of(key, 12, block + part, itemsize) for part in range(parts)]
        expected = torch.from_numpy(np.concatenate(normals)[: noise.numel()]).float()
        rounding = 1e-5 if itemsize == 4 else 1e-3
        torch.testing.assert_close(noise.float(), expected, rtol=rounding, atol=1e-5)
        block += -(-parts // blocks) * blocks  # whole programs
    other = noise_triton.draw(sums[1:2], 1.0, 1.0, seed=11 ^ noise_triton._KEY, offset=12)
    assert not torch.equal(other[0], found[1])


@interpreted
@pytest.mark.parametrize("block", [0, 2**25 - 1, 2**25, 5 * 2**25 + 3, 2**33 + 1])
def test_counters_go_on_beyond_32_bits(block: int) -> None:
    seed, offset, out = 2**63 - 3, 2**62 + 4, torch.empty(1024)
    _block_kernel[(1,)](torch.zeros(1024), out, torch.tensor([seed, offset, block]), BLOCK=1024)
    expected = torch.from_numpy(normals_of(seed, offset, block)).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


class Generator:
    """What the kernel asks of a device's default generator."""

    def __init__(self) -> None:
        self.offset = 8

    def initial_seed(self) -> int:
        return 5

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def test_launches_take_all_tensors_and_an_offset_each(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("flash_clipping.ops.noise.triton")
    source, launches = Generator(), []

    def draw(
        sums: list[Tensor],
        std: float,
        divisor: float,
        dtype: torch.dtype,
        *,
        seed: int,
        offset: int,
    ) -> list:
        launches.append((len(sums), seed, offset))
        return [summed + 1 for summed in sums]

    monkeypatch.setattr(torch.cuda, "default_generators", [source, source])
    monkeypatch.setattr(kernels, "draw", draw)
    sums = [torch.full((2,), float(k)) for k in range(600)]
    results = kernels.noisy_means(sums, 1.0, 1.0, None, torch.float32)
    assert torch.equal(torch.stack(results), torch.stack(sums) + 1)
    assert [launch[0] for launch in launches] == [256, 256, 88]
    assert [launch[2] for launch in launches] == [8, 12, 16] and source.offset == 20
    assert len({launch[1] for launch in launches}) == 1


def test_devices_with_one_seed_draw_different_noise() -> None:
    kernels = pytest.importorskip("flash_clipping.ops.noise.triton")
    seeds = [kernels.seed_of(Generator(), index) for index in range(8)]
    assert seeds[0] == Generator().initial_seed() and len(set(seeds)) == 8


@interpreted
def test_kernel_in_the_interpreter() -> None:
    draw = noise_triton.draw
    sums = [torch.linspace(-1, 1, 20_001), torch.zeros(3), torch.ones(5, 700), torch.zeros(4096)]
    sums.append(torch.zeros(4097)[1:])  # not on 16 bytes
    first = draw(sums, STD, DIVISOR, seed=7, offset=0)
    assert [x.shape for x in first] == [x.shape for x in sums]
    noise = [noisy * DIVISOR - summed for noisy, summed in zip(first, sums, strict=True)]
    for each in noise[:1] + noise[2:]:
        assert_normal(each, STD)
    assert_normal(torch.cat([each.flatten() for each in noise]), STD)
    assert_normal(noise[0][:4096] - noise[3], STD * math.sqrt(2))
    assert_normal(noise[4] - noise[3], STD * math.sqrt(2))
    again = draw(sums, STD, DIVISOR, seed=7, offset=0)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    for seed, offset in ((7, 4), (8, 0), (7, 1 << 32)):
        (other,) = draw(sums[:1], STD, DIVISOR, seed=seed, offset=offset)
        assert_normal(first[0] - other, STD / DIVISOR * math.sqrt(2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("dtype", "first"),
    [
        pytest.param(torch.float32, 0, id="fp32-aligned"),
        pytest.param(torch.float32, 1, id="fp32-not aligned"),
        pytest.param(torch.float16, 0, id="fp16-aligned"),
        pytest.param(torch.bfloat16, 1, id="bf16-not aligned"),
        pytest.param(torch.float16, 1, id="fp16-not aligned", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 0, id="bf16-aligned", marks=pytest.mark.slow),
    ],
)
def test_every_sum_is_divided_in_its_place(dtype: torch.dtype, first: int, device: str) -> None:
    """With noise of no size; of every element, in whole blocks and in those that are not."""
    kernels = pytest.importorskip("flash_clipping.ops.noise.triton")
    if device == "cpu" and not is_interpreting():
        pytest.skip("kernels are compiled for the GPU in this run")
    sizes = (3, 2047, 8191, 8192, 12_000)
    sums = [torch.randn(first + n, device=device).to(dtype)[first:] for n in sizes]
    for found, summed in zip(kernels.draw(sums, 0.0, 4.0, seed=1, offset=0), sums, strict=True):
        assert torch.equal(found, summed / 4)


@interpreted
def test_the_radius_reaches_far() -> None:
    """The smallest of 2^32 words gives 6.7 standard deviations, the largest none."""
    words, out = torch.tensor([0, 1, 2**31, 2**32 - 1]), torch.empty(4)
    _radius_kernel[(1,)](words, out)
    exact = ((words.double() + 0.5) / 2**32).log().mul(-2).sqrt().float()
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=2e-5)


def test_a_generator_is_used_in_the_order_of_the_sums() -> None:
    sums = [torch.zeros(5), torch.zeros(3, dtype=torch.float64), torch.zeros(0), torch.zeros(2, 2)]
    noisy = noisy_means(sums, STD, DIVISOR, generator=torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(3)
    for found, summed in zip(noisy, sums, strict=True):
        expected = torch.empty_like(summed).normal_(0, STD, generator=generator) / DIVISOR
        assert found.dtype == summed.dtype and torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernel_on_the_gpu(dtype: torch.dtype) -> None:
    summed = torch.zeros(1_000_003, device="cuda", dtype=dtype)
    torch.cuda.manual_seed(5)
    first = noisy_mean(summed, STD, 1.0, backend="triton")
    other = noisy_mean(summed, STD, 1.0, backend="triton")
    torch.cuda.manual_seed(5)
    assert torch.equal(first, noisy_mean(summed, STD, 1.0, backend="triton"))
    assert not torch.equal(first, other)
    if dtype == torch.float32:
        assert_normal(first, STD)
        assert_normal(first - other, STD * math.sqrt(2))
    else:
        assert abs(first.float().std() - STD) < 0.02
    generator = torch.Generator("cuda").manual_seed(1)
    given = noisy_mean(summed.float(), STD, 1.0, generator=generator)
    assert_normal(given, STD)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_device_s_own_functions_say_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("flash_clipping.ops.noise.triton")
    if not kernels._approximates(torch.device("cuda")):
        pytest.skip("needs a GPU by NVIDIA")
    sums = [torch.zeros(n, device="cuda", dtype=dtype) for n in (100_003, 5000)]
    fast = kernels.draw(sums, 1.0, 1.0, seed=1 << 40, offset=(1 << 33) + 8)
    monkeypatch.setattr(kernels, "_approximates", lambda device: False)
    exact = kernels.draw(sums, 1.0, 1.0, seed=1 << 40, offset=(1 << 33) + 8)
    rounding = max(1e-4, torch.finfo(dtype).eps)  # neighbours, where they round differently
    torch.testing.assert_close(fast, exact, rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("c2", [0, 1, 3, 7, 2**31 + 5, 2**32 - 1])
def test_words_are_those_of_philox(c2: int, device: str) -> None:
    """On a GPU what all threads share is computed apart, and by other instructions."""
    kernels = pytest.importorskip("flash_clipping.ops.noise.triton")
    if device == "cpu" and not is_interpreting():
        pytest.skip("kernels are compiled for the GPU in this run")
    seed, c1, c3 = 2**62 + 12345, 2**32 - 3, 2**31 + 9
    out = torch.empty(4, 128, dtype=torch.int64, device=device)
    numbers = torch.tensor([seed, c1, c2, c3], device=device)
    _words_kernel[(1,)](numbers, out, FAST=kernels._approximates(out.device))
    first = np.arange(128, dtype=np.uint64) + np.uint64(2**32 - 128)
    others = [np.full_like(first, c) for c in (c1, c2, c3)]
    words = np.stack(words_of(seed, [first, *others])).astype(np.int64)
    assert torch.equal(out.cpu(), torch.from_numpy(words))


@pytest.mark.gpu
def test_many_at_once_on_the_gpu() -> None:
    """More than a launch takes, of all dtypes, some that kernels cannot serve, in their places."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    sums = [
        torch.full((97 + 61 * k,), float(k), device="cuda", dtype=dtypes[k % 3]) for k in range(800)
    ]
    sums[5] = torch.zeros(0, device="cuda")
    sums[7] = torch.full((40, 60), 7.0, device="cuda").T  # not contiguous
    torch.cuda.manual_seed(5)
    first = noisy_means(sums, STD, 1.0)
    torch.cuda.manual_seed(5)
    again = noisy_means(sums, STD, 1.0)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    exact = []
    for noisy, summed in zip(first, sums, strict=True):
        assert noisy.shape == summed.shape and noisy.dtype == summed.dtype
        if summed.dtype != torch.bfloat16:
            exact.append((noisy - summed).double().flatten())
        elif summed.numel():
            error = (noisy.float() - summed.float()).mean().abs()
            assert error < 6 * STD / summed.numel() ** 0.5 + summed[0].float() / 256
    assert_normal(torch.cat(exact), STD)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_draw_for_themselves() -> None:
    torch.cuda.manual_seed_all(5)
    sums = [torch.zeros(100_000, device=f"cuda:{k % 2}") for k in range(4)]
    noisy = noisy_means(sums, STD, 1.0)
    assert [noise.device for noise in noisy] == [summed.device for summed in sums]
    noise = [each.cpu() for each in noisy]
    for k, each in enumerate(noise):
        assert_normal(each, STD)
        for other in noise[:k]:
            assert_normal(each - other, STD * math.sqrt(2))
