"""``survey``: which models of ``transformers`` are exact as they are, and what helps the others.

Small models of every kind (``kinds.yaml``) take one step, each in a process of its own. Norms and
clipped sums are compared with those of one sample at a time through an ordinary backward
(``measure.py``), in ways in which people run models (``modes.py``). A wrong norm is exit status 1.

On a machine with a GPU and many cores::

    python -m benchmarks survey --device cuda --dtype bfloat16 --modes all --processes 12 \\
        --json found.json
    python -m benchmarks survey --show found.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.options import UsageError
from benchmarks.records import write_json
from benchmarks.report import Page
from benchmarks.survey.kinds import Kind, all_kinds
from benchmarks.survey.measure import WRONG
from benchmarks.survey.modes import MODES, Where
from benchmarks.survey.page import END, PAGE, START, render, show, written
from benchmarks.survey.pool import Finding, measure_all

__all__ = ["END", "PAGE", "START", "Finding", "add_parser", "run"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "survey",
        help="models of transformers: exact, exact with help, or refused; and docs/models.md",
        description="The exit status is 1 if a norm or a sum is wrong.",
    )
    parser.add_argument("--only", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument(
        "--modes", nargs="*", metavar="MODE", default=["whole"], help=f"{', '.join(MODES)}; or all"
    )
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=["float64", "float32", "bfloat16", "float16"], help="default: float64"
    )
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=60, help="seconds for each model and mode")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    parser.add_argument(
        "--show", type=Path, nargs="+", metavar="FILE", help="print tables of these, and end"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write between {START} and {END}; kinds that were not measured now stay as they are",
    )
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    if options.show:
        console.print(show(options.show), markup=False, soft_wrap=True)
        return 0
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("install transformers")
    modes = list(MODES) if options.modes == ["all"] else options.modes
    if unknown := set(modes) - MODES.keys():
        raise UsageError(f"unknown modes {sorted(unknown)}: {', '.join(MODES)}, or all")
    where = Where(options.device, options.dtype)
    if options.write and ("whole" not in modes or where != Where()):
        raise UsageError("the page holds the mode `whole`, on a CPU: --write without --device")
    sections = all_kinds()
    chosen: dict[str, Kind] = {
        name: kind for kinds in sections.values() for name, kind in kinds.items()
    }
    if options.only:
        if unknown := set(options.only) - chosen.keys():
            raise UsageError(f"unknown kinds {sorted(unknown)}: {', '.join(chosen)}")
        chosen = {name: chosen[name] for name in options.only}
    found: dict[str, dict[str, Finding | None]] = {mode: {} for mode in modes}
    status = 0
    measured = measure_all(list(chosen), options.processes, options.limit, modes, where)
    for name, mode, finding in measured:
        found[mode][name] = finding
        label = name if mode == "whole" else f"{name}, {MODES[mode].words}"
        words = "nothing to run" if finding is None else finding.line()
        console.print(f"{label}: {words}", markup=False, soft_wrap=True)
        if finding is not None and finding.outcome.verdict == WRONG:
            console.print(f"{label}: a norm or a sum is wrong", style="bold red")
            status = 1
        write_json(options.json, _tables(found, where))  # what is there stays
    if options.write:
        now = options.page.read_text(encoding="utf-8").split(START)[1].split(END)[0]
        whole = {name: finding for name, finding in found["whole"].items() if finding is not None}
        Page(options.page, START, END, render(sections, whole, written(now))).write()
        console.print(f"wrote {options.page}")
    return status


def _tables(found: dict[str, dict[str, Finding | None]], where: Where) -> dict[str, Any]:
    modes = {
        mode: {name: finding and dataclasses.asdict(finding) for name, finding in of_mode.items()}
        for mode, of_mode in found.items()
    }
    about = {"torch": torch.__version__, "device": where.device, "dtype": where.dtype}
    return about | {"modes": modes}
