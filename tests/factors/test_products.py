"""Bounds of gradients that are products over positions, as libraries of a CPU add these up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_clipping.factors import ConvolutionGrad, LinearGrad, PerSampleGrad
from flash_clipping.factors.embedding import EmbeddingGrad, TiedEmbeddingGrad
from flash_clipping.factors.linear import SegmentedLinearGrad
from flash_clipping.factors.merge import merge
from flash_clipping.factors.units import UnitGrad, UnitMap
from flash_clipping.ops.error_bounds import additions_doubt, upper_bound
from flash_clipping.ops.segments import Segments

WAYS = (
    "linear",
    "two uses",
    "segment",
    "tied",
    "convolution",
    "unit",
    "unit of rows",
    "segment's unit",
    "tied unit",
    "convolution's unit",
    "convolution's unit of rows",
)


def factor_of(A: Tensor, G: Tensor, way: str) -> PerSampleGrad:
    """``Gᵀ A`` of one sample, ``[1, T, d]`` and ``[1, T, p]``, as a gradient of this kind."""
    T, d, p = A.shape[1], A.shape[2], G.shape[2]
    if way.endswith("of rows"):
        A, G = A.view(T // 64, 64, d), G.view(T // 64, 64, p)
    if way.startswith("convolution"):
        factor: PerSampleGrad = ConvolutionGrad(
            A.mT.contiguous(), G.mT.contiguous(), A.new_empty(p, d, 1), (1,), (0,), (1,), 1
        )
    elif way.startswith("segment"):
        rows = Segments(torch.zeros(T, dtype=torch.long), 1)
        factor = SegmentedLinearGrad(A[0], G[0], rows)
    elif way.startswith("tied"):
        nothing = torch.zeros(len(A), 1, dtype=torch.long), A.new_zeros(len(A), 1, d)
        factor = TiedEmbeddingGrad(EmbeddingGrad(*nothing, p), LinearGrad(A, G))
    elif way == "two uses":
        factor = merge(
            [LinearGrad(A[:, i : i + T // 2], G[:, i : i + T // 2]) for i in (0, T // 2)]
        )
    else:
        factor = LinearGrad(A, G)
    if "unit" in way:
        factor = UnitGrad(factor, UnitMap(torch.zeros(len(G), dtype=torch.long), 1))
    return factor


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("d", "p"), [(1, 1), (8, 8), (64, 16)])
@pytest.mark.parametrize("T", [256, 1024, 4096])
def test_products_that_are_rounded_up_as_they_are_released_are_in_the_bound(
    T: int, d: int, p: int, way: str
) -> None:
    """Products of half of what the first one's last bit is worth: each is lost as it is measured,
    and rounded up where coefficients have made it a little more."""
    A, G = torch.ones(1, T, d), torch.full((1, T, p), 2.0**-24)
    for coefficient, left in ((0.501, 0.5), (0.51, 0.5), (0.51, 0.2), (0.51, 0.05)):
        G[:, 0], G[:, -1] = 1, left - 1
        factor = factor_of(A, G, way)
        bound = upper_bound(factor.sqnorms("auto").sqrt().view(1), factor.error_bound("auto"))
        coef = torch.full((1,), coefficient)
        released = factor.clipped_sum(coef, "auto").double().norm() / coef.double()
        assert released <= bound[0] * (1 + 1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("T", [256, 4096])
def test_ordinary_samples_are_hardly_shortened(T: int, way: str) -> None:
    """Convolutions of so many positions are measured as they are released, unless units are."""
    further = 8e-4 if T == 256 else 6e-3
    if T == 4096 and "convolution" in way:
        further = 3.2e-2 if "unit" in way else 1.7e-2
    generator = torch.Generator().manual_seed(T)
    A, G = (torch.randn(1, T, 64, generator=generator) for _ in range(2))
    factor = factor_of(A, G, way)
    bound = upper_bound(factor.sqnorms("auto").sqrt().view(1), factor.error_bound("auto"))
    norm = (G[0].double().mT @ A[0].double()).norm()
    assert norm * (1 - 1e-4) <= bound[0] <= norm * (1 + further)


def test_the_tighter_of_two_bounds_counts() -> None:
    """Where positions cancel the one, where they do not the other; NaN stays what it is."""
    sq, spread = torch.tensor([1.0, 1.0, 0.0, torch.nan]), torch.tensor([1.0, 1e3, 1.0, 1.0])
    off = (1000 + 8) * 2.0**-24
    doubt = additions_doubt(sq, spread, 1000)
    assert doubt[0] == pytest.approx(off**2 / 1e-4, rel=1e-5)
    assert doubt[1] == pytest.approx((2 + 1e3 * off) * 1e3 * off, rel=1e-5)
    assert doubt[2] == pytest.approx(off**2, rel=1e-5) and doubt[3].isnan()
