"""Four processes as two replicas of two shards (HSDP): all of them have samples of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from flash_clipping import PoissonSampling, Users
from flash_clipping.noise.mechanisms import BandedNoise
from tests.distributed import experts, pipelines, processes, steps
from tests.distributed.processes import Found, Parts, clipped_step, device, make, sharded
from tests.distributed.test_two_processes import EPOCH, check_units

#: 5 samples of 5 positions in the second process, and none in the third.
CUTS = (0, 2, 7, 7, 8)
CASES: dict[str, dict[str, Any]] = {
    "one_pass": {},
    "two_pass": {"mode": "two_pass"},
    "tied": {"net": {"tied": True, "bare": True}},
}
#: They take longer; two processes share compiled blocks in every run.
COMPILED: dict[str, dict[str, Any]] = {
    "one_pass": {"compiled": "blocks"},
    "two_pass": {"compiled": "blocks", "mode": "two_pass"},
    "root": {"compiled": "root"},
    "private": {"compiled": "private"},
    "shards": {"compiled": "shards"},
}


def replicas() -> Any:
    """The mesh of two replicas of two shards."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device().type, (2, 2), mesh_dim_names=("replicate", "shard"))


def compiled(rank: int) -> Parts:
    shards = {"mesh": replicas()}
    return {n: partial(clipped_step, rank, CUTS, shards=shards, **c) for n, c in COMPILED.items()}


def main(rank: int) -> Parts:
    mesh = replicas()
    shards = {"mesh": mesh}
    return {
        **{
            f"clipped {n}": partial(clipped_step, rank, CUTS, shards=shards, **c)
            for n, c in CASES.items()
        },
        "documents": lambda: steps.documents_in_rows(
            rank, 4, lambda m: sharded(m, "leaves", mesh=mesh), mode="two_pass"
        ),
        "trained": lambda: steps.trained(rank, shards),
        "noise": lambda: steps.noisy(rank, shards),
        "units": lambda: steps.engine_run(shards, **EPOCH, unit=Users(steps.UNITS)),
        "engine": lambda: steps.engine_run(shards, clipping=steps.ADAPTIVE, noise_multiplier=0.1),
        "truncated": lambda: steps.engine_run(shards, part=1, mechanism=PoissonSampling(8)),
        "correlated": lambda: steps.correlated(sharded(make(), mesh=mesh), BandedNoise(3)),
        **experts.by_four(rank),
        **pipelines.main(rank),
    }


@pytest.fixture(scope="module")
def found(by_four: list[Found]) -> list[Found]:
    return by_four


@pytest.mark.slow
def test_compiled_models_match_single_samples(tmp_path_factory: pytest.TempPathFactory) -> None:
    group = processes.ProcessGroup("replicas_compiled", world=4, main=compiled)
    for of_rank in group.found(tmp_path_factory):
        for name in COMPILED:
            assert of_rank[name]["error"] <= 1e-12, name
            assert of_rank[name]["graphs"] >= 1, name


@pytest.mark.parametrize("part", ["noise", "experts noise"])
def test_replicas_have_one_noise_and_shards_their_own(part: str, found: list[Found]) -> None:
    """Experts lie over (data, expert) = (0, 0), (0, 1), (1, 0), (1, 1)."""
    assert all(of_rank[part]["drawn"] == of_rank[part]["own"] for of_rank in found)
    steps_of = [of_rank[part]["steps"] for of_rank in found]
    for mine, replica in ((0, 2), (1, 3)):
        for a, b in zip(steps_of[mine], steps_of[replica], strict=True):
            # Two divisions apart, by processes with other samples: not bitwise.
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    first, second = steps_of[0][0], steps_of[1][0]
    n = min(len(first), len(second))
    correlation = torch.corrcoef(torch.stack([first[:n], second[:n]]))[0, 1]
    assert abs(correlation) < 5 / n**0.5


def test_correlated_noise_is_that_of_one_process_and_equal_on_replicas(found: list[Found]) -> None:
    runs = [of_rank["correlated"] for of_rank in found]
    steps.check_correlated(BandedNoise(3), runs)
    for mine, replica in ((0, 2), (1, 3)):
        assert runs[mine]["places"] == runs[replica]["places"]
    assert sorted(sum((run["drawn"] for run in runs), [])) == [[]] * 8 + [[i] for i in range(8)]


def test_truncated_batches_are_spread_over_all_four(found: list[Found]) -> None:
    runs = [of_rank["truncated"] for of_rank in found]
    counted = [sum(own, []) for own in zip(*(run["counted"] for run in runs), strict=True)]
    assert all(len(rows) == 2 for run in runs for rows in run["drawn"])
    steps.check_sums(runs, counted)


def test_all_rows_of_a_unit_are_one_process_s(found: list[Found]) -> None:
    check_units([of_rank["units"] for of_rank in found], steps.UNITS, {})


def test_four_processes_draw_and_end_alike(found: list[Found]) -> None:
    runs = [of_rank["engine"] for of_rank in found]
    seen = [{i for batch in run["drawn"] for i in batch} for run in runs]
    assert len(set().union(*seen)) == sum(map(len, seen)) > 0
    for run in runs:
        assert run["bounds"] == runs[0]["bounds"] and run["expected"] == 2
        for name, value in run["end"].items():
            assert torch.equal(value, runs[0]["end"][name]), name
