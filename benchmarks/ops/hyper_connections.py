"""``hyper-connections``: four operations against a copy, and a step against eager PyTorch.

A step is forward and backward of one module whose sublayer hands on what it reads, so that nothing
else is timed: ``h, post, comb = hc(x)``, then ``hc.combine(x, h, post, comb)``. Useful bytes are
those of streams and of one stream's width, each read or written once by every operation; what
autograd adds up between operations is not counted, but takes its time. The floor of a step is the
eager one, and that of a private step the step. ``tests/ops`` compares results and gradients with
float64.

B samples, S positions, n streams, D features.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.ops.bench import (
    Candidate,
    OpBench,
    Result,
    Run,
    copy_candidate,
    integers,
    private,
    step,
)
from flash_clipping.layers import HyperConnections
from flash_clipping.layers.ops import hyper_connections as ops, stream_mix as mixing

SHAPES = {
    "cuda": [(4, 4096, 4, 2048), (4, 4096, 4, 2560), (4, 4096, 4, 4096)],
    "cpu": [(2, 64, 4, 256)],
}


class Block(nn.Module):
    """Connections around a sublayer that does nothing."""

    def __init__(self, hc: HyperConnections):
        super().__init__()
        self.hc = hc

    def forward(self, x: Tensor) -> Tensor:
        h, post, comb = self.hc(x)
        return self.hc.combine(x, h, post, comb)


class EagerBlock(Block):
    """The same in PyTorch's own operations, left to autograd."""

    def forward(self, x: Tensor) -> Tensor:
        hc = self.hc
        params = (hc.phi, hc.alpha, hc.bias, hc.gamma)
        h, post, comb, *_ = ops.reference.hyper_connections(x, params, hc.settings)
        return mixing.reference.stream_mix(x, h, post, comb, hc.transposed)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=integers(4), action="append", metavar="B,S,n,D")


def work(run: Run) -> Iterator[list[Candidate]]:
    for shape in run.sizes(run.options.shape, SHAPES):
        yield candidates(shape, run.device, run.dtype)


def module(n: int, D: int, device: torch.device) -> HyperConnections:
    """With parameters that are nowhere near where they begin."""
    torch.manual_seed(0)
    hc = HyperConnections(D, n)
    with torch.no_grad():
        hc.phi.mul_(50 / (n * D) ** 0.5)
        hc.alpha.copy_(torch.tensor([1.1, 0.9, 1.05]))
        hc.gamma.add_(torch.randn_like(hc.gamma) / 2)
    return hc.to(device)


def candidates(
    shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> list[Candidate]:
    """A copy, the four operations, and three kinds of steps."""
    B, S, n, D = shape
    hc = module(n, D, device)
    params = [p.detach() for p in (hc.phi, hc.alpha, hc.bias, hc.gamma)]
    x = torch.randn(B, S, n, D, device=device, dtype=dtype, requires_grad=True)
    grad, plain = torch.randn_like(x), x.detach()
    h, post, comb, inv, mix = ops.hyper_connections(plain, *params)
    upstream = torch.randn_like(h), torch.randn_like(post), torch.randn_like(comb)
    streams, one = float(x.numel() * x.element_size()), float(h.numel() * h.element_size())
    backward = partial(ops.hyper_connections_backward, plain, *params, inv, mix, *upstream)
    result = partial(Result, f"B {B}, S {S}, n {n}, D {D}")
    parts: list[Candidate] = [
        (
            result("forward", "copy", streams + one),
            lambda: ops.hyper_connections(plain, *params),
        ),
        (
            result("backward", "copy", 2 * streams + one),
            lambda: backward(input_grad=True, matrix_grad=True),
        ),
        (
            result("mix", "copy", 2 * streams + one),
            lambda: mixing.stream_mix(plain, h, post, comb),
        ),
        (
            result("mix backward", "copy", 3 * streams + 2 * one),
            lambda: mixing.stream_mix_backward(plain, h, post, comb, grad),
        ),
    ]
    whole = sum(each.work for each, _ in parts)
    flash = private(Block(module(n, D, device)))
    return [
        copy_candidate(f"B {B}, S {S}, n {n}, D {D}", x.numel(), device, dtype),
        *parts,
        (result("eager step", "copy", whole), partial(step, EagerBlock(hc), x, grad)),
        (result("step", "eager step", whole), partial(step, Block(hc), x, grad)),
        (result("private step", "step", whole), partial(step, flash, x, grad)),
    ]


BENCH = OpBench(
    "hyper-connections",
    "layers.HyperConnections against eager PyTorch and a copy",
    __doc__,
    work,
    _arguments,
    unit="TB/s",
)
