from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_clipping.ops.clipped_sum import clipped_sums, clipped_sums_many, reference
from tests.ops.cases import (
    Case,
    every_case,
    every_case_interpreted_once,
    in_rows_on_16_bytes,
    per_sample_gradients,
    relative_error,
)


def oracle_of(A: torch.Tensor, G: torch.Tensor, coef: torch.Tensor) -> torch.Tensor:
    keep = (coef != 0).cpu()
    grads = per_sample_gradients(A, G)[keep]
    return torch.einsum("bpd,b->pd", grads, coef.cpu().double()[keep])


@every_case_interpreted_once
@pytest.mark.parametrize("dropped", [False, True])
def test_kept_tables_serve_the_next_step(case: Case, dropped: bool) -> None:
    shapes = [(24, 40), (40, 24), (16, 8), (16, 24), (7, 5)]  # the last: nothing is aligned
    memo: dict = {}
    for seed in (0, 100):  # the second time with what was kept the first time
        pairs = [
            (case.randn(4, 9, d, seed=seed + 10 * i), case.randn(4, 9, p, seed=seed + 10 * i + 1))
            for i, (d, p) in enumerate(shapes)
        ]
        coef = torch.tensor([0.5, 1.0, 0.125, 0.25], device=case.device)
        if dropped:
            bad = 1 if seed else 2
            coef[bad] = 0
            for A, G in pairs:
                A[bad, 3, 1], G[bad, 2, 0] = float("inf"), float("nan")
        sums = clipped_sums_many(pairs, coef, backend=case.backend, memo=memo)
        for (A, G), total in zip(pairs, sums, strict=True):
            assert relative_error(total, oracle_of(A, G, coef)) <= case.tolerance


@every_case
def test_layers_of_several_dtypes(case: Case) -> None:
    """What one layer's dtype decides must not be decided for the others."""
    A, G = case.randn(3, 9, 16), case.randn(3, 9, 8, seed=1)
    wide = (A.double() / 3, [G.double() / 7])
    coef = torch.rand(3, device=case.device)
    for sums in (
        [*clipped_sums(A, [G], coef, backend=case.backend), *clipped_sums(*wide, coef)],
        clipped_sums_many([(A, G), (wide[0], wide[1][0])], coef, backend=case.backend),
    ):
        assert relative_error(sums[0], oracle_of(A, G, coef)) <= case.tolerance
        assert relative_error(sums[1], oracle_of(wide[0], wide[1][0], coef)) <= 1e-12
    both = clipped_sums(A, [G, wide[1][0]], coef, backend=case.backend)
    assert relative_error(both[0], oracle_of(A, G, coef)) <= case.tolerance
    assert relative_error(both[1], oracle_of(A, wide[1][0], coef)) <= 1e-12


def test_operands_that_are_widened_a_few_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("torch", "cpu", torch.bfloat16)
    A, G = case.randn(5, 9, 8), case.randn(5, 9, 6, seed=1)
    monkeypatch.setattr(reference, "CONVERTED", 2 * 9 * (8 + 6))
    monkeypatch.setattr(reference, "TOGETHER", 2 * 9)
    coef = torch.tensor([0.5, 0.0, 1.0, 0.25, 0.125])
    (total,) = clipped_sums(A, [G], coef, backend="torch")
    assert relative_error(total, oracle_of(A, G, coef)) <= 1e-5


@every_case_interpreted_once
def test_many_layers_at_once(case: Case) -> None:
    """Layers of several shapes and strides, a dropped sample that is not finite among them."""
    pairs = [
        (case.randn(3, 9, 8), case.randn(3, 9, 130)),
        (case.randn(9, 3, 33).transpose(0, 1), case.randn(3, 9, 5)),
        (case.randn(3, 9, 8)[..., ::2], case.randn(3, 9, 16)),
        (case.randn(3, 1, 24), case.randn(3, 1, 40)),
        (case.randn(3, 1, 24), case.randn(3, 1, 0)),
    ]
    coef = torch.tensor([0.25, 0.0, 2.0], device=case.device)
    for A, G in pairs:
        A[1], G[1] = float("inf"), float("nan")
    sums = clipped_sums_many(pairs, coef, backend=case.backend)
    for total, (A, G) in zip(sums, pairs, strict=True):
        keep = [0, 2]
        oracle = oracle_of(A[keep], G[keep], coef[keep])
        assert relative_error(total, oracle) <= case.tolerance
    again = clipped_sums_many(pairs, coef, backend=case.backend)
    assert all(torch.equal(x, y) for x, y in zip(sums, again, strict=True))


