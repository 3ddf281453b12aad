"""``report``: tables of README.md and of three pages in docs/, from the files in results/."""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import trainer
from benchmarks.options import UsageError
from benchmarks.records import Record, Row, Summary, size, summaries
from flash_clipping.ops.error_bounds import ETA

#: What stands between these comments is written here: on the page of all results, on those of noise
#: and of evidence beside it, and in the README, which has the steps measured beside both peers.
START, END = MARKS = ("<!-- performance:start -->", "<!-- performance:end -->")
PEERS_START, PEERS_END = PEERS_MARKS = ("<!-- peers:start -->", "<!-- peers:end -->")
NOISE = ("<!-- noise:start -->", "<!-- noise:end -->")
SENSITIVITY = ("<!-- sensitivity:start -->", "<!-- sensitivity:end -->")
TRAINER = ("<!-- trainer:start -->", "<!-- trainer:end -->")

PEERS = {"nonprivate": "non-private", "flash": "Flash Clipping", "opacus-ghost": 'Opacus `"ghost"`'}
PEERS |= {"fastdp": "FastDP"}

#: Where a rule's attacks moved the sum by less than this, the figure says nothing of the bound.
_NEAR = 0.999

_HERE = Path(__file__).resolve().parent


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="write the tables of README.md, and of pages in docs/",
        description=f"Replaces what stands between {START} and {END}, and between comments like "
        "these, on the page of all results, in the README, and on the pages of noise and of "
        "evidence beside that of all results.",
    )
    parser.add_argument("--results", type=Path, default=_HERE / "results", metavar="DIRECTORY")
    parser.add_argument("--page", type=Path, default=_HERE.parent / "docs" / "performance.md")
    parser.add_argument("--readme", type=Path, default=_HERE.parent / "README.md")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is out of date"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    found: dict[str, list[Record]] = defaultdict(list)
    for path in sorted(options.results.glob("*.json"), key=lambda path: path.stem):
        record = Record.read(path)
        found[record.kind].append(record)
    # GPUs, which have a driver, first; steps before kernels.
    measured = sorted(found["step"] + found["kernels"], key=lambda it: not it.environment["driver"])
    if not measured:
        raise UsageError(f"no results under {options.results}")
    folder = Path(os.path.relpath(options.results, options.page.parent)).as_posix()
    page, readme, docs = options.page, options.readme, options.page.parent
    pages = [
        Page(path, *marks, render(records, folder))
        for path, marks, render, records in (
            (page, MARKS, render_all, measured),
            (readme, PEERS_MARKS, render_peers, measured),
            (docs / "noise.md", NOISE, render_noise, found["noise"]),
            (docs / "evidence.md", SENSITIVITY, render_sensitivity, found["certificate"]),
            (page, TRAINER, render_trainer, found["trainer"]),
            (readme, TRAINER, render_trainer_in_short, found["trainer"]),
        )
        if records
    ]
    for page in pages:
        page.texts()  # raises before anything is written
    status = 0
    for page in pages:
        before, after = page.texts()
        if not options.check:
            page.write()
            console.print(f"wrote {page.path}")
        elif after != before:
            console.print(f"[bold red]{page.path} is not what the results say[/]")
            status = 1
    return status


@dataclass(frozen=True)
class Page:
    """A page, and what belongs between two of its lines."""

    path: Path
    start: str
    end: str
    content: str

    def texts(self) -> tuple[str, str]:
        """The page as it is, and as it should be."""
        before = self.path.read_text(encoding="utf-8")
        if before.count(self.start) != 1 or before.count(self.end) != 1:
            raise UsageError(f"{self.path} needs one line {self.start} and below it {self.end}")
        head, _, rest = before.partition(self.start)
        _, _, tail = rest.partition(self.end)
        return before, f"{head}{self.start}\n\n{self.content}\n{self.end}{tail}"

    def write(self) -> None:
        self.path.write_text(self.texts()[1], encoding="utf-8")


def render_all(records: Sequence[Record], folder: str) -> str:
    """Markdown: a section per machine and revision, a table per file, which lies in ``folder``."""
    parts: list[str] = []
    for where in dict.fromkeys(map(_where, records)):
        parts.append(f"**{where}**\n")
        for record in [record for record in records if _where(record) == where]:
            parts.append(f"`{record.command}`\n")
            dtype, file = record.settings["dtype"], record.file
            parts.append(f"({dtype}, [{file}]({folder}/{file}))\n")
            is_step = record.kind == "step"
            parts += [step_table(record.rows)] if is_step else _kernel_tables(record.rows)
    return "\n".join(parts)


