"""``survey``: which models of ``transformers`` are exact as they are, and what helps the others.

Small models of every kind (``kinds.py``) take one step, each in a process of its own. Norms and
clipped sums are compared with those of one sample at a time through an ordinary backward
(``measure.py``). A wrong norm is exit status 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks.options import UsageError
from benchmarks.survey.kinds import Kind, all_kinds
from benchmarks.survey.measure import WRONG
from benchmarks.survey.page import END, PAGE, START, render, written
from benchmarks.survey.pool import Finding, measure_all

__all__ = ["END", "PAGE", "START", "Finding", "add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "survey",
        help="models of transformers: exact, exact with help, or refused; and docs/models.md",
        description="The exit status is 1 if a norm or a sum is wrong.",
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=60, help="seconds for each model")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write between {START} and {END}; kinds that were not measured now stay as they are",
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"install transformers: {error}") from error
    transformers.logging.set_verbosity_error()
    sections = all_kinds()
    chosen: dict[str, Kind] = {
        name: kind for kinds in sections.values() for name, kind in kinds.items()
    }
    if options.only:
        if unknown := set(options.only) - chosen.keys():
            raise UsageError(f"unknown kinds {sorted(unknown)}: {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in options.only}
    found: dict[str, Finding] = {}
    for name, finding in measure_all(chosen, options.processes, options.limit):
        found[name] = finding
        console.print(f"{name}: {finding.line()}", markup=False, soft_wrap=True)
    wrong = [name for name, finding in found.items() if finding.outcome.verdict == WRONG]
    for name in wrong:
        console.print(f"{name}: a norm or a sum is wrong", style="bold red")
    if options.write:
        before, rest = options.page.read_text(encoding="utf-8").split(START)
        tables, after = rest.split(END)
        text = f"{before}{START}\n\n{render(sections, found, written(tables))}\n{END}{after}"
        options.page.write_text(text, encoding="utf-8")
        console.print(f"wrote {options.page}")
    return int(bool(wrong))
