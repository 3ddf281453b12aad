"""``trainer``: what a user of a trainer waits for."""

from __future__ import annotations

import pytest

from benchmarks.trainer import TASKS, Task, lines, measure

TINY = Task(
    "BertForSequenceClassification",
    {"vocab_size": 300, "max_position_embeddings": 16, "num_labels": 2, "num_hidden_layers": 1}
    | {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16},
    batch=4,
    lengths=(4, 8),
    classes=2,
)


@pytest.mark.parametrize("method", ["plain", "private"])
def test_a_run_of_each_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "tiny", TINY)
    found = measure("tiny", method, 3, True, 0.5)
    assert found["model"] == "tiny" and found["method"] == method
    assert set(found["windows"]) == {"0-1", "1-3"} and found["first_seconds"] > 0
    assert (found["replays"] is None) == (method == "plain")


def test_lines_are_ratios_to_the_trainer() -> None:
    def result(method: str, last: float) -> dict[str, object]:
        windows = {"0-1": 9e3, "1-12": 9.0, "12-42": 8.0, "42-100": 7.0, "100-200": last}
        memory = {"allocated_gib": last / 10, "reserved_gib": last / 5}
        run = {
            "model": "bert",
            "method": method,
            "windows": windows,
            "first_seconds": 9.0,
            "loss": 0.5,
        }
        return run | memory | {"replays": [90, 100] if method == "private" else None}

    error = {"model": "vit", "method": "private", "error": "over 240 s"}
    headings, rows = lines([result("plain", 40.0), result("private", 44.0), error])
    (row,) = rows
    found = dict(zip(headings, row, strict=True))
    assert found["ratio"] == "1.10" and found["replays"] == "90 of 100"
    assert found["allocated, GiB"] == "4.0, 4.4 (1.10)"
