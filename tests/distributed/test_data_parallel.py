"""Hugging Face's ``Trainer`` in two processes, beside one sample at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import data_parallel
from tests.distributed.data_parallel import RATE, SIZE, STEPS
from tests.distributed.processes import C, Found

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(by_two: list[Found]) -> list[dict[str, Any]]:
    return [of_rank["trainer"] for of_rank in by_two]


def test_steps_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    """Processes begin with other weights, draw other samples, in parts, and end alike."""
    drawn = [mine + others for mine, others in zip(*(run["drawn"] for run in found), strict=True)]
    assert len(drawn) == STEPS and max(map(len, drawn)) > 2
    expected = data_parallel.replayed(drawn)
    for run in found:
        assert run["most"] <= 2 and run["expected"] == SIZE / STEPS / 2
        assert run["history"] == [(0.0, pytest.approx(1 / STEPS), STEPS)]
        for name, value in run["end"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_each_sample_is_one_process_s(found: list[dict[str, Any]]) -> None:
    first, second = ({i for batch in run["drawn"] for i in batch} for run in found)
    assert first and second and first.isdisjoint(second)


def test_noise_is_added_once(found: list[dict[str, Any]]) -> None:
    """Beside it clipped sums are small: two steps change a parameter by noise of this size."""
    first, second = (run["noisy"] for run in found)
    start = data_parallel.replayed([])
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    moved = torch.cat([(first[name] - start[name]).flatten() for name in start])
    expected = 2**0.5 * RATE * C / (SIZE / STEPS)
    assert abs(moved.std() / expected - 1) < 5 / (2 * len(moved)) ** 0.5 + 0.05


def test_a_run_goes_on_from_its_checkpoint(found: list[dict[str, Any]]) -> None:
    for run in found:
        weights, accounted, drawn = run["resumed"]
        assert (accounted, drawn) == (STEPS + 1, 1)
        assert all(torch.equal(value, found[0]["resumed"][0][n]) for n, value in weights.items())
        assert "noise_multiplier was 0.0, is 1.0" in run["refused"]


def test_fsdp_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    assert all("found fsdp" in run["fsdp"] and "fully_shard" in run["fsdp"] for run in found)
