"""``kernels``: every operation against its floor, and the cost model against measuring.

The floors are the weight gradient of the same shape for what computes, as an ordinary step has it,
a copy for what moves memory. ``tests/ops`` compares the operations with float64.

B samples, T positions, d input features, p output features. Convolutions: C input and O output
channels, H the side of an image, k of a window, s its stride. Experts: N = B·T·k rows, k choices.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.ops.bench import Candidate, OpBench, Result, Run, Wrong, copy_candidate, integers
from benchmarks.ops.experts import SIZES, draw_routes
from flash_clipping import ops
from flash_clipping.ops.convolution import (
    Geometry,
    convolution_grads,
    convolution_sqnorms,
    convolution_sum,
    reference,
)
from flash_clipping.ops.gram import gram_blocks
from flash_clipping.ops.noise import noisy_means
from flash_clipping.ops.runtime import cost
from flash_clipping.ops.segments import (
    Rows,
    Segments,
    grouped_linear,
    grouped_sums,
    segment_sqnorms,
)
from flash_clipping.randomness import FEWER_ROUNDS, Purpose, SecretStream

LAYERS = 8
"""Layers in one gram launch; a step has more."""
NOISE = SecretStream()

SHAPES = {
    "cuda": [
        (8, 1024, 2048, 2048),
        (8, 1024, 2048, 5632),
        (4, 2048, 4096, 4096),
        (4, 2048, 4096, 11008),
        (16, 512, 1024, 4096),
        (32, 256, 2048, 2048),
        (32, 256, 2048, 5632),
        (8, 128, 768, 3072),
    ],
    "cpu": [(8, 128, 256, 256), (8, 256, 256, 1024)],
}
ROWS = {"cuda": [(8, 1024, 2048), (32, 1024, 2048), (4, 2048, 4096)], "cpu": [(8, 256, 256)]}
#: B, C, O, H, k, s, groups: of Wide ResNets, ResNet-50 and ConvNeXt.
CONVOLUTIONS = {
    "cuda": [
        (512, 16, 64, 32, 3, 1, 1),
        (512, 64, 128, 32, 3, 2, 1),
        (512, 256, 256, 8, 3, 1, 1),
        (128, 3, 64, 224, 7, 2, 1),
        (128, 64, 64, 56, 3, 1, 1),
        (128, 1024, 256, 14, 1, 1, 1),
        (128, 512, 512, 7, 3, 1, 1),
        (128, 96, 96, 56, 7, 1, 96),
    ],
    "cpu": [(3, 16, 20, 6, 3, 1, 1), (2, 6, 6, 5, 3, 2, 6)],
}
#: B, T of routes to experts in the sizes of Qwen3-MoE, tiny ones on a CPU.
ROUTES = {"cuda": [(8, 2048), (32, 512), (4, 4096)], "cpu": [(3, 10)]}
VOCABULARY = 32000

Shape = tuple[int, int, int, int]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=integers(4), action="append", metavar="B,T,d,p")
    parser.add_argument("--rows", type=integers(3), action="append", metavar="B,T,d")
    parser.add_argument(
        "--convolution", type=integers(7), action="append", metavar="B,C,O,H,k,s,groups"
    )
    parser.add_argument("--routes", type=integers(2), action="append", metavar="B,T")


def work(run: Run) -> Iterator[list[Candidate]]:
    worst = check(run.device, run.dtype)
    run.console.print(f"worst relative error of a norm against float64: {worst:.1e}")
    if not worst <= 1e-5:
        raise Wrong("a norm is wrong")
    choices = run.facts["choices"] = []
    for shape in run.sizes(run.options.shape, SHAPES):
        candidates = linear_candidates(shape, run.device, run.dtype)
        yield candidates
        took = {result.name: result.median for result, _ in candidates}
        choice = judge(shape, took, run.device, run.dtype)
        run.console.print(
            "the cost model's choice is {chosen}, {regret:.1%} slower".format(**choice)
        )
        choices.append(choice)
        del candidates
    for rows in run.sizes(run.options.rows, ROWS):
        yield row_candidates(rows, run.device, run.dtype)
    for layer in run.sizes(run.options.convolution, CONVOLUTIONS):
        yield convolution_candidates(layer, run.device, run.dtype)
    for routes in run.sizes(run.options.routes, ROUTES):
        yield segment_candidates(routes, run.device, run.dtype)


def check(device: torch.device, dtype: torch.dtype) -> float:
    """The worst relative error of any norm on a small case, against float64."""
    randn = partial(torch.randn, device=device, dtype=dtype)
    A, G = randn(3, 200, 136), randn(3, 200, 264)
    grads = torch.einsum("btp,btd->bpd", G.double(), A.double())
    linear = grads.square().sum((1, 2))
    ids = torch.randint(50, (3, 200), device=device)
    table = torch.nn.functional.one_hot(ids, 50).double().mT @ A.double()
    rstd = torch.ones(3, 200, device=device)
    wanted = dict.fromkeys(("input_grad", "weight_grad", "bias_grad"), True)
    _, w_Bd, _ = ops.norm_backward(A, A, None, rstd, None, **wanted)
    assert w_Bd is not None
    sq_B, kept = ops.outer_sqnorms(A, G, store=True)
    assert kept is not None
    pairs = [
        (ops.gram_sqnorms(A, [G])[0][0], linear),
        (ops.outer_sqnorms(A, G)[0], linear),
        (ops.embedding_sqnorms(ids, A), table.square().sum((1, 2))),
        (w_Bd.square().sum(1), A.double().square().sum(1).square().sum(1)),
        (sq_B, kept.double().square().sum((1, 2))),
    ]
    return max(float((ours / oracle - 1).abs().max()) for ours, oracle in pairs)


def linear_candidates(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    """The floor, and everything that a linear layer's norms and clipped sum can be made of."""
    B, T, d, p = shape
    randn = partial(torch.randn, device=device, dtype=dtype)
    groups = [(randn(B, T, d), [randn(B, T, p)]) for _ in range(LAYERS)]
    A, (G,) = groups[0]
    coef = torch.rand(B, device=device)
    grads = ops.outer_sqnorms(A, G, store=True)[1]
    assert grads is not None
    group = f"B {B}, T {T}, d {d}, p {p}"
    matmul = 2.0 * B * T * d * p
    gram = LAYERS * float(B) * T * T * (d + p)
    moved = float(d * p * (B * A.element_size() + 4))  # the sum is in fp32
    # In parts, as a step takes them: it adds up those of all layers in one go.
    outer = partial(ops.outer_sqnorms, A, G, in_parts=True)
    return [
        (Result(group, "matmul", "", matmul), lambda: G.flatten(0, 1).mT @ A.flatten(0, 1)),
        (Result(group, "gram", "matmul", gram), lambda: gram_blocks(groups)),
        (Result(group, "outer", "matmul", matmul), outer),
        (Result(group, "outer_store", "matmul", matmul), partial(outer, store=True)),
        (Result(group, "clipped_sum", "matmul", matmul), lambda: ops.clipped_sums(A, [G], coef)),
        copy_candidate(group, B * p * d, device, dtype),
        (Result(group, "weighted_sum", "copy", moved), lambda: ops.weighted_sum(grads, coef)),
    ]


