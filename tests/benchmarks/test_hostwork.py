"""``python -m benchmarks hostwork``: how many calls a private layer costs the host."""

from __future__ import annotations

import pytest

from benchmarks import hostwork

#: Calls of a layer and step that the library may make, beside those of its operations.
MOST = 60


@pytest.mark.parametrize("name", ["bert", "smollm"])
def test_a_layer_costs_the_host_few_calls(name: str) -> None:
    row, functions = hostwork.measure(name, steps=1)
    assert 10 < row["calls_per_layer"] <= MOST, functions.most_common(20)
    assert sum(row["calls_by_part"].values()) == pytest.approx(row["calls_per_layer"])
