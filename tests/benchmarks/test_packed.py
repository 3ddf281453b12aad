"""``packed`` checks norms before it times, and writes down what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import packed
from tests.benchmarks.conftest import Run

SMALL = ("packed", "--device", "cpu", "--rounds", "1", "--tokens", "700")


def test_every_step_is_measured(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "draw_lengths", lambda tokens: (300, 16, 384))
    path = tmp_path / "packed.json"
    status, printed = run(*SMALL, "--json", path)
    assert status == 0, printed
    content = json.loads(path.read_text())
    assert [found["name"] for found in content["results"]] == [
        *("non-private, packed", "packed", "padded"),
    ]
    assert content["results"][0]["ratio"] == 1
    assert list(content["lengths"].values()) == [[300, 16, 384]]


def test_a_wrong_norm_stops_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "draw_lengths", lambda tokens: (300, 16, 384))
    found = packed.GradSampleModuleFlashClipping.get_norm_sample
    monkeypatch.setattr(
        packed.GradSampleModuleFlashClipping, "get_norm_sample", lambda self: found(self) * 1.01
    )
    status, printed = run(*SMALL)
    assert status == 1 and "nothing is timed" in printed


def test_lengths() -> None:
    lengths = packed.draw_lengths(16_384)
    assert sum(lengths) == 16_384 and len(lengths) > 3
    assert max(lengths) <= packed.LONGEST and min(lengths[:-1]) >= packed.SHORTEST
