"""``hyper-connections``: four operations against a copy, and a step against eager PyTorch.

A step is forward and backward of one module whose sublayer hands on what it reads, so that nothing
else is timed: ``h, post, comb = hc(x)``, then ``hc.combine(x, h, post, comb)``. Useful bytes are
those of streams and of one stream's width, each read or written once by every operation; what
autograd adds up between operations is not counted, but takes its time. The floor of a step is the
eager one, and that of a private step the step. Results and gradients are compared with float64
before anything is timed.

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
    Wrong,
    copy_candidate,
    integers,
    private,
    relative_error,
    step,
)
from flash_clipping.layers import HyperConnections
from flash_clipping.layers.ops import hyper_connections as ops, stream_mix as mixing

SHAPES = {
    "cuda": [(4, 4096, 4, 2048), (4, 4096, 4, 2560), (4, 4096, 4, 4096)],
    "cpu": [(2, 64, 4, 256)],
}
CHECKED = (3, 1500, 4, 160)
"""Blocks of positions as large as in the shapes that are timed, and room left in the last of them
and of features."""

#: Relative errors up to which times are taken: of results in the streams' dtype, and in fp32.
ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PRECISE = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}


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
    errors = check(run.device, run.dtype)
    told = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    run.console.print(f"relative errors against float64: {told}")
    for name, error in errors.items():
        allowed = PRECISE if name in ("post", "comb", "of parameters") else ROUNDED
        if not error <= allowed[run.dtype]:
            raise Wrong(f"{name}: an error of {error:.1e} is too much")
    run.facts["errors"] = errors
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


def check(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of each result of the module, and of gradients by all of them."""
    B, S, n, D = CHECKED
    hc = module(n, D, device)
    x = torch.randn(B, S, n, D).to(device, dtype).requires_grad_()
    read = torch.randn(B, S, D).to(device, dtype)  # of a sublayer
    found = [*hc(x)]
    found.append(hc.combine(x, read, found[1].detach(), found[2].detach()))
    upstream = [torch.randn_like(each) for each in found]
    grads = torch.autograd.grad(found, [x, *hc.parameters()], upstream)
    wide = x.detach().double().requires_grad_()
    params = [p.detach().double().requires_grad_() for p in (hc.phi, hc.alpha, hc.bias, hc.gamma)]
    truth = [*ops.reference.hyper_connections(wide, params, hc.settings)[:3]]
    mixed = (found[1].detach().double(), found[2].detach().double())
    truth.append(mixing.reference.stream_mix(wide, read.double(), *mixed, hc.transposed))
    of_truth = torch.autograd.grad(truth, [wide, *params], [each.double() for each in upstream])
    names = ("h", "post", "comb", "streams")
    errors = {name: relative_error(*pair) for name, *pair in zip(names, found, truth, strict=True)}
    errors["of x"] = relative_error(grads[0], of_truth[0])
    pairs = zip(grads[1:], of_truth[1:], strict=True)
    return errors | {"of parameters": max(relative_error(*pair) for pair in pairs)}


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
