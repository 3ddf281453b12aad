"""``python -m benchmarks``: the command line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shlex
import sys
import warnings
from collections.abc import Sequence

from rich.console import Console

from benchmarks import (
    budgets,
    certificate,
    convolutions,
    hostwork,
    hyper_connections,
    memory,
    mixtures,
    noise,
    packed,
    plot,
    product_key,
    profile,
    report,
    segments,
    sharded,
    step,
    subclasses,
    survey,
    tables,
    trainer,
    versions,
    walk,
)
from benchmarks.options import UsageError, check_device


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run one subcommand; the exit status is 0, 1 (a result that is wrong) or 2 (usage)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a log file has no edge to wrap at
    warnings.filterwarnings("ignore", message=".*backward hook.*")  # the peers' own hooks
    try:
        return _run(arguments, console)
    except UsageError as error:
        console.print(f"[bold red]{error}[/]")
        return 2


def _run(arguments: list[str], console: Console) -> int:
    if arguments[:1] == ["kernels"]:
        return _kernels(arguments[1:], console)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands_of = (
        step,
        memory,
        tables,
        plot,
        report,
        budgets,
        certificate,
        mixtures,
        hyper_connections,
        noise,
        packed,
        product_key,
        profile,
        segments,
        sharded,
        subclasses,
        survey,
        convolutions,
        trainer,
        versions,
        walk,
        hostwork,
    )
    for module in commands_of:
        module.add_parser(commands)
    commands.add_parser("kernels", help="each op against its floor (benchmarks/kernels.py)")
    options = parser.parse_args(arguments)
    options.command = shlex.join(["python", "-m", "benchmarks", *arguments])
    check_device(getattr(options, "device", "cpu"))
    status: int = options.run(options, console)
    return status


def _kernels(arguments: list[str], console: Console) -> int:
    """``kernels`` has options of its own: ``benchmarks.kernels.main(arguments)``."""
    if importlib.util.find_spec("benchmarks.kernels") is None:
        console.print("[bold red]there is no benchmarks/kernels.py here[/]")
        return 2
    return importlib.import_module("benchmarks.kernels").main(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
