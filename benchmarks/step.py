"""``step``: full training steps of every method, in turn, on the same inputs."""

from __future__ import annotations

import argparse
import time

from rich.console import Console

from benchmarks import environment
from benchmarks.methods import METHODS
from benchmarks.options import (
    add_setting_options,
    method_names,
    recorded,
    setting,
)
from benchmarks.records import Record
from benchmarks.report import step_table, table
from benchmarks.session import Disagreement, Session

STEPS = {"cuda": 12, "cpu": 3}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "step",
        help="time full training steps of every method",
        description="Methods take turns in one process on the same inputs. Before anything is "
        "timed, their norms and clipped sums are compared with the plain model's on one sample at "
        "a time in fp32; where ours are wrong, that is an error and nothing is timed.",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is measured, and how often."""
    add_setting_options(parser)
    parser.add_argument("--batch", type=int, help="override the model's batch size")
    parser.add_argument("--seq", type=int, nargs="+", help="override the model's sequence length")
    parser.add_argument("--rounds", type=int, default=15, help="samples per method")
    parser.add_argument(
        "--steps",
        type=int,
        help="steps in a turn, timed together; default: "
        f"{STEPS['cuda']} on CUDA, {STEPS['cpu']} on a CPU",
    )
    parser.add_argument("--warmup", type=int, default=3, help="steps before a method's first turn")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="on a CPU, time that passes or the process's CPU time; the latter with --threads 1 "
        "on a machine that is shared",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if methods disagree or flash clipping failed."""
    methods, shapes = method_names(options.methods), options.seq or [None]
    settings = [
        setting(options, model, batch=options.batch, seq=seq)
        for model in options.model
        for seq in shapes
    ]
    device = settings[0].device
    where = environment.describe(device, options.revision)
    record = Record("step", where, options.command, recorded(options), [])
    if options.steps is None:
        options.steps = STEPS[settings[0].device.type]
    record.settings["steps"] = options.steps
    status = 0
    for each in settings:
        session = Session(each, methods)
        console.rule(
            f"{each.workload.name}: B {each.workload.batch}, T {each.workload.positions}, "
            f"{str(each.dtype).removeprefix('torch.')} on {record.environment['device']}"
        )
        if not is_measured(session, options, console):
            status = 1
            continue
        rows = list(session.rows.values())
        record.rows += rows
        if any(row.status == "failed" for row in rows if METHODS[row.method].ours):
            status = 1
        if options.json:  # after every model, so that an interrupted run leaves what it has
            record.write(options.json)
    return status


def is_measured(session: Session, options: argparse.Namespace, console: Console) -> bool:
    """Memory and agreement, then times; nothing is timed where methods disagree."""
    since = time.monotonic()
    with console.status("") as line:
        session.measure_memory(line.update)
        built = time.monotonic()
        wrong = ""
        try:
            session.check(line.update)
        except Disagreement as error:
            wrong = str(error)
        checked = time.monotonic()
        console.print(agreement(session), markup=False, soft_wrap=True)
        if wrong:
            console.print(f"[bold red]Nothing was timed: {wrong}[/]")
            return False
        turns = {name: getattr(options, name) for name in ("rounds", "steps", "warmup", "clock")}
        session.time(**turns, done=line.update)
    console.print(step_table(list(session.rows.values())), markup=False, soft_wrap=True)
    seconds = built - since, checked - built, time.monotonic() - checked
    console.print("first steps took {:.0f} s, agreement {:.0f}, turns {:.0f}".format(*seconds))
    return True


def agreement(session: Session) -> str:
    """What each method is off by, and what it may be off by; in Markdown."""
    lines: list[list[str]] = []
    notes: list[str] = []
    for name, row in session.rows.items():
        if not METHODS[name].flat and row.status == "ok":
            continue
        errors = [_error(row.norm_error), _error(row.gradient_error)]
        notes += [f"{name}: {row.note}"] if row.note else []
        shortened = "" if row.shortened is None else f"{row.shortened:.1e}"
        lines.append([name, *(errors if row.status == "ok" else [row.status, ""]), shortened])
    notes.append(f"compared with {session.reference or 'nothing: the plain model does not fit'}")
    if session.rounding is not None:
        norms, sums = _error(session.rounding.norms), _error(session.rounding.gradients)
        notes.append(f"the plain model's own rounding: {norms} (norms), {sums} (clipped sums)")
    allowed = session.allowed
    limits = f"{_error(allowed.norms)} for norms, {_error(allowed.gradients)} for sums"
    found = table(["method", "norms", "clipped sums", "shortened"], lines)
    return "\n".join([f"Agreement on one batch (allowed: {limits})\n", found, *notes])


def _error(value: float | None) -> str:
    return "not told" if value is None else f"{value:.1e}"
