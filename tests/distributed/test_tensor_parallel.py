"""Two processes that have half of every layer each, and all samples both: tensor parallelism."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as dist

from flash_clipping.noise.mechanisms import BandedInverseNoise
from tests.distributed import decoders, processes, steps, tensor_refusals, tensor_steps, uses
from tests.distributed.processes import Found, Parts, refusals

LINEAR = tuple(f"blocks.0.{part}" for part in ("attention.", "feed_forward."))

CASES: dict[str, dict[str, Any]] = {
    "layers": {"net": {"layers": 2}, "times": 2},
    "words that cannot be halved, padding": {"net": {"words": 11, "padding": 8}},
    "sequence": {"kind": "sequence", "net": {"layers": 2}, "times": 2},
    "as many samples as positions": {"kind": "sequence, loss", "length": 4},
    "frozen, automatic": {
        "frozen": ("embed", "blocks.0.attention.q", "blocks.0.feed_forward_norm"),
        "clipping": "automatic",
    },
    "adapters": {"net": {"adapted": True}},
    "norm layers alone": {"kind": "sequence", "frozen": ("embed", "head", *LINEAR)},
    "accumulated, checkpointed": {"kind": "sequence", "micro": 2, "net": {"checkpointed": True}},
    "per layer, tied": {"kind": "sequence", "clipping": "per_layer", "tied": True},
    "two_pass": {"kind": "sequence", "mode": "two_pass", "net": {"checkpointed": True}},
    "two_pass, tied": {"kind": "loss", "mode": "two_pass", "tied": True},
    "empty": {"cuts": (0, 0, 4)},
    "units": {"kind": "sequence", "of_row": (0, 1, 0, 2)},
    "compiled": {"kind": "sequence", "net": {"layers": 2}, "times": 2, "compiled": "eager"},
    "units, two_pass": {"of_row": (0, 1, 0, 2), "mode": "two_pass", "tied": True},
}
#: They take longer.
COMPILED: dict[str, dict[str, Any]] = {
    "inductor": {"net": {"layers": 2}, "compiled": "inductor"},
    "sequence": {"kind": "sequence", "compiled": "aot_eager"},
    "whole": {"kind": "sequence, loss", "net": {"words": 11}, "compiled": "whole, aot_eager"},
    "adapters": {"net": {"adapted": True}, "compiled": "aot_eager"},
    "frozen": {"frozen": ("embed", *LINEAR), "kind": "sequence", "compiled": "aot_eager"},
    "two_pass": {"mode": "two_pass", "compiled": "aot_eager"},
    "accumulated": {"micro": 2, "compiled": "aot_eager"},
    "checkpointed": {"net": {"checkpointed": True}, "compiled": "aot_eager"},
    "units": {"of_row": (0, 1, 0, 2), "compiled": "aot_eager"},
    "as many samples as positions": {"length": 4, "tied": True, "compiled": "aot_eager"},
}


def compiled(rank: int) -> Parts:
    mesh, _ = tensor_steps.meshes()
    step = partial(tensor_steps.clipped_step, mesh, times=3)
    return {n: partial(step, **case) for n, case in COMPILED.items()}


#: The same in fp32, beside float64.
IN_FP32 = ("layers", "sequence", "two_pass, tied")
IN_BF16 = ("layers", "sequence")

#: Frozen layers are cut as well, between layers that are trained.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "one_pass": {},
    "two_pass": {"mode": "two_pass"},
    "frozen": {"frozen": ("places", "out", "between.0")},
}


NOISE = BandedInverseNoise(2, (0.6,))


BACKWARD = steps.by_loss(decoders.loss_of)


def main(rank: int) -> Parts:
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    mesh, _ = tensor_steps.meshes()
    step = partial(tensor_steps.clipped_step, mesh)
    return {
        **{f"clipped {n}": partial(step, **case) for n, case in CASES.items()},
        **{f"fp32 {n}": partial(step, **CASES[n], dtype=torch.float32) for n in IN_FP32},
        **{f"bf16 {n}": partial(tensor_steps.beside_same_operands, mesh, n) for n in IN_BF16},
        "loaded": lambda: uses.cut_by_transformers("loaded"),
        "applied": lambda: uses.cut_by_transformers("applied"),
        "poisoned": lambda: tensor_steps.poisoned(mesh),
        **{
            f"documents {n}": partial(tensor_steps.documents, mesh, **options)
            for n, options in DOCUMENTS.items()
        },
        "lost document": lambda: tensor_steps.lost_document(mesh),
        "trained": lambda: tensor_steps.trained(mesh),
        "noise": lambda: tensor_steps.noisy(mesh),
        "engine": lambda: tensor_steps.engine_run(mesh),
        "correlated": lambda: steps.correlated(
            tensor_steps.sharded(decoders.make(), mesh, None),
            NOISE,
            BACKWARD,
            tensor_steps.Rows(),
            part=2,
        ),
        **refusals(tensor_refusals.refusals(rank, mesh)),
        "lost": lambda: tensor_refusals.lost(rank, str(folder[0])),
    }


@pytest.fixture(scope="module")
def found(tensor_by_two: list[Found]) -> list[Found]:
    return tensor_by_two


def test_equal_blocks_are_compiled_once(found: list[Found]) -> None:
    assert all(of_rank["clipped compiled"]["graphs"] == 1 for of_rank in found)


@pytest.mark.slow
def test_compiled_models_match_single_samples(tmp_path_factory: pytest.TempPathFactory) -> None:
    group = processes.ProcessGroup("tensor_compiled", world=2, main=compiled)
    for of_rank in group.found(tmp_path_factory):
        for name in COMPILED:
            assert of_rank[name]["error"] <= 1e-12 and of_rank[name]["alike"], name
            assert of_rank[name]["graphs"] >= 1, name


@pytest.mark.parametrize("name", IN_FP32)
def test_fp32_is_near_float64(name: str, found: list[Found]) -> None:
    for of_rank in found:
        assert of_rank[f"fp32 {name}"]["error"] <= 1e-5
        assert of_rank[f"fp32 {name}"]["alike"]


@pytest.mark.parametrize("name", IN_BF16)
def test_bf16_adds_up_in_fp32(name: str, found: list[Found]) -> None:
    """Beside float64 of the same bf16 operands; one rounding to bf16 would be 4e-3."""
    for of_rank in found:
        assert of_rank[f"bf16 {name}"]["norms"] <= 1e-5
        assert of_rank[f"bf16 {name}"]["sums"] <= 1e-5


def test_a_sample_that_is_not_finite_adds_nothing(found: list[Found]) -> None:
    """What makes it so is in one process's shard."""
    for of_rank in found:
        assert of_rank["poisoned"]["coefs"][0] == 0


