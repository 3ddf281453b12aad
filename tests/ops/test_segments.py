"""Rows of one sample anywhere: norms and sums of segments against float64, one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_clipping.factors import SegmentedOuter
from flash_clipping.ops.certificate import upper_bound
from flash_clipping.ops.segments import (
    Segments,
    grouped_linear,
    grouped_sums,
    segment_grads,
    segment_sqnorms,
    segment_sums,
)
from tests.support.oracle import assert_close

#: Samples, groups, rows; and how samples and groups are spread over the rows.
SPREADS = {
    "interleaved": lambda n, B, E: (torch.arange(n) % B, torch.arange(n) % E),
    "random": lambda n, B, E: (torch.randint(B, (n,)), torch.randint(E, (n,))),
    "all in one": lambda n, B, E: (torch.full((n,), B - 1), torch.zeros(n, dtype=torch.long)),
    "1000 to 1": lambda n, B, E: ((torch.arange(n) == 7).long() % B, torch.zeros(n).long()),
    "some of none": lambda n, B, E: (torch.arange(n) % (B + 1) - 1, torch.arange(n) % E),
    "groups of none": lambda n, B, E: (torch.arange(n) % B, torch.arange(n) % (E + 2) - 1),
    "none at all": lambda n, B, E: (torch.full((n,), -1), torch.zeros(n, dtype=torch.long)),
}
SHAPES = [
    (3, 4, 50, 5, 7),
    (1, 1, 1, 3, 2),
    (4, 1, 1001, 2, 3),
    (2, 3, 0, 4, 4),
    (5, 2, 60, 40, 33),
]


def spread(how: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    B, E, n, *_ = shape
    torch.manual_seed(0)
    return SPREADS[how](n, B, E)


def oracle(sample_N: Tensor, group_N: Tensor, A: Tensor, G: Tensor, B: int, E: int) -> Tensor:
    """``[E, B, p, d]``, row by row."""
    grads = torch.zeros(E, B, G.shape[1], A.shape[1], dtype=torch.float64)
    for n, (b, e) in enumerate(zip(sample_N.tolist(), group_N.tolist(), strict=True)):
        if 0 <= b < B and 0 <= e < E:
            grads[e, b] += torch.outer(G[n].double(), A[n].double())
    return grads


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", SPREADS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_segments_match_the_oracle(shape: tuple, how: str, dtype: torch.dtype) -> None:
    B, E, n, d, p = shape
    sample_N, group_N = spread(how, shape)
    A, G = torch.randn(n, d).to(dtype), torch.randn(n, p).to(dtype)
    grads = oracle(sample_N, group_N, A, G, B, E)
    segments = Segments(sample_N, B, group_N, E)
    order = segments.order_N
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    sq_S, doubt_S = segment_sqnorms(A[order], G[order], segments)
    expected = grads.flatten(2).square().sum(2)
    assert_close(sq_S, expected.flatten(), 2 * tolerance, "norms")
    bound_B = upper_bound(segments.by_sample(sq_S).sqrt(), segments.by_sample(doubt_S))
    assert (bound_B >= expected.sum(0).sqrt() * (1 - 1e-4)).all()
    coef = torch.rand(B).to(torch.float64 if dtype == torch.float64 else torch.float32)
    sums = grouped_sums(A[order], G[order], segments, coef)
    assert_close(sums, torch.einsum("ebpd,b->epd", grads, coef.double()), tolerance, "sums")
    if dtype != torch.bfloat16:
        assert_close(
            segment_grads(A[order], G[order], segments), grads.flatten(0, 1), tolerance, "grads"
        )
        ones = grouped_sums(A[order], G[order], segments, None)
        assert_close(ones, grads.sum(1), tolerance, "sums of all")
    again = segment_sqnorms(A[order], G[order], segments)
    assert all(torch.equal(x, y) for x, y in zip((sq_S, doubt_S), again, strict=True))


@pytest.mark.parametrize("how", SPREADS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_and_products(shape: tuple, how: str) -> None:
    B, E, n, d, p = shape
    sample_N, group_N = spread(how, shape)
    segments = Segments(sample_N, B, group_N, E)
    X, W = torch.randn(n, d, dtype=torch.float64), torch.randn(E, p, d, dtype=torch.float64)
    inside = (sample_N >= 0) & (group_N >= 0) & (group_N < E)
    expected = (
        torch.stack([W[e.clamp(0, E - 1)] @ x for x, e in zip(X, group_N, strict=True)])
        if n
        else X.new_zeros(0, p)
    )
    expected = expected.masked_fill(~inside.unsqueeze(1), 0)
    found = segments.unsorted(grouped_linear(X[segments.order_N], W, segments))
    assert_close(found, expected, 1e-12)
    sums = torch.zeros(E, B, d, dtype=torch.float64)
    for i in inside.nonzero().flatten().tolist():
        sums[group_N[i], sample_N[i]] += X[i]
    assert_close(segment_sums(X[segments.order_N], segments), sums.flatten(0, 1), 1e-12)
    assert torch.equal(segments.inside_N, inside[segments.order_N])
    assert torch.equal(
        segments.sample_N[segments.inside_N], sample_N[segments.order_N][segments.inside_N]
    )


def test_what_is_dropped_adds_nothing() -> None:
    """inf and NaN in rows of a dropped sample, and in rows of none."""
    sample_N = torch.tensor([0, 1, -1, 0, 1, 2])
    A, G = torch.randn(6, 3), torch.randn(6, 2)
    for n in (1, 2, 4):
        A[n], G[n] = float("inf"), float("nan")
    segments = Segments(sample_N, 3)
    order = segments.order_N
    coef = torch.tensor([0.5, 0.0, 2.0])
    (found,) = grouped_sums(A[order], G[order], segments, coef)
    keep = torch.tensor([0, 3, 5])
    expected = torch.einsum("np,nd,n->pd", G[keep], A[keep], coef[sample_N[keep]])
    assert_close(found, expected, 1e-6)
    sq_S, _ = segment_sqnorms(A[order], G[order], segments)
    assert torch.isfinite(sq_S).tolist() == [True, False, True]


def test_rows_that_cancel_are_bounded() -> None:
    """What is measured of rows that nearly cancel may be rounding alone: the bound holds."""
    torch.manual_seed(0)
    small = 0
    for _ in range(200):
        a, g = torch.randn(1, 40), torch.randn(1, 40)
        A = torch.cat([a, a + 1e-6 * torch.randn(1, 40), torch.randn(1, 40)])
        G = 1e3 * torch.cat([g, -g, 1e-9 * torch.randn(1, 40)])
        segments = Segments(torch.tensor([0, 0, 1]), 2)
        factor = SegmentedOuter(A, G, segments, stacked=False)
        released_B = torch.stack(
            [factor.clipped_sum(coef, "torch").double().norm() for coef in torch.eye(2)]
        )
        norms_B = factor.sqnorms("torch").clamp(min=0).sqrt()
        doubt_B = factor.doubt("torch")
        assert (upper_bound(norms_B, doubt_B) >= released_B * (1 - 1e-4)).all()
        small += int(norms_B[0] < 0.9 * released_B[0])
    assert small > 5  # of these, the measured norm alone would not have been enough


def test_rows_of_two_uses() -> None:
    first = Segments(torch.tensor([1, 0, -1]), 2, torch.tensor([0, 1, 1]), 2)
    second = Segments(torch.tensor([0, 0]), 2, torch.tensor([1, 5]), 2)
    both, order = first.both(second)
    assert both.starts.tolist() == [0, 0, 1, 3, 3]
    rows = torch.cat([first.order_N, 10 + second.order_N])[order]
    assert rows[:3].tolist() == [0, 1, 10]
