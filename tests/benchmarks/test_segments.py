"""``segments`` checks before it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks import segments
from tests.benchmarks.conftest import Run

SMALL = ["segments", "--device", "cpu", "--sizes", "tiny", "--rounds", "1"]
SMALL += ["--shapes", "3x10", "2x20-zipf"]


def test_all_of_it_is_measured(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "results" / "segments.json"
    status, printed = run(*SMALL, "--json", path)
    assert status == 0, printed
    content = json.loads(path.read_text())
    assert content["kind"] == "segments" and content["environment"]["torch"]
    names = ["forward", "norms", "weight gradients", "clipped sums"]
    assert [result["name"] for result in content["results"]] == names * 2
    assert all(result["median"] > 0 for result in content["results"])
    assert "2x20-zipf" in printed


@pytest.mark.parametrize(("what", "words"), [("segment_sqnorms", "norm"), ("grouped_sums", "sum")])
def test_a_wrong_result_stops_it(
    what: str, words: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(segments, what)

    def wrong(*args: object) -> object:
        found = right(*args)
        return found * 1.001 if isinstance(found, Tensor) else (found[0] * 1.001, found[1])

    monkeypatch.setattr(segments, what, wrong)
    status, printed = run(*SMALL)
    assert status == 1 and words in printed and "nothing is timed" in printed, printed
