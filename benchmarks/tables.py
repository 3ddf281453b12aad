"""``tables``: measure tables of docs/performance.md anew, all at one revision.

Each table is a run of another command, one after the other, or with ``--at-once N`` on N GPUs of a
machine, each with its share of the processors. Its file is named after the card and the table
(``h100-step-models.json``). A run that fails, or takes longer than it may, leaves what it has, and
the others go on in another process. ``report`` then writes the page.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import runpy
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
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
        alone: in a process that takes no table after it, as peers replace parts of PyTorch.
        cold: with an empty folder of compiled kernels, in a process of its own.
    """

    command: str
    seconds: int = 240
    alone: bool = False
    cold: bool = False


_LIST = Path(__file__).with_name("tables.yaml")
_PEERS = ("opacus", "fastdp", "flashdp")


def _listed(on: str) -> dict[str, Table]:
    found = {}
    for name, row in yaml.safe_load(_LIST.read_text(encoding="utf-8"))[on].items():
        row = {"command": row} if isinstance(row, str) else row
        peers = row["command"].startswith("step") and any(it in row["command"] for it in _PEERS)
        found[name] = Table(**row, alone=peers)
    return found


#: By the name of their files, the most wanted first.
ON_A_GPU, ON_A_CPU = _listed("gpu"), _listed("cpu")


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
    most = _shares(options.on)
    if not 1 <= options.at_once <= most:
        raise UsageError(
            f"--at-once: found {options.at_once}; expected 1 to {most}, as each takes a "
            f"{'GPU and a ' if options.on == 'gpu' else ''}processor"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.tables", "transformers"])
    options.results.mkdir(parents=True, exist_ok=True)
    begin, failed = time.monotonic(), list[str]()
    left: SimpleQueue[tuple[str, Table] | None] = SimpleQueue()
    for table_or_end in [*chosen.items(), *[None] * options.at_once]:
        left.put(table_or_end)

    def measure_what_is_left(share: int) -> None:
        worker = None
        while (taken := left.get()) is not None:
            name, table = taken
            since = time.monotonic()
            if options.seconds is not None and since - begin > options.seconds:
                failed.append(name)
                console.print(f"{name}: not begun")
                continue
            if worker is not None and table.cold:
                worker.end()
                worker = None
            worker = worker or _Worker(context, share, options.at_once)
            status = worker.measure(
                table.seconds, options.on, name, table, options.results, options.revision
            )
            if status or table.alone or table.cold:
                worker.end()
                worker = None
            took = time.monotonic() - since
            console.print(f"{name}: exit status {status} after {took:.0f} s")
            failed.extend([name] if status else [])
        if worker is not None:
            worker.end()

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(measure_what_is_left, range(options.at_once)))
    if failed:
        console.print(f"[bold red]not measured, or in part: {', '.join(failed)}[/]")
    return 1 if failed else 0


class _Worker:
    """A process that measures tables, one after the other: it takes seconds to begin.

    Args:
        share: which of ``shares`` parts of the machine it has: the GPU of this number, and as many
            processors as the others.
    """

    def __init__(self, context: ForkServerContext, share: int, shares: int) -> None:
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, share, shares), daemon=True)
        self._process.start()
        other.close()

    def measure(self, seconds: float, *arguments: object) -> int | None:
        """The exit status of :func:`measure`; not 0 where it took longer or ended the process."""
        try:
            self._connection.send(arguments)
            if self._connection.poll(seconds):
                status: int = self._connection.recv()
                return status
        except (EOFError, ConnectionError):
            pass
        self.end()
        return self._process.exitcode or 1

    def end(self) -> None:
        self._process.terminate()
        self._process.join()


def _shares(on: str) -> int:
    """Of how many tables at once this machine can have a part for each."""
    processors = len(os.sched_getaffinity(0))
    return min(processors, max(torch.cuda.device_count(), 1)) if on == "gpu" else processors


def gpu_of(share: int) -> str:
    """The GPU of this number among those that are visible, as CUDA names it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(share) if visible is None else visible.split(",")[share].strip()


def _serve(connection: Connection, share: int, shares: int) -> None:
    if shares > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_of(share)
        processors = sorted(os.sched_getaffinity(0))
        each = len(processors) // shares
        os.sched_setaffinity(0, processors[share * each : (share + 1) * each])
        torch.set_num_threads(each)
    while True:
        connection.send(measure(*connection.recv()))
        gc.collect()


def measure(on: str, name: str, table: Table, results: Path, revision: str | None) -> int:
    """One table, into its file and, as it is printed, a log beside it; the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        if table.cold:
            os.environ["TRITON_CACHE_DIR"] = folder
        path = results / f"{_card(on)}-{name}.json"
        sys.argv = ["benchmarks", *shlex.split(table.command), "--json", str(path)]
        sys.argv += ["--revision", revision] if revision else []
        with path.with_suffix(".log").open("w", buffering=1) as log, redirect_stdout(log):
            try:
                runpy.run_module("benchmarks", run_name="__main__")
            except SystemExit as end:
                return int(end.code or 0)
    return 0


def _card(on: str) -> str:
    """``h100`` of "NVIDIA H100 80GB HBM3"."""
    if on == "cpu":
        return on
    words: Sequence[str] = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()
    return words[0].lower()
