"""``subclasses``: one family is measured, and compared with one sample at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.benchmarks.conftest import Run

QUICK = ("--vocabulary", "40", "--batch", "3", "--seq", "5", "--steps", "1")


def test_a_family_is_measured(run: Run, tmp_path: Path) -> None:
    record = tmp_path / "subclasses.json"
    status, printed = run("subclasses", "--families", "Llama", *QUICK, "--json", record)
    assert status == 0, printed
    (row,) = json.loads(record.read_text())["rows"]
    assert row["model"] == "Llama" and row["private_mib"] > 0 and row["norm_error"] < 1e-9
    assert run("subclasses", "--families", "Nothing")[0] == 2
