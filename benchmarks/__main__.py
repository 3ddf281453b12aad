"""``python -m benchmarks``: the command line."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks import certificate, plot, report, step, survey, tables, trainer
from benchmarks.lab import hostwork, sharded, versions, walk
from benchmarks.ops import hyper_connections, kernels, noise, product_key
from benchmarks.options import UsageError, check_device

_OPS = (kernels, hyper_connections, product_key, noise)

#: Each adds its parser.
COMMANDS: tuple[Any, ...] = (
    *(step, trainer, tables, plot, report, survey, certificate),
    *(module.BENCH for module in _OPS),
    *(hostwork, walk, sharded, versions),
)


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run one subcommand; the exit status is 0, 1 (a result that is wrong) or 2 (usage)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a log file has no edge to wrap at
    warnings.filterwarnings("ignore", message=".*backward hook.*")  # the peers' own hooks
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    options.command = shlex.join(["python", "-m", "benchmarks", *arguments])
    try:
        check_device(getattr(options, "device", "cpu"))
        status: int = options.run(options, console)
    except UsageError as error:
        console.print(f"[bold red]{error}[/]")
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
