"""``memory``: peak memory of a step against sequence length and batch size."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import environment
from benchmarks.methods import METHODS
from benchmarks.options import (
    Shape,
    add_setting_options,
    method_names,
    recorded,
    setting,
    stop_without_triton,
)
from benchmarks.records import Record, Row
from benchmarks.session import Session


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "memory",
        help="peak memory against sequence length and batch size",
        description="Every method is alone on the device for its step. Two series are measured: "
        "--seqs at the model's batch size, and --batches at its sequence length.",
    )
    add_setting_options(parser)
    parser.add_argument("--seqs", type=int, nargs="*", default=[], metavar="T")
    parser.add_argument("--batches", type=int, nargs="*", default=[], metavar="B")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    methods = method_names(options.methods)
    shapes = [Shape(seq=seq) for seq in options.seqs]
    shapes += [Shape(batch=batch) for batch in options.batches]
    settings = [
        setting(options, model, shape) for model in options.model for shape in shapes or [Shape()]
    ]
    device = settings[0].device
    stop_without_triton(methods, device, options.force, console)
    record = Record(
        kind="memory",
        environment=environment.describe(device, options.revision),
        command=options.command,
        settings=recorded(options),
        rows=[],
    )
    turns = [(each, name) for each in settings for name in methods]
    for each, name in track(turns, "peak memory", console=console, transient=True):
        session = Session(each, [name])
        session.measure_memory()
        record.rows += session.rows.values()
        if options.json:
            record.write(options.json)
    console.print(memory_table(record.rows))
    failed = any(row.status == "failed" for row in record.rows if METHODS[row.method].ours)
    return 1 if failed else 0


def memory_table(rows: list[Row]) -> Table:
    """Workloads down, methods across, MiB (and the ratio to the non-private step)."""
    methods = list(dict.fromkeys(row.method for row in rows))
    cells = {(row.workload, row.method): row for row in rows}
    table = Table(title="Peak memory of a step, MiB (ratio to non-private)")
    for heading in ("model", "B", "T", *methods):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for workload in dict.fromkeys(row.workload for row in rows):
        baseline = cells.get((workload, "nonprivate"))
        line: list[str] = []
        for method in methods:
            row = cells[workload, method]
            if row.peak_bytes is None:
                line.append(row.status)
            elif baseline is None or not baseline.peak_bytes or row is baseline:
                line.append(f"{row.peak_bytes / 2**20:,.1f}")
            else:
                ratio = row.peak_bytes / baseline.peak_bytes
                line.append(f"{row.peak_bytes / 2**20:,.1f} ({ratio:.2f})")
        model, batch, positions = workload
        table.add_row(model, str(batch), str(positions), *line)
    return table
