from __future__ import annotations

import pytest
import torch

from flash_clipping.ops.clipped_sum import clipped_sums
from flash_clipping.ops.error_bounds import (
    additions,
    doubt_of_sums,
    lost_of,
    spread,
    upper_bound,
)
from flash_clipping.ops.outer import (
    outer_grads,
    outer_sqnorms,
    reference as outer_torch,
)
from flash_clipping.ops.runtime import cost
from tests.ops.cases import (
    OWN,
    Case,
    cut,
    every_case,
    every_case_interpreted_once,
    every_half_case,
    in_rows_on_16_bytes,
    per_sample_gradients,
    relative_error,
    sizes_of_products,
    worst_relative_error,
)


@every_half_case
def test_kept_gradients_are_rounded_to_nearest(case: Case) -> None:
    """Of one position, whose products fp32 holds exactly; ties, overflow and NaN among them."""
    A, G = torch.zeros(2, 3, 256), torch.zeros(2, 3, 128)
    A[:, 0] = 1 + torch.arange(256) / 128
    G[:, 0] = (1 + torch.arange(128) / 128) * torch.tensor([[1.0], [-30000.0]])
    G[0, 0, 5], G[0, 0, 6], G[1, 0, 7] = float("inf"), float("nan"), 0.0
    A, G = A.to(case.device, case.dtype), G.to(case.device, case.dtype)
    exact = G[:, 0, :, None].double() * A[:, 0, None, :].double()
    sq, grads = outer_sqnorms(A, G, store=True, backend=case.backend)
    assert grads is not None
    assert torch.allclose(grads, exact.to(case.dtype), rtol=0, atol=0, equal_nan=True)
    assert not torch.isfinite(sq[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 70, 264, 136),  # nothing is a multiple of a tile
        (2, 1, 512, 136),
        (150, 65, 256, 72),  # more tiles than programs, of two steps each
        (1, 4096, 520, 200),
        (5, 300, 1024, 640),
    ],
    ids=str,
)
def test_tiles_that_one_warp_loads(dtype: torch.dtype, shape: tuple) -> None:
    B, T, d, p = shape
    A, G = (torch.randn(B, T, n, device="cuda", dtype=dtype) for n in (d, p))
    kernels = pytest.importorskip("flash_clipping.ops.outer.triton")
    if not kernels.fills_ring(A, G):
        pytest.skip("needs Hopper and a Triton that is known")
    sq, grads = outer_sqnorms(A, G, store=True, backend="triton")
    again = outer_sqnorms(A, G, store=True, backend="triton")
    assert grads is not None
    assert torch.equal(sq, again[0]) and torch.equal(grads, again[1])
    assert relative_error(grads, per_sample_gradients(A, G)) <= 1.01 * torch.finfo(dtype).eps
    assert worst_relative_error(sq, grads.double().square().sum((1, 2))) <= 1e-5


@every_case_interpreted_once
@pytest.mark.parametrize("widths", [(24, 257), (133, 128), (3, 5)], ids=str)
@pytest.mark.parametrize("store", [False, True])
def test_rows_on_16_bytes_of_any_width(case: Case, widths: tuple, store: bool) -> None:
    A, G = (in_rows_on_16_bytes(case.randn(2, 33, n)) for n in widths)
    sq, grads = outer_sqnorms(A, G, store=store, backend=case.backend)
    oracle = per_sample_gradients(A, G)
    if grads is not None:
        assert relative_error(grads, oracle) <= case.rounding
        oracle = grads.double()
    assert worst_relative_error(sq, oracle.square().sum((1, 2))) <= case.tolerance


def test_gradients_that_are_not_kept_are_formed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_torch, "BUFFER", 64)
    sizes = sizes_of_products(monkeypatch)
    A, G = torch.randn(4, 3, 16), torch.randn(4, 3, 10)
    sq, _ = outer_sqnorms(A, G, backend="torch")
    assert max(sizes) <= 64
    oracle = per_sample_gradients(A, G).square().sum((1, 2))
    assert worst_relative_error(sq, oracle) <= 1e-5


@every_case
@pytest.mark.parametrize("casts", [None, torch.bfloat16, torch.float16], ids=str)
def test_gradients_alone_are_precise(case: Case, casts: torch.dtype | None) -> None:
    """Whatever the caller allows for its own products."""
    A, G = case.randn(3, 200, 24), case.randn(3, 200, 5, seed=1)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.no_grad(), torch.autocast(case.device, casts, enabled=casts is not None):
            grads = outer_grads(A, G)
        found = outer_grads(A.requires_grad_(), G)
    finally:
        torch.set_float32_matmul_precision(before)
        A = A.detach()
    assert torch.equal(grads, found) and not found.requires_grad
    assert grads.dtype == case.dtype
    assert relative_error(grads, per_sample_gradients(A, G)) <= max(2 * case.rounding, 1e-5)
    wide = outer_grads(A, G.double())
    assert wide.dtype == torch.float64
    assert relative_error(wide, per_sample_gradients(A, G)) <= 1e-12


