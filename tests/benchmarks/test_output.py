"""What commands write: tables, pages, certificates."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import models, step, tables
from benchmarks.lab import versions
from benchmarks.options import method_names
from benchmarks.records import Record, summaries
from benchmarks.report import END, PEERS_END, PEERS_START, START
from tests.benchmarks.conftest import Run

METHODS = "nonprivate,flash,opacus-ghost"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run: Run, quick: tuple[str, ...]) -> Path:
    """A directory with one JSON file of each kind."""
    tmp_path = tmp_path_factory.mktemp("results")
    status, printed = run("step", *quick, "--methods", METHODS, "--json", tmp_path / "step.json")
    assert status == 0, printed
    return tmp_path


ROOT = Path(__file__).parents[2]


def pages(directory: Path) -> tuple[tuple[str | Path, ...], Path, Path]:
    """Arguments of ``report`` for two pages that are still empty, and these pages."""
    page, readme = directory / "performance.md", directory / "README.md"
    page.write_text(f"# Before\n\n{START}\nold numbers\n{END}\n\nAfter\n")
    readme.write_text(f"# Short\n\n{PEERS_START}\nold numbers\n{PEERS_END}\n\nLast\n")
    return ("report", "--results", directory, "--page", page, "--readme", readme), page, readme


def test_the_pages_of_the_repository_say_what_the_results_say(run: Run) -> None:
    status, printed = run("report", "--check")
    assert status == 0, printed


def test_the_plot_of_the_front_page_is_of_the_results() -> None:
    """If not: python -m benchmarks plot benchmarks/results/h100-step-peers.json
    --output docs/speed.svg"""
    record = Record.read(ROOT / "benchmarks" / "results" / "h100-step-peers.json")
    plot = (ROOT / "docs" / "speed.svg").read_text(encoding="utf-8")
    drawn = Counter(re.findall(r"<text[^>]*>(\d\.\d\d)</text>", plot))
    ratios = [
        ratio
        for row, summary in zip(record.rows, summaries(record.rows), strict=True)
        if row.method != "nonprivate" and summary and summary.ratio
        for ratio in (summary.ratio.median, summary.memory_ratio)
    ]
    assert len(ratios) == 24
    assert drawn == Counter(f"{ratio:.2f}" for ratio in ratios)
    assert f"revision {record.environment['revision']}" in plot
    assert "](speed.svg)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_report_writes_tables_that_name_the_machine(results: Path, run: Run) -> None:
    arguments, page, _ = pages(results)
    assert run(*arguments, "--check")[0] == 1
    assert run(*arguments)[0] == 0
    text = page.read_text()
    assert text.startswith("# Before\n\n") and text.endswith("\n\nAfter\n")
    assert "old numbers" not in text
    record = Record.read(results / "step.json")
    for key in ("device", "torch", "revision"):
        assert str(record.environment[key]) in text
    assert f"`{record.command}`" in text
    assert "[step.json](./step.json)" in text
    assert "| tiny; B 4, T 6 |" in text
    assert run(*arguments, "--check")[0] == 0
    assert run(*arguments)[0] == 0
    assert page.read_text() == text


#: Of records that are written here.
WHERE: dict[str, str | None] = dict.fromkeys(("driver", "torch", "triton", "opacus"), "1")


WHERE |= {"device": "Some GPU", "revision": "abc"}


@pytest.mark.parametrize("name", [*tables.ON_A_GPU, *tables.ON_A_CPU])
def test_a_table_names_models_and_methods_that_there_are(name: str) -> None:
    table = (tables.ON_A_GPU | tables.ON_A_CPU)[name]
    command, *arguments = shlex.split(table.command)
    if command != "step":
        assert command in {"kernels", "noise", "hyper-connections", "product-key"}
        return
    parser = argparse.ArgumentParser()
    step.add_parser(parser.add_subparsers())
    options = parser.parse_args([command, *arguments])
    assert set(options.model) <= set(models.NAMES)
    assert "flash" in options.methods and method_names(options.methods)


def test_every_oldest_version_was_run_and_passed() -> None:
    """The row of the oldest PyTorch has no version above the floor it stands for."""
    rows = json.loads(versions.RESULTS.read_text())
    numbers = {key: [int(n) for n in re.findall(r"\d+", key)[:3]] for key in rows}
    row = rows[min(rows, key=numbers.__getitem__)]
    assert row["parts"].keys() == versions.PARTS.keys()
    assert all(versions.is_right(part) for part in row["parts"].values())
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    floors = dict(re.findall(r"[\"']([a-z-]+)>=([\d.]+)", metadata))
    tried = ("torch", "triton", "opacus", "cryptography", "dp-accounting", "transformers")
    for package in (*tried, "accelerate", "lightning", "peft"):
        assert f"{row['versions'][package]}.".startswith(f"{floors[package]}."), package
    for package in versions.PACKAGES:
        assert f"| {row['versions'][package]} |" in versions.PAGE.read_text()
