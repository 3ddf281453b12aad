"""``tables``: every command can be run, and one that fails leaves the others."""

from __future__ import annotations

import argparse
import json
import os
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
        assert command in {"memory", "kernels", "noise", "hyper-connections", "product-key"}
        return
    parser = argparse.ArgumentParser()
    step.add_parser(parser.add_subparsers())
    options = parser.parse_args([command, *arguments])
    assert set(options.model) <= set(models.NAMES)
    assert "flash" in options.methods and method_names(options.methods)


PROCESSORS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    "at_once", [1, pytest.param(2, marks=pytest.mark.skipif(PROCESSORS < 2, reason="of two"))]
)
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


@pytest.mark.parametrize("at_once", [-1, 0, PROCESSORS + 1])
def test_shares_that_a_machine_does_not_have(run: Run, tmp_path: Path, at_once: int) -> None:
    command = ["tables", "--on", "cpu", "--results", tmp_path, f"--at-once={at_once}"]
    status, printed = run(*command)
    assert status == 2 and f"--at-once: found {at_once}; expected 1 to {PROCESSORS}" in printed


@pytest.mark.parametrize(("visible", "gpu"), [(None, "1"), ("4,6", "6"), ("GPU-a, GPU-b", "GPU-b")])
def test_a_share_is_of_the_gpus_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpu: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert tables.gpu_of(1) == gpu
