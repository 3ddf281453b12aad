"""``tables``: measure tables of docs/performance.md anew, all at one revision.

Each table is a run of another command, one after the other, or with ``--at-once N`` on N GPUs of a
machine, each with its share of the processors. Each is a process of its own, as peers replace parts
of PyTorch. Its file is named after the card and the table (``h100-step-models.json``). A run that
fails, or takes longer than it may, leaves what it has, and the others go on. ``report`` then
writes the page.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch
import yaml
from rich.console import Console

from benchmarks.options import UsageError

_RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Table:
    """One run.

    Attributes:
        command: of ``python -m benchmarks``, without ``--json`` and ``--revision``.
        seconds: after which it is ended.
        cold: with an empty folder of compiled kernels.
    """

    command: str
    seconds: int = 240
    cold: bool = False


_LISTED = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
#: By the name of their files, the most wanted first.
ON_A_GPU, ON_A_CPU = (
    {name: Table(**({"command": row} if isinstance(row, str) else row)) for name, row in of.items()}
    for of in (_LISTED["gpu"], _LISTED["cpu"])
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tables",
        help="measure tables of docs/performance.md anew, all at one revision",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--on", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--only", nargs="+", metavar="TABLE", help="of those that --list tells")
    parser.add_argument("--list", action="store_true", help="tell the commands, and run nothing")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="tables side by side, on N GPUs"
    )
    parser.add_argument("--seconds", type=float, help="begin no table after so many")
    parser.add_argument("--results", type=Path, default=_RESULTS, metavar="DIRECTORY")
    parser.add_argument("--revision", help="git revision to record where there is no git directory")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if a table failed or was not begun."""
    tables = ON_A_GPU if options.on == "gpu" else ON_A_CPU
    if unknown := set(options.only or ()) - tables.keys():
        raise UsageError(f"--only: found {sorted(unknown)}; expected some of {list(tables)}")
    chosen = {name: tables[name] for name in options.only or tables}
    if options.list:
        for name, table in chosen.items():
            console.print(f"{name}: python -m benchmarks {table.command}", soft_wrap=True)
        return 0
    on_gpu = options.on == "gpu"
    processors = sorted(os.sched_getaffinity(0))
    most = min(len(processors), max(torch.cuda.device_count(), 1)) if on_gpu else len(processors)
    if not 1 <= options.at_once <= most:
        raise UsageError(
            f"--at-once: found {options.at_once}; expected 1 to {most}, as each takes a "
            f"{'GPU and a ' if on_gpu else ''}processor"
        )
    options.results.mkdir(parents=True, exist_ok=True)
    card = _card() if on_gpu else "cpu"
    begin = time.monotonic()
    each = len(processors) // options.at_once
    free: SimpleQueue[int] = SimpleQueue()  # parts of the machine
    for share in range(options.at_once):
        free.put(share)

    def is_measured(name: str) -> bool:
        since = time.monotonic()
        if options.seconds is not None and since - begin > options.seconds:
            console.print(f"{name}: not begun")
            return False
        share = free.get()
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # of the log
        if options.at_once > 1:
            environment |= {"CUDA_VISIBLE_DEVICES": gpu_of(share), "OMP_NUM_THREADS": str(each)}
        own = processors[share * each : (share + 1) * each]
        path = options.results / f"{card}-{name}.json"
        status = measure(chosen[name], path, options.revision, environment, own)
        free.put(share)
        took = time.monotonic() - since
        console.print(f"{name}: exit status {status} after {took:.0f} s")
        return status == 0

    with ThreadPoolExecutor(options.at_once) as pool:
        measured = dict(zip(chosen, pool.map(is_measured, chosen), strict=True))
    failed = [name for name, is_there in measured.items() if not is_there]
    if failed:
        console.print(f"[bold red]not measured, or in part: {', '.join(failed)}[/]")
    return 1 if failed else 0


def gpu_of(share: int) -> str:
    """The GPU of this number among those that are visible, as CUDA names it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(share) if visible is None else visible.split(",")[share].strip()


def measure(
    table: Table, path: Path, revision: str | None, environment: dict[str, str], own: list[int]
) -> int:
    """One table by a process with ``own`` processors, into its file and, as it is printed, a log
    beside it; its exit status."""
    command = [sys.executable, "-m", "benchmarks", *shlex.split(table.command), "--json", str(path)]
    command += ["--revision", revision] if revision else []
    with tempfile.TemporaryDirectory() as folder, path.with_suffix(".log").open("w") as log:
        if table.cold:
            environment["TRITON_CACHE_DIR"] = folder
        process = subprocess.Popen(command, env=environment, stdout=log)
        os.sched_setaffinity(process.pid, own)
        try:
            return process.wait(table.seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.wait()


def _card() -> str:
    """``h100`` of "NVIDIA H100 80GB HBM3"."""
    return torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()