def render_peers(records: Sequence[Record], _: str) -> str:
    """Markdown: one table of all steps on GPUs that were measured beside both peers."""
    lines: list[list[str]] = []
    places: list[str] = []
    reasons: list[str] = []
    for record in records:
        if record.kind != "step" or not record.environment["driver"]:
            continue  # of CPUs the page has tables
        if set(PEERS) <= {row.method for row in record.rows}:
            places.append(f"{_where(record)}, {record.settings['dtype']}")
            reasons += _reasons(record.rows, PEERS)
            lines += _step_lines(record.rows, list(PEERS)[1:])
    headings = ["time (memory) of a step", *PEERS.values()]
    return table(headings, lines) + "\n" + _notes([*places, *dict.fromkeys(reasons)])


def render_noise(records: Sequence[Record], folder: str) -> str:
    """Markdown: for each machine how long noise takes, and how normal it is."""
    parts = []
    for record in records:
        facts = record.facts
        speed = facts["speed"]
        lines = [[row["noise"], *(str(row[name]) for name in [*row][1:])] for row in speed]
        worst = max(facts["statistics"], key=lambda it: abs(it["errors"]))
        parts += [
            _heading(record, folder),
            table([*speed[0]], lines),
            f"Of {facts['draws']:.2g} normals the largest is {facts['largest']:.2f} σ. Of "
            f'{len(facts["statistics"])} statistics the furthest off is "{worst["name"]}", by '
            f"{abs(worst['errors']):.1f} standard errors.\n",
        ]
    return "\n".join(parts)


def render_trainer(records: Sequence[Record], folder: str) -> str:
    """Markdown: how long a step of ``PrivateTrainer`` takes beside one of ``Trainer``."""
    parts = []
    for record in records:
        headings, lines = trainer.lines(record.rows)
        apart = max(record.facts["oracle"].values())
        parts += [
            _heading(record, folder),
            table(headings, lines),
            "Norms that the private trainer clips by, of these models with two layers in fp32, are "
            f"within {apart:.0e} of one sample at a time in float64.\n",
        ]
    return "\n".join(parts)


def render_trainer_in_short(records: Sequence[Record], _: str) -> str:
    """Markdown: the same of the last steps alone, of all in one table."""
    last = f"{trainer.WINDOWS[-2]}-{trainer.WINDOWS[-1]}"
    names = {"model, batch": "model, batch", f"`Trainer`, {last}": "`Trainer`, ms"}
    names |= {last: "`PrivateTrainer`, ms", "ratio": "ratio", trainer.LOSS: trainer.LOSS}
    rows = []
    for record in records:
        headings, lines = trainer.lines(record.rows)
        found = [dict(zip(headings, line, strict=True)) for line in lines]
        rows += [[row[name] for name in names] for row in found]
    wheres = dict.fromkeys(map(_where, records))
    return "\n".join([table([*names.values()], rows), *[f"* {where}" for where in wheres], ""])


def render_sensitivity(records: Sequence[Record], folder: str) -> str:
    """Markdown: the largest change, less the bound, that attacks of each rule made."""
    columns: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        it = record.environment
        device, revision = "GPU" if it["driver"] else "CPU", str(it["revision"])[:7]
        for row in record.facts["search"]:
            interpreted = " interpreter" if (row["backend"], device) == ("triton", "CPU") else ""
            name = f"{device}{interpreted} {revision}, {row['precision']}"
            columns.setdefault(name, {}).setdefault(row["rule"], []).append(row)
    rules = dict.fromkeys(rule for column in columns.values() for rule in column)
    lines = [[rule, *(_change(it.get(rule, [])) for it in columns.values())] for rule in rules]
    parts = [table(["rule", *columns], lines)]
    for record in records:
        attacks = sum(row["tries"] for row in record.facts["search"])
        broken = sum(row["broken"] for row in record.facts["search"])
        parts.append(
            f"{_heading(record, folder)}\n{attacks} attacks, {broken} above the search's limit: "
            "1e-9 in fp64, what is promised elsewhere.\n"
        )
        equal = record.facts.get("equal samples", [])
        sizes = dict.fromkeys(it["samples"] for it in equal)
        kinds = dict.fromkeys((it["precision"], it["reduction"]) for it in equal)
        of = {(it["precision"], it["reduction"], it["samples"]): it["change"] - 1 for it in equal}
        if sizes:
            parts.append("One of `k` equal samples removed, by the loss:\n")
            lines = [[", ".join(kind), *(_signed(of[(*kind, k)]) for k in sizes)] for kind in kinds]
            lines.append(["promised of sums", *[_signed(ETA)] * len(sizes)])
            parts.append(table(["", *(f"k = {k}" for k in sizes)], lines))
        others = [row["other"] for row in record.facts["search"]]
        worst = {
            kind: max(it.get(kind, 0.0) for it in others) - 1
            for kind in dict.fromkeys(kind for it in others for kind in it)
        }
        told = ", ".join(f"{_signed(change)} ({kind})" for kind, change in worst.items())
        parts.append(f"An ordinary sample removed beside a hostile one: {told}.\n")
    return "\n".join(parts)