def by_tensor_cores(A_Td: torch.Tensor, G_Tp: torch.Tensor, alone: int) -> torch.Tensor:
    """``Gᵀ A`` as an H100 was seen to compute it, 16 positions at a time, in float64; results of
    ``alone`` positions are added up in fp32."""
    total = torch.zeros(G_Tp.shape[1], A_Td.shape[1])
    for As, Gs in zip(A_Td.split(alone), G_Tp.split(alone), strict=True):
        running = torch.zeros_like(total, dtype=torch.float64)
        for a, g in zip(As.split(16), Gs.split(16), strict=True):
            numbers = torch.cat([running[None], g[:, :, None] * a[:, None, :]])
            sums = cut(numbers, 25, numbers.abs().amax(0)).sum(0)
            running = cut(sums, 23, sums)
        total += running.float()
    return total.double()


def positions_that_hide(
    T: int, first: int, small: float, noise: float, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[1, T, 128]`` each: a large product at ``first`` that the last position takes away, and
    between them products that are each too small to count beside it."""
    generator = torch.Generator().manual_seed(T + first)
    A, G = torch.full((1, T, 128), small), torch.full((1, T, 128), small)
    A += noise * torch.randn(A.shape, generator=generator)
    G += noise * torch.randn(G.shape, generator=generator)
    A[:, first], A[:, -1], G[:, first], G[:, -1] = 1, 1, 1, -1
    return A.to(device, torch.bfloat16), G.to(device, torch.bfloat16)


HIDING = [
    (T, first, small, noise)
    for T in (512, 1024, 2304, 4096)
    for first in (0, 100)
    for small, noise in ((0.97 * 2.0**-12, 0), (1.375 * 2.0**-12, 0), (0.0, 2.0**-12), (0.0, 0.1))
]


@pytest.mark.parametrize(("T", "first", "small", "noise"), HIDING)
def test_what_tensor_cores_lose_of_a_product_is_in_doubt(
    T: int, first: int, small: float, noise: float
) -> None:
    A, G = positions_that_hide(T, first, small, noise)
    A_8, G_8 = A[..., :8].double(), G[..., :8].double()
    measured, released = by_tensor_cores(A_8[0], G_8[0], 1024), by_tensor_cores(A_8[0], G_8[0], T)
    sq, spread_1 = measured.square().sum()[None].float(), spread(A_8, G_8).float()
    bound = upper_bound(sq.sqrt(), doubt_of_sums(sq, spread_1, T, torch.bfloat16))
    assert released.norm() <= bound * OWN
    assert per_sample_gradients(A_8, G_8).norm() <= bound * OWN


@pytest.mark.parametrize("T", [1, 64, 2048, 2049, 32768, 10**6])
def test_additions_of_tensor_cores(T: int) -> None:
    """Of norms and of sums, as kernels promote what they add up."""
    norms = pytest.importorskip("flash_clipping.ops.outer.triton")
    from flash_clipping.ops.clipped_sum import triton as sums

    for dtype in (torch.bfloat16, torch.float32):
        met = 0.0
        of_norms = norms.config_for(dtype, T, 128, 128, False, True)[1]
        for constants in (of_norms, sums.constants_for(dtype, True)):
            alone = constants["PROMOTE"] * constants["BLOCK_T"] or T
            met += min(T, alone) * lost_of(dtype) * 2**24 + -(-T // alone)
        assert met <= additions(T, dtype) + 8


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "first", "small", "noise"), [*HIDING, (32768, 0, 2.0**-12, 0)])
def test_what_a_gpu_loses_of_a_product_is_in_doubt(
    T: int, first: int, small: float, noise: float
) -> None:
    A, G = positions_that_hide(T, first, small, noise, "cuda")
    assert cost.choose_on("cuda", 1, T, 128, 128, 2, may_store=False) == "outer" or T < 1024
    for dtype in (torch.bfloat16, torch.float32):
        pair = A.to(dtype), G.to(dtype)
        sq, _ = outer_sqnorms(*pair)
        bound = upper_bound(sq.sqrt(), doubt_of_sums(sq, spread(*pair), T, dtype))
        (released,) = clipped_sums(pair[0], [pair[1]], torch.ones(1, device="cuda"))
        assert released.double().norm().item() <= bound.item() * OWN


@pytest.mark.gpu
@pytest.mark.parametrize("T", [2048, 8192, 32768])
def test_long_samples_are_hardly_shortened(T: int) -> None:
    """By 1.3e-2 at most at 32768 positions."""
    generator = torch.Generator("cuda").manual_seed(T)
    A, G = (
        torch.randn(2, T, 256, device="cuda", generator=generator, dtype=torch.bfloat16)
        for _ in range(2)
    )
    sq_B, _ = outer_sqnorms(A, G)
    bound_B = upper_bound(sq_B.sqrt(), doubt_of_sums(sq_B, spread(A, G), T, A.dtype))
    assert (bound_B / sq_B.sqrt()).max().item() <= 1 + 1.3e-2 * (T / 32768) ** 0.5
