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


def test_one_more_layer_adds_few_jumps_and_calls(run: Run) -> None:
    status, printed = run("walk", "--layers")
    assert status == 0, printed
    (line,) = [line for line in printed.splitlines() if line.startswith("one more Linear")]
    jumps, calls = map(float, re.findall(r"[\d.]+", line))
    assert 5 < jumps <= 40
    assert 5 < calls <= 20


def test_its_calls_are_listed_in_order(run: Run) -> None:
    _, printed = run("walk", "--calls")
    lines = [line.strip() for line in printed.splitlines()]
    places = [
        lines.index(line)
        for line in (
            "capture/tap.py: Tap.proven",
            "rules/linear.py: LinearRule.forward",
            "rules/linear.py: LinearRule.backward",
            "finish/backward_pass.py: BackwardPass.finish",
            "finish/backward_pass.py: BackwardPass.add_clipped_sums",
        )
    ]
    assert places == sorted(places)


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
