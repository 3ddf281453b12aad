"""Operations on rows of tensors of any shape: sums, products, and rows that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flash_clipping.ops.rows import finite_rows, row_scale, row_sums
from flash_clipping.ops.runtime.shapes import Normalized
from tests.ops.cases import Case, every_case, relative_error
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


def test_one_coefficient_for_each_sample() -> None:
    with raises("FC303", ValueError, match=r"expected \(3,\)"):
        row_scale(torch.randn(3, 4), torch.ones(2))


INF, NAN = float("inf"), float("nan")


@every_case
@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("shape", [(70, 5), (3, 4097), (5,), (4, 3, 2), (2, 9000)], ids=str)
def test_rows_that_are_not_finite(case: Case, shape: tuple[int, ...], in_place: bool) -> None:
    """Whichever element it is, in the first part of a row or the last."""
    clean = case.randn(*shape)
    for row, place, value in ((1, -1, INF), (0, 0, NAN), (len(clean) - 1, 0, -INF)):
        x = clean.clone()
        x.view(len(x), -1)[row, place] = value
        given = x.clone()
        lost_N = torch.zeros(len(x), dtype=torch.uint8, device=case.device)
        found = finite_rows(x, lost_N, in_place=in_place, backend=case.backend)
        expected = clean.clone()
        expected[row] = 0
        assert torch.equal(found, expected)
        assert lost_N.tolist() == [int(n == row) for n in range(len(x))]
        assert (found is x) is in_place
        if not in_place:
            assert torch.equal(x.isfinite(), given.isfinite())


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_rows_without_elements_lose_none(shape: tuple[int, ...]) -> None:
    lost_N = torch.zeros(shape[0], dtype=torch.uint8)
    assert finite_rows(torch.empty(shape), lost_N).shape == shape
    assert not lost_N.any()


@pytest.mark.parametrize(
    ("lost_N", "x", "message"),
    [
        (torch.zeros(2, dtype=torch.uint8), torch.ones(3, 2), "one entry of uint8 for each"),
        (torch.zeros(3), torch.ones(3, 2), "found lost_N .* of torch.float32"),
        (torch.zeros(3, dtype=torch.uint8), torch.ones(2, 3).T, "changed in place"),
    ],
)
def test_operands_that_do_not_fit_are_refused(lost_N: Tensor, x: Tensor, message: str) -> None:
    with raises("FC303", ValueError, match=message):
        finite_rows(x, lost_N, in_place=True)
