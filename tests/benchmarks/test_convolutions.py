"""``convolutions`` checks before it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks import convolutions
from tests.benchmarks.conftest import Run

SMALL = ["convolutions", "--device", "cpu", "--layers", "tiny", "--rounds", "1"]


def test_all_of_it_is_measured(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "results" / "convolutions.json"
    status, printed = run(*SMALL, "--json", path)
    assert status == 0, printed
    content = json.loads(path.read_text())
    assert content["kind"] == "convolutions" and content["environment"]["torch"]
    names = [result["name"] for result in content["results"]]
    assert names == names[:8] * 4 and {"weight gradient", "norms", "clipped sum"} < set(names)
    assert all(result["median"] > 0 for result in content["results"])
    assert "16→20" in printed


@pytest.mark.parametrize(
    ("what", "words"),
    [("sqnorms", "norms are"), ("grads", "that were kept"), ("sum", "clipped sum is")],
)
def test_a_wrong_result_stops_it(
    what: str, words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(convolutions, f"convolution_{what}")

    def wrong(*args: object) -> object:
        found = right(*args)
        return found * 1.001 if isinstance(found, Tensor) else (found[0] * 1.001, found[1])

    monkeypatch.setattr(convolutions, f"convolution_{what}", wrong)
    status, printed = run(*SMALL)
    assert status == 1 and words in printed and "nothing is timed" in printed, printed
