"""Hugging Face's ``Trainer`` in two processes, with whole models or shards, beside one sample at a
time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import data_parallel, processes
from tests.distributed.data_parallel import KINDS, RATE, SIZE, STEPS, momentum_of
from tests.distributed.processes import C, Found
from tests.trainers import test_lightning

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def of_kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return processes.run(tmp_path_factory, "trainers", 2, data_parallel.main)


@pytest.fixture(scope="module")
def found(of_kinds: list[Found], kind: str) -> list[dict[str, Any]]:
    return [of_rank[kind] for of_rank in of_kinds]


def together(batches: Any) -> list[list[int]]:
    """What the processes have drawn, step by step."""
    return [mine + others for mine, others in zip(*batches, strict=True)]


def test_steps_are_those_of_one_process(found: list[dict[str, Any]], kind: str) -> None:
    """Processes draw other samples, in parts, and end alike; with whole models they also begin with
    other weights."""
    drawn = together(run["drawn"] for run in found)
    assert len(drawn) == STEPS and max(map(len, drawn)) > 2
    expected = data_parallel.replayed(drawn, kind)
    of_process = 2 if kind == "whole" else 1
    for run in found:
        assert run["most"] <= 2 and run["expected"] == SIZE / STEPS / of_process
        assert run["history"] == [(0.0, pytest.approx(1 / STEPS), STEPS)]
        for name, value in run["end"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_each_sample_is_one_process_s(found: list[dict[str, Any]]) -> None:
    first, second = ({i for batch in run["drawn"] for i in batch} for run in found)
    assert first and second and first.isdisjoint(second)


def test_noise_is_added_once(found: list[dict[str, Any]], kind: str) -> None:
    """Beside it clipped sums are small: two steps change a parameter by noise of this size."""
    first, second = (run["noisy"] for run in found)
    start = data_parallel.replayed([], kind)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    moved = torch.cat([(first[name] - start[name]).flatten() for name in start])
    expected = (1 + (1 + momentum_of(kind)) ** 2) ** 0.5 * RATE * C / (SIZE / STEPS)
    assert abs(moved.std() / expected - 1) < 5 / (2 * len(moved)) ** 0.5 + 0.05


def test_a_run_goes_on_from_its_checkpoint(found: list[dict[str, Any]], kind: str) -> None:
    drawn = together(run["drawn"] + run["resumed"][2] for run in found)
    assert len(drawn) == STEPS + 1
    expected = data_parallel.replayed(drawn, kind)
    for run in found:
        weights, accounted, _ = run["resumed"]
        assert accounted == STEPS + 1
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)
        assert "noise_multiplier was 0.0, is 1.0" in run["refused"]


@pytest.mark.skipif(processes.BACKEND == "nccl", reason="where there are GPUs it is started")
def test_fsdp_that_accelerate_does_not_start_is_refused(found: list[dict[str, Any]]) -> None:
    assert all("Accelerate does not shard here" in run["fsdp"] for run in found)


def test_parts_of_shards_are_not_halved(found: list[dict[str, Any]], kind: str) -> None:
    """With whole models a process that runs out of memory has more parts than the others."""
    said = "auto_find_batch_size=True, and shards" if kind == "fsdp" else "not refused"
    assert all(said in run["halved"] for run in found), [run["halved"] for run in found]


@pytest.mark.skipif(processes.BACKEND == "nccl", reason="the trainer is given CPUs")
def test_lightning_trains_and_resumes_shards(of_kinds: list[Found]) -> None:
    """Also in parts, of which all processes have as many; some are empty."""
    for first, second in zip(*(of_rank["lightning"] for of_rank in of_kinds), strict=True):
        drawn = []
        for run in ("first", "resumed"):
            assert first[run]["parts"] == second[run]["parts"]
            for mine, others in zip(first[run]["drawn"], second[run]["drawn"], strict=True):
                drawn.append(tuple(map(torch.cat, zip(mine, others, strict=True))))
            expected = test_lightning.oracle(drawn)
            for found in (first, second):
                for value, param in zip(found[run]["end"], expected.parameters(), strict=True):
                    torch.testing.assert_close(value, param.detach(), rtol=1e-9, atol=1e-12)
        assert len(drawn) == 8
        for found in (first, second):
            whole, sampler = found["refused"]
            assert "Sequential whole in each of them" in whole and "fully_shard" in whole
            assert "use_distributed_sampler=True" in sampler
