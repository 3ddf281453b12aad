"""``hyper-connections``: four operations against a copy, and a step against eager PyTorch.

A step is forward and backward of one module whose sublayer hands on what it reads, so that nothing
else is timed: ``h, post, comb = hc(x)``, then ``hc.combine(x, h, post, comb)``. Useful bytes are
those of streams and of one stream's width, each read or written once by every operation; what
autograd adds up between operations is not counted, but takes its time.

B samples, S positions, n streams, D features.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import environment, kernels
from benchmarks.measure import settle
from benchmarks.options import DTYPES
from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.layers import HyperConnections
from flash_clipping.layers.ops import hyper_connections as ops, stream_mix as mixing

SHAPES = {
    "cuda": [(4, 4096, 4, 2048), (4, 4096, 4, 2560), (4, 4096, 4, 4096)],
    "cpu": [(2, 64, 4, 256)],
}
CHECKED = (3, 1500, 4, 160)
"""Blocks of positions as large as in the shapes that are timed, and room left in the last of them
and of features."""

#: Relative errors up to which times are taken: of results in the streams' dtype, and of all others.
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


class Rounded(torch.autograd.Function):
    """Values, and their gradient, rounded to a dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype).to(grad.dtype), None


class EagerBlock(Block):
    """The same in PyTorch's own operations, left to autograd. What the sublayer reads, and its
    gradient, are rounded to ``dtype``, since the streams' dtype is all that a sublayer sees."""

    def __init__(self, hc: HyperConnections, dtype: torch.dtype | None = None):
        super().__init__(hc)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        hc = self.hc
        params = (hc.phi, hc.alpha, hc.bias, hc.gamma)
        h, post, comb, *_ = ops.reference.hyper_connections(x, params, hc.settings)
        if self.dtype is not None:
            h = Rounded.apply(h, self.dtype)
        return mixing.reference.stream_mix(x, h, post, comb, hc.transposed)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "hyper-connections",
        help="layers.HyperConnections against eager PyTorch and a copy",
        description="Results, gradients and norms are compared with float64 before anything is "
        "timed. The exit status is 1 if they are wrong.",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument("--shape", type=kernels.integers(4), action="append", metavar="B,S,n,D")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each operation")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--revision", help="git revision to record where there is no git directory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if a result is wrong."""
    device = torch.device(options.device)
    dtype = DTYPES[options.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    rounded, precise = check(device, dtype)
    console.print(
        f"worst relative error against float64: {rounded:.1e} of what is in the streams' dtype, "
        f"{precise:.1e} of all else"
    )
    if not (rounded <= ROUNDED[dtype] and precise <= PRECISE[dtype]):
        console.print("[bold red]that is too much: nothing is timed[/]")
        return 1
    results: list[kernels.Result] = []
    for shape in options.shape or SHAPES[device.type]:
        results += kernels.measure(candidates(shape, device, dtype), options.rounds, device)
        settle(device)
    console.print(result_table(results))
    if options.json:
        content = {
            "kind": "hyper-connections",
            "environment": environment.describe(device, options.revision),
            "command": options.command,
            "dtype": str(dtype).removeprefix("torch."),
            "errors": {"rounded": rounded, "precise": precise},
            "results": [
                {
                    **asdict(result),
                    "median": result.median,
                    "rate": result.rate,
                    **over(result, results),
                }
                for result in results
            ],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def module(n: int, D: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Block:
    """With parameters that are nowhere near where they begin."""
    torch.manual_seed(0)
    hc = HyperConnections(D, n)
    with torch.no_grad():
        hc.phi.mul_(50 / (n * D) ** 0.5)
        hc.alpha.copy_(torch.tensor([1.1, 0.9, 1.05]))
        hc.gamma.add_(torch.randn_like(hc.gamma) / 2)
    return Block(hc.to(device, dtype))


def check(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Worst relative error of streams and their gradient, and of the parameters' gradients and
    norms: ordinary ones, and those of each sample."""
    B, S, n, D = CHECKED
    block = module(n, D, device)
    torch.manual_seed(1)
    x = torch.randn(B, S, n, D).to(device, dtype)
    grad = torch.randn(B, S, n, D).to(device, dtype)
    eager = EagerBlock(module(n, D, device, torch.float64).hc, dtype)
    params, norms = [torch.zeros_like(p) for p in eager.parameters()], []
    outputs, of_x = [], []
    for b in range(B):  # one sample at a time
        wide = x[b : b + 1].double().requires_grad_()
        outputs.append(eager(wide))
        found = torch.autograd.grad(
            outputs[-1], (wide, *eager.parameters()), grad[b : b + 1].double()
        )
        of_x.append(found[0])
        norms.append(torch.stack([g.norm() for g in found[1:]]).norm())
        params = [summed + one for summed, one in zip(params, found[1:], strict=True)]
    x.requires_grad_()
    output = block(x)
    output.backward(grad)
    assert x.grad is not None
    rounded = [_error(output, torch.cat(outputs)), _error(x.grad, torch.cat(of_x))]
    precise = [
        _error(p.grad, truth)
        for p, truth in zip(block.parameters(), params, strict=True)
        if p.grad is not None
    ]
    block.zero_grad(set_to_none=True)
    flash = GradSampleModuleFlashClipping(block, max_grad_norm=1.0, loss_reduction="sum")
    flash(x).backward(grad)
    precise.append(_error(flash.get_norm_sample(), torch.stack(norms)))
    return max(rounded), max(precise)


def _error(found: Tensor, truth: Tensor) -> float:
    found, truth = found.detach().double(), truth.detach()
    error = float((found - truth).norm() / truth.norm())
    return error if error == error else float("inf")


def candidates(
    shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> list[kernels.Candidate]:
    """A copy, the four operations, and three kinds of steps."""
    B, S, n, D = shape
    block = module(n, D, device)
    hc = block.hc
    params = [p.detach() for p in (hc.phi, hc.alpha, hc.bias, hc.gamma)]
    x = torch.randn(B, S, n, D, device=device, dtype=dtype, requires_grad=True)
    grad, plain = torch.randn_like(x), x.detach()
    h, post, comb, inv, mix = ops.hyper_connections(plain, *params)
    upstream = torch.randn_like(h), torch.randn_like(post), torch.randn_like(comb)
    streams, one = float(x.numel() * x.element_size()), float(h.numel() * h.element_size())
    work = {
        "forward": streams + one,
        "backward": 2 * streams + one,
        "mix": 2 * streams + one,
        "mix backward": 3 * streams + 2 * one,
    }
    group = f"B {B}, S {S}, n {n}, D {D}"
    result = partial(kernels.Result, group)
    backward = partial(ops.hyper_connections_backward, plain, *params, inv, mix, *upstream)
    private = module(n, D, device)
    flash = GradSampleModuleFlashClipping(private, max_grad_norm=1.0, loss_reduction="sum")
    whole = sum(work.values())
    return [
        kernels.copy_candidate(group, x.numel(), device, dtype),
        (
            result("forward", "copy", work["forward"]),
            lambda: ops.hyper_connections(plain, *params),
        ),
        (
            result("backward", "copy", work["backward"]),
            lambda: backward(input_grad=True, matrix_grad=True),
        ),
        (
            result("mix", "copy", work["mix"]),
            lambda: mixing.stream_mix(plain, h, post, comb),
        ),
        (
            result("mix backward", "copy", work["mix backward"]),
            lambda: mixing.stream_mix_backward(plain, h, post, comb, grad),
        ),
        (result("eager step", "copy", whole), step(EagerBlock(hc), x, grad)),
        (result("step", "copy", whole), step(block, x, grad)),
        (result("private step", "copy", whole), step(flash, x, grad)),
    ]


def step(model: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Forward and backward, into fresh gradients."""

    def once() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        model(x).backward(grad)

    return once


def over(result: kernels.Result, results: list[kernels.Result]) -> dict[str, float]:
    """What a step is compared with: eager over ours, private over ours."""
    steps = {r.name: r.median for r in results if r.group == result.group}
    if result.name == "step":
        return {"eager_over_this": steps["eager step"] / result.median}
    if result.name == "private step":
        return {"over_step": result.median / steps["step"]}
    return {}


def result_table(results: list[kernels.Result]) -> Table:
    table = Table("shape", "operation", "ms", "TB/s", "of a copy", "compared")
    named = {"eager_over_this": "{:.2f} × faster than eager", "over_step": "{:.2f} × a step"}
    for result in results:
        compared = [named[key].format(value) for key, value in over(result, results).items()]
        table.add_row(
            result.group,
            result.name,
            f"{result.median:.3f}",
            f"{result.rate:.2f}",
            "" if result.of_floor is None else f"{result.of_floor:.2f}",
            *compared,
        )
    return table
