"""Rows of one sample anywhere: norms and sums of segments against float64, one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flash_clipping.layers.factors import SegmentedLinearGrad
from flash_clipping.ops import error_bounds
from flash_clipping.ops.error_bounds import upper_bound
from flash_clipping.ops.segments import (
    Rows,
    Segments,
    grouped_linear,
    grouped_sums,
    segment_grads,
    segment_sqnorms,
    segment_sums,
    sums_of_tokens,
)
from tests.ops.cases import (
    OWN,
    Case,
    doubt_of_reference,
    every_case,
    every_case_but_interpreted,
    every_case_interpreted_once,
    every_interpreted_case,
    relative_error,
)

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
    (4, 1, 301, 2, 3),
    (2, 3, 0, 4, 4),
    (5, 2, 60, 40, 33),
    (3, 4, 90, 16, 24),  # rows on 16 bytes, as products of a library take them
    (8, 130, 1100, 16, 24),  # and more segments than they take
]
every_spread = pytest.mark.parametrize("how", SPREADS)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
#: Those that the interpreter, which takes a while, tries.
spreads_interpreted = pytest.mark.parametrize(
    "how", ["random", "all in one", "some of none", "none at all"]
)
shapes_interpreted = pytest.mark.parametrize(
    "shape", [(1, 1, 1, 3, 2), (4, 1, 301, 2, 3), (2, 3, 0, 4, 4), (2, 2, 70, 40, 33)], ids=str
)


def spread(how: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    B, E, n, *_ = shape
    torch.manual_seed(0)
    return SPREADS[how](n, B, E)


def oracle(sample_N: Tensor, group_N: Tensor, A: Tensor, G: Tensor, B: int, E: int) -> Tensor:
    """``[E, B, p, d]``, row by row."""
    grads = torch.zeros(E, B, G.shape[1], A.shape[1], dtype=torch.float64)
    for n, (b, e) in enumerate(zip(sample_N.tolist(), group_N.tolist(), strict=True)):
        if 0 <= b < B and 0 <= e < E:
            grads[e, b] += torch.outer(G[n].cpu().double(), A[n].cpu().double())
    return grads


@pytest.mark.every_pair
@every_case_but_interpreted
@every_spread
@every_shape
def test_segments_match_the_oracle(shape: tuple, how: str, case: Case) -> None:
    check_segments(shape, how, case)


@pytest.mark.every_pair
@every_interpreted_case
@spreads_interpreted
@shapes_interpreted
def test_interpreted_segments_match_the_oracle(shape: tuple, how: str, case: Case) -> None:
    check_segments(shape, how, case)


def check_segments(shape: tuple, how: str, case: Case) -> None:
    B, E, n, d, p = shape
    sample_N, group_N = spread(how, shape)
    A, G = case.randn(n, d), case.randn(n, p, seed=1)
    grads = oracle(sample_N, group_N, A, G, B, E)
    segments = Segments(sample_N.to(case.device), B, group_N.to(case.device), E)
    order = segments.order_N
    run = {"backend": case.backend}
    sq_S, doubt_S = segment_sqnorms(Rows(A[order]), Rows(G[order]), segments, **run)
    expected = grads.flatten(2).square().sum(2)
    assert relative_error(sq_S, expected.flatten()) <= 2 * case.tolerance
    norms_B, doubts_B = segments.by_sample(sq_S).clamp(min=0).sqrt(), segments.by_sample(doubt_S)
    assert (expected.sum(0).sqrt() <= upper_bound(norms_B, doubts_B).cpu() * OWN).all()
    gathered = segment_sqnorms(Rows(A, order), Rows(G, order), segments, **run)
    coef = torch.rand(B).to(sq_S)
    sums = grouped_sums(Rows(A[order]), Rows(G[order]), segments, coef, **run)
    released = torch.einsum("ebpd,b->epd", grads, coef.cpu().double())
    assert relative_error(sums, released) <= case.tolerance
    half_gathered = grouped_sums(Rows(A, order), Rows(G[order]), segments, coef, **run)
    again = segment_sqnorms(Rows(A[order]), Rows(G[order]), segments, **run)
    for x, y in zip((sq_S, doubt_S), again, strict=True):
        assert torch.equal(x, y)
    for x, y in zip((sq_S, doubt_S, sums), (*gathered, half_gathered), strict=True):
        # A library's product may round by how its operand lies in memory. Ours may not.
        ours = case.backend == "triton"
        assert torch.equal(x, y) if ours else relative_error(x, y) <= case.rounding
    each = segment_grads(Rows(A[order]), Rows(G[order]), segments, **run)
    assert relative_error(each, grads.transpose(0, 1)) <= case.rounding
    ones = grouped_sums(Rows(A[order]), Rows(G[order]), segments, None, **run)
    assert relative_error(ones, grads.sum(1)) <= case.rounding


@pytest.mark.every_pair
@every_case_but_interpreted
@every_spread
@every_shape
def test_rows_and_products_match_the_oracle(shape: tuple, how: str, case: Case) -> None:
    check_rows_and_products(shape, how, case)


@pytest.mark.every_pair
@every_interpreted_case
@spreads_interpreted
@shapes_interpreted
def test_interpreted_rows_and_products_match_the_oracle(shape: tuple, how: str, case: Case) -> None:
    check_rows_and_products(shape, how, case)


def check_rows_and_products(shape: tuple, how: str, case: Case) -> None:
    B, E, n, d, p = shape
    sample_N, group_N = spread(how, shape)
    segments = Segments(sample_N.to(case.device), B, group_N.to(case.device), E)
    X, W = case.randn(n, d), case.randn(E, p, d)
    inside = (sample_N >= 0) & (group_N >= 0) & (group_N < E)
    expected = torch.zeros(n, p, dtype=torch.float64)
    for i in inside.nonzero().flatten().tolist():
        expected[i] = W[group_N[i]].cpu().double() @ X[i].cpu().double()
    sorted_X = X[segments.order_N]
    found = segments.unsorted(grouped_linear(sorted_X, W, segments, backend=case.backend))
    assert relative_error(found, expected) <= case.rounding
    transposed = grouped_linear(sorted_X, W.mT.contiguous().mT, segments, backend=case.backend)
    assert relative_error(segments.unsorted(transposed), expected) <= case.rounding
    sums = torch.zeros(E, B, d, dtype=torch.float64)
    for i in inside.nonzero().flatten().tolist():
        sums[group_N[i], sample_N[i]] += X[i].cpu().double()
    found = segment_sums(sorted_X, segments, backend=case.backend)
    assert relative_error(found, sums.flatten(0, 1)) <= case.tolerance
    assert torch.equal(segments.inside_N.cpu(), inside[segments.order_N.cpu()])
    samples_N = sample_N[segments.order_N.cpu()]
    inside_N = segments.inside_N.cpu()
    assert torch.equal(segments.sample_N.cpu()[inside_N], samples_N[inside_N])


@every_case_interpreted_once
@pytest.mark.parametrize("sizes", [(40, 33), (130, 200)], ids=str)
def test_lengths_about_a_block(sizes: tuple[int, int], case: Case) -> None:
    """Segments shorter and longer than blocks, steps and the change from Gram to product."""
    d, p = sizes
    if (case.backend, case.device) == ("triton", "cpu") and d > 128:
        pytest.skip("takes the interpreter too long; the other one is like it")
    lengths = torch.tensor([0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300, 1, 0, 513, 2])
    sample_N = torch.repeat_interleave(torch.arange(16) % 4, lengths)
    group_N = torch.repeat_interleave(torch.arange(16) // 4, lengths)
    mixed = torch.randperm(len(sample_N), generator=torch.Generator().manual_seed(0))
    sample_N, group_N = sample_N[mixed], group_N[mixed]
    A, G = case.randn(len(mixed), d), case.randn(len(mixed), p, seed=1)
    grads = torch.zeros(4, 4, p, d, dtype=torch.float64)
    for e in range(4):
        for b in range(4):
            of = (sample_N == b) & (group_N == e)
            grads[e, b] = G[of].cpu().double().mT @ A[of].cpu().double()
    segments = Segments(sample_N.to(case.device), 4, group_N.to(case.device), 4)
    operands = Rows(A, segments.order_N), Rows(G[segments.order_N])
    sq_S, doubt_S = segment_sqnorms(*operands, segments, backend=case.backend)
    spread_S = torch.zeros(16, dtype=torch.float64)
    lengths_N = A.cpu().double().norm(dim=1) * G.cpu().double().norm(dim=1)
    spread_S.index_add_(0, group_N * 4 + sample_N, lengths_N)
    expected = grads.flatten(2).square().sum(2).flatten()
    if case.backend == "triton":  # Gram matrices by tensor cores
        known_S = spread_S.square() * error_bounds.cancellation(True, sq_S.dtype, *sizes)
        assert relative_error(doubt_S, known_S) <= 1e-4
    else:
        of_all = doubt_of_reference(case.device, A.dtype, expected, spread_S, len(mixed))
        assert ((doubt_S.cpu().double() - of_all).abs() <= 1e-4 * (of_all + expected)).all()
    error = ((sq_S.cpu().double() - expected).abs() / expected.clamp(min=1e-9)).max()
    assert error <= 2 * case.tolerance
    coef = torch.tensor([0.5, 0.0, 2.0, 1.0], dtype=sq_S.dtype, device=case.device)
    found = grouped_sums(*operands, segments, coef, backend=case.backend)
    assert relative_error(found, torch.einsum("ebpd,b->epd", grads, coef.cpu().double())) <= (
        case.tolerance
    )


@every_case
def test_dropped_rows_add_nothing(case: Case) -> None:
    """inf and NaN in rows of a dropped sample, and in rows of none."""
    sample_N = torch.tensor([0, 1, -1, 0, 1, 2], device=case.device)
    A, G = case.randn(6, 3), case.randn(6, 2)
    for n in (1, 2, 4):
        A[n], G[n] = float("inf"), float("nan")
    segments = Segments(sample_N, 3)
    order = segments.order_N
    coef = torch.tensor([0.5, 0.0, 2.0], device=case.device)
    (found,) = grouped_sums(Rows(A[order]), Rows(G[order]), segments, coef, backend=case.backend)
    keep = torch.tensor([0, 3, 5], device=case.device)
    of_row = coef[sample_N][keep].double()
    expected = torch.einsum("np,nd,n->pd", G[keep].double(), A[keep].double(), of_row)
    assert relative_error(found, expected) <= case.tolerance
    sq_S, _ = segment_sqnorms(Rows(A[order]), Rows(G[order]), segments, backend=case.backend)
    assert torch.isfinite(sq_S).tolist() == [True, False, True]
    each = segment_grads(Rows(A[order]), Rows(G[order]), segments, backend=case.backend)
    assert torch.isfinite(each.flatten(1)).all(1).tolist() == [True, False, True]


def test_rows_that_cancel_are_bounded() -> None:
    """In fp32 what is measured of rows that nearly cancel would be rounding alone."""
    torch.manual_seed(0)
    for _ in range(200):
        a, g = torch.randn(1, 40), torch.randn(1, 40)
        A = torch.cat([a, a + 1e-6 * torch.randn(1, 40), torch.randn(1, 40)])
        G = 1e3 * torch.cat([g, -g, 1e-9 * torch.randn(1, 40)])
        segments = Segments(torch.tensor([0, 0, 1]), 2)
        factor = SegmentedLinearGrad(A, G, segments)
        released_B = torch.stack(
            [factor.clipped_sum(coef, "torch").double().norm() for coef in torch.eye(2)]
        )
        norms_B = factor.sqnorms("torch").clamp(min=0).sqrt()
        doubt_B = factor.error_bound("torch")
        assert (released_B <= upper_bound(norms_B, doubt_B) * OWN).all()
        grads = torch.stack([G[i:j].double().mT @ A[i:j].double() for i, j in ((0, 2), (2, 3))])
        lengths = A.double().norm(dim=1) * G.double().norm(dim=1)
        spread_B = torch.stack([lengths[:2].sum(), lengths[2]])
        error_B = norms_B.double().square() - grads.square().sum((1, 2))
        assert (error_B.abs() <= 1e-13 * spread_B.square() + 1e-6 * norms_B.square()).all()


@every_case
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_tokens_leave_out_rows_of_no_group(weighted: bool, case: Case) -> None:
    """Each token's rows; what is of no group adds nothing, whatever it and its weight hold."""
    tokens, k, f = 7, 3, 130
    group_Mk = torch.randint(5, (tokens, k), generator=torch.Generator().manual_seed(0)) - 1
    sample_N = (torch.arange(tokens) // 4).repeat_interleave(k)
    segments = Segments(sample_N.to(case.device), 2, group_Mk.flatten().to(case.device), 4)
    X_Nf, weight_Mk = case.randn(tokens * k, f), case.randn(tokens, k, seed=1)
    outside_Mk = (group_Mk < 0).to(case.device)
    assert outside_Mk.any()
    X_Nf[outside_Mk.flatten()] = float("nan")
    weight_Mk[outside_Mk] = float("inf")
    kept = X_Nf.view(tokens, k, f).cpu().double()
    if weighted:
        kept = kept * weight_Mk.cpu().double().unsqueeze(2)
    expected = kept.masked_fill(outside_Mk.cpu().unsqueeze(2), 0).sum(1)
    sorted_Nf = X_Nf[segments.order_N]
    weights = weight_Mk if weighted else None
    found = sums_of_tokens(sorted_Nf, segments, k, weights, backend=case.backend)
    assert found.dtype == case.dtype
    assert relative_error(found, expected) <= case.rounding
    if weighted:  # the sum keeps the digits of the wider dtype
        found_in = torch.promote_types(case.dtype, torch.float32)
        wide = sums_of_tokens(sorted_Nf, segments, k, weight_Mk.to(found_in), backend=case.backend)
        assert wide.dtype == found_in
        assert relative_error(wide, expected) <= case.tolerance
    assert torch.equal(segments.unsorted(sorted_Nf).nan_to_num(), X_Nf.nan_to_num())
