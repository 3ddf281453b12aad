"""Four processes, (data, tensor) = (2, 2): layers cut over two, and ``fully_shard`` over the other
two."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from flash_clipping import PoissonSampling
from flash_clipping.noise.mechanisms import BandedInverseNoise
from tests.distributed import decoders, processes, steps, tensor_steps
from tests.distributed.processes import Found, Parts

CASES: dict[str, dict[str, Any]] = {
    "layers": {"net": {"words": 11}, "times": 2},
    "sequence, logits stay cut": {"kind": "sequence, loss", "tied": True},
    "no samples in one half": {"kind": "sequence", "cuts": (0, 0, 4)},
    "two_pass": {"kind": "sequence", "mode": "two_pass"},
    "leaves": {"how": "leaves", "times": 2},
    "compiled": {"kind": "sequence", "times": 2, "compiled": "eager"},
    "units": {"kind": "sequence", "of_row": (0, 1, 0, 2)},
}


def replicas() -> None:
    """Three dimensions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from flash_clipping import GradSampleModuleFlashClipping

    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh(processes.device().type, (1, 2, 2), mesh_dim_names=names)
    model = decoders.cut(decoders.make(), mesh["tp"])
    GradSampleModuleFlashClipping(fully_shard(model, mesh=mesh["replicate", "shard"]))


def without_data_dimension() -> None:
    """Layers cut over two of four processes, and no ``fully_shard``."""
    tensor, _ = tensor_steps.meshes(2)
    tensor_steps.engine_run(tensor)


NOISE = BandedInverseNoise(2)


BACKWARD = steps.by_loss(decoders.loss_of)


def main(rank: int) -> Parts:
    tensor, data = tensor_steps.meshes(2)
    cuts: dict[str, Any] = {"cuts": (0, 3, 4)}
    return {
        **{
            f"clipped {n}": partial(tensor_steps.clipped_step, tensor, data, **cuts | case)
            for n, case in CASES.items()
        },
        "documents": lambda: tensor_steps.documents(tensor, data),
        "trained": lambda: tensor_steps.trained(tensor, data),
        "noise": lambda: tensor_steps.noisy(tensor, data),
        "engine": lambda: tensor_steps.engine_run(tensor, data),
        "truncated": lambda: tensor_steps.engine_run(tensor, data, mechanism=PoissonSampling(4)),
        "correlated": lambda: steps.correlated(
            tensor_steps.sharded(decoders.make(), tensor, data),
            NOISE,
            BACKWARD,
            tensor_steps.Rows(),
            part=1,
        ),
        "refused": lambda: [processes.message(call) for call in (replicas, without_data_dimension)],
    }


@pytest.fixture(scope="module")
def found(tensor_by_four: list[Found]) -> list[Found]:
    return tensor_by_four


def test_noise_is_drawn_once_for_every_element(found: list[Found]) -> None:
    """Processes are (data, tensor) = (0, 0), (0, 1), (1, 0), (1, 1). All four have other shards of
    what is cut twice; of a parameter that tensor parallelism leaves whole, (., 0) and (., 1) are
    replicas."""
    noises = [of_rank["noise"] for of_rank in found]
    for of_rank in noises:
        assert of_rank["drawn"] == of_rank["own"]  # never at full shape
    for name, cut in noises[0]["cut"].items():
        shards = [of_rank["noise"][name].flatten() for of_rank in noises]
        same = {(a, b) for a in range(4) for b in range(a) if (a - b) % 2 and a // 2 == b // 2}
        for a in range(4):
            for b in range(a):
                n = min(len(shards[a]), len(shards[b]))
                alike = torch.isclose(shards[a][:n], shards[b][:n], rtol=1e-4, atol=1e-5)
                if cut != (True, True) and (a, b) in same:
                    assert alike.all(), (name, a, b)
                else:
                    assert alike.sum() < 2, (name, a, b)


def test_correlated_noise_of_what_is_cut_twice_is_that_of_one_process(found: list[Found]) -> None:
    runs = [of_rank["correlated"] for of_rank in found]
    steps.check_correlated(NOISE, runs)
    assert [run["drawn"] for run in runs[::2]] == [run["drawn"] for run in runs[1::2]]
    assert sorted(sum(sum((run["drawn"] for run in runs[::2]), []), [])) == [*range(12)]


@pytest.mark.parametrize("how", ["engine", "truncated"])
def test_processes_share_batches_by_their_data_coordinate(how: str, found: list[Found]) -> None:
    runs = [of_rank[how] for of_rank in found]
    drawn = [run["counted"] for run in runs]
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3]
    if how == "truncated":
        assert all(len(rows) == 2 for run in runs for rows in run["drawn"])
    parts = [{i for batch in own for i in batch} for own in (drawn[0], drawn[2])]
    assert how == "truncated" or parts[0].isdisjoint(parts[1])
    assert parts[0] | parts[1]
    together = [a + b for a, b in zip(drawn[0], drawn[2], strict=True)]
    expected = tensor_steps.replayed(together)
    for run in runs:
        assert (run["expected"], run["processes"]) == (2, 2)
        for name, value in run["end"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_what_is_not_served_is_refused_by_name(found: list[Found]) -> None:
    for of_rank in found:
        replicas, without_data = of_rank["refused"]
        assert "a mesh of 3 dimensions" in replicas
        assert "4 processes of torch.distributed" in without_data
        assert "Call fully_shard over the data dimension of the mesh" in without_data
