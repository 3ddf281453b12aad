"""The harness of all benchmarks of operations.

A benchmark is an :class:`OpBench`. Its ``work`` checks results, then yields lists of candidates.
Those of a list are timed in turn, since clocks vary, and each beside its floor in the same list.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import environment
from benchmarks.measure import Clock, milliseconds, settle
from benchmarks.options import DTYPES, add_output_options
from benchmarks.records import write_json
from flash_clipping import GradSampleModuleFlashClipping

CALLS = 4
"""Calls in one sample of time."""
HEAD_START = 40
"""Matmuls, of 0.2 ms on an H200, that the device is given before a sample. Meanwhile the host
queues the calls: a small operation takes the host longer than the device, and it is the device
that is measured here. And every operation finds the device as warm as in the middle of a step:
one that has just idled, or copied, runs the next matmul a fifth faster."""
HEAD_START_SIDE = 4096


class Wrong(Exception):
    """A result is wrong; the message says which and by how much."""


@dataclass
class Result:
    """One operation on one shape.

    Attributes:
        floor: the operation of its group that it is compared with, or empty.
        work: useful FLOP of what computes, bytes read and written of what moves memory.
        of_floor: its rate over the floor's.
    """

    group: str
    name: str
    floor: str = ""
    work: float = 1.0
    milliseconds: list[float] = field(default_factory=list)
    of_floor: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def rate(self) -> float:
        """TFLOP/s or TB/s."""
        return self.work / self.median / 1e9


Candidate = tuple[Result, Callable[[], object]]


@dataclass
class Run:
    """What a command line asks for.

    Attributes:
        facts: what the file is to hold besides results.
    """

    options: argparse.Namespace
    console: Console
    device: torch.device
    dtype: torch.dtype
    facts: dict[str, Any] = field(default_factory=dict)

    def sizes(self, given: Any, by_device: dict[str, Any]) -> Any:
        """What was given, or the default of this device."""
        return given or by_device[self.device.type]


@dataclass(frozen=True)
class OpBench:
    """One subcommand.

    Attributes:
        work: raises :class:`Wrong`, or yields what is timed. Its results can be read once the next
            list is asked for.
        arguments: adds options of its own.
        unit: of rates, where the floor is no copy; empty: they are not told.
        samples: the option for samples of each, and how many by default.
        has_dtype: whether ``--dtype`` decides anything.
    """

    name: str
    help: str
    description: str | None
    work: Callable[[Run], Iterator[list[Candidate]]]
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    unit: str = "TFLOP/s"
    samples: tuple[str, int] = ("--rounds", 9)
    clock: Clock = "wall"
    has_dtype: bool = True

    def add_parser(self, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        parser = commands.add_parser(self.name, help=self.help, description=self.description)
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        if self.has_dtype:
            parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, else fp32")
        option, count = self.samples
        parser.add_argument(option, dest="samples", type=int, default=count, help="of each")
        self.arguments(parser)
        add_output_options(parser)
        parser.set_defaults(run=self.run)

    def run(self, options: argparse.Namespace, console: Console) -> int:
        """Exit status: 0, or 1 if a result is wrong."""
        device = torch.device(options.device)
        by_default = "bf16" if device.type == "cuda" and self.has_dtype else "fp32"
        dtype = DTYPES[getattr(options, "dtype", None) or by_default]
        run = Run(options, console, device, dtype)
        torch.manual_seed(0)
        results: list[Result] = []
        try:
            for candidates in self.work(run):
                found = measure(candidates, options.samples, device, self.clock)
                groups = dict.fromkeys(result.group for result in found)
                console.print(f"{self.name}: {'; '.join(groups)}", markup=False, soft_wrap=True)
                console.print(self._table(found))  # at once: an interrupted run leaves what it has
                results += found
                del candidates
                settle(device)
        except Wrong as error:
            console.print(f"[bold red]{error}: nothing is timed[/]")
            return 1
        record = {
            "kind": self.name,
            "environment": environment.describe(device, options.revision),
            "command": options.command,
            "dtype": str(dtype).removeprefix("torch."),
            "results": [asdict(it) | {"median": it.median, "rate": it.rate} for it in results],
        }
        write_json(options.json, record | run.facts)
        return 0

    def _table(self, results: list[Result]) -> Table:
        """Of one list of candidates."""
        heads = ["operation", "time (µs)", *(["rate"] if self.unit else []), "of its floor"]
        table = Table(*heads)
        for result in results:
            unit = "TB/s" if "copy" in (result.name, result.floor) else self.unit
            rate = [f"{result.rate:.3g} {unit}"] if self.unit else []
            share = "" if result.of_floor is None else f"{result.of_floor:.2f} of {result.floor}"
            table.add_row(result.name, f"{result.median * 1e3:.1f}", *rate, share)
        return table


def measure(
    candidates: list[Candidate], samples: int, device: torch.device, clock: Clock = "wall"
) -> list[Result]:
    """Every candidate in turn, so many times; rates relative to the floor of the same run."""
    for _, call in candidates:
        call()  # compiles
    busy: Callable[[], object] | None = None
    if device.type == "cuda":
        square = torch.randn(HEAD_START_SIDE, HEAD_START_SIDE, device=device, dtype=torch.bfloat16)
        busy = partial(torch.mm, square, square, out=torch.empty_like(square))
    order = random.Random(0)
    for _ in range(samples):
        for result, call in order.sample(candidates, len(candidates)):
            result.milliseconds.append(_sample(call, device, busy, clock))
    results = [result for result, _ in candidates]
    floors = {(result.group, result.name): result.rate for result in results}
    for result in results:
        if result.floor:
            result.of_floor = result.rate / floors[result.group, result.floor]
    return results


def _sample(
    call: Callable[[], object],
    device: torch.device,
    busy: Callable[[], object] | None,
    clock: Clock,
) -> float:
    """Milliseconds of one call, of ``CALLS`` in a row, after ``HEAD_START`` calls of ``busy``."""

    def run() -> None:
        for _ in range(CALLS):
            call()

    if busy is None:
        return milliseconds(device, run, clock) / CALLS
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    for _ in range(HEAD_START):
        busy()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def copy_candidate(
    group: str, elements: int, device: torch.device, dtype: torch.dtype
) -> Candidate:
    """The floor of what moves memory."""
    source = torch.randn(elements, device=device, dtype=dtype)
    target = torch.empty_like(source)
    work = 2.0 * elements * source.element_size()
    return Result(group, "copy", "", work), lambda: target.copy_(source)


def relative_error(found: Tensor, truth: Tensor) -> float:
    """``|found - truth| / |truth|``; infinite where that is no number."""
    found, truth = found.detach().double(), truth.detach()
    error = float((found - truth).norm() / truth.norm().clamp(min=1e-9))
    return error if error == error else float("inf")


def private(model: nn.Module) -> Any:
    return GradSampleModuleFlashClipping(model, max_grad_norm=1.0, loss_reduction="sum")


def step(model: nn.Module, x: Tensor, grad: Tensor) -> None:
    """Forward and backward, into fresh gradients."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    model(x).backward(grad)


def integers(count: int) -> Callable[[str], tuple[int, ...]]:
    """Parses an option of so many positive integers, with commas between them."""

    def parse(text: str) -> tuple[int, ...]:
        numbers = tuple(int(part) for part in text.split(","))
        if len(numbers) != count or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"expected {count} positive integers, as in 8,1024")
        return numbers

    return parse
