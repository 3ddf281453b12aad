"""``tables``: every command can be run, and one that fails leaves the others."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest

from benchmarks import models, step, tables
from benchmarks.options import method_names
from tests.benchmarks.conftest import Run


@pytest.mark.parametrize("name", [*tables.ON_A_GPU, *tables.ON_A_CPU])
def test_a_table_names_models_and_methods_that_there_are(name: str) -> None:
    table = (tables.ON_A_GPU | tables.ON_A_CPU)[name]
    command, *arguments = shlex.split(table.command)
    if command != "step":
        assert command in [
            "memory",
            "kernels",
            "noise",
            "hyper-connections",
            "product-key",
            "segments",
            "profile",
        ]
        return
    parser = argparse.ArgumentParser()
    step.add_parser(parser.add_subparsers())
    options = parser.parse_args([command, *arguments])
    assert set(options.model) <= set(models.NAMES)
    assert "flash" in options.methods and method_names(options.methods)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_table_that_fails_leaves_the_others(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_once: int
) -> None:
    tiny = "step --device cpu --methods flash --rounds 1 --steps 1 --model"
    chosen = {"wrong": tables.Table(f"{tiny} nothing"), "right": tables.Table(f"{tiny} tiny")}
    monkeypatch.setattr(tables, "ON_A_CPU", chosen)
    command = ["tables", "--on", "cpu", "--results", tmp_path, "--revision", "abc"]
    status, printed = run(*command, "--at-once", at_once)
    assert status == 1 and "not measured, or in part: wrong" in printed, printed
    assert "unknown model 'nothing'" in (tmp_path / "cpu-wrong.log").read_text()
    found = json.loads((tmp_path / "cpu-right.json").read_text())
    (row,) = found["rows"]
    assert row["status"] == "ok" and row["first_milliseconds"] > row["milliseconds"][0]
    assert found["environment"]["revision"] == "abc"
    status, printed = run("tables", "--on", "cpu", "--results", tmp_path, "--seconds", 0)
    assert status == 1 and "right: not begun" in printed, printed
    assert run("tables", "--on", "cpu", "--only", "left")[0] == 2
