"""What can only be seen on a GPU: addresses past 2**31 elements, and no wait for the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flash_clipping import ops
from flash_clipping.layers.ops.hyper_connections import (
    hyper_connections,
    hyper_connections_backward,
)
from flash_clipping.layers.ops.product_key import product_key_backward, product_key_scores
from flash_clipping.layers.ops.stream_mix import stream_mix, stream_mix_backward
from flash_clipping.ops.rows import finite_rows
from flash_clipping.ops.runtime.tables import to_device
from tests.ops.cases import relative_error, worst_relative_error
from tests.support.hyper_connections import params_of

pytestmark = pytest.mark.gpu

FAR = 2**31 + 2**20
"""More elements than a 32-bit offset reaches."""


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def far_operands(width: int) -> tuple[Tensor, Tensor, list[int]]:
    """``A`` past 2**31 elements and a narrow ``G``; ``G`` is zero outside a few rows."""
    T = FAR // width
    A = torch.randn(1, T, width, device="cuda", dtype=torch.bfloat16)
    rows = [0, 1, T // 2, T - 2, T - 1]
    G = torch.zeros(1, T, 64, device="cuda", dtype=torch.bfloat16)
    G[:, rows] = torch.randn(1, len(rows), 64, device="cuda", dtype=torch.bfloat16)
    return A, G, rows


@pytest.mark.parametrize("aligned", [True, False])
def test_gram_and_outer_far_from_the_start(aligned: bool) -> None:
    A, G, rows = far_operands(2**17)
    if not aligned:
        A = A[..., 1:]
    oracle = (G[0, rows].double().mT @ A[0, rows].double()).square().sum().view(1)
    (sq,), _ = ops.gram_sqnorms(A, [G], backend="triton")
    assert worst_relative_error(sq, oracle) <= 1e-5
    sq, grads = ops.outer_sqnorms(A, G, store=True, backend="triton")
    assert grads is not None
    assert worst_relative_error(sq, grads.double().square().sum().view(1)) <= 1e-5
    assert relative_error(grads[0], G[0, rows].double().mT @ A[0, rows].double()) <= 1e-2


@pytest.mark.parametrize("shift", [0, 1])
def test_stored_gradients_far_from_the_start(shift: int) -> None:
    B, T, d, p = 3, 16, 2**15, 2**15 - shift
    A = torch.randn(B, T, d, device="cuda", dtype=torch.bfloat16)
    G = torch.randn(B, T, p, device="cuda", dtype=torch.bfloat16)
    sq, grads = ops.outer_sqnorms(A, G, store=True, backend="triton")
    assert grads is not None and grads.numel() > 2**31
    for rows in (slice(0, 100), slice(p - 100, p)):
        oracle = G[-1, :, rows].double().mT @ A[-1].double()
        assert relative_error(grads[-1, rows], oracle) <= 1e-2
    total = ops.weighted_sum(grads, torch.tensor([0.0, 0.5, 2.0], device="cuda"))
    oracle = 0.5 * grads[1, -9:].double() + 2 * grads[2, -9:].double()
    assert relative_error(total[-9:], oracle) <= 1e-2


def test_row_scale_far_from_the_start() -> None:
    x = torch.randn(3, 2**30, device="cuda", dtype=torch.bfloat16)
    coef = torch.tensor([1.0, 0.0, 0.5], device="cuda")
    scaled = ops.row_scale(x, coef)
    assert torch.equal(scaled[0, -99:], x[0, -99:])
    assert not scaled[1].any()
    assert torch.equal(scaled[2, -99:], x[2, -99:] * 0.5)


def test_norm_layers_and_embeddings_far_from_the_start() -> None:
    d = 2048
    T = FAR // d
    x = torch.randn(1, T, d, device="cuda", dtype=torch.bfloat16)
    G = torch.zeros_like(x)
    rows = [0, T // 2, T - 1]
    G[:, rows] = torch.randn(1, 3, d, device="cuda", dtype=torch.bfloat16)
    rstd = torch.ones(1, T, device="cuda")
    dx, w, b = ops.norm_backward(
        x, G, None, rstd, None, input_grad=True, weight_grad=True, bias_grad=True
    )
    assert dx is not None and w is not None and b is not None
    assert relative_error(w, (G[:, rows].double() * x[:, rows].double()).sum(1)) <= 1e-5
    assert relative_error(b, G[:, rows].double().sum(1)) <= 1e-5
    g, x_hat = G[0, rows].double(), x[0, rows].double()
    assert relative_error(dx[0, rows], g - x_hat * (g * x_hat).mean(-1, keepdim=True)) <= 1e-2
    ids = torch.randint(1000, (1, T), device="cuda")
    ids[:, rows] = 5
    sq = ops.embedding_sqnorms(ids, G)
    assert worst_relative_error(sq, G[:, rows].double().sum(1).square().sum(1)) <= 1e-5


def test_streams_far_from_the_start() -> None:
    n, D = 2, 2048
    x = torch.randn(1, FAR // (n * D), n, D, device="cuda", dtype=torch.bfloat16)
    params = [p.cuda() for p in params_of(n, D)]
    end = x[:, -4:]
    connected = [hyper_connections(streams, *params) for streams in (x, end)]
    mixed, dx = [], []
    for streams, (h, post, comb, inv, mix) in zip((x, end), connected, strict=True):
        mixed.append(stream_mix(streams, h, post, comb))
        dx.append(stream_mix_backward(streams, h, post, comb, streams)[0])
        grads = (inv, mix, h, post, comb)
        found = hyper_connections_backward(
            streams, *params, *grads, input_grad=True, matrix_grad=streams is end
        )
        assert found.x_BSnD is not None
        dx.append(found.x_BSnD)
    for one, other in ((connected[0].h_BSD, connected[1].h_BSD), mixed, dx[::2], dx[1::2]):
        assert relative_error(one[:, -4:], other) <= 1e-2


def test_nothing_waits_for_the_device() -> None:
    A = torch.randn(3, 40, 64, device="cuda", dtype=torch.bfloat16)
    G = torch.randn(3, 40, 96, device="cuda", dtype=torch.bfloat16)
    coef = torch.tensor([0.5, 0.0, 1.0], device="cuda")
    ids = torch.randint(50, (3, 40), device="cuda")
    rstd = torch.rand(3, 40, device="cuda")
    statistics = torch.rand(3, 4, device="cuda")
    flags = {"input_grad": True, "weight_grad": True, "bias_grad": True}
    streams, params = torch.randn(3, 40, 4, 64, device="cuda"), [p.cuda() for p in params_of(4, 64)]
    for mode in ("default", "error"):  # the first round compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            ops.linear_sqnorms([(A, [G, G]), (G, [A]), (A[:, :1], [G[:, :1]])])
            ops.gram_sqnorms(A, [G])
            _, grads = ops.outer_sqnorms(A, G, store=True)
            assert grads is not None
            ops.weighted_sum(grads, coef)
            ops.row_scale(A, coef)
            for in_place in (False, True):
                finite_rows(
                    A, torch.zeros(len(A), dtype=torch.uint8, device="cuda"), in_place=in_place
                )
            ops.clipped_sums(A, [G, G], coef)
            ops.clipped_sums(A, [G], coef)
            ops.embedding_sqnorms(ids, A, padding_idx=3)
            ops.embedding_clipped_sum(ids, A, coef, 50)
            ops.tied_cross_term(ids, A, A, G)
            ops.norm_backward(A, A, rstd, rstd, A[0, 0], **flags)
            _, chosen = product_key_scores(A[0], A[1], 16)
            product_key_backward(A[0, :, :16], chosen, A[0], A[1])
            ops.group_norm_grads(A.mT.contiguous(), A.mT.contiguous(), statistics, statistics)
            h, post, comb, *saved = hyper_connections(streams, *params)
            stream_mix(streams, h, post, comb)
            stream_mix_backward(streams, h, post, comb, streams)
            grads = (*saved, h, post, comb)
            hyper_connections_backward(streams, *params, *grads, input_grad=True, matrix_grad=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_tables_that_repeat_are_copied_once() -> None:
    """Only where that was asked for (a table of noise holds its key), and for one stream."""
    device = torch.device("cuda", torch.cuda.current_device())
    table, again, other = [1, 2, 3], array("q", [1, 2, 3]), [1, 2, 4]
    first = to_device(table, device, torch.int64, repeats=True)
    assert to_device(again, device, torch.int64, repeats=True) is first
    assert to_device(other, device, torch.int64, repeats=True).tolist() == other
    assert to_device(table, device, torch.int64) is not first
    with torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = to_device(table, device, torch.int64, repeats=True)
    torch.cuda.synchronize()  # this stream does not wait for the other one's copy
    assert elsewhere is not first
    assert first.tolist() == elsewhere.tolist() == table
