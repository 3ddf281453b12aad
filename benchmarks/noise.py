"""``noise``: how fast noise is drawn, beside what others draw, and whether it is normal.

Beside ``torch.normal``, Opacus' noise and a copy of the same memory. Candidates take turns, and
medians are told; on a CPU of the time that the process had, for others may want the same cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import environment
from benchmarks.measure import milliseconds
from benchmarks.noise_statistics import Statistics
from benchmarks.report import table
from flash_clipping.ops.noise import noisy_means
from flash_clipping.randomness import ALL_ROUNDS, FEWER_ROUNDS, Purpose, SecretStream

#: Standard errors beyond which a figure is wrong: of some 25, one run in a million has such a one.
DOUBTFUL = 5.5


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "noise",
        help="noise: its speed beside torch.normal, Opacus' and a copy, and its distribution",
        description="The exit status is 1 if a figure of the distribution is off by more than "
        f"{DOUBTFUL} standard errors.",
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument(
        "--parameters", type=float, default=1e9 if on_gpu else 1e7, help="that noise is timed for"
    )
    parser.add_argument("--draws", type=float, default=1e10 if on_gpu else 1e8)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument(
        "--rounds",
        type=int,
        choices=(FEWER_ROUNDS, ALL_ROUNDS),
        default=FEWER_ROUNDS if on_gpu else ALL_ROUNDS,
        help="of the cipher whose normals are looked at; by default as in steps",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--revision", help="git revision to record where there is no git directory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    speed = _speed(device, int(options.parameters), options.turns, options.rounds)
    console.print(
        table(list(speed[0]), [[str(value) for value in row.values()] for row in speed]),
        markup=False,
    )
    draw = SecretStream().draw(Purpose.NOISE, options.rounds)
    found = Statistics.of(draw, int(options.draws), str(device))
    rows = [dataclasses.asdict(row) for row in found.rows()]
    texts = [[row["name"], *(f"{row[k]:.6g}" for k in list(row)[1:])] for row in rows]
    console.print(table(list(rows[0]), texts), markup=False)
    console.print(f"{found.count} normals; the largest is {found.largest:.4f}")
    record = {
        "kind": "noise",
        "environment": environment.describe(device, options.revision),
        "command": options.command,
        "speed": speed,
        "rounds": options.rounds,
        "draws": found.count,
        "largest": found.largest,
        "statistics": rows,
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(found.worst() > DOUBTFUL)


def _milliseconds(device: torch.device, candidate: Callable[[], Any]) -> float:
    if device.type != "cpu":
        return milliseconds(device, candidate)
    start = time.process_time()
    candidate()
    return (time.process_time() - start) * 1e3


def _speed(device: torch.device, parameters: int, turns: int, rounds: int) -> list[dict[str, Any]]:
    from opacus.optimizers.optimizer import _generate_noise

    summed = torch.randn(parameters, device=device)
    stream = SecretStream()
    kept: list[Any] = [None]

    others = ALL_ROUNDS if rounds == FEWER_ROUNDS else FEWER_ROUNDS

    def ours(rounds: int = rounds, dtype: torch.dtype = torch.float32, grid: bool = False) -> None:
        draw = stream.draw(Purpose.NOISE, rounds)
        kept[0] = noisy_means([summed], 1.0, 2.0, draw=draw, dtypes=[dtype], grid=grid)

    def opacus() -> None:
        kept[0] = (summed + _generate_noise(1.0, summed)) / 2.0

    def normal() -> None:
        kept[0] = torch.normal(0.0, 1.0, summed.shape, device=device)

    other = torch.empty_like(summed)
    candidates: dict[str, Callable[[], Any]] = {
        f"secret noise of {rounds} rounds, added": ours,
        "the same, rounded to a grid": lambda: ours(grid=True),
        "the same, in bf16": lambda: ours(dtype=torch.bfloat16),
        f"secret noise of {others} rounds, added": lambda: ours(others),
        "torch.normal alone": normal,
        "Opacus' noise, added": opacus,
        "a copy": lambda: other.copy_(summed),
    }
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns + 1):
        for name, candidate in candidates.items():
            took = _milliseconds(device, candidate)
            kept[0] = None
            if turn:  # the first compiles kernels
                times[name].append(took)
    median = {name: statistics.median(found) for name, found in times.items()}
    return [
        {
            "noise": name,
            "ms": round(took, 3),
            "ns for an element": round(took * 1e6 / parameters, 4),
            "times torch.normal": round(took / median["torch.normal alone"], 3),
            "share of a copy's speed": round(median["a copy"] / took, 3),
        }
        for name, took in median.items()
    ]
