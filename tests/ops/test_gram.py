from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_clipping.ops.error_bounds import gram_doubt, upper_bound
from flash_clipping.ops.gram import gram_blocks, gram_sqnorms, reference as gram_torch
from tests.ops.cases import (
    OWN,
    Case,
    cut,
    doubt_of,
    every_case,
    every_case_interpreted_once,
    in_rows_on_16_bytes,
    per_sample_gradients,
    sizes_of_products,
    worst_relative_error,
)
from tests.support.errors import raises

SHAPES = [
    (3, 17, 24, (40,)),  # no multiple of any tile
    (1, 1, 8, (8,)),
    (2, 1, 5, (3,)),
    (1, 150, 16, (48, 20, 20)),  # several tiles of T, several layers of different width
    (2, 130, 65, (33,)),
    (1, 700, 8, (16,)),  # several rows of wide tiles
    (5, 71, 24, (300, 5)),  # wide, which on a CPU goes another way; an odd number of positions
    (3, 128, 600, (20,)),  # the same on the other side
    (0, 4, 8, (8,)),
    (2, 0, 8, (8, 8)),
    (3, 17, 24, (8, 0, 40)),  # a layer without features
]


def by_group(groups: list, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Squared norms and doubts of every group's layers, [L, B] each."""
    rows = {}
    for order, sq_RB, doubt_RB, _ in gram_blocks(groups, **options):
        rows.update(zip(order, zip(sq_RB, doubt_RB, strict=True), strict=True))
    found = []
    for i, (A, Gs) in enumerate(groups):
        none = A.new_zeros((0, len(A)))
        both = [rows[i, j] for j in range(len(Gs))]
        found.append(tuple(map(torch.stack, zip(*both, strict=True))) if both else (none, none))
    return found


@every_case
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_match_the_oracle(case: Case, shape: tuple) -> None:
    B, T, d, ps = shape
    A = case.randn(B, T, d)
    Gs = [case.randn(B, T, p, seed=i + 1) for i, p in enumerate(ps)]
    sq, error_bound = gram_sqnorms(A, Gs, backend=case.backend)
    oracle = torch.stack([per_sample_gradients(A, G).square().sum((1, 2)) for G in Gs])
    assert sq.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert worst_relative_error(sq, oracle) <= case.tolerance
    oracle = torch.stack([doubt_of(case.backend, A, G, max(ps)) for G in Gs])
    some = (oracle != 0).to(error_bound.device)
    assert worst_relative_error(error_bound[some], oracle[oracle != 0]) <= 2 * case.tolerance
    assert (error_bound[~some] <= 1e-30).all()  # without features, or positions


def two_that_cancel(features: int, small: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of one large feature, in which they cancel, and many small ones, in which they add
    up: one sample's A and G."""
    A = torch.full((1, 2, features), small, dtype=torch.float64)
    A[0, 1] = -small
    A[..., 0] = 1
    return A, torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 2, 1).expand(1, 2, 8)


@every_case
@pytest.mark.parametrize("features", [64, 256, 1024, 4096])
def test_what_a_running_sum_loses_is_in_doubt(case: Case, features: int) -> None:
    """Products that are each too small to count beside the first: the norm is theirs alone."""
    for small in (0.96875 * 2.0**-12, 1.375 * 2.0**-12, 1.375 * 2.0**-13):
        A, G = (x.to(case.device, case.dtype) for x in two_that_cancel(features, small))
        (sq,), (error_bound,) = gram_sqnorms(A, [G], backend=case.backend)
        norm = per_sample_gradients(A, G).norm()
        assert norm <= upper_bound(sq.clamp(min=0).sqrt(), error_bound).item() * OWN


def by_tensor_cores(X_Tf: torch.Tensor, promoted: int) -> torch.Tensor:
    """``X Xᵀ`` as an H100 was seen to compute it, 16 features at a time, in float64."""
    total = torch.zeros(len(X_Tf), len(X_Tf), dtype=torch.float32)
    for part in X_Tf.split(promoted, dim=1):
        running = torch.zeros_like(total, dtype=torch.float64)
        for x in part.split(16, dim=1):
            numbers = torch.cat([running.unsqueeze(2), x.unsqueeze(1) * x.unsqueeze(0)], 2)
            sums = cut(numbers, 25, numbers.abs().amax(2, keepdim=True)).sum(2)
            running = cut(sums, 23, sums)
        total += running.float()
    return total.double()


def test_what_tensor_cores_lose_is_in_doubt() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    unbounded = 0
    for attempt in range(80):
        features = 128 << attempt % 4
        A, G = two_that_cancel(features, 1.375 * 2.0 ** -(11 + attempt % 5))
        if attempt % 2:  # the small features of both operands, and of more positions
            G = torch.cat([G, draw(1, 2, features) * 2.0**-13], 2)
            others = draw(1, 4, features), draw(1, 4, G.shape[2]) * 2.0 ** -(attempt % 16)
            A, G = torch.cat([A, others[0]], 1), torch.cat([G, others[1]], 1)
        A, G = A.bfloat16().double(), G.bfloat16().double()
        AA, GG = by_tensor_cores(A[0], 256), by_tensor_cores(G[0], 256)
        sq = (AA * GG).sum()
        spread = (AA.diagonal() * GG.diagonal()).sqrt().sum()
        bound = gram_doubt(
            spread.square(), AA.square().sum(), GG.square().sum(),
            T=A.shape[1], promoted=256, sums=-(-features // 256), dtype=torch.bfloat16,
        )  # fmt: skip
        exact = (G[0].mT @ A[0]).square().sum()
        assert sq + bound >= exact * (1 - 1e-5)
        unbounded += int(sq + spread**2 * 2.0**-21 < exact * (1 - 1e-4))
    assert unbounded > 5  # of these, the bound for random roundings would not have been enough


@every_case_interpreted_once
@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("sliced", [False, True])
def test_rows_on_16_bytes_of_any_width(
    case: Case, tma: bool, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses and strides suit descriptors; what lies between rows is none of theirs."""
    if case.backend != "triton":
        pytest.skip("is about kernels")
    kernels = gram_triton()
    if not tma:
        monkeypatch.setattr(kernels.tiles, "has_tma", lambda device: False)
    if sliced:
        gram_table = pytest.importorskip("flash_clipping.ops.gram.triton")
        monkeypatch.setattr(gram_table, "SLICE", 64)
        monkeypatch.setattr(gram_table, "SLICE_IN_INPUTS", 2)
    groups = [
        (
            in_rows_on_16_bytes(case.randn(2, 140, d)),
            [in_rows_on_16_bytes(case.randn(2, 140, p, seed=p)) for p in ps],
        )
        for d, ps in [(24, (257, 40, 3)), (33, (130,)), (64, (96,))]
    ]
    works = kernels.launches_of(groups)
    assert all(work.kind.aligned for work in works)
    widest = {index: work.widest for work in works for index, _ in work.order}
    found = by_group(groups, backend=case.backend)
    for i, ((A, Gs), (sq_LB, doubt_LB)) in enumerate(zip(groups, found, strict=True)):
        oracle = torch.stack([per_sample_gradients(A, G).square().sum((1, 2)) for G in Gs])
        assert worst_relative_error(sq_LB, oracle) <= case.tolerance
        if not sliced:  # of slices the doubts add up to less
            oracle = torch.stack([doubt_of(case.backend, A, G, widest[i]) for G in Gs])
            assert worst_relative_error(doubt_LB, oracle) <= 2 * case.tolerance


def launches() -> Any:
    return pytest.importorskip("flash_clipping.ops.runtime.tiles")


def gram_triton() -> Any:
    return pytest.importorskip("flash_clipping.ops.gram.triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (60, 300, 64, (64,)),  # more tiles than programs, and all that is loaded fits the ring
        (40, 300, 72, (8, 2056, 16)),  # steps that are not whole, a descriptor made after one step
        (9, 700, 520, (8, 8, 8, 8, 8)),  # many descriptors in a row
        (3, 1000, 2056, (3000,)),  # products that are added up in between
        (1, 1, 16, (16,)),
        (140, 128, 1032, (1032, 40)),  # diagonal tiles only
        (40, 300, 64, (257,)),  # rows on 16 bytes that are no multiple of them
        (9, 300, 257, (1001, 8, 257, 1)),
        (2, 200, 72, (50257, 257)),  # slices, of which one is not whole
    ],
    ids=str,
)
def test_tiles_that_one_warp_loads(dtype: torch.dtype, shape: tuple) -> None:
    B, T, d, ps = shape
    A, *Gs = [
        in_rows_on_16_bytes(torch.randn(B, T, n, device="cuda", dtype=dtype)) for n in (d, *ps)
    ]
    kernels = gram_triton()
    if not (kernels.has_gluon() and kernels.tiles.is_hopper(A.device)):
        pytest.skip("needs Hopper and a Triton that is known")
    (work,) = kernels.launches_of([(A, Gs)])
    assert work.kind.aligned
    sq, error_bound = gram_sqnorms(A, Gs, backend="triton")
    again = gram_sqnorms(A, Gs, backend="triton")
    assert torch.equal(sq, again[0]) and torch.equal(error_bound, again[1])
    for sq_B, doubt_B, G in zip(sq, error_bound, Gs, strict=True):
        gradients = torch.bmm(G.double().mT, A.double())
        assert worst_relative_error(sq_B, gradients.square().sum((1, 2))) <= 1e-5
        if G.shape[2] <= 4096:  # of slices the doubts add up to less
            expected_B = doubt_of("triton", A, G, work.widest)
            assert worst_relative_error(doubt_B, expected_B) <= 2e-5


@pytest.mark.gpu
def test_a_poisoned_sample_leaves_those_after_it_alone() -> None:
    """One program walks over tiles of many samples, with sums that it takes along."""
    A = torch.randn(200, 130, 64, device="cuda", dtype=torch.bfloat16)
    Gs = [torch.randn(200, 130, p, device="cuda", dtype=torch.bfloat16) for p in (64, 96)]
    clean = gram_sqnorms(A, Gs, backend="triton")
    A[3, 129, 5], Gs[0][50, 0, 0], Gs[1][60, 129, 95] = float("nan"), float("inf"), float("-inf")
    poisoned = gram_sqnorms(A, Gs, backend="triton")
    hit = torch.zeros(2, 2, 200, dtype=torch.bool, device="cuda")
    hit[:, :, 3] = hit[:, 0, 50] = hit[:, 1, 60] = True
    for sq, before, where in zip(poisoned, clean, hit, strict=True):
        assert not sq[where].isfinite().any()
        assert torch.equal(sq[~where], before[~where])


def test_hoppers_kernel_runs_16_bit_operands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for Hopper: there, for 16-bit operands of one dtype that descriptors can address."""
    kernels = gram_triton()
    launched: list[str] = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, *a, **k: launched.append(kernel))
    hopper = SimpleNamespace(_gram_ring_kernel="hopper")
    monkeypatch.setitem(sys.modules, "flash_clipping.ops.gram.hopper", hopper)
    monkeypatch.setattr(kernels, "_gram_kernel", "portable")
    monkeypatch.setattr(kernels.tiles, "has_tma", lambda device: True)

    def kernel_for(A: torch.Tensor, *Gs: torch.Tensor) -> str:
        kernels.gram_blocks([(A, Gs)])
        return launched.pop()

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    A, G = randn(2, 9, 64), randn(2, 9, 32)
    assert kernel_for(A, G) == "portable"
    monkeypatch.setattr(kernels.tiles, "is_hopper", lambda device: True)
    monkeypatch.setattr(launches(), "has_gluon_modules", lambda: True)
    monkeypatch.setattr(launches(), "VERSION", (3, 6))
    assert kernel_for(A, G) == kernel_for(A, G, G) == kernel_for(A.half(), G.half()) == "hopper"
    assert kernel_for(A.float(), G.float()) == kernel_for(A, G.float()) == "portable"
    assert kernel_for(A.half(), G) == kernel_for(A, G, G.float()) == "portable"
    assert kernel_for(randn(2, 9, 65)[..., 1:], G) == kernel_for(randn(2, 9, 60), G) == "portable"
    assert kernel_for(randn(2, 1, 64).expand(2, 9, 64), G) == "portable"
    assert kernel_for(A, G[..., :0]) == "portable"  # a layer without steps
    monkeypatch.setattr(launches(), "VERSION", (3, 10))
    assert kernel_for(A, G) == "portable"
    monkeypatch.setattr(launches(), "VERSION", (3, 6))
    monkeypatch.setattr(kernels.tiles, "has_tma", lambda device: False)
    assert kernel_for(A, G) == "portable"


def test_no_temporary_is_larger_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_torch, "TILE", 8)
    sizes = sizes_of_products(monkeypatch)
    A, G = torch.randn(5, 30, 4), torch.randn(5, 30, 6)
    gram_sqnorms(A, [G], backend="torch")
    assert max(sizes) <= 8 * 8
    assert len(sizes) == 2 * 5 * 10  # A and G, 5 samples, 4 + 3 + 2 + 1 tiles


def test_unequal_rows_are_refused() -> None:
    with raises("FC303", ValueError, match=r"A has shape \(2, 3, 4\) and G has shape \(2, 5, 4\)"):
        gram_sqnorms(torch.randn(2, 3, 4), [torch.randn(2, 5, 4)])


@every_case_interpreted_once
@pytest.mark.parametrize("shape", [(1, 140, 64), (3, 1, 64)], ids=str)
def test_what_was_kept_serves_any_stride_of_one_element(
    case: Case, shape: tuple[int, int, int]
) -> None:
    """A stride that is never taken may be odd, in the first step or in those after it."""
    B, T, d = shape
    odd = (7, d, 1) if B == 1 else (d, 5, 1)
    for ways in ((False, True), (True, False)):
        memo: dict = {}
        for seed, is_odd in enumerate(ways):
            A, G = case.randn(B, T, d, seed=seed), case.randn(B, T, d, seed=seed + 5)
            if is_odd:
                A, G = A.as_strided(shape, odd), G.as_strided(shape, odd)
            ((_, sq_LB, *_),) = gram_blocks([(A, [G])], backend=case.backend, memo=memo)
            oracle = per_sample_gradients(A, G).square().sum((1, 2))
            assert worst_relative_error(sq_LB[0], oracle) <= case.tolerance


@every_case_interpreted_once
def test_layers_of_many_features_are_shared_out(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.backend == "triton":
        gram_table = pytest.importorskip("flash_clipping.ops.gram.triton")
        monkeypatch.setattr(gram_table, "SLICE", 64)
        monkeypatch.setattr(gram_table, "SLICE_IN_INPUTS", 2)
    memo: dict = {}
    for seed in (0, 100):  # the second time with what was kept the first time
        widths = [(24, (40, 130, 8, 200)), (40, (129,)), (72, (16,))]
        groups = [
            (
                case.randn(2, 9, d, seed=seed + 10 * i),
                [case.randn(2, 9, p, seed=seed + 10 * i + j + 1) for j, p in enumerate(ps)],
            )
            for i, (d, ps) in enumerate(widths)
        ]
        found = by_group(groups, backend=case.backend, memo=memo)
        for (A, Gs), (sq_LB, doubt_LB) in zip(groups, found, strict=True):
            oracle = torch.stack([per_sample_gradients(A, G).square().sum((1, 2)) for G in Gs])
            assert worst_relative_error(sq_LB, oracle) <= case.tolerance
            # Of slices, which are orthogonal parts, the doubts add up: to about that of the whole.
            whole = torch.stack([doubt_of(case.backend, A, G) for G in Gs])
            assert (doubt_LB.cpu().double() <= 2 * whole).all()
            assert (doubt_LB.cpu().double() >= whole / 32).all()
