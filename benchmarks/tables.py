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
import shlex
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from queue import SimpleQueue

import torch
from rich.console import Console

from benchmarks.options import UsageError

_RESULTS = Path(__file__).resolve().parent / "results"

DECODERS = "decoder-1 decoder-2 decoder-3 decoder-4"
LANGUAGE = "llama-3.2-1b smollm-135m qwen3-0.6b bert-base t5-base qwen3-moe-small"
PUBLISHED = "gpt2-small-e2e gpt2-medium-e2e gpt2-large-e2e roberta-large vit-large"
GRAPHS = "nonprivate,nonprivate-graph,flash,flash-graph"
ALL_GRAPHS = f"{GRAPHS},flash-auto-graphs"
LONG = "llama-3.2-1b-untied"  # Opacus' ghost clipping takes no tied parameters
ESTIMATED = "opacus-ghost,opacus-randomized"


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


def _step(
    models: str, methods: str = "nonprivate,flash", more: str = "", seconds: int = 240
) -> Table:
    """Without ``more``, with enough turns for a median."""
    turns = "" if "--rounds" in more else "--rounds 5 --steps 4 "
    command = f"step --model {models} --methods {methods} {turns}{more}".strip()
    peers = any(peer in methods for peer in ("opacus", "fastdp", "flashdp"))
    return Table(command, seconds, alone=peers)


#: By the name of their files, the most wanted first.
ON_A_GPU = {
    "step-first": Table(
        "step --model bert-base llama-3.2-1b --methods flash --rounds 1 --steps 1", cold=True
    ),
    "step-decoders": _step(DECODERS, GRAPHS),
    "step-models": _step(LANGUAGE, ALL_GRAPHS, seconds=300),
    "step-published": _step(PUBLISHED, GRAPHS, seconds=300),
    "kernels": Table("kernels"),
    "step-peers": _step(DECODERS, "nonprivate,flash,opacus-ghost,fastdp", "--rounds 3 --steps 2"),
    "step-convolutions": _step("wrn-16-4 resnet50-gn unet", ALL_GRAPHS),
    "step-optimizer": _step("decoder-1", more="--optimizer"),
    "step-peers-gpt2": _step(
        "gpt2-small-shaped",
        "nonprivate,flash,flash-auto-graphs,flashdp",
        "--batch 4 --seq 1024 --rounds 5 --steps 4",
    ),
    "step-long-8k": _step(
        LONG,
        f"nonprivate,flash,{ESTIMATED}",
        "--batch 2 --seq 8192 --rounds 3 --steps 1 --warmup 1",
    ),
    "step-experts": _step(
        "experts-8x2048 experts-32x512-zipf mixture-8x2048 mixture-lora-32x512-zipf"
    ),
    "step-qwen3-moe": _step("qwen3-moe", GRAPHS),
    "hyper-connections": Table("hyper-connections"),
    "product-key": Table("product-key"),
    "step-checkpointing": _step(
        "decoder-1", "nonprivate,flash-two-pass", "--checkpointing --rounds 5 --steps 2"
    ),
    "step-lora": _step("llama-1b-lora"),
    "step-fp32": _step("wrn-16-4", "nonprivate,flash", "--dtype fp32 --rounds 3 --steps 4"),
    "noise": Table("noise"),
    "step-compiled": _step("bert-base", more="--compile"),
    # The largest, and the last: logits of two samples take 17 GB, three times.
    "step-long-32k": _step(
        LONG,
        "nonprivate,flash-two-pass,opacus-randomized",
        "--checkpointing --batch 2 --seq 32768 --rounds 3 --steps 1 --warmup 1",
    ),
}
ON_A_CPU = {
    "step": Table(
        "step --device cpu --model decoder-small cnn-small --threads 1 --rounds 7 --steps 1 "
        "--warmup 2 --clock cpu",
        seconds=1200,
    ),
    "decoder-small-memory": Table(
        "memory --device cpu --model decoder-small --methods "
        "nonprivate,flash,flash-two-pass,opacus-ghost,opacus-hooks,fastdp "
        "--seqs 64 128 256 512 --batches 4 8 32 --threads 1",
        seconds=1200,
    ),
}


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
    from benchmarks.__main__ import main

    with tempfile.TemporaryDirectory() as folder:
        if table.cold:
            os.environ["TRITON_CACHE_DIR"] = folder
        path = results / f"{_card(on)}-{name}.json"
        arguments = [*shlex.split(table.command), "--json", str(path)]
        if revision:
            arguments += ["--revision", revision]
        with path.with_suffix(".log").open("w", buffering=1) as log:
            return main(arguments, Console(file=log, width=140))


def _card(on: str) -> str:
    """``h100`` of "NVIDIA H100 80GB HBM3"."""
    if on == "cpu":
        return on
    words: Sequence[str] = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()
    return words[0].lower()
