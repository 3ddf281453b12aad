"""``profile``: what the kernels of a step take, by kind, for each method.

Our own kernels are told by name; those of libraries, which go by hundreds of names, by what they
do. Steps follow one another as in a loop, so that the card is as warm as there.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from benchmarks import environment
from benchmarks.measure import milliseconds, settle
from benchmarks.methods import METHODS, Setting
from benchmarks.options import (
    UsageError,
    add_setting_options,
    method_names,
    setting,
)
from benchmarks.records import write_json
from benchmarks.report import table

#: Of a library's kernel, by its name; the first that fits.
KINDS = {
    "attention": r"flash|fmha|sdpa|softmax_warp|attention",
    "convolutions": r"wgrad|dgrad|implicit_gemm|conv(?!ert)|nchwToNhwc|nhwcToNchw",
    "products": r"nvjet|gemm|gemv|cutlass|splitK",
    "copies": r"Memcpy|Memset",
}
OTHERS = "element by element, reductions"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "profile",
        help="what the kernels of a step take, by kind",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_setting_options(parser)
    parser.add_argument("--batch", type=int, help="override the model's batch size")
    parser.add_argument("--seq", type=int, help="override the model's sequence length")
    parser.add_argument("--steps", type=int, default=5, help="steps that are averaged over")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    if torch.device(options.device).type != "cuda":
        raise UsageError("profile: kernels are those of a GPU; there is none")
    models, status = {}, 0
    for model in options.model:
        chosen = setting(options, model, batch=options.batch, seq=options.seq)
        found = {}
        for name in method_names(options.methods):
            try:
                found[name] = kernels_of_a_step(name, chosen, options.steps)
            except Exception as error:  # the others go on
                console.print(f"{model}: {name}: {type(error).__name__}: {error}", markup=False)
                status = 1
            settle(chosen.device)
        models[model] = found
        kinds = dict.fromkeys(kind for times in found.values() for kind in times)
        lines = [
            [kind, *(f"{times.get(kind, 0.0):.2f}" for times in found.values())] for kind in kinds
        ]
        console.print(table([f"{model}, ms", *found], lines), markup=False)
    record = {
        "kind": "profile",
        "environment": environment.describe(torch.device(options.device), options.revision),
        "command": options.command,
        "milliseconds": models,
    }
    write_json(options.json, record)
    return status


def kernels_of_a_step(name: str, chosen: Setting, steps: int) -> dict[str, float]:
    """Milliseconds by kind, the longest first; and of all kernels, and of the whole step."""
    method, batch = METHODS[name](chosen), chosen.draw(1)[0]
    for _ in range(method.settling + 3):
        method.step(*batch)

    def take() -> None:
        for _ in range(steps):
            method.step(*batch)

    whole = milliseconds(chosen.device, take) / steps
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        take()
        torch.cuda.synchronize(chosen.device)
    times: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[kind_of(event.name)] += event.time_range.elapsed_us() / 1e3 / steps
    return {
        **dict(times.most_common()),
        "all kernels": sum(times.values()),
        "the step, not profiled": whole,
    }


def kind_of(kernel: str) -> str:
    """Its own name if it is one of ours."""
    if re.fullmatch(r"_\w+_kernel", kernel):
        return kernel
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel)), OTHERS)
