"""``product-key``: choosing experts by product keys, forward and backward, against plain PyTorch.

The plain way is the efficient one: the best of each axis, then the best of their k × k sums; ties
go wherever ``torch.topk`` leaves them. Before a time is taken, results and gradients of ours are
compared with float64 on all experts of a few rows.

N rows, s entries of an axis, k choices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks import environment
from benchmarks.kernels import Candidate, Result, measure
from benchmarks.measure import settle
from benchmarks.options import DTYPES
from flash_clipping.layers.product_key_router import route

SIDES, CHOICES = [64, 256, 1024], [16, 32]
ROWS = {"cuda": 16384, "cpu": 256}
CHECKED = 4
"""Rows that are compared: the oracle forms all experts of each."""

Routing = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "product-key",
        help="choosing experts by product keys against plain PyTorch",
        description=__doc__,
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument("--rows", type=int, metavar="N", help="default: 16384, on a CPU 256")
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES, metavar="S")
    parser.add_argument("--choices", type=int, nargs="+", default=CHOICES, metavar="K")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--revision", help="git revision to record where there is no git directory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if a result is wrong."""
    device = torch.device(options.device)
    name = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    dtype, rows = DTYPES[name], options.rows or ROWS[device.type]
    results: list[Result] = []
    for side in track(options.sides, "sides", console=console):
        for k in options.choices:
            draw = partial(torch.randn, device=device, dtype=dtype)
            torch.manual_seed(0)
            x, y, grad = draw(rows, side), draw(rows, side), draw(rows, k)
            wrong = disagreement(x[:CHECKED], y[:CHECKED], grad[:CHECKED])
            if wrong:
                console.print(f"[bold red]s {side}, k {k}: {wrong}: nothing is timed[/]")
                return 1
            results += measure(candidates(x, y, grad), options.rounds, device)
            settle(device)
    console.print(table(results, rows, name, device))
    if options.json:
        content = {
            "kind": "product-key",
            "environment": environment.describe(device, options.revision),
            "command": options.command,
            "dtype": name,
            "rows": rows,
            "results": [{**asdict(result), "median": result.median} for result in results],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


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
    leaves = [axis.clone().requires_grad_() for axis in (x, y)]
    k = grad.shape[1]
    moved = float(4 * x.numel() * x.element_size())  # logits and their gradients

    def step(routing: Routing) -> object:
        return torch.autograd.grad(routing(*leaves, k)[0], leaves, grad)

    group = f"s {x.shape[1]}, k {k}"
    return [
        (Result(group, "eager", "", moved), partial(step, eager)),
        (Result(group, "flash", "eager", moved), partial(step, route)),
    ]


def disagreement(x: Tensor, y: Tensor, grad: Tensor) -> str:
    """What is wrong with our results on these rows, or nothing."""
    k, side = grad.shape[1], x.shape[1]
    leaves = [axis.clone().requires_grad_() for axis in (x, y)]
    scores, indices = route(*leaves, k)
    found = (scores.detach(), *torch.autograd.grad(scores, leaves, grad))
    wide = [axis.double().requires_grad_() for axis in (x, y)]
    sums = (wide[0][:, :, None] + wide[1][:, None, :]).detach().flatten(1)
    chosen = sums.sort(dim=1, descending=True, stable=True).indices[:, :k]
    if not torch.equal(indices.long(), chosen):
        return "other experts than the oracle's"
    first, second = (axis.log_softmax(1) for axis in wide)
    oracle = first.gather(1, chosen // side) + second.gather(1, chosen % side)
    expected = (oracle.detach(), *torch.autograd.grad(oracle, wide, grad.double()))
    allowed = max(1e-5, 2 * torch.finfo(x.dtype).eps)
    for what, ours, theirs in zip(("scores", "dx", "dy"), found, expected, strict=True):
        error = float((ours.double() - theirs).norm() / theirs.norm())
        if not error <= allowed:
            return f"{what} are off by {error:.1e}"
    return ""


def table(results: list[Result], rows: int, dtype: str, device: torch.device) -> Table:
    found = Table(
        *("shape", "way", "time (µs)", "times as fast as eager"),
        title=f"forward and backward, {rows} rows, {dtype}, {device.type}",
    )
    for result in results:
        ratio = "" if result.of_floor is None else f"{result.of_floor:.2f}"
        found.add_row(result.group, result.name, f"{result.median * 1e3:.1f}", ratio)
    return found
