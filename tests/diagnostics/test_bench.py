"""``flash-clipping bench``: what privacy costs a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.__main__ import _METHODS, main
from flash_clipping.diagnostics import bench as benches
from flash_clipping.diagnostics.bench import METHODS, bench

FACTORIES = """
import torch
from torch import nn


def small():
    print("no part of the report")
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    return model, (x, y), lambda model, batch: nn.CrossEntropyLoss()(model(batch[0]), batch[1])


def on_gpu():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh()).cuda(), torch.randn(16, 8, device="cuda")


def mixing():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), torch.randn(5, 4)


def full():
    def loss(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return nn.Linear(4, 6), torch.randn(5, 4), loss
"""

USUAL = {"batch_first": True, "loss_reduction": "mean"}


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "measured.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("measured", None)


@pytest.fixture
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns in this process, which has imported all."""
    monkeypatch.setattr(benches, "ProcessPoolExecutor", lambda n, context: ThreadPoolExecutor(n))


def test_the_command_measures_in_processes_of_their_own(
    factories: None, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--rounds=1", "--steps=2", "--method=private", "--json"]
    assert main(["bench", "measured:small", *asked]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert not found["without"] and [*found["costs"]] == ["private"]
    cost = found["costs"]["private"]
    assert [*cost] == ["step_ms", "host_ms", "first_s", "peak_mib"]
    assert cost["step_ms"] > 0 and cost["host_ms"] is None and cost["first_s"] >= 0
    assert "measured" not in sys.modules
    assert said.err.count("private, round 1 of 1 ...\n") == 1


def test_methods_take_turns(
    factories: None, in_threads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "measured:small", "--rounds", "2", "--steps", "1"]) == 0
    said = capsys.readouterr()
    turns = [line.split()[1].strip(",") for line in said.err.splitlines() if ", round" in line]
    assert turns == ["plain", "private", "graphs", "two_pass", "plain", "private", "two_pass"]
    lines = [line.split() for line in said.out.splitlines() if line.strip()]
    assert [line[0] for line in lines] == ["method", "plain", "private", "two_pass", "graphs:"]
    assert "graphs: needs a GPU" in said.out
    assert [*_METHODS] == [*METHODS]


def test_a_method_that_refuses_the_model_is_named(
    factories: None, in_threads: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "measured:mixing", "--rounds", "1", "--steps", "1"]) == 2
    said = capsys.readouterr()
    assert "private: 1 (BatchNorm1d) mixes samples" in said.err and not said.out


def test_what_does_not_fit_has_no_cost(
    factories: None, in_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Any = "measured:full", None, None, 1, USUAL
    assert bench(["plain"], 2, str, *given) == ({}, {"plain": "out of memory"})

    class Ended(ThreadPoolExecutor):
        def submit(self, *_: Any, **__: Any) -> Any:
            raise BrokenProcessPool

    monkeypatch.setattr(benches, "ProcessPoolExecutor", lambda n, context: Ended(n))
    costs, without = bench(["plain", "private"], 2, str, *given)
    assert not costs and "ended the process" in without["plain"] and len(without) == 2


@pytest.mark.parametrize("method", ["plain", "private", "two_pass"])
def test_a_step_is_that_of_the_method_and_moves_nothing(method: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    before = model.weight.clone()
    made, step = benches._private(METHODS[method], USUAL, model, x, lambda m, x: m(x).sum(1))
    step()
    assert isinstance(made, GradSampleModuleFlashClipping) == (method != "plain")
    assert model.weight.equal(before) and model.weight.grad is not None
    if method == "plain":
        torch.testing.assert_close(model.weight.grad, x.mean(0).expand(3, 4))
        return
    assert made.mode == METHODS[method].get("mode", "one_pass")
    norm_B = (3 * (x.square().sum(1) + 1)).sqrt()  # of a weight and a bias
    clipped = (x / norm_B.clamp(min=1)[:, None]).mean(0).expand(3, 4)
    noise = model.weight.grad - clipped  # of 1 / 5
    assert 0.05 < float(noise.std()) < 0.5


@pytest.mark.gpu
def test_a_gpu_has_host_times_and_graphs(factories: None) -> None:
    given: Any = "measured:on_gpu", None, None, 5, USUAL
    costs, without = bench([*METHODS], 1, str, *given)
    assert {*costs} >= {"plain", "private", "two_pass"} and {*without} <= {"graphs"}
    for cost in costs.values():
        assert cost["host_ms"] is not None and cost["peak_mib"] is not None
