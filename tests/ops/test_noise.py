"""Noise: the right distribution, fresh at every call, and from the generator it should be from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_clipping.ops.backend import is_interpreting
from flash_clipping.ops.noise import noisy_mean

STD, DIVISOR = 3.0, 8.0


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

    summed = torch.linspace(-1, 1, 50_001)
    first = draw(summed, STD, DIVISOR, seed=7, offset=0)
    assert_normal(first * DIVISOR - summed, STD)
    assert torch.equal(first, draw(summed, STD, DIVISOR, seed=7, offset=0))
    for seed, offset in ((7, 4), (8, 0), (7, 1 << 32)):
        other = draw(summed, STD, DIVISOR, seed=seed, offset=offset)
        assert_normal(first - other, STD / DIVISOR * math.sqrt(2))


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
