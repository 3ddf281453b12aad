"""``memory``: peak memory of a step against sequence length and batch size."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.progress import track

from benchmarks.methods import METHODS
from benchmarks.options import add_setting_options
from benchmarks.report import memory_table
from benchmarks.session import Session
from benchmarks.step import begin


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
    shapes = [{"seq": seq} for seq in options.seqs]
    shapes += [{"batch": batch} for batch in options.batches]
    methods, settings, record = begin("memory", options, console, shapes or [{}])
    turns = [(each, name) for each in settings for name in methods]
    for each, name in track(turns, "peak memory", console=console, transient=True):
        session = Session(each, [name])
        session.measure_memory()
        record.rows += session.rows.values()
        if options.json:
            record.write(options.json)
    console.print(memory_table(record.rows), markup=False, soft_wrap=True)
    failed = any(row.status == "failed" for row in record.rows if METHODS[row.method].ours)
    return 1 if failed else 0
