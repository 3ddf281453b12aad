"""The example of private text runs, small, and with privacy has a finite epsilon."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG turned off")

SMALL = [
    *("--width", "16", "--layers", "1", "--length", "48", "--rank", "2", "--public-steps", "3"),
    *("--steps", "2", "--batch-size", "32", "--max-physical-batch-size", "16", "--canaries", "40"),
    *("--held-out", "20", "--device", "cpu"),
]


@pytest.fixture
def example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "private_text.py"
    spec = importlib.util.spec_from_file_location("example_private_text", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("private", [True, False])
def test_a_short_run(example: Any, tmp_path: Path, private: bool) -> None:
    more = [] if private else ["--not-private"]
    before, after, found = example.main([*SMALL, "--output", str(tmp_path), *more])
    assert 1 < before < 400 and after != before
    assert found.canaries == 40 and not found.violated
    assert (found.epsilon <= 8.0) if private else math.isinf(found.epsilon)


def test_passages_are_whole(example: Any) -> None:
    rows = example.passages(["abcdefg", "  a\n b", "xy"], 3)
    assert [bytes(row.tolist()) for row in rows] == [b"abc", b"def", b"a b"]
    assert len(example.public_texts()) > 1000
