"""``plot``: a picture of a JSON file of ``step``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.options import UsageError
from benchmarks.records import Record, Spread, summaries
from benchmarks.report import PEERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plot", help="draw JSON files as PNGs beside them")
    parser.add_argument("files", type=Path, nargs="+", metavar="JSON")
    parser.add_argument("--output", type=Path, help="PNG or SVG to write (for one JSON file)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    import matplotlib

    matplotlib.use("Agg")
    if options.output and len(options.files) > 1:
        raise UsageError("--output is for one JSON file; leave it out to write beside each")
    for path in options.files:
        if not path.exists() or (record := Record.read(path)).kind != "step":
            raise UsageError(f"{path} is no record of step")
        output = options.output or path.with_suffix(".png")
        # Letters as text, which is shorter than their outlines; the same file from the same record.
        with matplotlib.rc_context({"svg.hashsalt": "flash", "svg.fonttype": "none"}):
            metadata = {"Date": None} if output.suffix == ".svg" else None
            draw(record).savefig(output, dpi=150, metadata=metadata)
        console.print(f"wrote {output}")
    return 0


def draw(record: Record) -> Figure:
    """Bars of time and memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 6.5), layout="constrained")
    workloads = list(dict.fromkeys(row.workload for row in record.rows))
    methods = [m for m in dict.fromkeys(row.method for row in record.rows) if m != "nonprivate"]
    width = 0.8 / max(len(methods), 1)
    times, memories = {}, {}
    for row, summary in zip(record.rows, summaries(record.rows), strict=True):
        if summary and summary.ratio and summary.memory_ratio:
            times[row.workload, row.method] = summary.ratio
            memories[row.workload, row.method] = Spread.of([summary.memory_ratio])
    shown = {"time of a step": times, "peak memory": memories}
    # Letters are large enough on a phone.
    for axes, (title, ratios) in zip(figure.subplots(2, 1), shown.items(), strict=True):
        for number, method in enumerate(methods):
            bars = [ratios.get((workload, method), Spread(0.0, 0.0, 0.0)) for workload in workloads]
            drawn = axes.bar(
                [place + number * width for place in range(len(workloads))],
                [bar.median for bar in bars],
                width,
                label=PEERS.get(method, method).replace("`", ""),
                yerr=[[b.median - b.p10 for b in bars], [b.p90 - b.median for b in bars]],
            )
            labels = [f"{bar.median:.2f}" if bar.median else "–" for bar in bars]
            axes.bar_label(drawn, labels, fontsize=9)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_title(f"{title} (non-private: 1)", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        places = [place + width * (len(methods) - 1) / 2 for place in range(len(workloads))]
        axes.set_xticks(places, [f"{m}\nB {b}, T {t}" for m, b, t in workloads], fontsize=10)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(methods) or 1, fontsize=10)
    where = record.environment
    figure.suptitle(
        f"{where['device']}, torch {where['torch']}, revision {where['revision']}", fontsize=10
    )
    return figure
