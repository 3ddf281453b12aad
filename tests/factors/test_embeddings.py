"""Bounds of tables' gradients whose rows were added up one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_clipping.factors.embedding import LONG, EmbeddingGrad
from flash_clipping.ops.error_bounds import upper_bound

V, d = 5000, 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def bound_and_norm(ids: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """Of one sample: what it is clipped by, and the greater of its norm and of what is released."""
    factor = EmbeddingGrad(ids, G, V)
    bound = upper_bound(factor.sqnorms("auto").sqrt(), factor.error_bound("auto"))
    released = factor.clipped_sum(torch.ones(1, device=G.device), "auto").double().norm()
    exact = torch.zeros(V, G.shape[2], dtype=torch.float64, device=G.device)
    exact.index_add_(0, ids[0], G[0].double())
    return bound[0], torch.maximum(released, exact.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("small", [2.0**-13, 1.375 * 2.0**-13, 2.0**-14])
@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.parametrize("T", [LONG + 1, 4097])
def test_rows_that_are_lost_in_a_run_are_in_the_bound(
    T: int, first: int, small: float, device: str
) -> None:
    """One row takes another away again; those between are each too small to count beside it."""
    G = torch.full((1, T, d), small**2)
    G[:, first], G[:, -1] = 1, -1
    bound, norm = bound_and_norm(torch.full((1, T), 7, device=device), G.to(device))
    assert bound >= norm * (1 - 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [2048, 16384])
def test_tokens_of_a_long_text_are_hardly_shortened(T: int, device: str) -> None:
    """A word in nine of which is the same one."""
    generator = torch.Generator().manual_seed(T)
    often_V = 1 / (torch.arange(V) + 1.0)
    ids = torch.multinomial(often_V, T, replacement=True, generator=generator)[None]
    G = torch.randn(1, T, 64, generator=generator).bfloat16()
    bound, norm = bound_and_norm(ids.to(device), G.to(device))
    assert norm * (1 - 1e-4) <= bound <= norm * (1 + 4e-3 * T / 16384)
