"""Gradients that are kept as they are, and too long to be added up in one go."""

from __future__ import annotations

import pytest
import torch

from flash_clipping.factors import DenseGrad, LinearGrad
from flash_clipping.ops.error_bounds import ROW
from flash_clipping.ops.outer import outer_sqnorms


@pytest.mark.parametrize("n", [ROW - 1, ROW, ROW + 1, 3 * ROW + 5])
def test_norms_of_rows_of_any_length(n: int) -> None:
    grads = torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    grads[1] = torch.nan
    found = DenseGrad(grads).sqnorms("torch").sqrt().double()
    torch.testing.assert_close(found, grads.double().norm(dim=1), rtol=1e-6, atol=0, equal_nan=True)


def test_norms_of_a_vocabulary_are_exact() -> None:
    """PyTorch's own sum of 2^25 squares on a CPU is 2e-3 too low or too high: a sample would be
    released by that much above the bound."""
    p, d = 2**15, 2**10
    grads = torch.full((1, p, d), 1.5e-3)
    expected = 1.5e-3 * (p * d) ** 0.5
    for found in (
        DenseGrad(grads).sqnorms("torch"),
        outer_sqnorms(torch.ones(1, 1, d), grads[..., :1].mT, store=True, backend="torch")[0],
    ):
        assert abs(found.sqrt().item() / expected - 1) <= 1e-5


def test_sums_over_samples_are_formed_in_two_levels() -> None:
    """In turn, each of the last samples would be lost beside the first."""
    n = 2**14
    grads = torch.full((n, 3), 2.0**-24)
    grads[0] = 1
    for coef in (torch.ones(n), torch.cat([torch.ones(n - 1), torch.zeros(1)])):
        total = DenseGrad(grads).clipped_sum(coef, "torch").double()
        exact = (grads.double() * coef.double()[:, None]).sum(0)
        assert ((total - exact).abs() <= 300 * 2.0**-24).all()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1000, 8192, 20000])
@pytest.mark.parametrize("B", [1, 2, 5])
def test_few_long_products_are_measured_as_they_are_released(B: int, T: int) -> None:
    random = torch.Generator().manual_seed(T + B)
    A, G = (torch.randn(B, T, n, generator=random).cuda().bfloat16() for n in (1024, 768))
    factor = LinearGrad(A, G)
    stored = factor.stored("auto")
    exact = torch.stack([g.double().mT @ a.double() for g, a in zip(G, A, strict=True)])
    torch.testing.assert_close(stored.grads.double(), exact, rtol=8e-3, atol=0.5)
    own = stored.grads.double().flatten(1).norm(dim=1)
    torch.testing.assert_close(stored.sqnorms("auto").sqrt().double(), own, rtol=1e-5, atol=0)
    total = stored.clipped_sum(1 / own.float(), "auto").double()
    expected = (stored.grads.double() / own[:, None, None]).sum(0)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-6)
