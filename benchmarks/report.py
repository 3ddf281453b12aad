"""``report``: the README's performance tables, from the JSON files under benchmarks/results/."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.options import UsageError
from benchmarks.records import KernelRecord, Record, Row, Summary, read_any, size, summaries

START = "<!-- performance:start -->"
END = "<!-- performance:end -->"

_HERE = Path(__file__).resolve().parent


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="write the README's performance tables",
        description=f"Replaces what stands between {START} and {END}.",
    )
    parser.add_argument("--results", type=Path, default=_HERE / "results", metavar="DIRECTORY")
    parser.add_argument("--readme", type=Path, default=_HERE.parent / "README.md")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the README is out of date"
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
    before = options.readme.read_text()
    if before.count(START) != 1 or before.count(END) != 1:
        raise UsageError(f"{options.readme} needs one line {START} and below it one line {END}")
    head, _, rest = before.partition(START)
    _, _, tail = rest.partition(END)
    after = f"{head}{START}\n\n{render(records)}\n{END}{tail}"
    if options.check:
        if after != before:
            console.print(f"[bold red]{options.readme} is not what the results say[/]")
        return int(after != before)
    options.readme.write_text(after)
    console.print(f"wrote {options.readme}")
    return 0


def render(records: Sequence[tuple[str, Record | KernelRecord]]) -> str:
    """Markdown: a section per machine and revision, a table per file."""
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
            parts.append(f"({dtype}, [{name}](benchmarks/results/{name}))\n")
            parts += tables
    return "\n".join(parts)


def _where(record: Record | KernelRecord) -> str:
    it = record.environment
    versions = [f"{key} {it[key]}" for key in ("driver", "torch", "triton", "opacus") if it[key]]
    return ", ".join([str(it["device"]), *versions, f"git revision {it['revision']}"])


def table(headings: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *lines)) + "\n"


def _step_table(record: Record) -> str:
    methods = [m for m in dict.fromkeys(row.method for row in record.rows) if m != "nonprivate"]
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
        assert row.peak_bytes is not None and summary is not None
        lines.append(
            [
                _workload(workload),
                f"{summary.milliseconds.median:.1f} ms, {size(row.peak_bytes)}",
                *(_step_cell(*cells[workload, method]) for method in methods),
            ]
        )
    what = "step"
    if record.settings.get("graph"):
        what += " as one CUDA graph, the optimizer's aside"
    return table([f"time (memory) of a {what}", "non-private", *methods], lines)


def _step_cell(row: Row, summary: Summary | None) -> str:
    if summary is None or summary.ratio is None:
        return row.status
    memory = f" ({summary.memory_ratio:.2f})" if summary.memory_ratio else ""
    return f"{summary.ratio.median:.2f}×{memory}"


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
