"""``segments``: norms and clipped sums of experts' rows, against grouped products of PyTorch.

The floors are what an ordinary step has: the grouped product of forward for norms, that of weight
gradients for clipped sums. Norms are also taken with other lengths from which on a segment goes by
its product: how much the best of them saves is the regret of the cost model. Before a time is
taken, some segments and one group are compared with float64.

B samples, T positions, E experts, k choices, N = B·T·k rows, d input features, p output features.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks.ops.bench import Candidate, OpBench, Result, Run, Wrong, relative_error
from benchmarks.ops.experts import SIZES, draw_routes
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


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="BxT[-zipf]")
    parser.add_argument("--sizes", choices=tuple(SIZES), default="qwen3", help="(%(default)s)")


def work(run: Run) -> Iterator[list[Candidate]]:
    run.facts["sizes"] = run.options.sizes
    for shape in run.options.shapes:
        segments = _Work(shape, run.options.sizes, run.device, run.dtype)
        if wrong := segments.disagreement():
            raise Wrong(f"{shape}: {wrong}")
        yield segments.candidates()


class _Work:
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
        error = relative_error(sums[0], expected_pd)
        return "" if error <= 1e-5 else f"the sum of group 0 is off by {error:.1e}"

    def _product(self, first: int, last: int) -> Tensor:
        return self.G.X[first:last].double().mT @ self.A.X[first:last].double()

    def candidates(self) -> list[Candidate]:
        operands = (self.A, self.G, self.segments)
        result = partial(Result, self.shape, work=2.0 * len(self.segments) * self.d * self.p)
        forward = partial(grouped_linear, self.A.X, self.W_Epd, self.segments)
        found: list[Candidate] = [
            (result("forward"), forward),
            (result("norms", "forward"), partial(segment_sqnorms, *operands)),
            (result("weight gradients"), partial(grouped_sums, *operands, None)),
            (
                result("clipped sums", "weight gradients"),
                partial(grouped_sums, *operands, self.coef_B),
            ),
        ]
        for length in LENGTHS if self.A.X.is_cuda else []:
            name = f"norms, products above {length}"
            found.append((result(name, "norms"), partial(self._norms_by, length)))
        return found

    def _norms_by(self, length: int) -> object:
        """Segments of more rows go by their product, whatever the cost model says."""
        with mock.patch.object(cost, "longest_for_gram", lambda *_: length):
            return segment_sqnorms(self.A, self.G, self.segments)


BENCH = OpBench("segments", "norms and sums of experts' rows", __doc__, work, _arguments)
