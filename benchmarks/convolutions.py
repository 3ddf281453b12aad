"""``convolutions``: norms, gradients and clipped sums of convolutions, against the library's own.

The floor is the weight gradient that an ordinary step has, by cuDNN on a GPU, of the same operands
in the same memory format. Before a time is taken, some samples are compared with float64.

B samples, C input and O output channels, H the side of an image, k of a window, s its stride.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks import environment
from benchmarks.kernels import Candidate, Result, measure
from benchmarks.measure import settle
from benchmarks.options import DTYPES
from flash_clipping.ops.convolution import (
    Geometry,
    convolution_grads,
    convolution_sqnorms,
    convolution_sum,
    laid_out,
    reference,
)
from flash_clipping.ops.outer import weighted_sum
from flash_clipping.ops.runtime.backend import compiled_side_by_side, full_precision

#: Model -> its layers: B, C, O, H, k, s, groups.
LAYERS: dict[str, list[tuple[int, int, int, int, int, int, int]]] = {
    "wrn": [
        (512, 16, 64, 32, 3, 1, 1),
        (512, 64, 64, 32, 3, 1, 1),
        (512, 64, 128, 32, 3, 2, 1),
        (512, 128, 128, 16, 3, 1, 1),
        (512, 256, 256, 8, 3, 1, 1),
    ],
    "resnet": [
        (128, 3, 64, 224, 7, 2, 1),
        (128, 64, 64, 56, 3, 1, 1),
        (128, 64, 256, 56, 1, 1, 1),
        (128, 128, 128, 28, 3, 1, 1),
        (128, 1024, 256, 14, 1, 1, 1),
        (128, 256, 256, 14, 3, 1, 1),
        (128, 512, 512, 7, 3, 1, 1),
    ],
    "convnext": [
        (128, 96, 96, 56, 7, 1, 96),
        (128, 384, 384, 14, 7, 1, 384),
        (128, 96, 192, 56, 2, 2, 1),
    ],
    "tiny": [(3, 16, 20, 6, 3, 1, 1), (2, 6, 6, 5, 3, 2, 6)],
}
TOLERANCE = 1e-5
CHECKED = 3
"""Samples that are compared with float64."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "convolutions", help="norms and sums of convolutions", description=__doc__
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["wrn", "resnet"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["nchw", "nhwc"])
    parser.add_argument("--sweep", action="store_true", help="other tiles as well; Triton only")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--revision", help="git revision to record where there is no git directory")
    parser.set_defaults(run=run)


#: In which x and G lie.
FORMATS = {
    "nchw": (torch.contiguous_format, torch.contiguous_format),
    "nhwc": (torch.channels_last, torch.channels_last),
    "mixed": (torch.channels_last, torch.contiguous_format),
}


