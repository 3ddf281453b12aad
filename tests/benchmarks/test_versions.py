"""``python -m benchmarks versions``: what is installed, what passed, and the page's table."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.lab import versions
from tests.benchmarks.conftest import Run

ROOT = Path(__file__).parents[2]


def test_what_passed_is_written(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_of_this.py").write_text(
        "import pytest\ndef test_right(): pass\ndef test_wrong(): assert 0\n"
        "def test_skipped(): pytest.skip()\n"
    )
    page, results = tmp_path / "page.md", tmp_path / "versions.json"
    page.write_text(f"Before\n{versions.START}\n{versions.END}\nAfter\n")
    monkeypatch.setattr(versions, "PARTS", {"this": [str(tmp_path)], "other": ["nothing"]})
    status, printed = run("versions", "--json", results, "--page", page, "--only", "this")
    assert status == 1, printed
    (row,) = json.loads(results.read_text()).values()
    assert row["versions"]["torch"] == version("torch")
    part = row["parts"]["this"]
    assert [part[name] for name in versions.OUTCOMES] == [1, 1, 0, 1]
    assert re.search(
        rf"\| {re.escape(version('torch'))} .* 1 passed, 1 failed \|", page.read_text()
    )
    assert page.read_text().startswith("Before") and page.read_text().endswith("After\n")


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