def _change(rows: Sequence[dict[str, Any]]) -> str:
    """The worst of a rule's algorithms."""
    if failed := [row["failed"] for row in rows if row["failed"]]:
        return "refused" if failed[0].startswith("FlashClippingError") else "failed"
    if not rows:
        return "not run"
    worst: float = max(row["own"] for row in rows)
    return _signed(worst - 1) if worst >= _NEAR else "below C"


def _signed(change: float) -> str:
    return f"{change:+.2f}" if abs(change) >= 0.1 else f"{change:+.0e}".replace("e-0", "e-")


def _heading(record: Record, folder: str) -> str:
    """Machine, revision, commands and file."""
    commands = [record.command] if isinstance(record.command, str) else record.command
    where = "\n\n".join([f"**{_where(record)}**", *(f"`{command}`" for command in commands)])
    return f"{where}\n\n([{record.file}]({folder}/{record.file}))\n"


def _where(record: Record) -> str:
    it = record.environment
    versions = [f"{key} {it[key]}" for key in ("driver", "torch", "triton", "opacus") if it[key]]
    return ", ".join([str(it["device"]), *versions, f"git revision {it['revision']}"])


def _notes(lines: Sequence[str]) -> str:
    return "".join(f"* {line}\n" for line in lines)


def table(headings: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *lines)) + "\n"


def step_table(rows: Sequence[Row]) -> str:
    """Workloads down, methods across; below it why some have no numbers."""
    methods = [m for m in dict.fromkeys(row.method for row in rows) if m != "nonprivate"]
    if "nonprivate" not in {row.method for row in rows}:
        return _first_table(rows)
    found = table(["time (memory) of a step", "non-private", *methods], _step_lines(rows, methods))
    reasons = _reasons(rows, methods)
    return found + ("\n" + _notes(reasons) if reasons else "")


def _first_table(rows: Sequence[Row]) -> str:
    """Of a run on a machine that has compiled nothing, without the non-private step."""
    lines = []
    for row, summary in zip(rows, summaries(rows), strict=True):
        seconds = f"{(row.first_milliseconds or 0) / 1e3:.1f} s" if summary else row.status
        later = f"{summary.milliseconds.median:.1f} ms" if summary else ""
        lines.append([_workload(row.workload), seconds, later])
    return table(["with no kernel compiled", "first step", "later ones"], lines)


def _reasons(rows: Sequence[Row], methods: Iterable[str]) -> list[str]:
    """Why a method could not run, or what was wrong with what it computed."""
    return [
        f"{_workload(row.workload)}: `{row.method}`: {row.note}"
        for row in rows
        if row.note and row.method in methods
    ]


def _step_lines(rows: Sequence[Row], methods: Sequence[str]) -> list[list[str]]:
    cells = {
        (row.workload, row.method): (row, summary)
        for row, summary in zip(rows, summaries(rows), strict=True)
    }
    return [
        [_workload(workload), *(_cell(*cells[workload, name]) for name in ("nonprivate", *methods))]
        for workload in dict.fromkeys(row.workload for row in rows)
        if (workload, "nonprivate") in cells and cells[workload, "nonprivate"][1] is not None
    ]


def _cell(row: Row, summary: Summary | None) -> str:
    """Ratios to what is not private; of that, time, the host's where it was taken, and memory."""
    if summary is None or summary.ratio is None:
        return row.status
    if row.method in ("nonprivate", "nonprivate-graph"):
        host = f"host {summary.host_milliseconds:.1f} ms, " if summary.host_milliseconds else ""
        return f"{summary.milliseconds.median:.1f} ms, {host}{size(row.peak_bytes or 0)}"
    memory = f" ({summary.memory_ratio:.2f})" if summary.memory_ratio else ""
    host = f", host {summary.host_ratio:.2f}×" if summary.host_ratio else ""
    return f"{summary.ratio.median:.2f}×{memory}{host}"


def _kernel_tables(results: Sequence[dict[str, Any]]) -> list[str]:
    """Rates as shares of their floor's; a table for each floor and what is compared with it."""
    rates = {(result["group"], result["name"]): result["rate"] for result in results}
    shares: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # by floor and group
    for result in results:
        if result["floor"]:
            of_group = shares[result["floor"], result["group"]]
            of_group[result["name"]] = f"{result['of_floor']:.2f}"
    tables: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)  # by headings
    for (floor, group), cells in shares.items():
        unit = "TB/s" if floor == "copy" else "TFLOP/s"
        line = [group, f"{rates[group, floor]:.3g} {unit}", *cells.values()]
        tables[("rate, the others' as shares of it", floor, *cells)].append(line)
    return [table(list(headings), lines) for headings, lines in tables.items()]


def _workload(workload: tuple[str, int, int]) -> str:
    model, batch, positions = workload
    return f"{model}; B {batch}" + (f", T {positions}" if positions > 1 else "")
