"""``plot``: a picture of a JSON file of ``step``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks.options import UsageError
from benchmarks.records import Record, summaries
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
        try:
            record = Record.read(path)
            if record.kind != "step":
                raise ValueError(f"{path} is no record of step")
        except (OSError, ValueError) as error:
            raise UsageError(str(error)) from error
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

    figure = _draw_steps(Figure(figsize=(5.5, 6.5), layout="constrained"), record)
    where = record.environment
    figure.suptitle(
        f"{where['device']}, torch {where['torch']}, revision {where['revision']}", fontsize=10
    )
    return figure


def _draw_steps(figure: Figure, record: Record) -> Figure:
    time, memory = figure.subplots(2, 1)  # letters are large enough on a phone
    results = list(zip(record.rows, summaries(record.rows), strict=True))
    workloads = list(dict.fromkeys(row.workload for row in record.rows))
    methods = list(dict.fromkeys(row.method for row in record.rows))
    methods = [m for m in methods if m != "nonprivate"]
    width = 0.8 / max(len(methods), 1)
    for number, method in enumerate(methods):
        for axes, pick in ((time, "time"), (memory, "memory")):
            heights: list[float] = []
            errors: list[tuple[float, float]] = []
            for workload in workloads:
                summary = next(
                    (s for r, s in results if r.method == method and r.workload == workload), None
                )
                ratio = summary.ratio if summary else None
                if pick == "time" and ratio is not None:
                    heights.append(ratio.median)
                    errors.append((ratio.median - ratio.p10, ratio.p90 - ratio.median))
                else:
                    heights.append((summary.memory_ratio or 0.0) if summary else 0.0)
                    errors.append((0.0, 0.0))
            places = [place + number * width for place in range(len(workloads))]
            bars = axes.bar(
                places,
                heights,
                width,
                label=PEERS.get(method, method).replace("`", ""),
                yerr=list(zip(*errors, strict=True)) if pick == "time" else None,
            )
            axes.bar_label(bars, [f"{h:.2f}" if h else "–" for h in heights], fontsize=9)
    for axes, title in ((time, "time of a step"), (memory, "peak memory")):
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_title(f"{title} (non-private: 1)", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        places = [p + width * (len(methods) - 1) / 2 for p in range(len(workloads))]
        axes.set_xticks(places, [f"{m}\nB {b}, T {t}" for m, b, t in workloads], fontsize=10)
    handles, labels = time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(methods) or 1, fontsize=10)
    return figure
