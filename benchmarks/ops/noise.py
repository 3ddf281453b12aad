"""``noise``: how fast noise is drawn, beside what others draw, and whether it is normal.

Beside ``torch.normal``, Opacus' noise and a copy of the same memory; on a CPU by the time that the
process had, for others may want the same cores. A figure of the distribution that is off by more
than 5.5 standard errors is exit status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator

import torch

from benchmarks.ops.bench import Candidate, OpBench, Result, Run, Wrong
from benchmarks.ops.noise_statistics import Statistics
from benchmarks.report import table
from flash_clipping.ops.noise import noisy_means
from flash_clipping.randomness import ALL_ROUNDS, FEWER_ROUNDS, Purpose, SecretStream

#: Standard errors beyond which a figure is wrong: of some 25, one run in a million has such a one.
DOUBTFUL = 5.5


def _arguments(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--parameters", type=float, default=1e9 if on_gpu else 1e7, help="that noise is timed for"
    )
    parser.add_argument("--draws", type=float, default=1e10 if on_gpu else 1e8)
    parser.add_argument(
        "--rounds",
        type=int,
        choices=(FEWER_ROUNDS, ALL_ROUNDS),
        default=FEWER_ROUNDS if on_gpu else ALL_ROUNDS,
        help="of the cipher whose normals are looked at; by default as in steps",
    )


def work(run: Run) -> Iterator[list[Candidate]]:
    options = run.options
    if run.device.type == "cpu":
        torch.set_num_threads(1)
    timed = candidates(run.device, int(options.parameters), options.rounds)
    yield timed
    took = {result.name: result.median for result, _ in timed}
    run.facts["speed"] = [
        {
            "noise": name,
            "ms": round(ms, 3),
            "ns for an element": round(ms * 1e6 / options.parameters, 4),
            "times torch.normal": round(ms / took["torch.normal alone"], 3),
            "share of a copy's speed": round(took["a copy"] / ms, 3),
        }
        for name, ms in took.items()
    ]
    draw = SecretStream().draw(Purpose.NOISE, options.rounds)
    found = Statistics.of(draw, int(options.draws), str(run.device))
    rows = [dataclasses.asdict(row) for row in found.rows()]
    texts = [[row["name"], *(f"{row[k]:.6g}" for k in list(row)[1:])] for row in rows]
    run.console.print(table(list(rows[0]), texts), markup=False)
    run.console.print(f"{found.count} normals; the largest is {found.largest:.4f}")
    run.facts |= {"rounds": options.rounds, "draws": found.count, "largest": found.largest}
    run.facts["statistics"] = rows
    if found.worst() > DOUBTFUL:
        raise Wrong(f"a figure is off by {found.worst():.1f} standard errors")


def candidates(device: torch.device, parameters: int, rounds: int) -> list[Candidate]:
    from opacus.optimizers.optimizer import _generate_noise

    summed = torch.randn(parameters, device=device)
    other = torch.empty_like(summed)
    stream = SecretStream()
    others = ALL_ROUNDS if rounds == FEWER_ROUNDS else FEWER_ROUNDS

    def ours(
        rounds: int = rounds, dtype: torch.dtype = torch.float32, grid: bool = False
    ) -> object:
        draw = stream.draw(Purpose.NOISE, rounds)
        return noisy_means([summed], 1.0, 2.0, draw=draw, dtypes=[dtype], grid=grid)

    calls: dict[str, Callable[[], object]] = {
        f"secret noise of {rounds} rounds, added": ours,
        "the same, rounded to a grid": lambda: ours(grid=True),
        "the same, in bf16": lambda: ours(dtype=torch.bfloat16),
        f"secret noise of {others} rounds, added": lambda: ours(others),
        "torch.normal alone": lambda: torch.normal(0.0, 1.0, summed.shape, device=device),
        "Opacus' noise, added": lambda: (summed + _generate_noise(1.0, summed)) / 2.0,
        "a copy": lambda: other.copy_(summed),
    }
    group, floor = f"{parameters} parameters", "a copy"
    return [(Result(group, name, "" if name == floor else floor), calls[name]) for name in calls]


BENCH = OpBench(
    "noise",
    "noise: its speed beside torch.normal, Opacus' and a copy, and its distribution",
    __doc__,
    work,
    _arguments,
    unit="",
    samples=("--turns", 9),
    clock="cpu",
    has_dtype=False,
)