def run(options: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if a result is wrong."""
    device = torch.device(options.device)
    name = options.dtype or ("bf16" if device.type == "cuda" else "fp32")
    shapes = [shape for model in options.layers for shape in LAYERS[model]]
    works = [(shape, form) for shape in shapes for form in options.formats]
    with compiled_side_by_side():  # what will be timed, of a few samples
        for shape, form in works:
            work = Work(shape, form, device, DTYPES[name], samples=2)
            for _, call in work.candidates() + [*(sweep(work) if options.sweep else ())]:
                call()
    results: list[Result] = []
    for shape, form in track(works, "layers", console=console, disable=not console.is_terminal):
        work = Work(shape, form, device, DTYPES[name])
        wrong = work.disagreement()
        if wrong:
            console.print(f"[bold red]{work.name}: {wrong}: nothing is timed[/]")
            return 1
        candidates = work.candidates()
        if options.sweep:
            candidates += sweep(work)
        found = measure(candidates, options.rounds, device)
        console.print(table(found, name))  # layer by layer: an interrupted run leaves what it has
        results += found
        settle(device)
    if options.json:
        content = {
            "kind": "convolutions",
            "environment": environment.describe(device, options.revision),
            "command": options.command,
            "dtype": name,
            "results": [
                {**asdict(result), "median": result.median, "rate": result.rate}
                for result in results
            ],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


class Work:
    """One convolution: its operands, and what is asked of them."""

    def __init__(
        self,
        shape: tuple[int, int, int, int, int, int, int],
        form: str,
        device: torch.device,
        dtype: torch.dtype,
        samples: int = 0,
    ) -> None:
        B, C, O, H, k, s, groups = shape  # noqa: E741
        B = samples or B
        self.name = f"{C}→{O} {H}² k{k} s{s}" + (f" g{groups}" if groups > 1 else "") + f" {form}"
        padding = k // 2 if k % 2 else 0
        self.geometry = Geometry((k, k), (s, s), (padding, padding), (1, 1), groups)
        generator = torch.Generator(device).manual_seed(0)
        randn = partial(torch.randn, device=device, dtype=dtype, generator=generator)
        of_x, of_G = FORMATS[form]
        self.x = randn(B, C, H, H).contiguous(memory_format=of_x)
        sizes = self.geometry.out_sizes(self.x.shape)
        self.G = randn(B, O, *sizes).contiguous(memory_format=of_G)
        self.coef_B = torch.rand(B, device=device, generator=generator)
        positions = self.G.shape[2:].numel()
        #: FLOP of the weight gradient.
        self.flop = 2.0 * B * positions * O * (C // groups) * k * k

    def disagreement(self) -> str:
        """What is wrong of some samples, or nothing."""
        x, G, coef = (operand[:CHECKED] for operand in (self.x, self.G, self.coef_B))
        with full_precision(x.device):
            grads = reference.by_patches(x.double(), G.double(), self.geometry)
        squares = grads.flatten(1).square().sum(1)
        parts, _ = convolution_sqnorms(x, G, self.geometry)
        if not _close(parts.double().sum(1), squares):
            return "norms are not those of float64"
        kept, parts_or_none = convolution_grads(x, G, self.geometry)
        if parts_or_none is not None:
            of_kept = kept.double().flatten(1).square().sum(1)
            if not _close(parts_or_none.double().sum(1), of_kept):
                return "norms are not those of the gradients that were kept"
        if not _close(kept.double(), grads, torch.finfo(kept.dtype).eps):
            return "gradients are not those of float64"
        sums = convolution_sum(x, G, coef, self.geometry)
        if not _close(sums.double(), torch.einsum("b...,b->...", grads, coef.double())):
            return "the clipped sum is not that of float64"
        # Of one sample, what is released is what was measured.
        for sample in range(len(coef)):
            one = torch.zeros_like(coef)
            one[sample] = 1
            released = convolution_sum(x, G, one, self.geometry).double().square().sum()
            if abs(released / parts.double().sum(1)[sample] - 1) > 3e-6:
                return "what is released is not what was measured"
        return ""

    def candidates(self) -> list[Candidate]:
        """The floors, and what the library does."""
        x, G, coef, geometry, flop = self.x, self.G, self.coef_B, self.geometry, self.flop
        weight = x.new_empty(geometry.weight_shape(x, G))
        options = geometry.stride, geometry.padding, geometry.dilation, False
        rest = [0] * len(geometry.kernel), geometry.groups
        grads, _ = convolution_grads(x, G, geometry)

        def copies() -> object:
            lies = torch.channels_last if x.is_contiguous() else torch.contiguous_format
            return x.contiguous(memory_format=lies), G.contiguous(memory_format=lies)

        floor = "weight gradient"
        calls: list[tuple[str, Callable[[], object]]] = [
            ("norms", lambda: convolution_sqnorms(x, G, geometry)),
            ("gradients", lambda: convolution_grads(x, G, geometry)),
            ("sum of gradients", lambda: weighted_sum(grads, coef)),
            ("clipped sum", lambda: convolution_sum(x, G, coef, geometry)),
            ("forward", lambda: torch.convolution(x, weight, None, *options, *rest)),
            ("other format", copies),
            ("laid out", lambda: laid_out(x, G, geometry)),
        ]
        own = Result(self.name, floor, "", flop), lambda: reference.weight_grad(x, G, geometry)
        return [own, *((Result(self.name, name, floor, flop), call) for name, call in calls)]


def sweep(work: Work) -> Iterator[Candidate] | list[Candidate]:
    """Norms and sums with other tiles; of ``x`` and ``G`` in formats of their own too."""
    from flash_clipping.ops.convolution.triton import Config, config_for, launch_convolution

    x, G, geometry = work.x, work.G, work.geometry
    if geometry.is_depthwise(x):
        return []
    C, O = x.shape[1] // geometry.groups, G.shape[1] // geometry.groups  # noqa: E741
    found: list[Candidate] = []
    settings: dict[str, Any] = {
        mode: partial(launch_convolution, mode, x, G, geometry, work.coef_B * (mode == "sum"))
        for mode in ("norm", "sum")
    }
    chosen = config_for(x.dtype, G.shape[2:].numel(), C, O)
    tiles = [(64, 64, 4, 6), (64, 128, 4, 4), (128, 64, 4, 6), (128, 128, 8, 4), (64, 64, 4, 16)]
    for (block_o, block_n, warps, programs), mode in itertools.product(tiles, settings):
        if x.dtype == torch.float32 and block_n * block_o > 64 * 128:
            continue
        if mode == "sum" and programs > 6:
            continue
        config = Config(block_o, block_n, 64, chosen.promote, warps, 3, programs)
        label = f"{mode} {block_o}x{block_n} w{warps} p{programs}"
        result = Result(work.name, label, "weight gradient", work.flop)
        found.append((result, partial(settings[mode], config=config)))
    return found


def table(results: list[Result], name: str) -> Table:
    found = Table("layer", "operation", "time (µs)", "TFLOP/s", "of weight gradient", title=name)
    for result in results:
        share = "" if result.of_floor is None else f"{result.of_floor:.2f}"
        found.add_row(
            result.group, result.name, f"{result.median * 1e3:.1f}", f"{result.rate:.0f}", share
        )
    return found


def _close(found: Tensor, truth: Tensor, tolerance: float = 0.0) -> bool:
    tolerance = max(tolerance, TOLERANCE)
    return bool((found - truth).norm() <= tolerance * truth.norm())
