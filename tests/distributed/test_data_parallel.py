"""Hugging Face's ``Trainer``, and Lightning's, in two processes and in four: with whole models,
shards, replicas of shards, or layers that are cut; beside one sample at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from flash_clipping.engine.grad_ledger import sensitivity_of
from tests.distributed import data_parallel, processes
from tests.distributed.data_parallel import FITTED, KINDS, RATE, SIZE, STEPS, momentum_of
from tests.distributed.processes import C, Found
from tests.trainers import test_lightning

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def by_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Found]]:
    """What so many processes have found."""

    @cache
    def found(world: int) -> list[Found]:
        name, main = f"trainers_by_{world}", data_parallel.main
        return processes.ProcessGroup(name, world=world, main=main).found(tmp_path_factory)

    return found


@pytest.fixture(scope="module")
def found(by_world: Callable[[int], list[Found]], kind: str) -> list[dict[str, Any]]:
    return [of_rank[kind] for of_rank in by_world(KINDS[kind][0])]


def of_samples(runs: list[Any], kind: str) -> list[Any]:
    """Those of processes with samples of their own; others have drawn the same."""
    return runs[:: 2 if "tensor" in kind else 1]


def together(batches: Any) -> list[list[int]]:
    """What the processes have drawn, step by step."""
    return [sum(of_step, []) for of_step in zip(*batches, strict=True)]


def test_steps_are_those_of_one_process(found: list[dict[str, Any]], kind: str) -> None:
    """Processes draw other samples, in parts, and end alike; with whole models they also begin with
    other weights."""
    drawn = together(run["drawn"] for run in of_samples(found, kind))
    assert len(drawn) == STEPS and max(map(len, drawn)) > 2
    expected = data_parallel.replayed(drawn, kind)
    of_process = 2 if kind == "whole" else 1
    for run in found:
        # Shards run parts of the expected size; a whole model what it has drawn.
        largest = max(map(len, run["drawn"])) if kind == "whole" else 2
        assert run["most"] <= largest and run["expected"] == SIZE / STEPS / of_process
        assert run["history"] == [(0.0, pytest.approx(1 / STEPS), STEPS)]
        for name, value in run["end"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_each_sample_is_one_process_s(found: list[dict[str, Any]], kind: str) -> None:
    """Or all processes' of a tensor mesh."""
    parts = [{*sum(run["drawn"], [])} for run in found]
    assert all(parts)
    if kind == "tensor":
        assert found[0]["drawn"] == found[1]["drawn"]
    else:
        assert len(set().union(*parts)) == sum(map(len, parts))


def test_noise_is_added_once(found: list[dict[str, Any]], kind: str) -> None:
    """Beside it clipped sums are small: two steps change a parameter by noise of this size."""
    first, *others = (run["noisy"] for run in found)
    start = data_parallel.replayed([], kind)
    for name, value in first.items():
        assert all(torch.equal(value, other[name]) for other in others), name
    moved = torch.cat([(first[name] - start[name]).flatten() for name in start])
    expected = (1 + (1 + momentum_of(kind)) ** 2) ** 0.5 * RATE * sensitivity_of(C) / (SIZE / STEPS)
    assert abs(moved.std() / expected - 1) < 5 / (2 * len(moved)) ** 0.5 + 0.05


def test_a_run_goes_on_from_its_checkpoint(found: list[dict[str, Any]], kind: str) -> None:
    """But where the Trainer has none: it saves in one process what lies in several."""
    if kind == "tensor":
        for run in found:
            assert "found save_strategy=steps, and layers that are cut" in run["refused"]
            for name, value in run["saved"].items():
                assert torch.equal(value, run["end"][name]), name
        return
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
    said = "not refused" if kind == "whole" else "auto_find_batch_size=True, and shards"
    assert all(said in run["halved"] for run in found), [run["halved"] for run in found]


@pytest.mark.skipif(processes.BACKEND == "nccl", reason="the trainer is given CPUs")
@pytest.mark.parametrize("name", FITTED)
def test_lightning_trains_and_resumes_shards(
    name: str, by_world: Callable[[int], list[Found]]
) -> None:
    """Also in parts, of which all processes have as many; some are empty."""
    found = [of_rank[f"lightning {name}"] for of_rank in by_world(FITTED[name][0])]
    for runs in zip(*found, strict=True):
        drawn = []
        for which in ("first", "resumed"):
            assert all(run[which]["parts"] == runs[0][which]["parts"] for run in runs)
            of_steps = zip(*(run[which]["drawn"] for run in of_samples([*runs], name)), strict=True)
            for of_step in of_steps:
                drawn.append(tuple(map(torch.cat, zip(*of_step, strict=True))))
            expected = test_lightning.oracle(drawn)
            for run in runs:
                for value, param in zip(run[which]["end"], expected.parameters(), strict=True):
                    torch.testing.assert_close(value, param.detach(), rtol=1e-9, atol=1e-12)
        assert len(drawn) == 8
        for run in runs:
            whole, sampler = run["refused"]
            assert "Sequential whole in each of them" in whole and "fully_shard" in whole
            assert "use_distributed_sampler=True" in sampler
