"""``report``: the tables of docs/performance.md and README.md, from the files in results/."""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.options import UsageError
from benchmarks.records import KernelRecord, Record, Row, Summary, read_any, size, summaries

START = "<!-- performance:start -->"
END = "<!-- performance:end -->"

#: Around the README's table, which has the steps that were measured beside both peers.
PEERS_START = "<!-- peers:start -->"
PEERS_END = "<!-- peers:end -->"
PEERS = {"nonprivate": "non-private", "flash": "Flash Clipping", "opacus-ghost": 'Opacus `"ghost"`'}
PEERS |= {"fastdp": "FastDP"}

_HERE = Path(__file__).resolve().parent


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="write the tables of docs/performance.md and README.md",
        description=f"Replaces what stands between {START} and {END} on the page of all results, "
        f"and between {PEERS_START} and {PEERS_END} in the README.",
    )
    parser.add_argument("--results", type=Path, default=_HERE / "results", metavar="DIRECTORY")
    parser.add_argument("--page", type=Path, default=_HERE.parent / "docs" / "performance.md")
    parser.add_argument("--readme", type=Path, default=_HERE.parent / "README.md")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page is out of date"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    records: list[tuple[str, Record | KernelRecord]] = []
    for path in sorted(options.results.glob("*.json"), key=lambda path: path.stem):
        try:
            records.append((path.name, read_any(path)))
        except ValueError:
            console.print(f"passed over {path}: not a record of step, memory or kernels")
    # GPUs, which have a driver, first; steps before kernels.
    records.sort(key=lambda it: (not it[1].environment["driver"], isinstance(it[1], KernelRecord)))
    if not records:
        raise UsageError(f"no results under {options.results}")
    folder = Path(os.path.relpath(options.results, options.page.parent)).as_posix()
    pages = [
        _Page(options.page, START, END, render(records, folder)),
        _Page(options.readme, PEERS_START, PEERS_END, render_peers(records)),
    ]
    texts = [page.texts() for page in pages]
    status = 0
    for page, (before, after) in zip(pages, texts, strict=True):
        if not options.check:
            page.path.write_text(after, encoding="utf-8")
            console.print(f"wrote {page.path}")
        elif after != before:
            console.print(f"[bold red]{page.path} is not what the results say[/]")
            status = 1
    return status


@dataclass(frozen=True)
class _Page:
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


def render(records: Sequence[tuple[str, Record | KernelRecord]], folder: str) -> str:
    """Markdown: a section per machine and revision, a table per file, which lies in ``folder``."""
    by_environment: dict[str, list[tuple[str, Record | KernelRecord]]] = defaultdict(list)
    for name, record in records:
        by_environment[_where(record)].append((name, record))
    parts: list[str] = []
    for where, members in by_environment.items():
        parts.append(f"**{where}**\n")
        for name, record in members:
            parts.append(f"`{record.command}`\n")
            if isinstance(record, KernelRecord):
                dtype, tables = record.dtype, _kernel_tables(record)
            else:
                dtype = record.settings["dtype"]
                make = _step_table if record.kind == "step" else _memory_table
                tables = [make(record)]
            parts.append(f"({dtype}, [{name}]({folder}/{name}))\n")
            parts += tables
    return "\n".join(parts)


def render_peers(records: Sequence[tuple[str, Record | KernelRecord]]) -> str:
    """Markdown: one table of all steps that were measured beside both peers."""
    lines: list[list[str]] = []
    places: list[str] = []
    reasons: list[str] = []
    for _, record in records:
        if isinstance(record, KernelRecord) or record.kind != "step":
            continue
        if not set(PEERS) <= {row.method for row in record.rows}:
            continue
        device = "GPU" if record.environment["driver"] else "CPU"
        places.append(f"{device}: {_where(record)}, {record.settings['dtype']}")
        reasons += _reasons(record, PEERS)
        lines += [
            [f"{device}: {line[0]}", *line[1:]] for line in _step_lines(record, list(PEERS)[1:])
        ]
    headings = ["time (memory) of a step", *PEERS.values()]
    notes = [*places, *dict.fromkeys(reasons)]
    return table(headings, lines) + "\n" + "".join(f"* {note}\n" for note in notes)


