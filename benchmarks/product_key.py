"""``product-key``: choosing experts by product keys, forward and backward, against plain PyTorch;
and a step of ``ProductKeyExperts``, private against not.

The plain way to choose is the efficient one: the best of each axis, then the best of their k × k
sums; ties go wherever ``torch.topk`` leaves them. Before a time is taken, results and gradients of
ours are compared with float64 on all experts of a few rows, and the private step's norms with
float64, one sample at a time.

N rows, s entries of an axis, k choices; B samples, T tokens, d features.
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
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.kernels import Candidate, Result, measure
from benchmarks.measure import settle
from benchmarks.options import DTYPES
from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.layers import ProductKeyExperts
from flash_clipping.layers.product_key_experts import route

SIDES, CHOICES = [64, 256, 1024], [16, 32]
ROWS = {"cuda": 16384, "cpu": 256}
NORMS = 1e-3
"""Relative error of norms up to which times of the layer are taken."""
CHECKED = 4
"""Rows that are compared: the oracle forms all experts of each."""

#: Of the layer: samples, tokens of each, features, entries of an axis, choices, heads.
LAYER = {"cuda": (8, 512, 1024, 256, 16, 4), "cpu": (2, 16, 32, 16, 4, 2)}

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
    error = error_of_norms(device)
    if not error <= NORMS:
        console.print(f"[bold red]norms of the layer are off by {error:.1e}: it is not timed[/]")
        return 1
    results += measure(layers(LAYER[device.type], device, dtype), options.rounds, device)
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
    k = grad.shape[1]
    logits = float(2 * x.numel() * x.element_size())
    group = f"s {x.shape[1]}, k {k}"
    found: list[Candidate] = []
    ways: list[tuple[str, Routing]] = [("topk", eager), ("", route)]
    for name, routing in ways:
        leaves = [axis.clone().requires_grad_() for axis in (x, y)]
        scores, _ = routing(leaves[0], leaves[1], k)
        forward = partial(routing, x, y, k)
        backward = partial(torch.autograd.grad, scores, leaves, grad, retain_graph=True)
        for direction, work, call in (
            ("forward", logits, forward),
            ("backward", 2 * logits, backward),
        ):
            floor = "" if name else f"topk {direction}"
            found.append((Result(group, f"{name} {direction}".strip(), floor, work), call))
    return found


def layers(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> list[Candidate]:
    """A step of :class:`ProductKeyExperts`, forward and backward, not private and private."""
    B, T, d, side, k, heads = sizes
    x = torch.randn(B, T, d, device=device, dtype=dtype)
    grad = torch.randn_like(x)
    group = f"B {B}, T {T}, d {d}, E {side**2}, k {k}, {heads} heads"
    found: list[Candidate] = []
    for name, floor in (("layer", ""), ("private layer", "layer")):
        model: nn.Module = layer(sizes, device, dtype)
        if floor:
            model = private(model)
        found.append((Result(group, name, floor, float(B * T)), partial(step, model, x, grad)))
    return found


def layer(sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> ProductKeyExperts:
    _, _, d, side, k, heads = sizes
    torch.manual_seed(0)
    return ProductKeyExperts(d, side**2, k, heads=heads).to(device, dtype)


def private(model: nn.Module) -> nn.Module:
    return GradSampleModuleFlashClipping(model, max_grad_norm=1.0, loss_reduction="sum")


def step(model: nn.Module, x: Tensor, grad: Tensor) -> None:
    """Forward and backward, into fresh gradients."""
    model.zero_grad(set_to_none=True)
    model(x).backward(grad)


def error_of_norms(device: torch.device) -> float:
    """Of a small private layer in fp32, against float64."""
    sizes = LAYER["cpu"]
    B, T, d, *_ = sizes
    torch.manual_seed(1)
    x = torch.randn(B, T, d, device=device)
    grad = torch.randn_like(x)
    flash, alone = private(layer(sizes, device, x.dtype)), layer(sizes, device, torch.float64)
    step(flash, x, grad)
    norms = []
    for b in range(B):
        step(alone, x[b : b + 1].double(), grad[b : b + 1].double())
        each = [p.grad.norm() for p in alone.parameters() if p.grad is not None]
        norms.append(torch.stack(each).norm())
    truth = torch.stack(norms)
    found: Tensor = flash.get_norm_sample()  # type: ignore[operator, assignment]
    return float((found.double() - truth).norm() / truth.norm())


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
        *("shape", "what", "time (µs)", "times as fast as topk, or as the layer"),
        title=f"{rows} rows, {dtype}, {device.type}",
    )
    for result in results:
        ratio = "" if result.of_floor is None else f"{result.of_floor:.2f}"
        found.add_row(result.group, result.name, f"{result.median * 1e3:.1f}", ratio)
    return found
