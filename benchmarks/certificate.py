"""``certificate``: how far one sample moves what is released, for every rule, by a search.

The search is that of ``tests/certificate``; this runs it for longer and writes the figures down,
and asks besides how far one of many equal samples moves the sum. ``report`` makes the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from benchmarks import environment, report
from benchmarks.options import UsageError, add_output_options
from benchmarks.records import Record, write_json

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
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    device = torch.device(options.device)
    if device.type == "cpu":
        # Before the first kernel is decorated: they then run on the CPU.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        torch.set_num_threads(1)
    try:
        from tests.certificate import search
    except ImportError as error:
        raise UsageError(
            f"run this from the repository's root, with [dev] installed: {error}"
        ) from error
    precisions = options.precisions or PRECISIONS[device.type]
    if unknown := set(precisions) - {*PRECISIONS["cpu"], *PRECISIONS["cuda"]}:
        raise UsageError(f"unknown precisions {sorted(unknown)}")
    names = options.rules or list(search.SUBJECTS)
    if unknown := set(names) - search.SUBJECTS.keys():
        raise UsageError(f"unknown rules {sorted(unknown)}: {', '.join(search.SUBJECTS)}")
    left_out = ("command", "run", "json", "revision")
    found: list[dict[str, Any]] = []
    record = {
        "kind": "certificate",
        "environment": environment.describe(device, options.revision),
        "command": options.command,
        "settings": {key: x for key, x in vars(options).items() if key not in left_out},
        "search": found,
    }
    rows = [
        {"rule": name, "precision": precision, "algorithm": algorithm, "backend": backend}
        for backend in options.backends or ("torch", "triton")
        for precision in precisions
        for name in names
        for algorithm in search.SUBJECTS[name].algorithms
        if _can_run(backend, precision, device)
    ]
    for row in track(rows, "searching", console=console):
        with _as_called(row["precision"]):
            found.append(row | _worst(row, options, device, search))
        write_json(options.json, record)  # an interrupted run leaves what it has
    record["equal samples"] = _equal_samples(precisions, device, search)
    facts = {"environment": record["environment"], "command": options.command, "facts": record}
    shown = Record("certificate", **facts, settings={}, rows=[], file=str(options.json))
    tables = report.render_sensitivity([shown], ".")
    console.print(tables, markup=False, highlight=False, soft_wrap=True)
    write_json(options.json, record)
    return int(any(row["broken"] or row["failed"] for row in found))


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


def _worst(
    row: dict[str, str], options: argparse.Namespace, device: torch.device, search: Any
) -> dict[str, Any]:
    """What attacks of one rule, precision, algorithm and backend found.

    ``tries`` were made, of which ``broken`` moved the sum by more than is promised; ``own`` is the
    largest change when the hostile sample was removed, in units of the bound, by the attack
    ``worst``; ``other`` the largest when an ordinary one was removed beside it, by the reduction
    of the loss; ``failed`` the error, where the library raised one.
    """
    interpreted = (row["backend"], device.type) == ("triton", "cpu")
    share = INTERPRETER_SHARE if interpreted else 1
    drawn: dict[str, Any] = {
        "tries": max(1, round(options.tries * share)),
        "seed": options.seed,
        "lengths": search.SHORT if interpreted else search.LENGTHS,
    }
    climbs = drawn["tries"] if options.climbs is None else round(options.climbs * share)
    chosen = {key: row[key] for key in ("algorithm", "backend")}
    setting = _setting(row["precision"], device, search, **chosen)
    few, other = drawn | {"tries": max(1, drawn["tries"] // 4)}, {}
    try:
        findings = search.search(row["rule"], setting, climbs=climbs, **drawn)
        for reduction in REDUCTIONS:
            reduced = dataclasses.replace(setting, reduction=reduction)
            other[reduction] = search.neighbours(row["rule"], reduced, **few)[0].other
    except Exception as error:  # one rule that cannot run here must not cost the others' figures
        failed = f"{type(error).__name__}: {error}"[:500]
        return {"tries": 0, "broken": 0, "own": 0.0, "other": other, "worst": "", "failed": failed}
    return {
        "tries": len(findings),
        "broken": sum(finding.own > finding.allowed for finding in findings),
        "own": findings[0].own,
        "other": other,
        "worst": f"{findings[0].attack}, {findings[0].setting}",
        "failed": "",
    }


def _equal_samples(precisions: Any, device: torch.device, search: Any) -> list[dict[str, Any]]:
    """How far one of k equal samples moves the sum."""
    found = []
    layers = "Linear with bias", "Conv1d", "Embedding", "LayerNorm"
    for precision, reduction, size in itertools.product(precisions, REDUCTIONS, EQUAL_SAMPLES):
        setting = _setting(precision, device, search, reduction=reduction)
        with _as_called(precision):
            worst = max(
                _one_of_many(name, log_product, size, setting, search)
                for name in layers
                for log_product in (-1.5, -0.5, 0.1, 2.0)
            )
        row = {"precision": precision, "reduction": reduction, "samples": size}
        found.append(row | {"change": worst, "allowed": search.allowed(setting)})
    return found


def _one_of_many(name: str, log_product: float, size: int, setting: Any, search: Any) -> float:
    attack = search.Attack("aligned", 3, 3, 2, 0.0, log_product, None, 0.0, size)
    subject = search.SUBJECTS[name]
    sample = subject.sample(attack, search.DTYPES[setting.dtype])
    release = search.Release(subject, attack, setting)
    change = release([sample] * size) - release([sample] * (size - 1))
    return change.norm().item() / attack.bound
