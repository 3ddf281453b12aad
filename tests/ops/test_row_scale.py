from __future__ import annotations

import pytest
import torch

from flash_clipping.ops.rows import row_scale
from tests.ops.cases import Case, every_case, relative_error
from tests.support.errors import raises


@every_case
@pytest.mark.parametrize(
    "shape", [(3, 17, 24), (1, 8), (4, 3, 5, 67), (0, 4, 4), (2, 0, 3)], ids=str
)
def test_rows_are_scaled(case: Case, shape: tuple) -> None:
    x = case.randn(*shape)
    coef = torch.rand(shape[0], device=case.device)
    kept = x.clone()
    scaled = row_scale(x, coef, backend=case.backend)
    assert scaled.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    assert torch.equal(x, kept)
    oracle = x.cpu().double() * coef.cpu().double().view(-1, *(1,) * (len(shape) - 1))
    assert relative_error(scaled, oracle) <= min(case.tolerance, 1e-7)


@every_case
def test_strided_input(case: Case) -> None:
    x = case.randn(20, 2, 16).transpose(0, 1)
    coef = torch.tensor([0.25, 2.0], device=case.device)
    scaled = row_scale(x, coef, backend=case.backend)
    assert torch.equal(scaled, (x * coef.to(x.dtype).view(-1, 1, 1)).to(scaled.dtype))


@every_case
def test_coefficient_zero_gives_exactly_zero(case: Case) -> None:
    x = case.randn(3, 5, 4)
    x[1] = float("inf")
    x[1, 2] = float("nan")
    coef = torch.tensor([1.0, 0.0, 0.5], device=case.device)
    scaled = row_scale(x, coef, backend=case.backend)
    assert torch.equal(scaled[1], torch.zeros_like(scaled[1]))
    assert torch.equal(scaled[0], x[0].to(scaled.dtype))


def test_one_coefficient_for_each_sample() -> None:
    with raises("FC303", ValueError, match=r"expected \(3,\)"):
        row_scale(torch.randn(3, 4), torch.ones(2))
