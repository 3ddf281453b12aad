"""Noise: the words and normals it is said to be made of, on every device, and its distribution."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.ops.noise_statistics import Statistics
from flash_clipping.ops import noise as ops_noise
from flash_clipping.ops.noise import MOST_ELEMENTS, grid_of, noisy_means, reference
from flash_clipping.ops.runtime.backend import is_interpreting
from flash_clipping.randomness import Draw, Purpose, SecretStream
from flash_clipping.randomness.chacha import words
from tests.support.errors import raises

STD, DIVISOR = 3.0, 8.0


@pytest.fixture(autouse=True)
def sizes_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a program takes as long for many blocks as for few."""
    monkeypatch.setattr(reference, "CHUNK", 1024)
    if is_interpreting():
        kernels = pytest.importorskip("flash_clipping.ops.noise.triton")
        monkeypatch.setattr(kernels, "BLOCKS", 1024)
        monkeypatch.setattr(kernels, "PARTS", 2)
        monkeypatch.setattr(kernels, "PROGRAMS", 2)


def draw(number: int = 7, rounds: int = 20) -> Draw:
    return Draw(bytes(range(100, 132)), Purpose.NOISE, number, rounds)


def noisy_mean(summed: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    (result,) = noisy_means([summed], *args, **kwargs)
    return result


def normals_of(of: Draw, count: int, tensor: int = 0, shard: int = 0) -> Tensor:
    """By the words, one pair of normals at a time, with Python's functions."""
    blocks = words(of, -(-count // 8), tensor=tensor, shard=shard).flatten().tolist()
    normals: list[float] = []
    for i in range(0, len(blocks), 4):
        n, a = struct.unpack("<Qq", struct.pack("<4i", *blocks[i : i + 4]))
        radius = math.sqrt(-2 * math.log((n + 0.25) / 2**64))
        angle = 2 * math.pi * a / 2**64
        normals += [radius * math.cos(angle), radius * math.sin(angle)]
    return torch.tensor(normals[:count], dtype=torch.float64)


#: Around blocks, around programs (of 16 384 elements here) and more than a chunk on the CPU.
SIZES = (1, 4, 7, 8, 9, 16_383, 16_385, 20_000)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rounds", [20, 12])
def test_every_element_has_words_of_its_own(rounds: int, backend: str, device: str) -> None:
    """In a call for many tensors, each with numbers of its own; in float64 to the last places."""
    if backend == "triton" and device == "cpu" and not is_interpreting():
        pytest.skip("kernels are compiled for the GPU in this run")
    if backend == "triton":
        pytest.importorskip("triton")
    tensors, shards = [5, 0, 1, 2, 3, 4, (1 << 32) - 1, 6], [0, 0, 1, 2, 255, 256, 0, (1 << 24) - 1]
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        if dtype == torch.float64 and backend == "triton":
            continue  # served by the reference
        sums = [torch.full((n,), 0.5, dtype=dtype, device=device) for n in SIZES]
        found = noisy_means(
            sums,
            STD,
            DIVISOR,
            draw=draw(rounds=rounds),
            tensors=tensors,
            shards=shards,
            backend=backend,
        )
        for noisy, tensor, shard in zip(found, tensors, shards, strict=True):
            normals = normals_of(draw(rounds=rounds), noisy.numel(), tensor, shard)
            expected = (0.5 + STD * normals) / DIVISOR
            difference = (noisy.double().cpu() - expected).abs()
            assert noisy.dtype == dtype
            assert (difference <= tolerance * (1 + expected.abs())).all()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sums_of_all_kinds_in_their_places(backend: str, device: str) -> None:
    """Added in fp32, divided, and rounded once: bitwise, of the noise that fp32 sums get."""
    if backend == "triton" and device == "cpu" and not is_interpreting():
        pytest.skip("kernels are compiled for the GPU in this run")
    torch.manual_seed(0)
    kinds = {
        "fp16": torch.randn(3, 70, device=device).half(),
        "bf16": torch.randn(2100, device=device).bfloat16(),
        "not contiguous": torch.randn(4, 50, device=device).T,
        "not on 16 bytes": torch.randn(2051, device=device)[1:],
        "empty": torch.zeros(0, 5, device=device),
        "scalar": torch.tensor(2.5, device=device),
    }
    sums, options = list(kinds.values()), {"draw": draw(), "backend": backend}
    wanted = [torch.float16, torch.float32, torch.bfloat16, torch.float32, *[torch.float32] * 2]
    found = noisy_means(sums, STD, 4.0, dtypes=wanted, **options)
    noise = noisy_means([torch.zeros(x.shape, device=device) for x in sums], STD, 1.0, **options)
    for noisy, summed, drawn, dtype in zip(found, sums, noise, wanted, strict=True):
        assert noisy.shape == summed.shape and noisy.dtype == dtype and noisy.is_contiguous()
        if backend == "torch":
            assert torch.equal(noisy, ((summed.float() + drawn) / 4).to(dtype))
        else:  # the kernel's sum is rounded once, with the noise's product
            close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
            torch.testing.assert_close(noisy, ((summed.float() + drawn) / 4).to(dtype), **close)
    for summed in sums:
        assert not any(summed.numel() and summed.data_ptr() == x.data_ptr() for x in found)


def test_more_than_a_launch_takes() -> None:
    pytest.importorskip("flash_clipping.ops.noise.triton")
    backend = "triton" if is_interpreting() or torch.cuda.is_available() else "torch"
    if backend == "torch":
        pytest.skip("needs Triton")
    device = "cpu" if is_interpreting() else "cuda"
    import flash_clipping.ops.noise.triton as kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "MOST", 4)
        sums = [torch.zeros(3 + k, device=device) for k in range(9)]
        found = noisy_means(sums, 1.0, 1.0, draw=draw(), backend=backend)
    for k, noisy in enumerate(found):
        expected = normals_of(draw(), 3 + k, tensor=k)
        torch.testing.assert_close(noisy.double().cpu(), expected, rtol=1e-6, atol=1e-6)


def test_two_sums_with_one_number_are_refused() -> None:
    sums = [torch.zeros(3), torch.zeros(4)]
    with raises("FC312", ValueError):
        noisy_means(sums, 1.0, 1.0, draw=draw(), tensors=[1, 1])
    with pytest.raises(ValueError):
        noisy_means(sums, 1.0, 1.0, draw=draw(), tensors=[1])
    noisy_means(sums, 1.0, 1.0, draw=draw(), tensors=[1, 1], shards=[0, 1])


def test_a_sum_that_would_meet_itself_is_refused() -> None:
    large = torch.zeros(1).expand(MOST_ELEMENTS + 1)
    with raises("FC304", ValueError):
        noisy_means([large], 1.0, 1.0, draw=draw())


def test_radii_at_the_ends_on_the_cpu() -> None:
    """The smallest word gives 9.565 standard deviations, the largest none; the kernel's are in
    ``test_box_muller.py``."""
    words_N16 = torch.zeros(2, 16, dtype=torch.int32)
    words_N16[1, ::4] = words_N16[1, 1::4] = -1
    normals = reference.normals(words_N16, 2.0).view(2, 4, 2)
    assert torch.allclose(normals[0, :, 0], torch.tensor(2 * math.sqrt(132 * math.log(2))).double())
    assert not normals[0, :, 1].any() and not normals[1].any()


def test_no_noise_draws_nothing() -> None:
    class NoDraw:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError("was asked for words")

    summed = torch.randn(7)
    assert torch.equal(noisy_mean(summed, 0.0, 4.0, draw=NoDraw()), summed / 4.0)


def test_generators_of_pytorch_are_neither_read_nor_touched() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = noisy_mean(torch.zeros(9), 1.0, 1.0, draw=draw())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(noisy_mean(torch.zeros(9), 1.0, 1.0, draw=draw()), first)
    assert not torch.equal(noisy_mean(torch.zeros(9), 1.0, 1.0, draw=draw(8)), first)


def test_bf16_keeps_noise_below_its_ulp_on_average() -> None:
    """The fp32 sum is rounded to nearest: noise of a 16th of an ulp decides where it matters, and a
    mean in the middle between two numbers of bf16 goes up as often as down."""
    ulp = 2.0**-7  # of bf16 between 1 and 2
    n = 100_000
    middle = torch.full((n,), 1.0 + ulp / 2)
    found = noisy_mean(middle, ulp / 16, 1.0, draw=draw(), dtypes=[torch.bfloat16])
    up = (found.float() == 1.0 + ulp).double().mean()
    assert set(found.float().unique().tolist()) == {1.0, 1.0 + ulp}
    assert abs(up - 0.5) < 5 * 0.5 / n**0.5
    exact = noisy_mean(middle, ulp / 16, 1.0, draw=draw())
    assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_grid_depends_on_the_deviation_alone(dtype: torch.dtype, backend: str) -> None:
    if backend == "triton" and (dtype == torch.float64 or not is_interpreting()):
        pytest.skip("no kernel for this")
    grid = grid_of(STD, dtype)
    assert math.frexp(grid)[0] == 0.5
    assert (256 if dtype == torch.float32 else 2**24) <= STD / grid < 2**25
    assert grid == grid_of(2.1, dtype) != grid_of(4.0, dtype) == 2 * grid
    most = reference.cells(dtype)
    summed = torch.randn(5000, dtype=dtype) * 100
    summed[:5] = torch.tensor([1e12, -1e12, 1e-30, math.nan, 3.0])
    found = noisy_mean(summed, STD, 1.0, draw=draw(), grid=True, backend=backend)
    plain = noisy_mean(summed, STD, 1.0, draw=draw(), backend=backend)
    cells = found / grid
    assert torch.equal(cells[:3].round()[:2], torch.tensor([most, -most], dtype=dtype))
    assert cells[3].isnan()
    assert torch.equal(cells[4:], cells[4:].round())
    assert ((found - plain)[4:].abs() <= grid / 2).all()
    assert len(cells[4:].remainder(2).unique()) == 2


@pytest.mark.parametrize("rounds", [20, 12])
def test_the_normal_distribution(rounds: int) -> None:
    """A million normals; ``python -m benchmarks noise`` looks at many more."""
    found = Statistics.of(SecretStream().draw(Purpose.NOISE, rounds), draws=1_000_000)
    assert found.worst() < 5.5, found.rows()


def test_a_wrong_distribution_is_seen() -> None:
    """Each of the statistics, of normals that are wrong in one way."""
    torch.manual_seed(0)
    good = torch.randn(2, 400_000, dtype=torch.float64)

    def quantised(z: Tensor) -> Tensor:
        return (z * 30).round() / 30

    wrong = {
        "mean": good + 0.02,
        "variance": good * 1.02,
        "tails": good.clamp(-3.9, 3.9),
        "chi": quantised(good),
        "serial": torch.cat([good[:, :1], good[:, 1:] + 0.02 * good[:, :-1]], 1),
        "cross": torch.stack([good[0], good[1] + 0.02 * good[0]]),
    }
    assert Statistics([tuple(good)]).worst() < 5.5
    for name, normals in wrong.items():
        found = Statistics([tuple(normals)])
        assert found.worst(name) > 5.5, name


@pytest.mark.gpu
@pytest.mark.parametrize("rounds", [20, 12])
def test_the_same_noise_on_a_gpu_without_waiting(rounds: int) -> None:
    sums = [torch.full((100_003,), 0.5), torch.zeros(5, 70), torch.zeros(9, dtype=torch.float64)]
    on_gpu = [summed.cuda() for summed in sums]
    # At addresses that are no multiples of 16: another kernel, of which bits are the same.
    odd = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x) for x in on_gpu]
    assert all(x.data_ptr() % 16 for x in odd)
    noisy_means(on_gpu + odd, STD, DIVISOR, draw=draw(1, rounds))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = noisy_means(on_gpu, STD, DIVISOR, draw=draw(rounds=rounds))
        again = noisy_means(odd, STD, DIVISOR, draw=draw(rounds=rounds))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = noisy_means(sums, STD, DIVISOR, draw=draw(rounds=rounds))
    for noisy, same, wanted in zip(found, again, expected, strict=True):
        assert torch.equal(noisy, same)
        torch.testing.assert_close(noisy.cpu(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_noise_is_not_captured() -> None:
    summed = torch.zeros(100, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), raises("FC701"):
        noisy_means([summed], 1.0, 1.0, draw=draw())


def test_noise_is_not_captured_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the device, without one."""

    class OnGpu:
        device, dtype = torch.device("cuda", 0), torch.float32
        numel = staticmethod(lambda: 3)

    monkeypatch.setattr(ops_noise, "is_current_stream_capturing", lambda: True)
    with raises("FC701"):
        noisy_means([OnGpu()], 1.0, 1.0, draw=draw())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_draw_for_themselves() -> None:
    sums = [torch.zeros(100_000, device=f"cuda:{k % 2}") for k in range(4)]
    noisy = noisy_means(sums, STD, 1.0, draw=draw())
    for k, (each, summed) in enumerate(zip(noisy, sums, strict=True)):
        assert each.device == summed.device
        expected = noisy_mean(torch.zeros(100_000), STD, 1.0, draw=draw(), tensors=[k])
        torch.testing.assert_close(each.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_oracle_is_an_oracle() -> None:
    """The words of the oracle above are ChaCha's (``tests/randomness``); its normals are
    normal, or nothing here would see a wrong formula."""
    z = normals_of(draw(), 40_000)
    assert abs(z.mean()) < 5 / 200 and abs(z.var() - 1) < 5 * math.sqrt(2) / 200
    assert np.corrcoef(z[::2], z[1::2])[0, 1] < 5 / 140
