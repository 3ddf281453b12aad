"""``product-key``: choosing experts by product keys, forward and backward, against plain PyTorch;
and a step of ``ProductKeyExperts``, private against not.

The plain way to choose is the efficient one: the best of each axis, then the best of their k × k
sums; ties go wherever ``torch.topk`` leaves them. Before a time is taken, results and gradients of
ours are compared with float64 on all experts of a few rows.

N rows, s entries of an axis, k choices; B samples, T tokens, d features.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.ops.bench import (
    Candidate,
    OpBench,
    Result,
    Run,
    Wrong,
    private,
    relative_error,
    step,
)
from flash_clipping.layers import ProductKeyExperts
from flash_clipping.layers.product_key_experts import route

SIDES, CHOICES = [64, 256, 1024], [16, 32]
ROWS = {"cuda": 16384, "cpu": 256}
CHECKED = 4
"""Rows that are compared: the oracle forms all experts of each."""

#: Of the layer: samples, tokens of each, features, entries of an axis, choices, heads.
LAYER = {"cuda": (8, 512, 1024, 256, 16, 4), "cpu": (2, 16, 32, 16, 4, 2)}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, metavar="N", help="default: 16384, on a CPU 256")
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES, metavar="S")
    parser.add_argument("--choices", type=int, nargs="+", default=CHOICES, metavar="K")


def work(run: Run) -> Iterator[list[Candidate]]:
    rows = run.facts["rows"] = run.sizes(run.options.rows, ROWS)
    draw = partial(torch.randn, device=run.device, dtype=run.dtype)
    for side in run.options.sides:
        for k in run.options.choices:
            x, y, grad = draw(rows, side), draw(rows, side), draw(rows, k)
            if wrong := disagreement(x[:CHECKED], y[:CHECKED], grad[:CHECKED]):
                raise Wrong(f"s {side}, k {k}: {wrong}")
            yield candidates(x, y, grad)
    yield layers(LAYER[run.device.type], run.device, run.dtype)


def eager(logits_x: Tensor, logits_y: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Scores and indices, by PyTorch alone."""
    side = logits_x.shape[1]
    w = min(k, side)
    x_Nw, ix_Nw = logits_x.float().log_softmax(1).topk(w, dim=1)
    y_Nw, iy_Nw = logits_y.float().log_softmax(1).topk(w, dim=1)
    scores_Nk, pair_Nk = (x_Nw[:, :, None] + y_Nw[:, None, :]).flatten(1).topk(k, dim=1)
    index_Nk = ix_Nw.gather(1, pair_Nk // w) * side + iy_Nw.gather(1, pair_Nk % w)
    return scores_Nk.to(logits_x.dtype), index_Nk.to(torch.int32)


def candidates(x: Tensor, y: Tensor, grad: Tensor) -> list[Candidate]:
    """Forward and backward of both, on the same logits."""
    k = grad.shape[1]
    result = partial(Result, f"s {x.shape[1]}, k {k}")
    found: list[Candidate] = []
    for name, routing in (("topk ", eager), ("", route)):
        leaves = [axis.clone().requires_grad_() for axis in (x, y)]
        scores, _ = routing(leaves[0], leaves[1], k)
        forward = partial(routing, x, y, k)
        backward = partial(torch.autograd.grad, scores, leaves, grad, retain_graph=True)
        for direction, call in (("forward", forward), ("backward", backward)):
            floor = "" if name else f"topk {direction}"
            found.append((result(name + direction, floor), call))
    return found


def layers(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    """A step of :class:`ProductKeyExperts`, forward and backward, not private and private."""
    B, T, d, side, k, heads = sizes
    x = torch.randn(B, T, d, device=device, dtype=dtype)
    grad = torch.randn_like(x)
    result = partial(Result, f"B {B}, T {T}, d {d}, E {side**2}, k {k}, {heads} heads")
    plain, other = (
        ProductKeyExperts(d, side**2, k, heads=heads).to(device, dtype) for _ in range(2)
    )
    return [
        (result("layer"), partial(step, plain, x, grad)),
        (result("private layer", "layer"), partial(step, private(other), x, grad)),
    ]


def disagreement(x: Tensor, y: Tensor, grad: Tensor) -> str:
    """What is wrong with our results on these rows, or nothing."""
    k, side = grad.shape[1], x.shape[1]
    leaves = [axis.clone().requires_grad_() for axis in (x, y)]
    scores, indices = route(*leaves, k)
    found = (scores, *torch.autograd.grad(scores, leaves, grad))
    wide = [axis.double().requires_grad_() for axis in (x, y)]
    sums = (wide[0][:, :, None] + wide[1][:, None, :]).detach().flatten(1)
    chosen = sums.sort(dim=1, descending=True, stable=True).indices[:, :k]
    if not torch.equal(indices.long(), chosen):
        return "other experts than the oracle's"
    first, second = (axis.log_softmax(1) for axis in wide)
    oracle = first.gather(1, chosen // side) + second.gather(1, chosen % side)
    expected = (oracle, *torch.autograd.grad(oracle, wide, grad.double()))
    allowed = max(1e-5, 2 * torch.finfo(x.dtype).eps)
    for what, ours, theirs in zip(("scores", "dx", "dy"), found, expected, strict=True):
        error = relative_error(ours, theirs)
        if not error <= allowed:
            return f"{what} are off by {error:.1e}"
    return ""


BENCH = OpBench(
    "product-key",
    "choosing experts by product keys against plain PyTorch",
    __doc__,
    work,
    _arguments,
    unit="",
)
