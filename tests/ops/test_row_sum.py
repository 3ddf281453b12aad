from __future__ import annotations

import pytest
import torch

from flash_clipping.ops.row_sum import row_sums
from flash_clipping.ops.shapes import Normalized
from tests.ops.cases import Case, every_case, relative_error


@every_case
@pytest.mark.parametrize(
    "shape",
    [(3, 17, 24), (2, 1, 130), (1, 70, 5), (4, 33, 257), (0, 4, 4), (2, 0, 3)],
    ids=str,
)
@pytest.mark.parametrize("tensors", [1, 3])
def test_sums_over_positions(case: Case, shape: tuple, tensors: int) -> None:
    rows = [case.randn(*shape) for _ in range(tensors)]
    sums = row_sums(rows, backend=case.backend)
    assert sums.shape == (shape[0], tensors, shape[2])
    assert sums.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    oracle = torch.stack([x.cpu().double().sum(1) for x in rows], dim=1)
    assert relative_error(sums, oracle) <= 1e-5


@every_case
@pytest.mark.parametrize("shape", [(3, 17, 24), (2, 1, 130), (4, 33, 257)], ids=str)
def test_sums_of_products_with_what_is_normalized(case: Case, shape: tuple) -> None:
    B, T, n = shape
    memo: dict = {}
    for seed in (0, 10):  # the second time with what was kept the first time
        rows, normalized, oracle = [], [], []
        for each in range(3):
            x = case.randn(B, T, n + 3, seed=seed + each)[..., 3:]  # rows apart, not on 16 bytes
            wide = x.cpu().double()
            mean, rstd = wide.mean(-1), wide.var(-1, correction=0).add(1e-5).rsqrt()
            rows.append(case.randn(B, T, n, seed=seed + 5 + each))
            statistic = torch.float64 if case.dtype == torch.float64 else torch.float32
            mean, rstd = mean.to(x.device, statistic), rstd.to(x.device, statistic)
            normalized.append(Normalized(x, mean, rstd))
            x_hat = (wide - mean.cpu().double()[..., None]) * rstd.cpu().double()[..., None]
            oracle.append((rows[-1].cpu().double() * x_hat).sum(1))
        sums = row_sums(rows, normalized, backend=case.backend, memo=memo)
        assert relative_error(sums, torch.stack(oracle, dim=1)) <= 1e-5


@every_case
def test_strided_and_shifted_tensors(case: Case) -> None:
    memo: dict = {}
    for seed in (0, 10):
        wide = case.randn(3, 20, 40, seed=seed)
        rows = [wide[:, :, 3:24], wide.transpose(0, 1)[:3, :3, :21].transpose(0, 1)[:, :3]]
        rows = [rows[0][:, :3], rows[1], case.randn(3, 21, 3, seed=seed + 1).mT]
        sums = row_sums(rows, backend=case.backend, memo=memo)
        oracle = torch.stack([x.cpu().double().sum(1) for x in rows], dim=1)
        assert relative_error(sums, oracle) <= 1e-5


@every_case
def test_a_poisoned_sample_stays_alone(case: Case) -> None:
    x = case.randn(3, 5, 8)
    x[1, 2] = float("nan")
    sums = row_sums([x, case.randn(3, 5, 8)], backend=case.backend)
    assert (
        sums[1, 0].isnan().all() and sums[[0, 2]].isfinite().all() and sums[1, 1].isfinite().all()
    )


def test_tensors_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one shape and dtype; found torch.float32 \(2, 4, 3\)"):
        row_sums([torch.randn(2, 3, 3), torch.randn(2, 4, 3)])


def test_what_is_normalized_must_fit_its_rows() -> None:
    rows, x, mean = torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.randn(2, 4)
    with pytest.raises(ValueError, match="1 normalized tensors .* for 2 of rows"):
        row_sums([rows, rows], [Normalized(x, mean, mean)])
    with pytest.raises(ValueError, match=r"means and rstds \[B, T\]; found \(2, 3\)"):
        row_sums([rows], [Normalized(x, mean[:, :3], mean)])
    with pytest.raises(ValueError, match="one shape and dtype; found torch.float32"):
        row_sums([rows.half(), rows], [Normalized(x, mean, mean)] * 2)
