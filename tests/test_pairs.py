"""``every_pair``: which combinations of parameters are left."""

from __future__ import annotations

from itertools import combinations, product

from tests.support.pairs import every_two_values


def test_all_pairs_are_left_of_few_combinations() -> None:
    rows = [{"a": a, "b": b, "c": c} for a, b, c in product(range(4), range(3), range(3))]
    rows = [row for row in rows if row["a"] != 0 or row["b"] != 2]  # one pair is in none
    chosen = [rows[i] for i in every_two_values(rows)]
    pairs = [{*combinations(row.items(), 2)} for row in chosen]
    assert set().union(*pairs) == {pair for row in rows for pair in combinations(row.items(), 2)}
    assert len(chosen) <= 14 < len(rows)
