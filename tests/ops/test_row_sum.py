from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flash_clipping.ops.rows import row_sums
from flash_clipping.ops.runtime.shapes import Normalized
from tests.ops.cases import Case, every_case, in_rows_on_16_bytes, relative_error
from tests.support.errors import raises


def assert_sums(found: tuple[Tensor, Tensor], oracle: Sequence[Tensor]) -> None:
    """Sums side by side, and their squared norms, against those in float64."""
    sums_BN, sq_PB = found
    assert sums_BN.dtype == sq_PB.dtype
    assert sums_BN.shape == (len(oracle[0]), sum(x.shape[1] for x in oracle))
    assert sq_PB.shape == (len(oracle), len(oracle[0]))
    for sums, expected in zip(sums_BN.split([x.shape[1] for x in oracle], 1), oracle, strict=True):
        assert relative_error(sums, expected) <= 1e-5
    assert relative_error(sq_PB, torch.stack([x.square().sum(1) for x in oracle])) <= 1e-5


def normalized_case(case: Case, shape: tuple[int, int, int], seed: int) -> Normalized:
    B, T, n = shape
    x = case.randn(B, T, n + 3, seed=seed)[..., 3:]  # rows apart, not on 16 bytes
    wide = x.cpu().double()
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    mean, rstd = wide.mean(-1), wide.var(-1, correction=0).add(1e-5).rsqrt()
    return Normalized(x, mean.to(x.device, dtype), rstd.to(x.device, dtype))


def oracle_of(rows: Tensor, x_hat: Normalized | None) -> Tensor:
    wide = rows.cpu().double()
    if x_hat is not None:
        x, mean, rstd = (each.cpu().double() for each in x_hat)
        wide = wide * (x - mean[..., None]) * rstd[..., None]
    return wide.sum(1)


@every_case
@pytest.mark.parametrize(
    ("batch", "positions", "widths"),
    [
        (3, 17, [24]),
        (3, 17, [24, 24, 24]),
        (2, 1, [130, 5, 260, 1]),
        (1, 70, [5, 5]),
        (2, 3, [5, 0, 300]),
        (4, 33, [257, 128, 129]),
        (0, 4, [4, 8]),
        (2, 0, [3, 200]),
    ],
    ids=str,
)
def test_sums_over_positions(case: Case, batch: int, positions: int, widths: list[int]) -> None:
    rows = [case.randn(batch, positions, n, seed=i) for i, n in enumerate(widths)]
    found = row_sums(rows, backend=case.backend)
    assert found[0].dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert_sums(found, [oracle_of(x, None) for x in rows])


@every_case
@pytest.mark.parametrize(
    ("widths", "which"),
    [
        ([24], [True]),
        ([24, 24, 24], [True, True, True]),
        ([130, 24, 130, 257], [True, False, False, True]),
        ([257, 24], [False, True]),
    ],
    ids=str,
)
def test_products_with_what_is_normalized(case: Case, widths: list[int], which: list[bool]) -> None:
    memo: dict = {}
    for seed in (0, 10):  # the second time with what was kept the first time
        rows, normalized = [], []
        for i, (n, wanted) in enumerate(zip(widths, which, strict=True)):
            shape = (3, 17, n)
            rows.append(case.randn(*shape, seed=seed + 5 + i))
            normalized.append(normalized_case(case, shape, seed + i) if wanted else None)
        found = row_sums(rows, normalized, backend=case.backend, memo=memo)
        assert_sums(found, list(map(oracle_of, rows, normalized)))
        assert ("table" in memo) == (case.backend == "triton")


@every_case
def test_statistics_that_lie_otherwise_are_copied_and_not_remembered(case: Case) -> None:
    shape = (3, 17, 24)
    rows = case.randn(*shape, seed=5)
    plain = normalized_case(case, shape, 0)
    apart = plain._replace(mean=plain.mean.mT.contiguous().mT)
    wide = plain._replace(rstd=plain.rstd.double())
    for x_hat in (plain, apart, wide):
        memo: dict = {}
        for _ in range(2):
            found = row_sums([rows], [x_hat], backend=case.backend, memo=memo)
            assert_sums(found, [oracle_of(rows, x_hat)])
    short = plain._replace(mean=plain.mean[:, 1:].contiguous())
    turned = plain._replace(rstd=plain.rstd.mT.contiguous())
    for wrong in (short, turned):
        with raises("FC303", ValueError, match="means and rstds of every row"):
            row_sums([rows], [wrong], backend=case.backend, memo={})


@every_case
def test_strided_and_shifted_tensors(case: Case) -> None:
    memo: dict = {}
    for seed in (0, 10):
        wide = case.randn(3, 20, 40, seed=seed)
        rows = [wide[:, :, 3:24], wide.transpose(0, 1)[:3, :3, :21].transpose(0, 1)[:, :3]]
        rows = [rows[0][:, :3], rows[1], case.randn(3, 21, 3, seed=seed + 1).mT]
        rows.append(in_rows_on_16_bytes(case.randn(3, 3, 257, seed=seed + 2)))
        found = row_sums(rows, backend=case.backend, memo=memo)
        assert_sums(found, [oracle_of(x, None) for x in rows])


@every_case
def test_a_poisoned_sample_stays_alone(case: Case) -> None:
    x = case.randn(3, 5, 8)
    x[1, 2] = float("nan")
    sums_BN, sq_PB = row_sums([x, case.randn(3, 5, 8)], backend=case.backend)
    assert sums_BN[1, :8].isnan().all() and sq_PB[0, 1].isnan()
    assert sums_BN[[0, 2]].isfinite().all() and sums_BN[1, 8:].isfinite().all()
    assert sq_PB[0, [0, 2]].isfinite().all() and sq_PB[1].isfinite().all()


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    x = torch.randn(2, 3, 3)
    with raises("FC303", ValueError, match=r"one B, T and dtype; found torch.float32 \(2, 4, 3\)"):
        row_sums([x, torch.randn(2, 4, 3)])
    with raises("FC303", ValueError, match="one B, T and dtype; found torch.float32"):
        row_sums([x.half(), x])


def test_what_is_normalized_must_fit_its_rows() -> None:
    rows, x, mean = torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.randn(2, 4)
    with raises("FC303", ValueError, match="found 1 normalized tensors for 2 of rows"):
        row_sums([rows, rows], [Normalized(x, mean, mean)])
    with raises("FC303", ValueError, match=r"found \(2, 4, 5\), .* beside rows \(2, 4, 3\)"):
        row_sums([rows], [Normalized(torch.randn(2, 4, 5), mean, mean)])
    with raises("FC303", ValueError, match=r"rstds of every row.*; found .*\(2, 3\)"):
        row_sums([rows], [Normalized(x, mean[:, :3], mean)])
    with raises("FC303", ValueError, match="one dtype; found torch.float16, torch.float32"):
        row_sums([rows, rows], [Normalized(x, mean, mean), Normalized(x.half(), mean, mean)])
