"""The cost of privacy for one model on this machine: ``flash-clipping bench``.

Methods take turns, and each turn is a process of its own, so that none has what another left.
Medians of the turns are reported.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping.diagnostics.factory import load_factory
from flash_clipping.diagnostics.oracle import BadBatchError, Samples, squared_outputs
from flash_clipping.diagnostics.report import described
from flash_clipping.engine.options import Kernels
from flash_clipping.engine.privacy_engine import FlashPrivacyEngine

#: Arguments of ``make_private``, and of its ``Kernels``.
Options = dict[str, Any]

#: What ``make_private`` is asked for by each method; ``None`` is training without it.
METHODS: dict[str, Options | None] = {
    "plain": None,
    "private": {},
    "graphs": {"cuda_graphs": "auto"},
    "two_pass": {"mode": "two_pass"},
}

#: Steps before those that are timed: on a GPU kernels are compiled, and a graph is captured.
WARM_UP = 5

#: The cost of training steps (forward, backward, AdamW; in private ones clipping and noise):
#: ``step_ms``; ``host_ms``, until the last kernel is launched, on a GPU; ``first_s``, what first
#: steps take more, to check the model, compile and capture; ``peak_mib``, of all tensors on a GPU,
#: and on a CPU what the process has more than without the model. ``None`` is not known.
Cost = dict[str, float | None]


def bench(
    methods: Sequence[str], rounds: int, tell: Callable[[str], None], *given: Any
) -> tuple[dict[str, Cost], dict[str, str]]:
    """The cost of each of these :data:`METHODS`, and why others have none on this machine.

    Args:
        rounds: turns of each method.
        tell: hears of each turn.
        given: the factory's name, the device and the dtype to move the model to, if any, the number
            of steps that are timed in a turn, and options of ``make_private``.

    Raises:
        BadBatchError: the factory cannot be used, or a method refuses its model.
    """
    turns: dict[str, list[Cost]] = {}
    without: dict[str, str] = {}
    for number in range(rounds):
        for method in [method for method in methods if method not in without]:
            tell(f"{method}, round {number + 1} of {rounds}")
            try:
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    found = process.submit(_turn, method, *given).result()
            except BrokenProcessPool:
                found = "the system has ended the process, as where memory is short"
            if isinstance(found, str):
                without[method] = found
                turns.pop(method, None)
            else:
                turns.setdefault(method, []).append(found)
    return {method: _medians(costs) for method, costs in turns.items()}, without


def _medians(costs: Sequence[Cost]) -> Cost:
    columns = {n: [x for cost in costs if (x := cost[n]) is not None] for n in costs[0]}
    return {n: statistics.median(values) if values else None for n, values in columns.items()}


def table(costs: dict[str, Cost]) -> list[list[str]]:
    """A heading, and a row for each method, with time and memory beside those of plain training."""
    rows = [["method", *next(iter(costs.values()), {}), "time x plain", "memory x plain"]]
    for method, cost in costs.items():
        times = []
        for name in ("step_ms", "peak_mib"):
            mine, plain = cost[name], costs.get("plain", cost)[name]
            times.append(mine / plain if mine and plain else None)
        numbers = (*cost.values(), *times)
        rows.append([method, *("" if x is None else f"{x:,.2f}" for x in numbers)])
    return rows


def _turn(
    method: str, factory: str, device: str | None, dtype: str | None, steps: int, options: Options
) -> Cost | str:
    """The cost of a method in this process, or why there is none on this machine."""
    warnings.simplefilter("ignore")
    try:
        with redirect_stdout(sys.stderr):  # what a factory prints is no part of the report
            usual = {"batch_first": True, "loss_reduction": "mean"}
            _, toy = _private(METHODS[method], usual, nn.Linear(2, 2), torch.randn(2, 2), None)
            toy()  # what is imported and started at a first step is not the model's
            before = _peak(None)
            model, batch, loss = load_factory(factory, device, dtype)
            place = next(model.parameters()).device
            gpu = place if place.type == "cuda" else None
            if method == "graphs" and gpu is None:
                return "needs a GPU"
            private, step = _private(METHODS[method], options, model, batch, loss)
            first = sum(_seconds(step, gpu)[1] for _ in range(WARM_UP))
            timed = [_seconds(step, gpu) for _ in range(steps)]
    except torch.OutOfMemoryError:
        return "out of memory"
    except BadBatchError:
        raise
    except Exception as error:  # of the user's model, or a refusal of it
        refusal = f"{method}: {described(error)}"
        raise BadBatchError(refusal) from error
    if why := getattr(getattr(private, "_graphs", None), "off", None):
        return f"runs without graphs, because {why}"
    host, seconds = map(statistics.median, zip(*timed, strict=True))
    peak = _peak(gpu)
    if gpu is None:
        peak = None if peak is None or before is None else peak - before
    return {
        "step_ms": 1e3 * seconds,
        "host_ms": None if gpu is None else 1e3 * host,
        "first_s": max(first - WARM_UP * seconds, 0.0),
        "peak_mib": peak,
    }


def _private(
    asked: Options | None, options: Options, model: Any, batch: Any, loss: Any
) -> tuple[Any, Callable[[], None]]:
    """The model, made private unless ``asked`` is ``None``, and a training step on the batch."""
    losses_of = loss or squared_outputs(options["batch_first"])
    # As much work as with any other rate, and the model stays what it is.
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    if asked is not None:
        count = Samples(batch, options["batch_first"], model).count
        given = {**options, **asked}
        kernels = {name: given.pop(name) for name in ("backend", "cuda_graphs") if name in given}
        model, optimizer, *_ = FlashPrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(TensorDataset(torch.empty(count, 0)), batch_size=count),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            kernels=Kernels(**kernels),
            **given,
        )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses = losses_of(model, batch)
        (losses.mean() if options["loss_reduction"] == "mean" else losses.sum()).backward()
        optimizer.step()

    return model, step


def _seconds(step: Callable[[], None], gpu: torch.device | None) -> tuple[float, float]:
    """Of the host, and until the device has nothing more to do."""
    begin = time.perf_counter()
    step()
    host = time.perf_counter() - begin
    if gpu is not None:
        torch.cuda.synchronize(gpu)
    return host, time.perf_counter() - begin


def _peak(gpu: torch.device | None) -> float | None:
    """The most MiB that a GPU, or this process, has had, where the system says."""
    if gpu is not None:
        return torch.cuda.max_memory_allocated(gpu) / 2**20
    try:
        (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except (OSError, ValueError):
        return None
    return int(kilobytes) / 2**10