def row_candidates(
    rows: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> list[Candidate]:
    """The floor, and what moves memory."""
    B, T, d = rows
    x = torch.randn(B, T, d, device=device, dtype=dtype)
    G = torch.randn_like(x)
    coef, weight = torch.rand(B, device=device), torch.ones(d, device=device, dtype=dtype)
    mean, rstd = torch.zeros(B, T, device=device), torch.ones(B, T, device=device)
    ids = torch.randint(VOCABULARY, (B, T), device=device)
    ones = torch.ones(B, 1, device=device)
    once = float(x.numel() * x.element_size())
    group = f"B {B}, T {T}, d {d}"

    def norm(mean: Tensor | None) -> object:
        return ops.norm_backward(
            x, G, mean, rstd, weight, input_grad=True, weight_grad=True, bias_grad=True
        )

    def noise() -> object:  # as many parameters as samples
        return noisy_means(list(x), 1.0, 2.0, draw=NOISE.draw(Purpose.NOISE, FEWER_ROUNDS))

    # In parts, as a step takes them: what comes in parts it adds up by itself.
    embedding = partial(ops.embedding_sqnorms, ids, G, in_parts=True)
    return [
        copy_candidate(group, x.numel(), device, dtype),
        (Result(group, "row_scale", "copy", once + 4 * x.numel()), lambda: ops.row_scale(x, coef)),
        (Result(group, "layer_norm", "copy", 3 * once), lambda: norm(mean)),
        (Result(group, "rms_norm", "copy", 3 * once), lambda: norm(None)),
        (Result(group, "embedding", "copy", once), embedding),
        (Result(group, "noise", "copy", 2 * once), noise),
        (
            Result(group, "group_norm", "copy", 2 * once),  # positions as channels
            lambda: ops.group_norm_grads(x, G, ones, ones),
        ),
    ]


def convolution_candidates(
    layer: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> list[Candidate]:
    """The weight gradient of a convolution, and what its norms and clipped sum can be made of."""
    B, C, O, H, k, s, groups = layer  # noqa: E741
    padding = k // 2 if k % 2 else 0
    geometry = Geometry((k, k), (s, s), (padding, padding), (1, 1), groups)
    randn = partial(torch.randn, device=device, dtype=dtype)
    x = randn(B, C, H, H)
    G = randn(B, O, *geometry.out_sizes(x.shape))
    coef = torch.rand(B, device=device)
    grads, _ = convolution_grads(x, G, geometry)
    floor = "weight gradient"
    group = f"B {B}, {C}→{O} {H}² k{k} s{s} g{groups}"
    result = partial(Result, group, work=2.0 * G.numel() * (C // groups) * k * k)
    return [
        (result(floor), lambda: reference.weight_grad(x, G, geometry)),
        (result("norms", floor), lambda: convolution_sqnorms(x, G, geometry)),
        (result("gradients", floor), lambda: convolution_grads(x, G, geometry)),
        (result("sum of gradients", floor), lambda: ops.weighted_sum(grads, coef)),
        (result("clipped sum", floor), lambda: convolution_sum(x, G, coef, geometry)),
    ]


def segment_candidates(
    routes: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> list[Candidate]:
    """Grouped products of experts' rows, as an ordinary step has them, and norms and sums."""
    B, T = routes
    d, hidden, E, k = SIZES["qwen3" if device.type == "cuda" else "tiny"].values()
    generator = torch.Generator().manual_seed(0)
    routes_BTk, _ = draw_routes(generator, batch=B, seq=T, experts=E, chosen=k, zipf=False)
    sample_N = torch.arange(B, device=device).repeat_interleave(T * k)
    chosen_N = routes_BTk[..., 1:].reshape(-1).to(device)
    segments = Segments(sample_N, B, chosen_N, E)
    randn = partial(torch.randn, device=device, dtype=dtype)
    rows = len(segments)
    A, G, W_Epd = Rows(randn(rows, d)), Rows(randn(rows, 2 * hidden)), randn(E, 2 * hidden, d)
    coef = torch.rand(B, device=device)
    result = partial(Result, f"B {B}, T {T}, {E} experts", work=4.0 * rows * d * hidden)
    sums = partial(grouped_sums, A, G, segments)
    return [
        (result("forward"), lambda: grouped_linear(A.X, W_Epd, segments)),
        (result("norms", "forward"), lambda: segment_sqnorms(A, G, segments)),
        (result("weight gradients"), lambda: sums(None)),
        (result("clipped sums", "weight gradients"), lambda: sums(coef)),
    ]


def judge(
    shape: Shape, took: dict[str, float], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """What each algorithm takes in all, and what the cost model's choice loses."""
    B, T, d, p = shape
    totals = {
        "gram": took["gram"] / LAYERS + took["clipped_sum"],
        "outer": took["outer"] + took["clipped_sum"],
        "outer_store": took["outer_store"] + took["weighted_sum"],
    }
    chosen = cost.choose_on(device.type, B, T, d, p, dtype.itemsize, may_store=True)
    allowed = dict(totals)
    if not cost.may_hold_gradients(T=T, d=d, p=p):
        del allowed["outer_store"]
    regret = 0.0
    if chosen in allowed:  # one position: nothing to choose
        regret = allowed[chosen] / min(allowed.values()) - 1
    return {"shape": shape, "chosen": chosen, "milliseconds": totals, "regret": regret}


BENCH = OpBench(
    "kernels", "each op against its floor, and the cost model", __doc__, work, _arguments
)
