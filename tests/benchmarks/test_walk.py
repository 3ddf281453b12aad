"""``walk``: calls are counted, and told in their order."""

from __future__ import annotations

import re

from benchmarks.lab import walk
from flash_clipping.factors import accumulation_dtype
from flash_clipping.ops.error_bounds import upper_bound
from tests.benchmarks.conftest import Run


def test_the_walk_of_a_linear_layer_is_counted(run: Run) -> None:
    status, printed = run("walk")
    assert status == 0, printed
    lines = printed.splitlines()
    assert [line.split(":")[0] for line in lines] == ["forward", "backward"]
    for line in lines:
        calls, files, changes = map(int, re.findall(r"\d+", line))
        assert 1 < files <= changes + 1 < calls
        assert calls <= {"forward": 28, "backward": 72}[line.split(":")[0]]


def test_calls_of_other_libraries_do_not_count() -> None:
    import torch

    def work() -> None:
        torch.nn.functional.relu(torch.ones(2))
        upper_bound(torch.ones(2), None)
        upper_bound(torch.ones(2), None)
        accumulation_dtype(torch.float32)

    found = walk.recorded(work)
    assert [(call.file, call.depth) for call in found.calls] == [
        ("ops/error_bounds.py", 0),
        ("ops/error_bounds.py", 0),
        ("factors/base.py", 0),
    ]
    assert (found.files, found.changes) == (2, 1)
