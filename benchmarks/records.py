"""What a JSON file of results holds, and the statistics that are read off it."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "OOM", "failed", "missing"]


@dataclass
class Row:
    """One method on one workload.

    Attributes:
        batch, positions: samples in a batch, tokens in a sample.
        status: ``ok``; ``OOM``; ``failed`` (``note`` says why); ``missing`` (not installed).
        milliseconds: one step's time, a value per round.
        host_milliseconds: what the host takes of a step; see ``measure.host_milliseconds``.
        first_milliseconds: of the method's first step: kernels are compiled, and ours shows which
            rows are samples.
        peak_bytes: see ``measure.PeakMemory``.
        norm_error, gradient_error: see ``agreement``; None where there is nothing to compare.
        shortened: how much shorter than its norm asks for a clipped sample is, the largest.
    """

    method: str
    model: str = ""
    batch: int = 0
    positions: int = 1
    status: Status = "ok"
    note: str = ""
    milliseconds: list[float] = field(default_factory=list)
    host_milliseconds: list[float] = field(default_factory=list)
    first_milliseconds: float | None = None
    peak_bytes: int | None = None
    norm_error: float | None = None
    gradient_error: float | None = None
    shortened: float | None = None

    @property
    def workload(self) -> tuple[str, int, int]:
        return self.model, self.batch, self.positions


@dataclass
class Record:
    """One run of a subcommand: where, how, and what came out.

    Attributes:
        rows: of ``step``; of operations, results of :mod:`benchmarks.ops.bench`.
        facts: what else the file holds.
        file: its name, once it was read.
    """

    kind: str
    environment: dict[str, str | None]
    command: str
    settings: dict[str, Any]
    rows: list[Any]
    facts: dict[str, Any] = field(default_factory=dict)
    file: str = ""

    def write(self, path: Path) -> None:
        """Of ``step``, with summaries for readers of the file; the code recomputes them."""
        rows = [
            dataclasses.asdict(row) | {"summary": summary and dataclasses.asdict(summary)}
            for row, summary in zip(self.rows, summaries(self.rows), strict=True)
        ]
        names = ("kind", "environment", "command", "settings")
        write_json(path, {name: getattr(self, name) for name in names} | {"rows": rows})

    @classmethod
    def read(cls, path: Path) -> Record:
        """``kind`` is empty if the file is not one of ours."""
        facts = json.loads(path.read_text(encoding="utf-8"))
        kind = facts.get("kind", "")
        rows, known = facts.get("results", []), {it.name for it in dataclasses.fields(Row)}
        if kind == "step":
            rows = [Row(**{key: row[key] for key in row.keys() & known}) for row in facts["rows"]]
        settings = facts.get("settings") or {"dtype": facts.get("dtype")}
        where, command = facts.get("environment", {}), facts.get("command", "")
        return cls(kind, where, command, settings, rows, facts, path.name)


def write_json(path: Path | None, content: dict[str, Any]) -> None:
    """Results in a file, if one is asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def size(nbytes: int) -> str:
    """Bytes for people."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Spread:
    """Median, tenth and ninetieth percentile."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), deciles[0], deciles[-1])


@dataclass(frozen=True)
class Summary:
    """A row in numbers; ratios are to :func:`baseline_of`, the times paired round by round."""

    milliseconds: Spread
    ratio: Spread | None
    memory_ratio: float | None
    host_milliseconds: float | None = None
    host_ratio: float | None = None


def baseline_of(method: str) -> str:
    """What a method is compared with: as a graph, where it is one."""
    return "nonprivate-graph" if method == "flash-graph" else "nonprivate"


def summaries(rows: Sequence[Row]) -> list[Summary | None]:
    """One per row; None for a row that was not timed."""

    baselines = {(row.workload, row.method): row for row in rows}

    def summary(row: Row) -> Summary | None:
        if not row.milliseconds:
            return None
        spread = Spread.of(row.milliseconds)
        ratio = memory_ratio = host_ratio = None
        host = statistics.median(row.host_milliseconds) if row.host_milliseconds else None
        baseline = baselines.get((row.workload, baseline_of(row.method)))
        if baseline is not None and baseline.milliseconds:
            pairs = zip(row.milliseconds, baseline.milliseconds, strict=False)
            ratio = Spread.of([ours / theirs for ours, theirs in pairs])
            if row.peak_bytes and baseline.peak_bytes:
                memory_ratio = row.peak_bytes / baseline.peak_bytes
            if host is not None and baseline.host_milliseconds:
                host_ratio = host / statistics.median(baseline.host_milliseconds)
        return Summary(spread, ratio, memory_ratio, host, host_ratio)

    return [summary(row) for row in rows]
