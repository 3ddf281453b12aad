"""``walk``: which Python functions one linear layer goes through in a step, and in which order.

A small model waits for the host, and a reader follows the same path. Counted are calls of Python
functions of this library and of Opacus, in the third step, when nothing is looked up for the first
time any more: how many, in how many files, and how often the next call is of another file. As
Python itself counts, a comprehension is a call, and so is every value asked of a generator; what
dataclasses and named tuples generate for themselves has no file, and is not counted.

``--layers`` counts what one more ``Linear`` adds to a step: calls, and the conditional jumps that
Python passes in this library's own code, taken or not.
"""

from __future__ import annotations

import argparse
import dis
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import opacus
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flash_clipping

#: Where the functions are that count, by the name of what they are a part of.
PACKAGES = {
    "": Path(flash_clipping.__file__).parent,
    "opacus/": Path(opacus.__file__).parent,
}

STEPS = 3

_JUMPS = {number for name, number in dis.opmap.items() if "JUMP" in name and "IF" in name}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "walk",
        help="count the Python functions that one linear layer's step goes through",
        description="Python calls in this library and in Opacus, in one forward and one backward "
        "of a wrapped nn.Sequential(nn.Linear(8, 4)) on the CPU.",
    )
    parser.add_argument("--calls", action="store_true", help="list the calls, in order")
    parser.add_argument(
        "--layers",
        action="store_true",
        help="count calls and conditional jumps that one more layer adds, by function",
    )
    parser.set_defaults(run=run)


@dataclass
class Call:
    """One call of a Python function.

    Attributes:
        file: relative to the package.
        function: its name, with that of its class.
        depth: how many calls of the list it is inside of.
    """

    file: str
    function: str
    depth: int

    @property
    def where(self) -> str:
        return f"{self.file}: {self.function}"


@dataclass
class Walk:
    """Calls in their order, and how many conditional jumps each function passed, taken or not."""

    calls: list[Call]
    jumps: Counter[str]

    @property
    def files(self) -> int:
        return len({call.file for call in self.calls})

    @property
    def changes(self) -> int:
        """How often the next call is of another file."""
        files = [call.file for call in self.calls]
        return sum(one != other for one, other in zip(files, files[1:], strict=False))


def recorded(work: Callable[[], Any]) -> Walk:
    """What ``work`` calls; in this thread, where autograd runs backward on the CPU."""
    walk = Walk([], Counter())
    running: list[FrameType] = []

    def begin(frame: FrameType, *_: Any) -> Any:
        if (file := _counted(frame.f_code.co_filename)) is None:
            return None
        call = Call(file, frame.f_code.co_qualname, len(running))
        walk.calls.append(call)
        running.append(frame)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def inside(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode" and frame.f_code.co_code[frame.f_lasti] in _JUMPS:
                walk.jumps[call.where] += 1
            elif event == "return" and running and running[-1] is frame:
                running.pop()
            return inside

        return inside

    sys.settrace(begin)
    try:
        work()
    finally:
        sys.settrace(None)
    return walk


def walk_of_a_linear() -> tuple[Walk, Walk]:
    """Forward and backward of a linear layer, in a step when all is known."""
    data = TensorDataset(torch.zeros(16, 8))
    model = nn.Sequential(nn.Linear(8, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batches are not drawn, and noise is not secure
        model, optimizer, _, _ = flash_clipping.FlashPrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.MSELoss(),
            data_loader=DataLoader(data, batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode="flash",
        )
    x = torch.randn(4, 8)
    outputs: list[Any] = []
    for _ in range(STEPS):
        forward = recorded(lambda: outputs.append(model(x)))
        backward = recorded(outputs.pop().square().sum().backward)
        optimizer.step()
        optimizer.zero_grad()
    return forward, backward


def of_one_more_layer() -> dict[str, tuple[float, float]]:
    """Conditional jumps and calls that a ``Linear`` adds to a step, by function: the difference of
    models of four and of eight."""
    few, many = (recorded(_step_of(n)) for n in (4, 8))
    counts = [(walk.jumps, Counter(call.where for call in walk.calls)) for walk in (few, many)]
    found = {}
    for where in sorted(counts[1][1]):
        added = tuple((counts[1][kind][where] - counts[0][kind][where]) / 4 for kind in (0, 1))
        if any(added) and not where.startswith("opacus/"):
            found[where] = added
    return found


def _step_of(layers: int) -> Callable[[], None]:
    """Forward and backward of so many layers and a last one, when all is known."""
    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())]
    model = flash_clipping.GradSampleModuleFlashClipping(
        nn.Sequential(*parts, nn.Linear(8, 2)), max_grad_norm=1.0
    )
    x = torch.randn(4, 8)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.running_step.forget()
        model(x).sum(1).mean().backward()

    for _ in range(STEPS):
        step()
    return step


def _counted(file: str) -> str | None:
    for name, folder in PACKAGES.items():
        if Path(file).is_relative_to(folder):
            return name + Path(file).relative_to(folder).as_posix()
    return None


def run(options: argparse.Namespace, console: Console) -> int:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        walks = walk_of_a_linear()
        of_layer = of_one_more_layer() if options.layers else {}
    finally:
        torch.set_num_threads(threads)
    for name, walk in zip(("forward", "backward"), walks, strict=True):
        console.print(
            f"{name}: {len(walk.calls)} calls, {walk.files} files, {walk.changes} changes of file"
        )
        if options.calls:
            for call in walk.calls:
                print(f"    {'  ' * call.depth}{call.where}", file=console.file)
    if options.layers:
        jumps, calls = (sum(found) for found in zip(*of_layer.values(), strict=True))
        console.print(f"one more Linear: {jumps:g} conditional jumps, {calls:g} calls")
        for where, found in sorted(of_layer.items(), key=lambda item: -item[1][0]):
            print(f"    {found[0]:5.2f} {found[1]:5.2f}  {where}", file=console.file)
    return 0
