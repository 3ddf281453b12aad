"""``segments``: norms and clipped sums of experts' rows, against grouped products of PyTorch.

The floors are what an ordinary step has: the grouped product of forward for norms, that of weight
gradients for clipped sums. Norms are also taken with other lengths from which on a segment goes by
its product: how much the best of them saves is the regret of the cost model. Before a time is
taken, some segments and one group are compared with float64.

B samples, T positions, E experts, k choices, N = B·T·k rows, d input features, p output features.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks import environment
from benchmarks.experts import SIZES, draw_routes
from benchmarks.kernels import Candidate, Result, measure
from benchmarks.measure import settle
from benchmarks.options import DTYPES
from flash_clipping.ops.runtime import cost
from flash_clipping.ops.segments import (
    Rows,
    Segments,
    grouped_linear,
    grouped_sums,
    segment_sqnorms,
)

SHAPES = ["8x2048", "8x2048-zipf", "32x512", "32x512-zipf", "4x4096", "2x16384-zipf"]
LENGTHS = [256, 512, 1024, 2048, 4096]
CHECKED = 6
"""Segments that are compared: the longest, and some others."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "segments", help="norms and sums of experts' rows", description=__doc__
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="BxT[-zipf]")
    parser.add_argument("--sizes", choices=tuple(SIZES), default="qwen3", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--revision", help="git revision to record where there is no git directory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if a result is wrong."""
    device = torch.device(options.device)
    name = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    results: list[Result] = []
    for shape in track(options.shapes, "shapes", console=console):
        work = Work(shape, options.sizes, device, DTYPES[name])
        wrong = work.disagreement()
        if wrong:
            console.print(f"[bold red]{shape}: {wrong}: nothing is timed[/]")
            return 1
        results += measure(work.candidates(), options.rounds, device)
        settle(device)
    console.print(table(results, options.sizes, name, device))
    if options.json:
        content = {
            "kind": "segments",
            "environment": environment.describe(device, options.revision),
            "command": options.command,
            "dtype": name,
            "sizes": options.sizes,
            "results": [{**asdict(result), "median": result.median} for result in results],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


class Work:
    """Rows of one shape's routes, and the operands of the first projection."""

    def __init__(self, shape: str, sizes: str, device: torch.device, dtype: torch.dtype):
        size, _, zipf = shape.partition("-")
        B, T = map(int, size.split("x"))
        self.shape = shape
        self.d, hidden, self.E, k = SIZES[sizes].values()
        self.p = 2 * hidden
        generator = torch.Generator().manual_seed(0)
        routes_BTk, _ = draw_routes(
            generator, batch=B, seq=T, experts=self.E, chosen=k, zipf=bool(zipf)
        )
        chosen_N = routes_BTk[..., 1:].reshape(-1).to(device)
        sample_N = torch.arange(B, device=device).repeat_interleave(T * k)
        self.segments = Segments(sample_N, B, chosen_N, self.E)
        rows = len(self.segments)
        torch.manual_seed(0)
        draw = partial(torch.randn, device=device, dtype=dtype)
        self.A, self.G = Rows(draw(rows, self.d)), Rows(draw(rows, self.p))
        self.W_Epd = draw(self.E, self.p, self.d)
        self.coef_B = torch.rand(B, device=device)

    def disagreement(self) -> str:
        """What is wrong with some results, or nothing."""
        starts = self.segments.starts.tolist()
        longest = self.segments.starts.diff().argsort(descending=True)[: CHECKED // 2].tolist()
        sq_S, _ = segment_sqnorms(self.A, self.G, self.segments)
        for s in {*longest, *range(min(CHECKED - len(longest), len(sq_S)))}:
            expected = float(self._product(starts[s], starts[s + 1]).square().sum())
            if not abs(float(sq_S[s]) - expected) <= 2e-5 * max(expected, 1e-9):
                return f"the squared norm of segment {s} is {float(sq_S[s])}, not {expected}"
        B = len(self.coef_B)
        sums = grouped_sums(self.A, self.G, self.segments, self.coef_B)
        expected_pd = torch.zeros(self.p, self.d, dtype=torch.float64, device=sums.device)
        for b in range(B):
            expected_pd += float(self.coef_B[b]) * self._product(starts[b], starts[b + 1])
        error = float((sums[0].double() - expected_pd).norm() / expected_pd.norm().clamp(min=1e-9))
        return "" if error <= 1e-5 else f"the sum of group 0 is off by {error:.1e}"

    def _product(self, first: int, last: int) -> Tensor:
        return self.G.X[first:last].double().mT @ self.A.X[first:last].double()

    def candidates(self) -> list[Candidate]:
        flop = 2.0 * len(self.segments) * self.d * self.p
        operands = (self.A, self.G, self.segments)
        group = partial(Result, self.shape, work=flop)
        found: list[Candidate] = [
            (
                group("forward", floor=""),
                partial(grouped_linear, self.A.X, self.W_Epd, self.segments),
            ),
            (group("norms", floor="forward"), partial(segment_sqnorms, *operands)),
            (group("weight gradients", floor=""), partial(grouped_sums, *operands, None)),
            (
                group("clipped sums", floor="weight gradients"),
                partial(grouped_sums, *operands, self.coef_B),
            ),
        ]
        for length in LENGTHS if self.A.X.is_cuda else []:
            name = f"norms, products above {length}"
            found.append((group(name, floor="norms"), partial(self._norms_by, length)))
        return found

    def _norms_by(self, length: int) -> object:
        with products_above(length):
            return segment_sqnorms(self.A, self.G, self.segments)


@contextmanager
def products_above(rows: int) -> Iterator[None]:
    """Segments of more rows go by their product, whatever the cost model says."""
    before = cost.longest_for_gram
    cost.longest_for_gram = lambda *_: rows  # type: ignore[assignment]
    try:
        yield
    finally:
        cost.longest_for_gram = before


def table(results: list[Result], sizes: str, dtype: str, device: torch.device) -> Table:
    found = Table(
        *("routes", "what", "time (ms)", "TFLOP/s", "of its floor's rate"),
        title=f"experts of {sizes}, {dtype}, {device.type}",
    )
    for result in results:
        ratio = "" if result.of_floor is None else f"{result.of_floor:.2f}"
        times = f"{result.median:.3f}", f"{result.rate:.0f}"
        found.add_row(result.group, result.name, *times, ratio)
    return found
