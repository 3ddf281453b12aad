"""``versions``: a part of the tests with the packages that are installed, and what came of it.

Run in an environment with the oldest versions that ``pyproject.toml`` allows, with those of
``constraints.txt``, and with newer ones. ``benchmarks/results/versions.json`` keeps a row for each
PyTorch, and the table of ``docs/versions.md`` is made of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import Page, table

_ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = _ROOT / "benchmarks" / "results" / "versions.json"
PAGE = _ROOT / "docs" / "versions.md"

#: What is run, column by column: arguments of pytest.
PARTS = {
    "rules": ["tests/rules"],
    "capture": ["tests/capture"],
    "engine, noise": [
        *(f"tests/engine/test_{name}.py" for name in ("engine", "clipping", "accounting")),
        *(f"tests/engine/test_{name}.py" for name in ("noise", "errors", "sampling")),
        "tests/randomness",
        "tests/test_compat.py",
    ],
    "kernels (interpreter)": [
        *(f"tests/ops/test_{name}.py" for name in ("gram", "outer", "row_scale", "row_sum"))
    ],
    "trainers": ["tests/trainers"],
}
PACKAGES = (
    *("torch", "triton", "opacus", "cryptography", "dp-accounting", "transformers"),
    *("accelerate", "lightning", "peft", "numpy"),
)
OUTCOMES = ("passed", "failed", "errors", "skipped")

START = "<!-- versions:start -->"
END = "<!-- versions:end -->"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "versions",
        help="test the installed versions, and write what passed to docs/versions.md",
        description="Runs a part of the tests with the packages that are installed, and replaces "
        "the row of this PyTorch in benchmarks/results/versions.json and in docs/versions.md. The "
        "exit status is 1 if a test failed.",
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--only", choices=PARTS, action="append", help="parts; the others stay")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for one part")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    rows: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    found = {"python": platform.python_version(), **{name: installed(name) for name in PACKAGES}}
    before = rows.get(found["torch"], {})
    parts = before.get("parts", {}) if before.get("versions") == found else {}
    for name in options.only or PARTS:
        command = ["pytest", "-q", "-p", "no:cacheprovider", *PARTS[name]]
        counts = outcome(command, options.timeout)
        parts[name] = {"command": f"python -m {' '.join(command)}", **counts}
        console.print(f"{name}: {counts}")
    rows[found["torch"]] = {"versions": found, "parts": parts}
    options.json.write_text(json.dumps(rows, indent=2) + "\n")
    write_table(options.page, rows)
    return int(any(not is_right(part) for part in parts.values()))


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def is_right(part: dict[str, Any]) -> bool:
    return part["passed"] > 0 and not part["failed"] and not part["errors"]


def outcome(command: list[str], timeout: int) -> dict[str, int]:
    """The numbers in pytest's last line; all 0 where it did not come to one."""
    settings = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    try:
        ran = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=_ROOT,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(OUTCOMES, 0)
    lines = ran.stdout.splitlines()
    sys.stderr.writelines(f"{line}\n" for line in lines if line.startswith(("FAILED", "ERROR")))
    counts = dict.fromkeys(OUTCOMES, 0)
    for number, name in re.findall(r"(\d+) (passed|failed|error|skipped)", "".join(lines[-1:])):
        counts["errors" if name == "error" else name] = int(number)
    return counts


def write_table(page: Path, rows: dict[str, Any]) -> None:
    """Replace the table of the page."""
    packages = [name for name in PACKAGES if name != "torch"]
    lines = []
    for torch in sorted(rows, key=lambda version: [int(n) for n in re.findall(r"\d+", version)]):
        row = rows[torch]
        cells = [row["versions"][name] for name in packages]
        for name in PARTS:
            part = row["parts"].get(name)
            bad = part and [f"{part[key]} {key}" for key in ("failed", "errors") if part[key]]
            cells.append(", ".join([f"{part['passed']} passed", *bad]) if part else "")
        lines.append([torch, *cells])
    made = table(["PyTorch", *packages, *PARTS], lines)
    Page(page, START, END, made).write()
