from __future__ import annotations

import torch

from flash_clipping.ops.linear import linear_sqnorms
from flash_clipping.ops.runtime import cost
from tests.ops.cases import (
    Case,
    every_case,
    worst_relative_error,
)
from tests.ops.opcases import squares_of_products


@every_case
def test_groups_of_every_kind(case: Case) -> None:
    groups = [
        (case.randn(2, 9, 16), [case.randn(2, 9, 24)]),
        (case.randn(2, 9, 16, seed=1), [case.randn(2, 9, 24, seed=2)]),
        (case.randn(2, 40, 8), [case.randn(2, 40, 8), case.randn(2, 40, 12)]),  # outer
        (case.randn(2, 3, 64), [case.randn(2, 3, 64), case.randn(2, 3, 32)]),  # gram
        (case.randn(2, 6), [case.randn(2, 5)]),  # one position
        (case.randn(2, 3, 2, 16), [case.randn(2, 3, 2, 24)]),  # more positions than one axis
        (case.randn(20, 2, 16).transpose(0, 1), [case.randn(2, 20, 64)[..., ::2]]),
        (case.randn(0, 3, 4), [case.randn(0, 3, 5)]),
        (case.randn(2, 0, 4), [case.randn(2, 0, 5)]),
    ]
    results = linear_sqnorms(groups, backend=case.backend)
    assert len(results) == len(groups)
    for (sq_LB, doubt_LB), (A, Gs) in zip(results, groups, strict=True):
        assert doubt_LB.shape == sq_LB.shape
        oracle = torch.stack([*squares_of_products(A.cpu(), *(G.cpu() for G in Gs))])
        assert worst_relative_error(sq_LB, oracle) <= case.tolerance


def test_no_groups_have_no_norms() -> None:
    assert linear_sqnorms([]) == []


def test_stored_gradients_never_outgrow_the_operands() -> None:
    for T in (64, 256, 1024):
        for d in (256, 1024, 4096):
            if cost.choose_on("cuda", 8, T, d, d, 2, may_store=True) == "outer_store":
                assert d * d <= cost.STORE_BUDGET * T * 2 * d
