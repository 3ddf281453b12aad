"""Bounds of gradients that are products over positions, as libraries of a CPU add these up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_clipping.factors import (
    ConvolutionGrad,
    DenseGrad,
    EmbeddingBagGrad,
    LinearGrad,
    PerSampleGrad,
)
from flash_clipping.factors.base import UnitGrad, merge
from flash_clipping.factors.embedding import EmbeddingGrad, TiedEmbeddingGrad
from flash_clipping.factors.units import UnitMap
from flash_clipping.finish.clipping import total_norm
from flash_clipping.layers.factors import (
    ScaledEmbeddingGrad,
    SegmentedLinearGrad,
)
from flash_clipping.ops.clipped_sum import reference
from flash_clipping.ops.error_bounds import (
    APART,
    ETA,
    SLACK,
    TOGETHER,
    additions,
    doubt_of_sums,
    squared_norms,
    upper_bound,
)
from flash_clipping.ops.linear import rank_one_sqnorms
from flash_clipping.ops.segments import Segments
from tests.ops.cases import OWN

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


@pytest.mark.every_pair
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
        assert released <= bound[0] * OWN


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("T", [64, 256, 4096, 16384])
def test_ordinary_samples_are_clipped_by_their_norm(T: int, way: str) -> None:
    further = 3e-3 if "tied" in way else 1e-5
    generator = torch.Generator().manual_seed(T)
    A, G = (torch.randn(1, T, 64, generator=generator) for _ in range(2))
    factor = factor_of(A, G, way)
    bound = upper_bound(factor.sqnorms("auto").sqrt().view(1), factor.error_bound("auto"))
    norm = (G[0].double().mT @ A[0].double()).norm().item()
    assert norm * (1 - 1e-5) <= bound[0] <= norm * (1 + (further if T > 4096 else 1e-5))


def test_bound_of_sums_is_the_formula() -> None:
    """Nothing where sums lose little; else what they may lose; at least a part of the spread."""
    sq, spread = torch.tensor([1.0, 1.0, 0.0, torch.nan]), torch.tensor([1.0, 1e3, 1.0, 1.0])
    n, delta = 1000, additions(1000) * 2.0**-24 * 1e3
    doubt = doubt_of_sums(sq, spread, n)
    assert doubt[0] == 0 and doubt[3].isnan()
    assert doubt[1] == pytest.approx(((1 + delta) / (1 + SLACK)) ** 2 - 1, rel=1e-5)
    assert doubt[2] == 2.0**-21 and doubt_of_sums(sq, spread, n, torch.bfloat16)[2] == 2.0**-18
    assert additions(n) <= SLACK * 2.0**24 * 2.0**-4  # 0.02 % of the spread


ALONE = ("linear", "lookup", "tied", "scaled", "bag", "convolution")


@pytest.mark.parametrize("way", ALONE)
@pytest.mark.parametrize("T", [APART, 2 * APART - 6])
def test_what_rounding_makes_of_a_sample_does_not_depend_on_others(T: int, way: str) -> None:
    """The second sample is all rounding. Its first position is close below 1, where the next are
    rounded up; on top of the first sample it is above, where they are lost. The last takes the
    first away."""
    d = 1
    A, G = torch.ones(2, T, d), torch.zeros(2, T, d)
    first = 1 - 1.2 * T * 2.0**-24
    G[1, 1:-1], G[1, 0], G[1, -1] = 0.6 * 2.0**-24, first, -first
    ids = torch.zeros(2, T, dtype=torch.long)

    def of(some: slice) -> PerSampleGrad:
        a, g, n = A[some], G[some], len(A[some])
        if way == "lookup":
            return EmbeddingGrad(ids[some], g, T)
        if way == "tied":
            head = LinearGrad(torch.zeros_like(a), g.new_zeros(n, T, T))
            return TiedEmbeddingGrad(EmbeddingGrad(ids[some], g, T), head)
        if way == "scaled":
            return ScaledEmbeddingGrad(ids[some].unsqueeze(2), g[:, :, :1], a, T)
        if way == "bag":
            bags = torch.arange(n).repeat_interleave(T)
            return EmbeddingBagGrad(bags, ids[some].flatten(), g[..., 0].flatten(), a[:, 0], T)
        if way == "convolution":
            x, grad = a.mT.contiguous(), g.mT.contiguous()
            return ConvolutionGrad(x, grad, x.new_empty(d, d, 1), (1,), (0,), (1,), 1)
        return LinearGrad(a, g)

    # C is what makes the second sample's coefficient 1.
    bound = bound_of(of(slice(1, 2)))
    G[0, 0] = 0.95 * bound
    both, first_alone, second = of(slice(2)), of(slice(1)), of(slice(1, 2))
    ones = torch.ones(2)
    change = both.clipped_sum(ones, "auto").double()
    change -= second.clipped_sum(ones[1:], "auto").double()
    alone = first_alone.clipped_sum(ones[:1], "auto").double()
    assert 0.9 * bound <= alone.norm() <= bound
    is_apart = T > APART and way not in ("scaled", "bag")
    assert (change - alone).norm() <= (0 if is_apart else ETA * bound)


def bound_of(factor: PerSampleGrad) -> float:
    """Of the first sample."""
    norms = factor.sqnorms("auto").reshape(factor.batch_size, -1).sum(1).sqrt()
    return upper_bound(norms, factor.error_bound("auto"))[0].item()


def released_of(factor: PerSampleGrad, coefficient: float) -> float:
    coef = torch.zeros(factor.batch_size)
    coef[0] = coefficient
    return factor.clipped_sum(coef, "auto").double().norm().item() / coef[0].item()


def rearranged(A: Tensor, G: Tensor) -> SegmentedLinearGrad:
    """Of rows of samples, in one group, with its elements elsewhere."""
    M, T, _ = A.shape
    segments = Segments(torch.arange(M).repeat_interleave(T), M)
    return SegmentedLinearGrad(A.flatten(0, 1), G.flatten(0, 1), segments, torch.clone)


@pytest.mark.parametrize("rows", ["linear", "convolution", "rearranged", "own"])
def test_many_rows_of_a_unit_are_in_the_bound(rows: str) -> None:
    """Rows that are each lost beside the first, and rounded up as they are released."""
    M, T = 2048, 2
    units = UnitMap(torch.zeros(M, dtype=torch.long), 1)
    for coefficient, left in ((0.5005, 0.1), (0.5005, 0.05), (0.51, 0.5)):
        A, G = torch.zeros(M, T, 1), torch.full((M, T, 1), 2.0**-24)
        A[:, 0] = 1
        G[0], G[-1] = 1, left - 1
        factor: PerSampleGrad = LinearGrad(A, G)
        if rows == "convolution":  # used twice
            x, g = A.mT.contiguous(), G.mT.contiguous()
            geometry = x.new_empty(1, 1, 1), (1,), (0,), (1,), 1
            of_uses = [ConvolutionGrad(x, g / 2, *geometry).by_units(units) for _ in range(2)]
            factor = merge(of_uses)
        elif rows == "rearranged":
            factor = rearranged(A, G).by_units(units)
        elif rows == "own":
            factor = DenseGrad(factor.dense()).by_units(units)
        else:
            factor = factor.by_units(units)
        assert released_of(factor, coefficient) <= bound_of(factor) * OWN


@pytest.mark.parametrize("T", [2, 100, 129, 255, 1000])
@pytest.mark.parametrize("M", [4, 4096])
def test_additions_of_rows_of_a_unit(M: int, T: int) -> None:
    """A long row of a unit is added up by itself, and its sum to those of all others."""
    measured = TOGETHER + -(-M * T // TOGETHER)
    apart = min(T, TOGETHER) + -(-T // TOGETHER) + M
    released = apart if T > APART else TOGETHER + M * T // TOGETHER
    assert additions(M * T) >= min(2 * M * T, measured + released)


def test_rearranged_rows_of_units_are_not_rounded_before_they_are_added_up() -> None:
    """In bf16 norms of rounded rows were below those of what is released."""
    generator = torch.Generator().manual_seed(0)
    A, G = (torch.randn(16, 3, 8, generator=generator).bfloat16() for _ in range(2))
    units = UnitMap(torch.arange(16) % 2, 2)
    factor = rearranged(A, G).by_units(units)
    assert released_of(factor, 0.7) == pytest.approx(bound_of(factor), rel=1e-5)


def test_chunks_of_16_bit_operands_hold_as_many_positions_as_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "CONVERTED", 1)
    M, T = 4096, 8
    A, G = torch.ones(M * T, 1), torch.zeros(M * T, 1)
    G[::T], G[0] = 2.0**-24, 1
    units = UnitMap(torch.zeros(M, dtype=torch.long), 1)
    for left in (0.02, 0.05, 0.1, 0.2):
        G[-1] = left - 1
        operands = (x.view(M, T, 1).bfloat16() for x in (A, G))
        factor = LinearGrad(*operands).by_units(units)
        assert released_of(factor, 0.5005) <= bound_of(factor) * OWN


@pytest.mark.parametrize("T", [256, 512])
@pytest.mark.parametrize(("d", "p"), [(1, 16384), (8, 2048)])
def test_squares_and_products_are_lost_together(T: int, d: int, p: int) -> None:
    """A product of which the last positions are lost, in few elements of a row whose squares are
    lost beside that of the first."""
    A, G = torch.ones(1, T, d), torch.full((1, T, p), 2.0**-24)
    for left in (0.5, 0.75):
        G[:, 0], G[:, -1] = 1, left - 1
        G[:, :, 1:] *= 2.0**-12.02
        factor = LinearGrad(A, G)
        assert released_of(factor, 0.5001) <= bound_of(factor) * OWN


@pytest.mark.parametrize("shape", ["a row", "a column"])
@pytest.mark.parametrize("n", [2048, 2**17])
def test_squares_that_are_lost_beside_the_first(n: int, shape: str) -> None:
    grads = torch.full((2, n), 2.0**-12.01)
    grads[:, 0] = 1
    if shape == "a column":
        grads = grads.mT.contiguous().mT
    norm = grads[0].double().norm()
    assert squared_norms(grads)[0].double().sqrt() >= norm * (1 - 1e-5)


def test_norms_of_many_parameters_are_added_up() -> None:
    norms = torch.full((30000, 2), 2.0**-12.01)
    norms[0] = 1
    assert total_norm(norms)[0].double() == pytest.approx(norms[:, 0].double().norm(), rel=1e-6)


def test_ids_of_a_unit_are_added_up() -> None:
    """Each of another row of the table; the first alone has a norm of 1."""
    N = 65536
    G = torch.full((1, N, 1), 2.0**-12.01)
    G[:, 0] = 1
    lookup = EmbeddingGrad(torch.arange(N)[None], G, N)
    factor = lookup.by_units(UnitMap(torch.zeros(1, dtype=torch.long), 1))
    assert bound_of(factor) >= G.double().norm() * (1 - 1e-4)


@pytest.mark.parametrize("huge", ["input", "gradient"])
def test_an_operand_beyond_what_the_other_can_be_scaled_for_has_no_norm(huge: str) -> None:
    """Times its coefficient, the other would be a few times the least number of fp32."""
    a, g = torch.full((2, 1, 64), 1.0), torch.full((2, 1, 63), 1.0)
    (a if huge == "input" else g)[0], (g if huge == "input" else a)[0] = 1e38, 1e-37
    norms = rank_one_sqnorms(a, g).sqrt()
    assert not norms[0].isfinite() and norms[1] == pytest.approx((64 * 63) ** 0.5)
    wide = rank_one_sqnorms(a.double(), g.double()).sqrt()
    assert wide[0] == pytest.approx(10 * (64 * 63) ** 0.5)
