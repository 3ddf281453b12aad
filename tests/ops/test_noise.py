"""Noise: the right distribution, fresh at every call, and from the generator it should be from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_clipping.ops.backend import is_interpreting
from flash_clipping.ops.noise import noisy_means

try:
    import triton
    import triton.language as tl

    from flash_clipping.ops.noise_triton import _pair
except ImportError:
    pass
else:

    @triton.jit
    def _radius_kernel(words_ptr, out_ptr):
        at = tl.arange(0, 4)
        words = tl.load(words_ptr + at).to(tl.uint32)
        radius, _ = _pair(words, tl.zeros_like(words), -1.0, False)
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


@pytest.mark.skipif(not is_interpreting(), reason="kernels are compiled for the GPU in this run")
def test_kernel_in_the_interpreter() -> None:
    from flash_clipping.ops.noise_triton import draw

    sums = [torch.linspace(-1, 1, 50_001), torch.zeros(3), torch.ones(20, 700), torch.zeros(4096)]
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
        other = draw(sums, STD, DIVISOR, seed=seed, offset=offset)
        assert_normal(first[0] - other[0], STD / DIVISOR * math.sqrt(2))


@pytest.mark.skipif(not is_interpreting(), reason="kernels are compiled for the GPU in this run")
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
def test_the_device_s_own_functions_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("flash_clipping.ops.noise_triton")
    if not kernels._approximates(torch.device("cuda")):
        pytest.skip("needs a GPU by NVIDIA")
    sums = [torch.zeros(100_003, device="cuda"), torch.zeros(5000, device="cuda")]
    fast = kernels.draw(sums, 1.0, 1.0, seed=1 << 40, offset=(1 << 33) + 8)
    monkeypatch.setattr(kernels, "_approximates", lambda device: False)
    exact = kernels.draw(sums, 1.0, 1.0, seed=1 << 40, offset=(1 << 33) + 8)
    torch.testing.assert_close(fast, exact, rtol=1e-4, atol=1e-4)


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
