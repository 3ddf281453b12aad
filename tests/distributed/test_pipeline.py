"""Pipelines: one norm over the stages of all processes."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import pipelines, processes, steps
from tests.distributed.processes import Found


def check(found: list[Found], name: str) -> None:
    for of_rank in found:
        step = of_rank[f"pipeline, {name}"]
        assert step["error"] <= 1e-12
        assert step["backwards"] == 1  # whatever the number of micro-batches and rounds
        assert step["held"] == 0
    losses = [of_rank[f"pipeline, {name}"]["losses"] for of_rank in found]
    assert losses[-1] > 0 and not any(losses[:-1])


@pytest.mark.parametrize("name", pipelines.STEPS)
def test_sums_and_norms_are_those_of_single_samples(name: str, by_two: list[Found]) -> None:
    check(by_two, name)


def test_sums_of_four_stages_are_those_of_single_samples(by_four: list[Found]) -> None:
    for name in pipelines.BY_FOUR:
        check(by_four, name)


def test_what_rounding_may_hide_is_added_up_over_stages(by_two: list[Found]) -> None:
    for of_rank in by_two:
        found, alone = of_rank["pipeline cancelling"]
        assert (alone > 0).all()
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=0)


def test_stages_have_noise_of_their_own(by_two: list[Found]) -> None:
    steps.check_independent([step for of_rank in by_two for step in of_rank["pipeline noise"]])


@pytest.mark.parametrize("name", ["engine", "truncated", "in parts", "truncated, in parts"])
def test_stages_draw_one_poisson_batch_and_train_as_one_process(
    name: str, by_two: list[Found]
) -> None:
    first, last = (of_rank[f"pipeline {name}"] for of_rank in by_two)
    assert first["counted"] == last["counted"] and len(first["counted"]) == 12
    sizes = {len(index) for index in first["counted"]}
    assert len(sizes) > 1
    # As many as are drawn take several rounds, in some step; two are one.
    assert max(sizes) == 2 if "truncated" in name else max(sizes) > 2
    steps.check_sums([first, last], first["counted"])


def test_correlated_noise_of_stages_is_that_of_one_process(by_two: list[Found]) -> None:
    first, last = (of_rank["pipeline correlated"] for of_rank in by_two)
    steps.check_correlated(pipelines.NOISE, [first, last])
    assert first["drawn"] == last["drawn"]
    assert sorted(sum(first["drawn"], [])) == [*range(processes.SAMPLES)]


REFUSED = {
    "alone": "FC640",
    "plain step": r"a step of the schedule alone",
    "other optimizer": r"FlashDPOptimizer as the module's optimizer",
    "changed": r"is not the clipped sum that",
    "counted apart": r"count different numbers of samples",
    "no count": r"neither arguments nor a target",
    "two counts": r"of shapes \(8, 5\), \(7,\); expected as many samples",
    "out of order": r"found step 0 \(from 0\) with batch 1 of",
    "interleaved": r"ScheduleInterleaved1F1B; expected ScheduleGPipe",
    "not wrapped": r"is Part; expected a GradSampleModule",
    "context parallel": "FC651",
    "two_pass": r"mode='two_pass', for which",
    "per layer": r"clipping='per_layer'",
    "reduction": r"reduction='sum'",
    "engine, two_pass": r"mode='two_pass', for which",
    "engine, not Poisson": r"poisson_sampling=False",
    "engine, adaptive": r"clipping='...', for which",
}
