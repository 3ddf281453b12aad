"""``versions``: a part of the tests, with the oldest, the pinned and the newest PyTorch.

Each gets a virtual environment of its own, which is deleted when it has been used: gigabytes, as
PyTorch's wheels for Linux bring CUDA along. Triton comes as PyTorch requires it: no other can be
installed beside it. Opacus is the newest that ``setup.cfg`` allows.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.options import UsageError

_ROOT = Path(__file__).resolve().parent.parent
SETUP, PINS = _ROOT / "setup.cfg", _ROOT / "constraints.txt"

#: What each environment runs, column by column: arguments of pytest. Transformers is not installed.
PARTS = {
    # Without the one rule for a layer of transformers.
    "rules vs oracle": ["tests/rules/test_norms.py", "-k", "not transposed_linear"],
    "engine": ["tests/integration/test_engine.py"],
    "private interfaces": ["tests/test_compat.py"],
    "kernels (interpreter)": [
        "tests/ops/test_embedding.py",
        "tests/ops/test_gram.py",
        "tests/ops/test_outer.py",
        "tests/ops/test_row_scale.py",
        "tests/ops/test_row_sum.py",
    ],
}
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "setuptools")
#: Without constraints.txt: the interpreters of older versions of Triton do not run with newer ones.
NUMPY = "numpy<2.4"
PACKAGES = ("torch", "triton", "opacus", "numpy")

START = "<!-- versions:start -->"
END = "<!-- versions:end -->"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "versions",
        help="test the oldest, the pinned and the newest PyTorch, and write docs/versions.md",
        description="Makes a virtual environment for each version of PyTorch, runs a part of the "
        f"tests in it, and replaces its row between {START} and {END}. The exit status is 1 if a "
        "test failed.",
    )
    parser.add_argument(
        "versions",
        nargs="*",
        metavar="VERSION",
        help="of PyTorch; default: the oldest of setup.cfg, that of constraints.txt, 'newest'",
    )
    parser.add_argument("--page", type=Path, default=_ROOT / "docs" / "versions.md")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one part")
    parser.set_defaults(run=run)


def promised() -> list[str]:
    """The oldest version that setup.cfg promises, and the one that constraints.txt pins."""
    oldest = re.search(r"torch>=(\d+\.\d+)", SETUP.read_text())
    pinned = re.search(r"^torch==(\S+)", PINS.read_text(), re.MULTILINE)
    if oldest is None or pinned is None:
        raise UsageError("no torch>= in setup.cfg, or no torch== in constraints.txt")
    return [f"{oldest[1]}.*", pinned[1]]


def run(options: argparse.Namespace, console: Console) -> int:
    rows = read_rows(options.page)
    failed = False
    for version in options.versions or [*promised(), "newest"]:
        console.print(f"[bold]PyTorch {version}[/]")
        with tempfile.TemporaryDirectory(prefix="versions-") as folder:
            try:
                found, results = try_version(version, Path(folder), options.timeout, console)
            except subprocess.CalledProcessError as error:
                console.print(f"[bold red]{error}[/]")
                failed = True
                continue
        rows[found["torch"]] = [*(found[package] for package in PACKAGES), *results]
        failed |= any("failed" in result or "passed" not in result for result in results)
        write_rows(options.page, rows)  # row by row: a run takes long
    return int(failed)


def try_version(
    version: str, folder: Path, timeout: int, console: Console
) -> tuple[dict[str, str], list[str]]:
    """Installed versions by package, and what came of each part."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    torch = "torch" if version == "newest" else f"torch=={version}"
    bounds = re.findall(r"^ +((?:opacus|triton)>=[\d.]+)", SETUP.read_text(), re.MULTILINE)
    install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    if version == promised()[1]:
        install += ["-c", str(PINS), "numpy"]
    else:
        install += [NUMPY]
    subprocess.run([*install, torch, *bounds, *TOOLS], check=True)
    listed = subprocess.run(
        [python, "-m", "pip", "freeze", "--all"], check=True, capture_output=True, text=True
    ).stdout
    found = dict(line.split("==") for line in listed.splitlines() if line.count("==") == 1)
    results = []
    for name, arguments in PARTS.items():
        results.append(outcome(python, arguments, timeout))
        console.print(f"  {name}: {results[-1]}")
    return {package: found.get(package, "none") for package in PACKAGES}, results


def outcome(python: str, arguments: Sequence[str], timeout: int) -> str:
    """The numbers in pytest's last line."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    settings = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    environment = {**os.environ, **settings}
    try:
        ran = subprocess.run(
            command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"not through in {timeout} s"
    last = ran.stdout.strip().splitlines()[-1:]
    counts = re.findall(r"\d+ (?:passed|failed|errors?)", last[0] if last else "")
    if ran.returncode and ran.stdout:
        sys.stderr.write(
            "\n".join(line for line in ran.stdout.splitlines() if line.startswith("FAILED"))
        )
    return ", ".join(sorted(counts, key=lambda count: "passed" not in count)) or "did not start"


def read_rows(page: Path) -> dict[str, list[str]]:
    """Rows of the table that is on the page, by version of PyTorch."""
    body = page.read_text().split(START)[1].split(END)[0]
    lines = [line for line in body.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row for row in rows}


def write_rows(page: Path, rows: dict[str, list[str]]) -> None:
    """Replace the table."""
    header = ["PyTorch", "Triton", "Opacus", "NumPy", *PARTS]
    ordered = sorted(rows.values(), key=lambda row: [int(n) for n in re.findall(r"\d+", row[0])])
    lines = [header, ["---"] * len(header), *ordered]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    python = ".".join(platform.python_version_tuple()[:2])
    before, rest = page.read_text().split(START)
    text = f"{START}\n\nPython {python}, on a CPU.\n\n{table}\n\n{END}"
    page.write_text(before + text + rest.split(END)[1])
