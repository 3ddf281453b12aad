"""``step``: rows that are right, rows that say what went wrong, and a check that bites."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import methods, records
from benchmarks.agreement import Errors, allowed
from benchmarks.methods import METHODS, Flash, Method, OpacusHooks
from benchmarks.options import UsageError, stop_without_triton
from benchmarks.records import Record, Row, Spread
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


def test_norms_of_randomized_clipping_are_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "VECTORS", 20_000)
    layer, A, G = torch.nn.Linear(4, 3), torch.randn(2, 5, 4), torch.randn(2, 5, 3)
    found = methods._estimated_norms(layer, [A], G)
    torch.testing.assert_close(found[layer.weight], (G.mT @ A).norm(dim=(1, 2)), rtol=0.05, atol=0)
    torch.testing.assert_close(found[layer.bias], G.sum(1).norm(dim=1))


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


def test_statistics() -> None:
    slow = Row("flash", "m", batch=4, positions=10, milliseconds=[12.0, 24.0, 18.0], peak_bytes=30)
    base = Row("nonprivate", "m", 4, 10, milliseconds=[10.0, 20.0, 10.0], peak_bytes=20)
    other = Row("flash", "another", milliseconds=[5.0])
    summary, _, alone = records.summaries([slow, base, other])
    assert summary is not None and summary.ratio is not None
    assert summary.ratio.median == pytest.approx(1.2)  # of 1.2, 1.2, 1.8: paired by round
    assert summary.memory_ratio == 1.5
    assert alone is not None and alone.ratio is None
    assert Spread.of([float(value) for value in range(11)]) == Spread(5.0, 1.0, 9.0)


# ---------------------------------------------------------------------------- rows that say why not


class OutOfMemory(OpacusHooks):
    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")


class Broken(OpacusHooks):
    def backward(self, inputs: Tensor, targets: Tensor) -> None:
        raise ZeroDivisionError("what a pity\nand more")


class NotInstalled(OpacusHooks):
    package = "no_such_package_anywhere"


@pytest.mark.parametrize(
    ("method", "status", "note"),
    [
        (OutOfMemory, "OOM", ""),
        (Broken, "failed", "ZeroDivisionError: what a pity"),
        (NotInstalled, "missing", "the package no_such_package_anywhere cannot be imported"),
    ],
)
def test_a_method_that_cannot_run_is_a_row_and_the_others_go_on(
    step: Step, monkeypatch: pytest.MonkeyPatch, method: type[Method], status: str, note: str
) -> None:
    monkeypatch.setitem(METHODS, "opacus-hooks", method)
    found = step("nonprivate,flash,opacus-hooks")
    assert found.status == 0, found.printed
    assert status in found.printed and note in found.printed
    row = found.rows["opacus-hooks"]
    assert (row.status, row.note, row.milliseconds) == (status, note, [])
    assert len(found.rows["flash"].milliseconds) == 2
    assert found.rows["flash"].norm_error is not None


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


def test_what_a_method_may_be_off_by() -> None:
    bf16 = torch.bfloat16
    assert allowed(torch.float32, None) == Errors(1e-4, 1e-4)
    assert allowed(bf16, Errors(1e-3, 0.02)) == Errors(3e-2, 0.06)
    assert not Errors(1e-3, None).exceed(allowed(bf16, None))
    assert Errors(1e-3, 0.05).exceed(allowed(bf16, None))
    assert Errors(float("nan"), 0.0).exceed(allowed(bf16, None))


# ------------------------------------------------------------------------------------- usage


def test_without_triton_a_gpu_run_stops_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_clipping.ops.is_triton_available", lambda: False)
    quiet, gpu = Console(quiet=True), torch.device("cuda")
    with pytest.raises(UsageError, match="--force"):
        stop_without_triton(["nonprivate", "flash"], gpu, False, quiet)
    stop_without_triton(["nonprivate", "flash"], gpu, True, quiet)
    stop_without_triton(["nonprivate", "opacus-ghost"], gpu, False, quiet)
    stop_without_triton(["nonprivate", "flash"], torch.device("cpu"), False, quiet)


@pytest.mark.parametrize("command", ["step", "kernels", "product-key"])
def test_a_gpu_that_is_not_there_is_what_is_missing(command: str, run: Run) -> None:
    status, printed = run(command, "--device", "cuda:99")
    assert status == 2
    assert "--device cuda:99: found" in printed and "--device cpu" in printed
    assert "triton" not in printed.lower()


# ------------------------------------------------------------------------------------- peers
