"""Tests of several parameters: every two values meet, not every combination of all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest


def every_two_values(rows: Sequence[Mapping[str, int]]) -> set[int]:
    """Which of these combinations show all pairs of values that any of them shows; few of them."""
    pairs = [set(combinations(sorted(row.items()), 2)) for row in rows]
    missing, chosen = set().union(*pairs), set[int]()
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def leave_other_combinations_to_slow(items: Sequence[pytest.Item]) -> None:
    """Of tests with ``every_pair``. All of those on a GPU stay."""
    tests = defaultdict[tuple[object, ...], list[pytest.Function]](list)
    for item in items:
        if item.get_closest_marker("every_pair") and not item.keywords.keys() & {"gpu", "slow"}:
            assert isinstance(item, pytest.Function)
            tests[item.parent, item.originalname].append(item)
    for combined in tests.values():
        # Values are the same objects in all of a test's items. Their ``indices`` are not the same
        # numbers: since pytest 9 they count items.
        rows = [item.callspec.params.items() for item in combined]
        chosen = every_two_values([{name: id(value) for name, value in row} for row in rows])
        for i, item in enumerate(combined):
            if i not in chosen:
                item.add_marker(pytest.mark.slow)
