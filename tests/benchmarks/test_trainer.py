"""``trainer``: what a user of a trainer waits for."""

from __future__ import annotations

import pytest

from benchmarks.trainer import TASKS, Task, measure

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
