"""What holds however processes share a model: by shards and their replicas, by experts, by cut
layers, by stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.distributed import (
    cases,
    experts,
    steps,
    test_four_processes,
    test_pipeline,
    test_tensor_parallel,
    test_tensor_parallel_shards,
    test_two_processes,
)
from tests.support.errors import on_one_line


@dataclass(frozen=True)
class ShardCase:
    """What processes of a ``group`` have found in a ``part``.

    Attributes:
        tolerance: of its largest error; models of transformers take norms in fp32.
        said: what it is refused with.
    """

    group: str
    part: str
    tolerance: float = 1e-12
    said: str = ""


def cases_of(
    group: str, prefix: str, names: Iterable[str], tolerance: float = 1e-12
) -> list[ShardCase]:
    return [ShardCase(group, f"{prefix}{name}", tolerance) for name in names]


def every(shard_cases: list[ShardCase]) -> pytest.MarkDecorator:
    ids = [f"{case.group}-{case.part}" for case in shard_cases]
    return pytest.mark.parametrize("case", shard_cases, ids=ids)


SUMS = [
    *cases_of("by_two", "clipped ", cases.CASES),
    *cases_of("by_two", "documents ", ["one_pass", "two_pass"]),
    *cases_of("by_two", "tables ", steps.TABLES),
    *cases_of("by_two", "experts ", [*experts.BY_TWO, "poisoned"]),
    # Of a model that is not wrapped, and with hooks disabled before or after forward.
    *cases_of("by_two", "experts ordinary ", ["", "before", "after"]),
    *cases_of("by_two", "experts of ", experts.families(), 1e-6),
    *cases_of("by_two", "", ["llama", "LoRA"], 1e-6),
    *cases_of("by_four", "clipped ", test_four_processes.CASES),
    *cases_of("by_four", "experts ", experts.BY_FOUR),
    *cases_of("by_four", "", ["documents"]),
    *cases_of("tensor_by_two", "clipped ", test_tensor_parallel.CASES),
    *cases_of("tensor_by_two", "documents ", test_tensor_parallel.DOCUMENTS),
    *cases_of("tensor_by_two", "", ["poisoned", "lost document"]),
    *cases_of("tensor_by_two", "", ["loaded", "applied"], 1e-6),
    *cases_of("tensor_by_four", "clipped ", test_tensor_parallel_shards.CASES),
    *cases_of("tensor_by_four", "", ["documents"]),
]


@every(SUMS)
def test_sums_and_norms_are_those_of_single_samples(
    case: ShardCase, request: pytest.FixtureRequest
) -> None:
    """And the coefficients of all who cut a layer are bitwise equal."""
    for of_rank in request.getfixturevalue(case.group):
        found = of_rank[case.part]
        found = found if isinstance(found, dict) else {"error": found}
        assert found["error"] <= case.tolerance
        assert found.get("alike", True)


TRAINED = [
    *cases_of("by_two", "trained ", test_two_processes.TRAINED, 1e-9),
    *cases_of("by_two", "experts ", ["trained"], 1e-9),
    *cases_of("by_four", "", ["trained", "experts trained"], 1e-9),
    *cases_of("tensor_by_two", "", ["trained"], 1e-9),
    *cases_of("tensor_by_four", "", ["trained"], 1e-9),
]


@every(TRAINED)
def test_training_is_that_of_one_process(case: ShardCase, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(case.group)
    assert max(of_rank[case.part] for of_rank in found) <= case.tolerance


SETTLED = [
    *cases_of("by_two", "clipped ", ["even", "uneven", "bare", "tied", "two_pass"]),
    *cases_of("by_two", "clipped ", [name for name in cases.CASES if "one each" in name]),
    *cases_of("by_two", "documents ", ["one_pass", "two_pass"]),
    *cases_of("by_two", "experts ", ["even", "LoRA", "twice"]),
    *cases_of("tensor_by_two", "clipped ", ["sequence"]),
]


@every(SETTLED)
def test_processes_stop_asking_each_other(case: ShardCase, request: pytest.FixtureRequest) -> None:
    """Steps then wait for no answer."""
    found = request.getfixturevalue(case.group)
    assert all(of_rank[case.part]["settled"] for of_rank in found)


REFUSED = [
    ShardCase(group, f"{prefix} {name}", said=said)
    for group, prefix, of_group in (
        ("by_two", "refuses", test_two_processes.REFUSED),
        ("by_two", "experts refuse", experts.REFUSED),
        ("by_two", "pipeline refuses", test_pipeline.REFUSED),
        ("tensor_by_two", "refuses", test_tensor_parallel.REFUSED),
    )
    for name, said in of_group.items()
]


@every(REFUSED)
def test_what_is_not_served_is_refused_by_name(
    case: ShardCase, request: pytest.FixtureRequest
) -> None:
    for of_rank in request.getfixturevalue(case.group):
        with pytest.raises(AssertionError, match=case.said):
            raise AssertionError(on_one_line(of_rank[case.part]))
