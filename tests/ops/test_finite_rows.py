from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_clipping.ops.rows import finite_rows
from tests.ops.cases import Case, every_case
from tests.support.errors import raises

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


@every_case
def test_all_rows_are_finite(case: Case) -> None:
    """The largest numbers too; and what was noted before stays."""
    x = case.randn(6, 40)
    x[2] = torch.finfo(case.dtype).max
    lost_N = torch.tensor([0, 1, 0, 0, 0, 0], dtype=torch.uint8, device=case.device)
    assert torch.equal(finite_rows(x, lost_N, backend=case.backend), x)
    assert lost_N.tolist() == [0, 1, 0, 0, 0, 0]


@every_case
def test_strides(case: Case) -> None:
    x = case.randn(8, 6).T
    x[3, 2] = NAN
    lost_N = torch.zeros(6, dtype=torch.uint8, device=case.device)
    found = finite_rows(x, lost_N, backend=case.backend)
    assert lost_N.tolist() == [0, 0, 0, 1, 0, 0] and torch.isnan(x[3, 2])
    assert not found[3].any() and torch.equal(found[:3], x[:3])


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_without_elements(shape: tuple[int, ...]) -> None:
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
def test_refused(lost_N: Tensor, x: Tensor, message: str) -> None:
    with raises("FC303", ValueError, match=message):
        finite_rows(x, lost_N, in_place=True)
