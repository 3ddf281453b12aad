"""``hyper-connections`` checks before it times, and writes down what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import hyper_connections
from tests.benchmarks.conftest import Run

SMALL = ("hyper-connections", "--device", "cpu", "--shape", "2,3,2,8", "--rounds", "1")


def test_every_operation_is_measured(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "results" / "hyper-connections.json"
    status, printed = run(*SMALL, "--json", path)
    assert status == 0, printed
    assert printed.startswith("worst relative error against float64")
    content = json.loads(path.read_text())
    assert content["environment"]["torch"] == torch.__version__
    found = {result["name"]: result for result in content["results"]}
    assert set(found) == {
        *("copy", "forward", "backward", "mix", "mix backward"),
        *("eager step", "step", "private step"),
    }
    assert found["step"]["eager_over_this"] > 0 and found["private step"]["over_step"] > 0
    assert all(result["median"] > 0 for result in content["results"])


def test_a_wrong_result_stops_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hyper_connections.mixing.stream_mix
    monkeypatch.setattr(
        hyper_connections.mixing, "stream_mix", lambda *args, **kw: right(*args, **kw) * 1.001
    )
    status, printed = run(*SMALL)
    assert status == 1 and "nothing is timed" in printed