@every_case
def test_a_coefficient_is_not_rounded_with_an_operand(case: Case) -> None:
    """All elements alike, so that a product rounded to 16 bits would be off the same way in all."""
    A = torch.full((1, 1, 16), 1.2421875, dtype=case.dtype, device=case.device)
    G = torch.ones((1, 1, 16), dtype=case.dtype, device=case.device)
    coef = torch.tensor([0.83], device=case.device)
    (total,) = clipped_sums(A, [G], coef, backend=case.backend)
    (many,) = clipped_sums_many([(A, G)], coef, backend=case.backend)
    for found in (total, many):
        assert relative_error(found, oracle_of(A, G, coef)) <= 2e-7


def kernels() -> Any:
    return pytest.importorskip("flash_clipping.ops.clipped_sum.triton")


def of_one_kind(pairs: list, coef: torch.Tensor) -> list[torch.Tensor]:
    """The sums by one launch."""
    module = kernels()
    (kind,) = module.kinds_of(pairs)
    found: list[torch.Tensor] = module.launch_clipped_sums(module.Products(pairs), kind, coef)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        (3, 64, [(128, 128)]),
        (5, 128, [(136, 72)]),  # tiles that are not whole
        (2, 2048, [(264, 520)]),  # samples added up in several parts
        (7, 192, [(2048, 3000)]),  # more tiles than programs
        (1, 64, [(8, 8)]),
        (4, 128, [(1024, 2048), (8, 8), (520, 264), (2048, 1024), (128, 136), (1032, 3000)]),
        (2, 1088, [(72, 40)] * 40 + [(1024, 1032)] * 3),  # layers that a program has no tile of
        (5, 197, [(136, 72), (520, 264)]),  # samples that are not whole steps
        (3, 1, [(64, 128)]),
        (2, 1057, [(264, 520)]),
        (3, 128, [(256, 257)]),  # rows on 16 bytes that are no multiple of them
        (3, 197, [(72, 1001), (1001, 257), (264, 520), (257, 64)]),
        (2, 64, [(1024, 50257)]),
        # Many samples of few positions: other tiles.
        (12, 128, [(384, 200), (200, 384), (1024, 2048)]),  # turned, and not
        (12, 197, [(72, 1001), (1001, 257), (264, 520), (257, 64)]),  # an odd number of steps of 32
        (24, 48, [(520, 264)] * 90),
        (64, 17, [(384, 200), (136, 264)]),  # samples shorter than a step
        (5, 384, [(520, 264), (8, 8)]),
    ],
    ids=str,
)
def test_tiles_that_one_warp_loads(dtype: torch.dtype, shape: tuple) -> None:
    B, T, widths = shape
    pairs = [
        tuple(in_rows_on_16_bytes(torch.randn(B, T, n, device="cuda", dtype=dtype)) for n in dp)
        for dp in widths
    ]
    coef = torch.rand(B, device="cuda")
    module = kernels()
    if not (module.tiles.is_hopper(coef.device) and module.has_gluon()):
        pytest.skip("needs Hopper and a Triton that is known")
    assert module.Products(pairs).aligned

    def check() -> list[torch.Tensor]:
        sums = of_one_kind(pairs, coef)
        for total, (A, G) in zip(sums, pairs, strict=True):
            kept = coef != 0
            grads = torch.bmm(G[kept].double().mT, A[kept].double())
            oracle = torch.einsum("bpd,b->pd", grads, coef[kept].double())
            assert relative_error(total, oracle) <= 5e-6
        return sums

    first = check()
    for _ in range(3):  # the same from run to run
        again = of_one_kind(pairs, coef)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    if B > 1:  # a dropped sample, whatever it holds
        coef[1] = 0
        for A, G in pairs:
            A[1, -1, 5], G[1, T // 2, 2] = float("inf"), float("nan")
        check()


@every_case_interpreted_once
@pytest.mark.parametrize("tma", [False, True])
def test_products_that_are_worth_a_launch(case: Case, tma: bool) -> None:
    """Descriptors, and programs that walk over the tiles of several layers."""
    if case.backend != "triton":
        pytest.skip("is about kernels")
    module = kernels()
    widths = [(136, 264), (8, 8), (264, 136)]
    pairs = [(case.randn(3, 40, d, seed=d), case.randn(3, 40, p, seed=p + 1)) for d, p in widths]
    coef = torch.tensor([0.5, 0.0, 2.0], device=case.device)
    for A, G in pairs:
        A[1], G[1] = float("inf"), float("nan")
    (kind,) = module.kinds_of(pairs)
    kind = kind._replace(small=False)
    config = dict(module.constants_for(torch.float32, tma), PROMOTE=1)
    sums = module.launch_clipped_sums(module.Products(pairs), kind, coef, config)
    for total, (A, G) in zip(sums, pairs, strict=True):
        oracle = oracle_of(A[[0, 2]], G[[0, 2]], coef[[0, 2]])
        assert relative_error(total, oracle) <= case.tolerance


@every_case_interpreted_once
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    "widths",
    [[(24, 257)], [(257, 24)], [(5, 3)], [(24, 40), (257, 133), (40, 24)]],
    ids=str,
)
def test_rows_on_16_bytes_of_any_width(case: Case, tma: bool, widths: list) -> None:
    """Addresses and strides suit descriptors; what lies between rows is none of theirs."""
    if case.backend != "triton":
        pytest.skip("is about kernels")
    module = kernels()
    pairs = [
        (
            in_rows_on_16_bytes(case.randn(3, 40, d, seed=d)),
            in_rows_on_16_bytes(case.randn(3, 40, p, seed=p + 1)),
        )
        for d, p in widths
    ]
    coef = torch.tensor([0.5, 0.0, 2.0], device=case.device)
    for A, G in pairs:
        A[1], G[1] = float("inf"), float("nan")
    (kind,) = module.kinds_of(pairs)
    kind = kind._replace(small=False)
    work = module.Products(pairs)
    assert work.aligned
    config = dict(module.constants_for(torch.float32, tma), PROMOTE=1)
    sums = module.launch_clipped_sums(work, kind, coef, config)
    for total, (A, G) in zip(sums, pairs, strict=True):
        oracle = oracle_of(A[[0, 2]], G[[0, 2]], coef[[0, 2]])
        assert relative_error(total, oracle) <= case.tolerance


