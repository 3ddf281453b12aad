"""Bounds of tables' gradients whose rows were added up one after the other."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_clipping.factors import EmbeddingBagGrad, EmbeddingGrad, LinearGrad, PerSampleGrad
from flash_clipping.factors.base import UnitGrad
from flash_clipping.factors.embedding import TiedEmbeddingGrad
from flash_clipping.factors.units import UnitMap
from flash_clipping.layers.factors import ScaledEmbeddingGrad
from flash_clipping.ops.error_bounds import ETA, upper_bound
from tests.ops.cases import OWN

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
@pytest.mark.parametrize("T", [1025, 4097])
def test_rows_that_are_lost_in_a_run_are_in_the_bound(
    T: int, first: int, small: float, device: str
) -> None:
    """One row takes another away again; those between are each too small to count beside it."""
    G = torch.full((1, T, d), small**2)
    G[:, first], G[:, -1] = 1, -1
    bound, norm = bound_and_norm(torch.full((1, T), 7, device=device), G.to(device))
    assert norm <= bound * OWN


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [2048, 16384])
def test_tokens_of_a_long_text_are_clipped_by_their_norm(T: int, device: str) -> None:
    """A word in nine of which is the same one."""
    generator = torch.Generator().manual_seed(T)
    often_V = 1 / (torch.arange(V) + 1.0)
    ids = torch.multinomial(often_V, T, replacement=True, generator=generator)[None]
    G = torch.randn(1, T, 64, generator=generator).bfloat16()
    bound, norm = bound_and_norm(ids.to(device), G.to(device))
    assert bound.item() == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize(
    "as_what", ["lookup", "bag", "scaled", "tied", "unit", "scaled unit", "tied unit"]
)
@pytest.mark.parametrize("T", [256, 1024, 16384, 65536])
def test_rows_that_are_rounded_up_as_they_are_released_are_in_the_bound(
    T: int, as_what: str
) -> None:
    """Rows of half of what the first one's last bit is worth: each is lost as it is measured, and
    rounded up where coefficients have made it a little more."""
    ids, coef = torch.zeros(1, T, dtype=torch.long), torch.full((1,), 0.51)
    G = torch.full((1, T, 1), 2.0**-24)
    for left in (0.05, 0.1, 0.2, 0.5):
        G[:, 0], G[:, -1] = 1, left - 1
        lookup = EmbeddingGrad(ids, G, V)
        factor: PerSampleGrad = lookup
        if as_what == "bag":
            bags = torch.zeros(T, dtype=torch.long)
            factor = EmbeddingBagGrad(bags, ids[0], G[0, :, 0], torch.ones(1, 1), V)
        elif "scaled" in as_what:
            factor = ScaledEmbeddingGrad(ids.unsqueeze(2), G, torch.ones(1, T, 1), V)
        elif "tied" in as_what:
            lookup = EmbeddingGrad(ids, G, 3)
            head = LinearGrad(torch.zeros(1, 2, 1), torch.zeros(1, 2, 3))
            factor = TiedEmbeddingGrad(lookup, head)
        if "unit" in as_what:
            factor = UnitGrad(factor, UnitMap(torch.zeros(1, dtype=torch.long), 1))
        bound = upper_bound(factor.sqnorms("auto").sqrt(), factor.error_bound("auto"))
        released = factor.clipped_sum(coef, "auto").double().norm() / coef.double()
        assert released <= bound[0] * OWN
        assert bound[0] <= left * 1.1 + 1e-2  # and no more than it needs


def test_what_a_row_may_lose_is_in_the_bound_of_its_unit() -> None:
    """The row alone has next to no norm; the unit has that of another row."""
    T = 1024
    ids, G = torch.zeros(2, T, dtype=torch.long), torch.zeros(2, T, 1)
    G[0], G[0, 0], G[0, -1], G[1, 0] = 2.0**-24, 1, -1, 0.3
    ids[1, 1:] = torch.arange(1, T)
    unit = EmbeddingGrad(ids, G, V).by_units(UnitMap(torch.zeros(2, dtype=torch.long), 1))
    bound = upper_bound(unit.sqnorms("auto").sqrt(), unit.error_bound("auto"))
    released = unit.clipped_sum(torch.full((1,), 0.51), "auto").double().norm() / 0.51
    assert released <= bound[0] * OWN


@pytest.mark.parametrize(
    ("as_what", "k", "L"),
    [("lookup", 256, 4096), ("lookup", 4096, 128), ("bag", 256, 4096), ("scaled", 256, 4096)],
)
def test_rows_that_others_sums_round_up(as_what: str, k: int, L: int) -> None:
    """Each row of one sample is a half of the last bit of what others have summed up to, and a
    little more, beside a number of whole bits."""
    each = 1 - 1 / k
    bit = 2.0 ** (math.floor(math.log2((k - 1) * each)) - 23)
    row = (math.floor(1 / L / bit) + 0.5001) * bit if bit < 1 / L else 0.5001 * bit
    ids, G = torch.zeros(k, L, dtype=torch.long), torch.zeros(k, L, 1)
    ids[:-1, 1:], G[:-1, 0], G[-1] = 1, each, row

    def released(some: slice) -> Tensor:
        n = len(ids[some])
        factor: PerSampleGrad = EmbeddingGrad(ids[some], G[some], 2)
        if as_what == "bag":
            bags = torch.arange(n).repeat_interleave(L)
            rows = ids[some].flatten(), G[some].flatten()
            factor = EmbeddingBagGrad(bags, *rows, torch.ones(n, 1), 2)
        elif as_what == "scaled":
            factor = ScaledEmbeddingGrad(ids[some].unsqueeze(2), G[some], torch.ones(n, L, 1), 2)
        return factor.clipped_sum(torch.ones(n), "auto").double()

    change = (released(slice(k)) - released(slice(k - 1))).norm() / (row * L)
    assert abs(change - 1) <= ETA / 2
