"""``step``: full training steps of every method, in turn, on the same inputs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
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
from benchmarks.records import Record, Row, Spread, summaries
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
    add_setting_options(parser)
    parser.add_argument("--batch", type=int, help="override the model's batch size")
    parser.add_argument("--seq", type=int, help="override the model's sequence length")
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
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if methods disagree or flash clipping failed."""
    methods = method_names(options.methods)
    settings = [
        setting(options, model, Shape(options.batch, options.seq)) for model in options.model
    ]
    device = settings[0].device
    if options.steps is None:
        options.steps = STEPS[device.type]
    stop_without_triton(methods, device, options.force, console)
    record = Record(
        kind="step",
        environment=environment.describe(device, options.revision),
        command=options.command,
        settings=recorded(options),
        rows=[],
    )
    status = 0
    for each in settings:
        session = Session(each, methods)
        console.rule(
            f"{each.workload.name}: B {each.workload.batch}, T {each.workload.positions}, "
            f"{str(each.dtype).removeprefix('torch.')} on {record.environment['device']}"
        )
        with _progress(console) as progress:
            task = progress.add_task("", total=None)

            def done(line: str, progress: Progress = progress, task: TaskID = task) -> None:
                progress.update(task, description=line, advance=1)

            since = time.monotonic()
            session.measure_memory(done)
            built = time.monotonic()
            try:
                session.check(done)
            except Disagreement as error:
                progress.stop()
                _print_agreement(session, console)
                console.print(f"[bold red]Nothing was timed: {error}[/]")
                status = 1
                continue
            checked = time.monotonic()
            progress.stop()
            _print_agreement(session, console)
            progress.start()
            progress.reset(task, total=len(session.running()) * options.rounds)
            session.time(
                rounds=options.rounds,
                steps=options.steps,
                warmup=options.warmup,
                clock=options.clock,
                gc_freeze=options.gc_freeze,
                done=done,
            )
        rows = list(session.rows.values())
        console.print(step_table(rows))
        seconds = built - since, checked - built, time.monotonic() - checked
        console.print("first steps took {:.0f} s, agreement {:.0f}, turns {:.0f}".format(*seconds))
        record.rows += rows
        if any(row.status == "failed" for row in rows if METHODS[row.method].ours):
            status = 1
        if options.json:  # after every model, so that an interrupted run leaves what it has
            record.write(options.json)
    return status


def step_table(rows: Sequence[Row]) -> Group:
    """The rows of one workload, for the terminal."""
    table = Table()
    table.add_column("method", no_wrap=True)
    headings = ("ms / step", "p10 – p90", "ratio", "p10 – p90", "host ms", "ratio")
    for heading in (*headings, "peak MiB", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("samples / s", justify="right")
    table.add_column("tokens / s", justify="right")
    notes: list[str] = []
    for row, summary in zip(rows, summaries(list(rows)), strict=True):
        notes += [f"{row.method}: {row.note}"] if row.note else []
        peak = f"{row.peak_bytes / 2**20:,.1f}" if row.peak_bytes else ""
        if summary is None:
            table.add_row(row.method, f"[bold]{row.status}[/]", *[""] * 5, peak)
            continue
        ratio = summary.ratio
        table.add_row(
            row.method,
            f"{summary.milliseconds.median:.2f}",
            _range(summary.milliseconds, 2),
            f"[bold]{ratio.median:.3f}[/]" if ratio else "",
            _range(ratio, 3) if ratio else "",
            f"{summary.host_milliseconds:.2f}" if summary.host_milliseconds else "",
            f"{summary.host_ratio:.2f}" if summary.host_ratio else "",
            peak,
            f"{summary.memory_ratio:.3f}" if summary.memory_ratio else "",
            f"{summary.samples_per_second:,.1f}",
            f"{summary.tokens_per_second:,.0f}",
        )
    return Group(table, *notes)


def _range(spread: Spread, digits: int) -> str:
    return f"{spread.p10:.{digits}f} – {spread.p90:.{digits}f}"


def _print_agreement(session: Session, console: Console) -> None:
    table = Table()
    for heading in ("method", "norms", "clipped sums", "shortened", "doubtful"):
        table.add_column(heading)
    notes: list[str] = []
    for name, row in session.rows.items():
        if name == session.reference:
            table.add_row(name, "reference", "reference", *_shortened(row))
        elif row.status != "ok":
            table.add_row(name, f"[bold]{row.status}[/]", "", "", "")
            notes += [f"{name}: {row.note}"] if row.note else []
        elif METHODS[name].flat:
            errors = _error(row.norm_error), _error(row.gradient_error)
            table.add_row(name, *errors, *_shortened(row))
            notes += [f"{name}: {row.note}"] if row.note else []
    if session.reference not in session.rows:
        reference = session.reference or "nothing: no method could be a reference"
        notes.append(f"compared with {reference}")
    if session.rounding is not None:
        norms, sums = _error(session.rounding.norms), _error(session.rounding.gradients)
        notes.append(f"the plain model's own rounding: {norms} (norms), {sums} (clipped sums)")
    allowed = session.allowed
    limits = f"{_error(allowed.norms)} for norms, {_error(allowed.gradients)} for sums"
    title = f"Agreement on one batch (allowed: {limits})"
    console.print(title, table, *notes, sep="\n")


def _error(value: float | None) -> str:
    return "not told" if value is None else f"{value:.1e}"


def _shortened(row: Row) -> tuple[str, str]:
    if row.shortened is None or row.doubtful is None:
        return "", ""
    return f"{row.shortened:.1e}", f"{row.doubtful:.1%}"


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