def test_hoppers_kernel_runs_16_bit_operands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for Hopper: there, for 16-bit operands that lie on 16 bytes."""
    module = kernels()
    launched: list[str] = []
    monkeypatch.setattr(module, "launch", lambda kernel, *a, **k: launched.append(kernel))
    hopper = SimpleNamespace(_clipped_sums_ring_kernel="hopper")
    monkeypatch.setitem(sys.modules, "flash_clipping.ops.clipped_sum.hopper", hopper)
    monkeypatch.setattr(module, "_clipped_sums_kernel", "portable")
    monkeypatch.setattr(module, "has_gluon", lambda: True)
    monkeypatch.setattr(module.tiles, "has_tma", lambda device: True)

    def kernel_for(A: torch.Tensor, G: torch.Tensor) -> str:
        module.clipped_sums_many([(A, G)], torch.ones(len(A)))
        return launched.pop()

    A, G = (torch.randn(2, 128, n, dtype=torch.bfloat16) for n in (64, 32))
    assert kernel_for(A, G) == "portable"
    monkeypatch.setattr(module.tiles, "is_hopper", lambda device: True)
    assert kernel_for(A, G) == kernel_for(A.half(), G.half()) == "hopper"
    assert kernel_for(A[:1, ::2], G[:1, ::2]) == "hopper"  # strides of rows may be any
    assert kernel_for(A.float(), G.float()) == kernel_for(A, G.float()) == "portable"
    assert kernel_for(A[:, :99], G[:, :99]) == "hopper"  # not whole steps, nor in a row
    assert kernel_for(A[..., 1:], G) == kernel_for(A[..., :63].clone(), G) == "portable"
    assert kernel_for(A[..., :63], G[..., :1]) == "hopper"  # rows lie on 16 bytes
    monkeypatch.setattr(module, "has_gluon", lambda: False)
    assert kernel_for(A, G) == "portable"
