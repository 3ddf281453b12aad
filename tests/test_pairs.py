"""``every_pair``: which combinations of parameters are left."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairs import every_two_values


def test_all_pairs_are_left_of_few_combinations() -> None:
    rows = [{"a": a, "b": b, "c": c} for a, b, c in product(range(4), range(3), range(3))]
    rows = [row for row in rows if row["a"] != 0 or row["b"] != 2]  # one pair is in none
    chosen = [rows[i] for i in every_two_values(rows)]
    pairs = [{*combinations(row.items(), 2)} for row in chosen]
    assert set().union(*pairs) == {pair for row in rows for pair in combinations(row.items(), 2)}
    assert len(chosen) <= 14 < len(rows)


@pytest.mark.every_pair
@pytest.mark.parametrize("first", ["a", "b", "c"])
@pytest.mark.parametrize("second", [1, 2, 3])
@pytest.mark.parametrize("third", [None, len, max])
def test_few_combinations_of_a_marked_test_run(
    first: str, second: int, third: object, request: pytest.FixtureRequest
) -> None:
    """Of this one, 9 or a few more of 27."""
    name = request.function.__name__
    items = [item for item in request.session.items if item.name.startswith(f"{name}[")]
    assert sum(item.get_closest_marker("slow") is None for item in items) <= 12