def test_a_document_that_is_not_finite_in_one_process_adds_nothing_anywhere(
    found: list[Found],
) -> None:
    for of_rank in found:
        assert of_rank["lost document"]["coefs"][3] == 0


def test_noise_is_of_shards_and_equal_on_replicas(found: list[Found]) -> None:
    first, second = (of_rank["noise"] for of_rank in found)
    for of_rank in (first, second):
        assert of_rank["drawn"] == of_rank["own"]  # never at full shape
    shards = [[], []]  # type: ignore[var-annotated]
    for name, cut in first["cut"].items():
        ours, others = first["noise"][name], second["noise"][name]
        if cut == (True,):
            shards[0].append(ours.flatten())
            shards[1].append(others.flatten())
        else:
            assert torch.equal(ours, others), name
    one, two = map(torch.cat, shards)
    n = min(len(one), len(two))
    assert abs(torch.corrcoef(torch.stack([one[:n], two[:n]]))[0, 1]) < 5 / n**0.5
    assert torch.isclose(one[:n], two[:n], rtol=1e-4).sum() < 4
    both = torch.cat([one, two])
    assert abs(both.std() - 1) < 5 / (2 * len(both)) ** 0.5


def test_correlated_noise_of_cut_layers_is_that_of_one_process(found: list[Found]) -> None:
    runs = [of_rank["correlated"] for of_rank in found]
    steps.check_correlated(NOISE, runs)
    assert runs[0]["drawn"] == runs[1]["drawn"]  # all samples are both processes'


def test_all_processes_take_the_same_poisson_batches(found: list[Found]) -> None:
    """They are seeded differently; step by step against single samples."""
    first, second = (of_rank["engine"] for of_rank in found)
    drawn = first["counted"]
    assert drawn == second["counted"] and len({*map(str, drawn)}) > 1
    expected = tensor_steps.replayed(drawn)
    for run in (first, second):
        assert (run["expected"], run["processes"]) == (2, 1)
        assert run["history"] == [(0.0, pytest.approx(1 / 6), 6)]
        for name, value in run["end"].items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


REFUSED = {
    "packed": r"o_proj \(Linear\): found the style PackedRowwiseParallel.*Load the model without",
    "reduced gradients": r"self_attn.norm \(LayerNorm\): found a sum of its gradients",
    "unserved": r"norm \(Scale\): found a DTensor",
    "own heads": "whose gradients differ between them",
    "two layouts": "norm.*a sum over some of the positions.*the whole",
    "positions": r"embed.places \(Embedding\): what it reads is the same for all samples",
    "functional": "its own forward uses a parameter that is a DTensor",
    "of samples": "cut along axis 0, that of the samples",
    "a sum": "head.weight: found a DTensor that is a sum",
    "empty shards": "embed.weight: found a DTensor of 1 rows or columns, cut into 2",
    "two meshes": "norm.weight: found a DTensor over a mesh of 2 dimensions",
    "a DTensor": "the model: called with a DTensor",
    "not laid out": r"norm \(RMSNorm\): it has parameters that are DTensors, and was called with",
    "other samples": "called with different samples",
    "changed": "is not the clipped sum",
    "by hand": r"c10d::allreduce_, in its forward \(.*tensor_refusals.py",
    "graph break": r"a break between two compiled graphs.*\n.*\n        block.compile\(fullgraph",
    "other units": "called with different samples",
    "documents, frozen": r"cut along its positions.*SequenceParallel",
    "documents": r"found parts of the positions.*SequenceParallel",
}


def test_a_process_that_ends_leaves_none_waiting(found: list[Found]) -> None:
    assert "ZeroDivisionError" in found[0]["lost"]
    assert "not refused" not in found[1]["lost"]