def _where(record: Record | KernelRecord) -> str:
    it = record.environment
    versions = [f"{key} {it[key]}" for key in ("driver", "torch", "triton", "opacus") if it[key]]
    return ", ".join([str(it["device"]), *versions, f"git revision {it['revision']}"])


def table(headings: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *lines)) + "\n"


def _step_table(record: Record) -> str:
    methods = [m for m in dict.fromkeys(row.method for row in record.rows) if m != "nonprivate"]
    if "nonprivate" not in {row.method for row in record.rows}:
        return _first_table(record)
    what = "step"
    if record.settings.get("graph"):
        what += " as one CUDA graph, the optimizer's aside"
    headings = [f"time (memory) of a {what}", "non-private", *methods]
    reasons = _reasons(record, methods)
    return table(headings, _step_lines(record, methods)) + (
        "\n" + "".join(f"* {reason}\n" for reason in reasons) if reasons else ""
    )


def _first_table(record: Record) -> str:
    """Of a run on a machine that has compiled nothing, without the non-private step."""
    lines = []
    for row, summary in zip(record.rows, summaries(record.rows), strict=True):
        seconds = f"{(row.first_milliseconds or 0) / 1e3:.1f} s" if summary else row.status
        later = f"{summary.milliseconds.median:.1f} ms" if summary else ""
        lines.append([_workload(row.workload), seconds, later])
    return table(["with no kernel compiled", "first step", "later ones"], lines)


def _reasons(record: Record, methods: Iterable[str]) -> list[str]:
    """Why a method could not run, or what was wrong with what it computed."""
    return [
        f"{_workload(row.workload)}: `{row.method}`: {row.note}"
        for row in record.rows
        if row.note and row.method in methods
    ]


def _step_lines(record: Record, methods: Sequence[str]) -> list[list[str]]:
    cells = {
        (row.workload, row.method): (row, summary)
        for row, summary in zip(record.rows, summaries(record.rows), strict=True)
    }
    lines: list[list[str]] = []
    for workload in dict.fromkeys(row.workload for row in record.rows):
        baseline = cells.get((workload, "nonprivate"))
        if baseline is None or baseline[1] is None:
            continue
        row, summary = baseline
        assert summary is not None
        lines.append(
            [
                _workload(workload),
                _baseline_cell(row, summary),
                *(_cell(*cells[workload, method]) for method in methods),
            ]
        )
    return lines


def _baseline_cell(row: Row, summary: Summary) -> str:
    """Time, the host's time where it was taken, and peak memory."""
    assert row.peak_bytes is not None
    host = summary.host_milliseconds
    of_host = f"host {host:.1f} ms, " if host else ""
    return f"{summary.milliseconds.median:.1f} ms, {of_host}{size(row.peak_bytes)}"


def _cell(row: Row, summary: Summary | None) -> str:
    if row.method == "nonprivate-graph" and summary is not None:
        return _baseline_cell(row, summary)
    return _step_cell(row, summary)


def _step_cell(row: Row, summary: Summary | None) -> str:
    if summary is None or summary.ratio is None:
        return row.status
    memory = f" ({summary.memory_ratio:.2f})" if summary.memory_ratio else ""
    host = f", host {summary.host_ratio:.2f}×" if summary.host_ratio else ""
    return f"{summary.ratio.median:.2f}×{memory}{host}"


def _memory_table(record: Record) -> str:
    methods = list(dict.fromkeys(row.method for row in record.rows))
    cells = {(row.workload, row.method): row for row in record.rows}
    lines: list[list[str]] = []
    for workload in dict.fromkeys(row.workload for row in record.rows):
        line = [_workload(workload)]
        for method in methods:
            row = cells[workload, method]
            line.append(size(row.peak_bytes) if row.peak_bytes else row.status)
        lines.append(line)
    return table(["peak memory of a step", *methods], lines)


def _kernel_tables(record: KernelRecord) -> list[str]:
    """Rates as shares of their floor's; a table for each floor and what is compared with it."""
    rates = {(result["group"], result["name"]): result["rate"] for result in record.results}
    shares: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # by floor and group
    for result in record.results:
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
