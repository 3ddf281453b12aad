"""``convolutions``: norms, gradients and clipped sums of convolutions, against the library's own.

The floor is the weight gradient that an ordinary step has, by cuDNN on a GPU, of the same operands
in the same memory format. Before a time is taken, some samples are compared with float64.

B samples, C input and O output channels, H the side of an image, k of a window, s its stride.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.ops.bench import Candidate, OpBench, Result, Run, Wrong, relative_error
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

Shape = tuple[int, int, int, int, int, int, int]

#: Model -> its layers: B, C, O, H, k, s, groups.
LAYERS: dict[str, list[Shape]] = {
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
#: In which x and G lie.
FORMATS = {
    "nchw": (torch.contiguous_format, torch.contiguous_format),
    "nhwc": (torch.channels_last, torch.channels_last),
    "mixed": (torch.channels_last, torch.contiguous_format),
}
TOLERANCE = 1e-5
CHECKED = 3
"""Samples that are compared with float64."""


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["wrn", "resnet"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["nchw", "nhwc"])


def work(run: Run) -> Iterator[list[Candidate]]:
    shapes = [shape for model in run.options.layers for shape in LAYERS[model]]
    layers = [(shape, form) for shape in shapes for form in run.options.formats]
    with compiled_side_by_side():  # what will be timed, of a few samples
        for (_, *shape), form in layers:
            for _, call in _Work((2, *shape), form, run.device, run.dtype).candidates():
                call()
    for shape, form in layers:
        layer = _Work(shape, form, run.device, run.dtype)
        if wrong := layer.disagreement():
            raise Wrong(f"{layer.name}: {wrong}")
        yield layer.candidates()


class _Work:
    """One convolution: its operands, and what is asked of them."""

    def __init__(self, shape: Shape, form: str, device: torch.device, dtype: torch.dtype) -> None:
        B, C, O, H, k, s, groups = shape  # noqa: E741
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
        parts, _ = convolution_sqnorms(x, G, self.geometry)
        if relative_error(parts.double().sum(1), grads.flatten(1).square().sum(1)) > TOLERANCE:
            return "norms are not those of float64"
        kept, parts_or_none = convolution_grads(x, G, self.geometry)
        if parts_or_none is not None:
            of_kept = kept.double().flatten(1).square().sum(1)
            if relative_error(parts_or_none.double().sum(1), of_kept) > TOLERANCE:
                return "norms are not those of the gradients that were kept"
        if relative_error(kept, grads) > max(TOLERANCE, torch.finfo(kept.dtype).eps):
            return "gradients are not those of float64"
        sums = convolution_sum(x, G, coef, self.geometry)
        if relative_error(sums, torch.einsum("b...,b->...", grads, coef.double())) > TOLERANCE:
            return "the clipped sum is not that of float64"
        # Of one sample, what is released is what was measured.
        for one, measured in zip(torch.eye(len(coef)).to(coef), parts.double().sum(1), strict=True):
            released = convolution_sum(x, G, one, self.geometry).double().square().sum()
            if abs(released / measured - 1) > 3e-6:
                return "what is released is not what was measured"
        return ""

    def candidates(self) -> list[Candidate]:
        """The floors, and what the library does."""
        x, G, coef, geometry = self.x, self.G, self.coef_B, self.geometry
        weight = x.new_empty(geometry.weight_shape(x, G))
        options = geometry.stride, geometry.padding, geometry.dilation, False
        rest = [0] * len(geometry.kernel), geometry.groups
        grads, _ = convolution_grads(x, G, geometry)

        def copies() -> object:
            lies = torch.channels_last if x.is_contiguous() else torch.contiguous_format
            return x.contiguous(memory_format=lies), G.contiguous(memory_format=lies)

        floor = "weight gradient"
        calls: dict[str, Callable[[], object]] = {
            floor: lambda: reference.weight_grad(x, G, geometry),
            "norms": lambda: convolution_sqnorms(x, G, geometry),
            "gradients": lambda: convolution_grads(x, G, geometry),
            "sum of gradients": lambda: weighted_sum(grads, coef),
            "clipped sum": lambda: convolution_sum(x, G, coef, geometry),
            "forward": lambda: torch.convolution(x, weight, None, *options, *rest),
            "other format": copies,
            "laid out": lambda: laid_out(x, G, geometry),
        }
        return [
            (Result(self.name, name, "" if name == floor else floor, self.flop), call)
            for name, call in calls.items()
        ]


BENCH = OpBench(
    "convolutions",
    "norms and sums of convolutions",
    __doc__,
    work,
    _arguments,
    samples=("--rounds", 5),
)
