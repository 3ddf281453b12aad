"""Gradients of units that are stored in place of a linear map's operands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_clipping.factors import DenseGrad, LinearGrad, UnitMap
from flash_clipping.factors.base import UnitGrad
from tests.ops.cases import relative_error, worst_relative_error

MAPS = {
    "in order": ([0, 0, 0, 1, 2, 2, -1], 3),
    "scattered": ([2, 0, -1, 2, 1, 0, 2], 3),
    "a unit without rows": ([2, 2, 0, 0, 0, 2, 2], 4),
}


def operands(T: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T)
    A, G = (torch.randn(7, T, f, generator=generator, dtype=torch.float64) for f in (3, 2))
    return A.to(dtype), G.to(dtype)


def truth(A: Tensor, G: Tensor, index: list[int], count: int) -> Tensor:
    grads = torch.zeros(count, 2, 3, dtype=torch.float64)
    for m, u in enumerate(index):
        if u >= 0:
            grads[u] += G[m].double().mT @ A[m].double()
    return grads


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("name", MAPS)
def test_stored_gradients_of_units_match_their_sums(name: str, T: int) -> None:
    """Norms and sums of the units' own gradients; what is not finite stays with its unit."""
    index, count = MAPS[name]
    A, G = operands(T)
    for row, u in enumerate(index):
        if u < 0:
            A[row], G[row] = torch.inf, torch.nan  # of nobody
    expected = truth(A, G, index, count)
    stored = UnitGrad(LinearGrad(A, G), UnitMap(torch.tensor(index), count)).stored("torch")
    assert type(stored) is DenseGrad and stored.error_bound("torch") is None
    assert relative_error(stored.dense(), expected) <= 1e-12
    sq_U = stored.sqnorms("torch")
    assert worst_relative_error(sq_U, expected.square().sum((1, 2))) <= 1e-12
    coef_U = torch.linspace(0.3, 1.0, count, dtype=torch.float64)
    total = torch.einsum("u,upd->pd", coef_U, expected)
    assert relative_error(stored.clipped_sum(coef_U, "torch"), total) <= 1e-12
    lost = index[0]
    G[0] = torch.inf
    stored = UnitGrad(LinearGrad(A, G), UnitMap(torch.tensor(index), count)).stored("torch")
    finite_U = torch.isfinite(stored.sqnorms("torch"))
    assert finite_U.tolist() == [u != lost for u in range(count)]


def test_what_is_measured_is_what_is_released() -> None:
    """In 16 bits: the norm is that of the rounded gradients."""
    index, count = MAPS["in order"]
    A, G = operands(4, torch.bfloat16)
    stored = UnitGrad(LinearGrad(A, G), UnitMap(torch.tensor(index), count)).stored("torch")
    assert stored.grads.dtype == torch.bfloat16
    released = torch.stack(
        [stored.clipped_sum(one, "torch") for one in torch.eye(count, dtype=torch.float32)]
    )
    sq_U = stored.sqnorms("torch")
    assert worst_relative_error(sq_U, released.double().square().sum((1, 2))) <= 1e-6
