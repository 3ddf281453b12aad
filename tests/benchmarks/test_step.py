"""``step``: rows that are right, rows that say what went wrong, and a check that bites."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.methods import METHODS, Flash, Method
from benchmarks.records import Record
from tests.benchmarks.conftest import Run

OURS_AND_OPACUS = "nonprivate,flash,flash-two-pass,opacus-ghost,opacus-hooks"

Step = Callable[..., SimpleNamespace]


@pytest.fixture
def step(run: Run, quick: tuple[str, ...], tmp_path: Path) -> Step:
    """``step(methods, *options)``: what a quick run printed, its rows by method, and its file."""

    def step(methods: str, *extra: str) -> SimpleNamespace:
        path = tmp_path / "step.json"
        arguments = ["--methods", methods, "--json", path, *extra]
        status, printed = run("step", *quick, *arguments)
        rows = {row.method: row for row in Record.read(path).rows} if path.exists() else {}
        return SimpleNamespace(status=status, printed=printed, rows=rows, path=path)

    return step


# ------------------------------------------------------------------------------------- right rows


@pytest.mark.parametrize("extra", [(), ("--optimizer",), ("--checkpointing",), ("--lora", "2")])
def test_every_method_has_a_row_with_all_its_samples(step: Step, extra: tuple[str, ...]) -> None:
    methods = "nonprivate,flash,opacus-ghost" if extra else OURS_AND_OPACUS
    if "--checkpointing" in extra:
        methods = "nonprivate,flash,flash-two-pass"  # not Opacus: its hooks fire twice there
    found = step(methods, *extra)
    assert found.status == 0, found.printed
    assert "Agreement on one batch" in found.printed
    content = json.loads(found.path.read_text())
    assert content["command"].startswith("python -m benchmarks step --device cpu --model tiny")
    assert content["environment"]["torch"] == torch.__version__
    assert set(content["environment"]) >= {"device", "driver", "triton", "opacus", "revision"}
    assert content["settings"]["rounds"] == 2
    for row in content["rows"]:
        assert row["status"] == "ok", row
        assert len(row["milliseconds"]) == 2 and row["peak_bytes"] > 0
    assert content["rows"][0]["summary"]["ratio"]["median"] == 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_method_on_a_gpu(step: Step, dtype: str) -> None:
    found = step(OURS_AND_OPACUS, "--device", "cuda", "--dtype", dtype, "--optimizer")
    assert found.status == 0, found.printed


@pytest.mark.gpu
@pytest.mark.parametrize("extra", [(), ("--optimizer",), ("--checkpointing",), ("--lora", "2")])
def test_graphs_on_a_gpu(step: Step, extra: tuple[str, ...]) -> None:
    methods = "nonprivate,nonprivate-graph,flash,flash-graph"
    found = step(methods, "--device", "cuda", *extra)
    assert found.status == 0, found.printed
    assert "compared with one sample at a time in fp32" in found.printed


# ---------------------------------------------------------------------------- rows that say why not


# -------------------------------------------------------------------------------- disagreement


class WrongNorm(Flash):
    def norms(self) -> Tensor:
        return super().norms() * 1.001


class WrongGradient(Flash):
    def gradients(self) -> Iterator[Tensor]:
        for number, gradient in enumerate(super().gradients()):
            yield gradient if number else torch.zeros_like(gradient)


class NotANumber(Flash):
    def norms(self) -> Tensor:
        return super().norms() * float("nan")


@pytest.mark.parametrize("wrong", [WrongNorm, WrongGradient, NotANumber])
def test_disagreement_is_an_error_exit_and_nothing_is_timed(
    step: Step, monkeypatch: pytest.MonkeyPatch, wrong: type[Method]
) -> None:
    monkeypatch.setitem(METHODS, "flash", wrong)
    found = step("nonprivate,flash")
    assert found.status == 1 and not found.path.exists()
    assert (
        "flash is off by" in found.printed and "from one sample at a time in fp64" in found.printed
    )
    assert "Nothing was timed" in found.printed


# ------------------------------------------------------------------------------------- usage


# ------------------------------------------------------------------------------------- peers
