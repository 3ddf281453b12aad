"""``walk``: which Python functions one linear layer goes through in a step, and in which order.

A small model waits for the host, and a reader follows the same path. Counted are calls of Python
functions of this library and of Opacus, in the third step, when nothing is looked up for the first
time any more: how many, in how many files, and how often the next call is of another file. As
Python itself counts, a comprehension is a call, and so is every value asked of a generator; what
dataclasses and named tuples generate for themselves has no file, and is not counted.
"""

from __future__ import annotations

import argparse
import sys
import warnings
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


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "walk",
        help="count the Python functions that one linear layer's step goes through",
        description="Python calls in this library and in Opacus, in one forward and one backward "
        "of a wrapped nn.Sequential(nn.Linear(8, 4)) on the CPU.",
    )
    parser.add_argument("--calls", action="store_true", help="list the calls, in order")
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


def recorded(work: Callable[[], Any]) -> list[Call]:
    """What ``work`` calls; in this thread, where autograd runs backward on the CPU."""
    calls: list[Call] = []
    running: list[FrameType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and running and running[-1] is frame:
            running.pop()
        elif event == "call" and (file := _counted(frame.f_code.co_filename)) is not None:
            calls.append(Call(file, frame.f_code.co_qualname, len(running)))
            running.append(frame)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def changes(calls: list[Call]) -> int:
    """How often the next call is of another file."""
    return sum(one.file != other.file for one, other in zip(calls, calls[1:], strict=False))


def walk_of_a_linear() -> dict[str, list[Call]]:
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
    return {"forward": forward, "backward": backward}


def _counted(file: str) -> str | None:
    for name, folder in PACKAGES.items():
        if Path(file).is_relative_to(folder):
            return name + Path(file).relative_to(folder).as_posix()
    return None


def run(options: argparse.Namespace, console: Console) -> int:
    for name, calls in walk_of_a_linear().items():
        files = len({call.file for call in calls})
        console.print(
            f"{name}: {len(calls)} calls, {files} files, {changes(calls)} changes of file"
        )
        for call in calls if options.calls else ():
            print(f"    {'  ' * call.depth}{call.file}: {call.function}", file=console.file)
    return 0
