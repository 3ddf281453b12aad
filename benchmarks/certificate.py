"""``certificate``: how far one sample moves what is released, for every rule, by a search.

The attacks, models and the measure are those of ``tests/certificate``; this runs them for longer
and writes the figures down. What is asked besides: sums of many equal samples, and how many
ordinary samples are released shorter than they could be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks import environment, models
from benchmarks.agreement import DOUBTFUL
from benchmarks.options import UsageError
from benchmarks.report import table

#: What is computed in: a dtype of the model, or fp32 with what may round its products.
PRECISIONS = {
    "cpu": ("fp32", "fp64", "bf16", "fp16", "autocast"),
    "cuda": ("fp32", "bf16", "fp16", "autocast", "tf32"),
}
#: bf16 products are wrong in Triton's interpreter.
INTERPRETED = ("fp32", "fp16")

REDUCTIONS = ("sum", "mean", "mean by hand")

EQUAL_SAMPLES = (64, 512, 2048, 8192)

#: Of the tries: the interpreter takes ten times as long.
INTERPRETER_SHARE = 0.25


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "certificate",
        help="search for samples that move what is released by more than the bound",
        description="Hostile samples for every rule, with every algorithm forced in turn. The "
        "exit status is 1 if one of them moved the released sum by more than is promised.",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backends", nargs="+", choices=("torch", "triton"), metavar="NAME")
    parser.add_argument("--precisions", nargs="+", metavar="NAME")
    parser.add_argument("--rules", nargs="+", metavar="NAME", help="as the table names them")
    parser.add_argument("--tries", type=int, default=200, help="attacks on each row of the table")
    parser.add_argument("--climbs", type=int, help="mutations of the worst; default: as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--models", nargs="*", default=["tiny"], help="benchmark models for ordinary samples"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results here")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables here")
    parser.add_argument("--revision", help="git revision to record where there is no git directory")
    parser.set_defaults(run=run)


@dataclasses.dataclass
class Row:
    """The worst of one rule, precision, algorithm and backend.

    Attributes:
        tries: attacks made.
        broken: those of them that moved the sum by more than is promised.
        own: the largest change when the hostile sample was removed, in units of the bound.
        other: the largest when an ordinary one was removed beside it, by the reduction of the loss.
        worst: the attack and the setting of ``own``.
        failed: the error, where the library raised one.
    """

    rule: str
    precision: str
    algorithm: str
    backend: str
    tries: int = 0
    broken: int = 0
    own: float = 0.0
    other: dict[str, float] = dataclasses.field(default_factory=dict)
    worst: str = ""
    failed: str = ""


def run(options: argparse.Namespace, console: Console) -> int:
    device = torch.device(options.device)
    if device.type == "cpu":
        # Before the first kernel is decorated: they then run on the CPU.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        torch.set_num_threads(1)
    try:
        from tests.certificate import search, subjects
    except ImportError as error:
        raise UsageError(
            f"run this from the repository's root, with [dev] installed: {error}"
        ) from error
    precisions = options.precisions or PRECISIONS[device.type]
    if unknown := set(precisions) - {*PRECISIONS["cpu"], *PRECISIONS["cuda"]}:
        raise UsageError(f"unknown precisions {sorted(unknown)}")
    backends = options.backends or ["torch", "triton"]
    names = options.rules or list(subjects.SUBJECTS)
    if unknown := set(names) - subjects.SUBJECTS.keys():
        raise UsageError(f"unknown rules {sorted(unknown)}: {', '.join(subjects.SUBJECTS)}")
    left_out = ("command", "run", "json", "markdown", "revision")
    settings = {key: value for key, value in vars(options).items() if key not in left_out}
    record: dict[str, Any] = {
        "kind": "certificate",
        "environment": environment.describe(device, options.revision),
        "command": options.command,
        "settings": settings,
    }
    rows = [
        Row(name, precision, algorithm, backend)
        for backend in backends
        for precision in precisions
        for name in names
        for algorithm in subjects.SUBJECTS[name].algorithms
        if _can_run(backend, precision, device)
    ]
    record["search"] = found = []
    for row in track(rows, "searching", console=console):
        with _as_called(row.precision):
            _fill(row, options, device, search)
        found.append(dataclasses.asdict(row))
        _write(record, options.json)  # after every row, so that an interrupted run leaves some
    record["equal samples"] = _equal_samples(precisions, device, search)
    record["ordinary samples"] = _ordinary_samples(options.models, device)
    tables = markdown(record)
    console.print(tables, markup=False, highlight=False, soft_wrap=True)
    _write(record, options.json)
    if options.markdown:
        options.markdown.write_text(tables)
    return int(any(row.broken or row.failed for row in rows))


def _write(record: dict[str, Any], path: Path | None) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def _can_run(backend: str, precision: str, device: torch.device) -> bool:
    if backend == "torch":
        return True
    return precision != "fp64" and (device.type == "cuda" or precision in INTERPRETED)


@contextmanager
def _as_called(precision: str) -> Iterator[None]:
    """TF32 is a setting of the whole process."""
    if precision != "tf32":
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _setting(precision: str, device: torch.device, search: Any, **changes: Any) -> Any:
    dtype = "fp32" if precision in ("autocast", "tf32") else precision
    return search.Setting(dtype, device=str(device), autocast=precision == "autocast", **changes)


def _fill(row: Row, options: argparse.Namespace, device: torch.device, search: Any) -> None:
    interpreted = (row.backend, device.type) == ("triton", "cpu")
    share = INTERPRETER_SHARE if interpreted else 1
    lengths = search.SHORT if interpreted else search.LENGTHS
    tries = max(1, round(options.tries * share))
    climbs = tries if options.climbs is None else round(options.climbs * share)
    setting = _setting(row.precision, device, search, algorithm=row.algorithm, backend=row.backend)
    try:
        findings = search.search(
            row.rule, setting, tries=tries, climbs=climbs, seed=options.seed, lengths=lengths
        )
        for reduction in REDUCTIONS:
            others = search.neighbours(
                row.rule,
                dataclasses.replace(setting, reduction=reduction),
                tries=max(1, tries // 4),
                seed=options.seed,
                lengths=lengths,
            )
            row.other[reduction] = others[0].other
    except Exception as error:  # one rule that cannot run here must not cost the others' figures
        row.failed = f"{type(error).__name__}: {error}"[:500]
        return
    row.tries = len(findings)
    row.broken = sum(finding.own > finding.allowed for finding in findings)
    row.own = findings[0].own
    row.worst = f"{findings[0].attack}, {findings[0].setting}"


def _equal_samples(
    precisions: Sequence[str], device: torch.device, search: Any
) -> list[dict[str, Any]]:
    """How far one of k equal samples moves the sum."""
    found = []
    for precision in precisions:
        for reduction in REDUCTIONS:
            for size in EQUAL_SAMPLES:
                setting = _setting(precision, device, search, reduction=reduction)
                worst = max(
                    _one_of_many(name, log_product, size, setting, precision, search)
                    for name in ("Linear with bias", "Conv1d", "Embedding", "LayerNorm")
                    for log_product in (-1.5, -0.5, 0.1, 2.0)
                )
                found.append(
                    {
                        "precision": precision,
                        "reduction": reduction,
                        "samples": size,
                        "change": worst,
                        "allowed": search.allowed(setting),
                    }
                )
    return found


def _one_of_many(
    name: str, log_product: float, size: int, setting: Any, precision: str, search: Any
) -> float:
    attack = search.Attack("aligned", 3, 3, 2, 0.0, log_product, None, 0.0, size)
    subject = search.SUBJECTS[name]
    sample = subject.sample(attack, search.DTYPES[setting.dtype])
    with _as_called(precision):
        release = search.Release(subject, attack, setting)
        change = release([sample] * size) - release([sample] * (size - 1))
    return change.norm().item() / attack.bound


def _ordinary_samples(names: list[str], device: torch.device) -> list[dict[str, Any]]:
    """Norms against one plain backward per sample, and doubtful samples, of untrained models."""
    from flash_clipping import GradSampleModuleFlashClipping

    found = []
    for name in names:
        torch.manual_seed(0)
        try:
            workload = models.workload(name, batch=16 if device.type == "cuda" else 4)
        except (ValueError, ImportError, AttributeError) as error:
            raise UsageError(str(error)) from error
        model = workload.build().to(device)
        inputs, targets = (x.to(device) for x in workload.draw(torch.Generator().manual_seed(0)))
        truth_B = _one_by_one(model, inputs, targets)
        C = truth_B.median().item()
        module = GradSampleModuleFlashClipping(model, max_grad_norm=C, strict=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            models.loss(module(inputs), targets).backward()
        norms_B = module.get_norm_sample().double()
        wanted_B = (C / truth_B).clamp(max=1)
        doubtful = (module.get_clipping_coef().double() < wanted_B * (1 - DOUBTFUL)).sum().item()
        found.append(
            {
                "model": name,
                "samples": len(truth_B),
                "norm error": ((norms_B - truth_B).abs() / truth_B).max().item(),
                "doubtful": doubtful,
            }
        )
    return found


def _one_by_one(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    norms = []
    for b in range(len(inputs)):
        model.zero_grad(set_to_none=True)
        models.loss(model(inputs[b : b + 1]), targets[b : b + 1]).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(torch.stack([grad.double().norm() for grad in grads]).norm())
    model.zero_grad(set_to_none=True)
    return torch.stack(norms)


def markdown(record: dict[str, Any]) -> str:
    """The tables of docs/evidence.md."""
    parts: list[str] = []
    rows = [Row(**row) for row in record["search"]]
    for backend in dict.fromkeys(row.backend for row in rows):
        of_backend = [row for row in rows if row.backend == backend]
        precisions = list(dict.fromkeys(row.precision for row in of_backend))
        cells = {(row.rule, row.algorithm, row.precision): row for row in of_backend}
        lines = [
            [rule, algorithm, *(_cell(cells.get((rule, algorithm, it))) for it in precisions)]
            for rule, algorithm in dict.fromkeys((row.rule, row.algorithm) for row in of_backend)
        ]
        tries = sum(row.tries for row in of_backend)
        parts.append(f"Hostile sample removed: largest change / C, {backend}, {tries} attacks\n")
        parts.append(table(["rule", "algorithm", *precisions], lines))
        parts.append(f"Another removed beside a hostile one: largest change / C, {backend}\n")
        headings = [f"{it}, {reduction}" for it in precisions for reduction in REDUCTIONS]
        parts.append(table(["rule", *headings], _others(of_backend, precisions)))
    parts.append("One of k equal samples removed: change / C\n")
    equal = record["equal samples"]
    sizes = list(dict.fromkeys(it["samples"] for it in equal))
    figures = {(it["precision"], it["reduction"], it["samples"]): it["change"] for it in equal}
    kinds = dict.fromkeys((it["precision"], it["reduction"]) for it in equal)
    parts.append(
        table(
            ["loss", *(f"k = {size}" for size in sizes)],
            [
                [f"{kind[0]}, {kind[1]}", *(_figure(figures[(*kind, size)]) for size in sizes)]
                for kind in kinds
            ],
        )
    )
    parts.append("Ordinary samples\n")
    parts.append(
        table(
            ["model", "samples", "error of norms", "doubtful"],
            [
                [it["model"], str(it["samples"]), f"{it['norm error']:.1e}", str(it["doubtful"])]
                for it in record["ordinary samples"]
            ],
        )
    )
    return "\n".join(parts)


def _others(rows: Sequence[Row], precisions: Sequence[str]) -> list[list[str]]:
    """The worst of all algorithms of a rule."""
    lines = []
    for rule in dict.fromkeys(row.rule for row in rows):
        cells = []
        for precision in precisions:
            found = [row.other for row in rows if (row.rule, row.precision) == (rule, precision)]
            for reduction in REDUCTIONS:
                cells.append(_figure(max((it.get(reduction, 0.0) for it in found), default=0.0)))
        lines.append([rule, *cells])
    return lines


def _cell(row: Row | None) -> str:
    if row is None:  # an interrupted run
        return "not run"
    return "failed" if row.failed else _figure(row.own)


def _figure(change: float) -> str:
    if not math.isfinite(change):
        return "not finite"
    return f"{change:.6f}" if change < 10 else f"{change:.2g}"
