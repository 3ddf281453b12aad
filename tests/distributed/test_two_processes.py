"""Two processes that share a model by ``fully_shard``, with a part of every batch each.

Sums, norms, training, noise, sampling, checkpoints, refusals: in processes that are started once.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from flash_clipping import Documents, PoissonSampling, Users
from flash_clipping.noise.mechanisms import BandedInverseNoise, BandedNoise, BufferedNoise
from tests.distributed import cases, experts, failures, pipelines, processes, steps, uses
from tests.distributed.processes import BACKEND, C, Found, Parts, refusals
from tests.support.units import truth_by_unit

TRAINED: dict[str, dict[str, Any]] = {
    "one_pass": {},
    "two_pass": {"mode": "two_pass"},
    "hooks": {"wrap": False},
}


#: Six steps; with batches that are empty, and none that is so in all of them.
EPOCH: dict[str, Any] = {"batch_size": 4, "seed": 0}
#: Units with several rows: those of ``Users``, and items of two rows.
OF_UNITS: dict[str, dict[str, Any]] = {
    "units": {"unit": Users(steps.UNITS, max_rows=3)},
    "units, two_pass": {"unit": Users(steps.UNITS), "mode": "two_pass"},
    "items": {"unit": Documents("item")},
}


ADAPTIVE: dict[str, Any] = {"clipping": steps.ADAPTIVE, "noise_multiplier": 0.1}


CORRELATED = {
    "inverse": BandedInverseNoise(3),
    "buffers": BufferedNoise((0.3, 0.2), (0.5, 0.9)),
    "stored": BandedNoise(3),
}


def main(rank: int) -> Parts:
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    return {
        **{f"clipped {n}": partial(cases.clipped, rank, c) for n, c in cases.CASES.items()},
        **{f"trained {n}": partial(steps.trained, rank, {}, **how) for n, how in TRAINED.items()},
        "mixed": lambda: [steps.mixed_precision(rank, mode) for mode in ("one_pass", "two_pass")],
        "offloaded": steps.offloaded_gradient,
        "noise": lambda: steps.noisy(rank, {}),
        "engine": lambda: steps.engine_run({}),
        **{
            f"documents {mode}": partial(
                steps.documents_in_rows,
                rank,
                2,
                partial(processes.sharded, how="leaves"),
                mode=mode,
            )
            for mode in ("one_pass", "two_pass")
        },
        **{
            f"tables {n}": partial(steps.tables_without_samples, rank, kind, **options)
            for n, (kind, options) in steps.TABLES.items()
        },
        "in parts": lambda: steps.engine_run({}, part=1),
        "adaptive": lambda: steps.engine_run({}, **ADAPTIVE),
        "truncated": lambda: steps.engine_run({}, mechanism=PoissonSampling(4)),
        "truncated, in parts": lambda: steps.engine_run({}, part=1, mechanism=PoissonSampling(6)),
        "correlated, saved": lambda: (
            steps.correlated(
                processes.sharded(processes.make()), BandedNoise(3), save=f"{folder[0]}/correlated"
            )
            and folder[0]
        ),
        **{
            f"correlated {n}": lambda noise=noise: steps.correlated(
                processes.sharded(processes.make()), noise, data=steps.Rows(copies=3), part=2
            )
            for n, noise in CORRELATED.items()
        },
        **{
            f"engine, {n}": partial(steps.engine_run, {}, **EPOCH, **o) for n, o in OF_UNITS.items()
        },
        **{
            f"data parallel, {n}": partial(steps.engine_run, None, **EPOCH, **o)
            for n, o in OF_UNITS.items()
        },
        "checkpoint": lambda: steps.checkpointed(rank, str(folder[0])),
        **refusals(steps.refusals(rank)),
        **pipelines.main(rank),
        **uses.main(rank),
        **experts.by_two(rank),
    }


@pytest.fixture(scope="module")
def found(by_two: list[Found]) -> list[Found]:
    return by_two


def test_equal_blocks_are_compiled_once(found: list[Found]) -> None:
    for of_rank in found:
        compiled = of_rank["clipped compiled blocks"]
        assert (compiled["graphs"], compiled["breaks"]) == (1, 0)


@pytest.mark.slow
def test_compiled_models_match_single_samples(tmp_path_factory: pytest.TempPathFactory) -> None:
    group = processes.ProcessGroup("sharded_compiled", world=2, main=cases.compiled)
    for of_rank in group.found(tmp_path_factory):
        for name in cases.COMPILED:
            assert of_rank[name]["error"] <= 1e-12, name
        for name in ("blocks", "two_pass", "shards"):
            assert (of_rank[name]["graphs"], of_rank[name]["breaks"]) == (1, 0), name


def test_mixed_precision_sums_are_in_fp32(found: list[Found]) -> None:
    assert max(error for of_rank in found for error in of_rank["mixed"]) <= 1e-5


def test_gradients_are_where_shards_are(found: list[Found]) -> None:
    assert all(of_rank["offloaded"] for of_rank in found)


def test_noise_is_drawn_once_for_every_element_by_shard(found: list[Found]) -> None:
    noise = [of_rank["noise"] for of_rank in found]
    for of_rank in noise:
        assert of_rank["drawn"] == of_rank["own"]  # never at full shape
    steps.check_independent([step for of_rank in noise for step in of_rank["steps"]])


def test_all_processes_have_one_key_and_each_model_another(found: list[Found]) -> None:
    (first, second), *others = (of_rank["noise"]["keys"] for of_rank in found)
    assert all([first, second] == keys for keys in others)
    assert first["key_digest"] != second["key_digest"]
    assert (first["draws"], second["draws"]) == (2, 0)


@pytest.mark.parametrize(
    ("how", "net"), [("engine", {}), ("in parts", {}), ("experts engine", experts.NET)]
)
def test_poisson_batches_are_of_the_whole_dataset(
    how: str, net: dict[str, Any], found: list[Found]
) -> None:
    """Step by step against single samples; ranks are seeded alike."""
    drawn = [of_rank[how]["drawn"] for of_rank in found]
    assert len(drawn[0]) == len(drawn[1]) == 12
    assert any(not batch for batch in drawn[0] + drawn[1])  # empty here, and not there
    mine, others = ({i // 2 for batch in d for i in batch} for d in drawn)
    assert mine != others
    together = [a + b for a, b in zip(*drawn, strict=True)]
    steps.check_sums([of_rank[how] for of_rank in found], together, net)


@pytest.mark.parametrize(("how", "rows"), [("truncated", 2), ("truncated, in parts", 3)])
def test_truncated_batches_have_one_shape_in_all_processes(
    how: str, rows: int, found: list[Found]
) -> None:
    """The bound is that of all processes' samples together; each has half of the rows."""
    runs = [of_rank[how] for of_rank in found]
    for step in range(12):
        drawn = [run["drawn"][step] for run in runs]
        assert [len(own) for own in drawn] == [rows, rows] and len({*sum(drawn, [])}) == 2 * rows
        first, second = (len(run["counted"][step]) for run in runs)
        assert 0 <= first - second <= 1  # spread evenly
    counted = [a + b for a, b in zip(*(run["counted"] for run in runs), strict=True)]
    assert len({*map(len, counted)}) > 1
    steps.check_sums(runs, counted)
    for run in runs:
        assert (run["process"].samples, run["process"].max_batch_size) == (24, 2 * rows)
        assert all(
            sizes == ([rows] if how == "truncated" else [1] * rows) for sizes in run["sizes"]
        )


def check_units(runs: list[dict[str, Any]], of_unit: list[int], options: dict[str, Any]) -> None:
    """A run by the batches of units that its processes have drawn, beside one unit at a time."""
    ids, y, _ = steps.Rows(copies=3).tensors
    model = processes.make()
    drawn = [run["drawn"] for run in runs]
    assert any(not batch for of_rank in drawn for batch in of_rank)
    seen = [{of_unit[row] for batch in of_rank for row in batch} for of_rank in drawn]
    assert all(seen) and sum(map(len, seen)) == len(set().union(*seen)), "a unit of two processes"
    most = getattr(options.get("unit"), "max_rows", None) or len(of_unit)
    for batches in zip(*drawn, strict=True):
        for batch in batches:
            rows = Counter(of_unit[row] for row in batch)
            assert rows == {unit: min(most, of_unit.count(unit)) for unit in rows}
        index = [row for batch in batches for row in batch]
        found = [of_unit[row] for row in index]
        units = sorted(set(found))
        x, target, places = ids[index], y[index], torch.tensor(list(map(units.index, found)))
        if isinstance(options.get("unit"), Documents):
            x, target, places = steps.views(x, target)
        truth = truth_by_unit(model, (x, target), places.long(), losses_of_rows, len(units))
        expected = len(set(of_unit)) / len(drawn[0])
        for name, total in truth.clipped(C).items():
            dict(model.named_parameters())[name].data -= 0.5 * total / expected
    for run in runs:
        assert run["history"] == [(0.0, pytest.approx(1 / len(drawn[0])), len(drawn[0]))]
        for name, param in model.named_parameters():
            torch.testing.assert_close(run["end"][name], param.detach(), rtol=1e-9, atol=1e-12)


def losses_of_rows(model: Any, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("name", OF_UNITS)
@pytest.mark.parametrize("how", ["engine", "data parallel"])
def test_all_rows_of_a_unit_are_one_process_s(how: str, name: str, found: list[Found]) -> None:
    options = OF_UNITS[name]
    of_unit = steps.UNITS if isinstance(options["unit"], Users) else list(range(24))
    check_units([of_rank[f"{how}, {name}"] for of_rank in found], of_unit, options)


def test_batches_have_as_many_parts_in_all_processes(found: list[Found]) -> None:
    """Of ``BatchMemoryManager``; processes with fewer samples take part with empty ones."""
    first, second = (of_rank["in parts"]["sizes"] for of_rank in found)
    assert [len(parts) for parts in first] == [len(parts) for parts in second]
    assert max(len(parts) for parts in first) > 1
    for mine, others in zip(first, second, strict=True):
        assert max(mine + others) <= 1
        assert len(mine) == max(1, sum(mine), sum(others))  # no more than are needed


@pytest.mark.parametrize("name", CORRELATED)
def test_correlated_noise_of_shards_is_that_of_one_process(name: str, found: list[Found]) -> None:
    runs = [of_rank[f"correlated {name}"] for of_rank in found]
    steps.check_correlated(CORRELATED[name], runs)
    first, second = (run["drawn"] for run in runs)
    assert sorted(sum(first + second, [])) == [*range(3 * processes.SAMPLES)]  # once an epoch
    sensitivity = CORRELATED[name].sensitivity(4, 4)
    dp = pytest.importorskip("dp_accounting")
    for run in runs:
        assert run["history"] == [(5.0, 0.25, 4)]
        assert run["epsilon"] == pytest.approx(dp.get_epsilon_gaussian(5.0 / sensitivity, 1e-3))


def test_a_correlated_run_goes_on_in_one_process_as_a_run_of_its_own(found: list[Found]) -> None:
    """It takes back nothing of the noise before, and is accounted for beside it."""
    folder = found[0]["correlated, saved"]
    run = steps.correlated(processes.make(), BandedNoise(3), load=f"{folder}/correlated")
    steps.check_correlated(BandedNoise(3), [run])
    assert run["history"] == [(5.0, 0.25, 4), (5.0, 0.25, 4)]
    dp = pytest.importorskip("dp_accounting")
    one = 5.0 / BandedNoise(3).sensitivity(4, 4)
    assert run["epsilon"] == pytest.approx(dp.get_epsilon_gaussian(one / 2**0.5, 1e-3))


def test_an_adaptive_bound_is_one_for_all(found: list[Found]) -> None:
    bounds = [of_rank["adaptive"]["bounds"] for of_rank in found]
    assert bounds[0] == bounds[1] and len(set(bounds[0])) > 1


def test_a_distributed_checkpoint_goes_on_as_before(found: list[Found]) -> None:
    for of_rank in found:
        saved = of_rank["checkpoint"]
        assert saved["files"] == 2 and saved["equal"] and saved["extra"] == {"epoch": 3}
        assert saved["loaded"] == [(0.0, 0.5, 2)]  # no step more
        assert saved["history"] == [(0.0, 0.5, 3)]
        assert "would forget" in saved["again"]


def test_a_checkpoint_of_two_processes_goes_on_in_one(found: list[Found]) -> None:
    from torch.distributed import checkpoint as dcp

    saved = found[0]["checkpoint"]
    model, step, state = steps.resumable(lambda model: model, seed=2)
    dcp.load({"run": state}, checkpoint_id=saved["folder"], no_dist=True)
    assert state.engine.accountant.history == [(0.0, 0.5, 2)]
    step(*processes.batch())
    assert state.engine.accountant.history == [(0.0, 0.5, 3)]
    for name, param in model.named_parameters():
        torch.testing.assert_close(saved["end"][name], param.detach(), rtol=1e-9, atol=1e-12)


REFUSED = {
    "parts only": "fully_shard on parts.*Call fully_shard",
    "ignored": "head.weight.*fully_shard does not manage",
    "followed too early": r"found shards as parameters.*\n    optimizer.follow\(model\)",
    "changed": "is not the clipped sum that",
    "some": "without inputs",
    "split": "BatchMemoryManager: found.*a loader with BatchSampler",
    "compile": r"torch.compile around a model that fully_shard.*\n    model.compile\(\)",
    "other units": "loaders differ.*rank 0: 24 samples, 12 batches, 2 units.*rank 1: .* 3 units",
    "units in parts": r"batches must come whole \(units",
    "past a tap": "blocks.0.gate.weight: .*outside the module that owns it",
}


@pytest.mark.parametrize("name", failures.CASES)
def test_a_process_that_fails_leaves_none_waiting(name: str, failing: list[Found]) -> None:
    """Within the time-out of the processes' group, though the one that failed stays."""
    if BACKEND == "nccl" and name in failures.ENDED_BY_NCCL:
        pytest.skip("the other process waits on its GPU alone, until NCCL's watchdog ends it")
    number = failures.CASES[name][1]
    own = failing[number][f"failure {name}"]["said"]
    assert "ZeroDivisionError" in own or "Failed to run stage backward" in own
    other = failing[1 - number][f"failure {name}"]
    assert "Error" in other["said"] and other["seconds"] < 30


def test_a_model_that_accelerate_prepared_trains_as_single_samples_say(found: list[Found]) -> None:
    expected = uses.as_accelerated()
    for of_rank in found:
        for run in of_rank["accelerate"]:
            assert run["history"] == [(0.0, 0.5, 2)]
            for name, value in run["end"].items():
                torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in uses.SENT if name != "plain"])
def test_a_private_step_sends_what_others_send(name: str, found: list[Found]) -> None:
    """And its own: sums in buckets in place of gradients module by module; no question."""
    buckets = len([*processes.make().parameters()]) if name == "small buckets" else 1
    for of_rank in found:
        plain, private = ({**of_rank["sent"][how]} for how in ("plain", name))
        assert plain.pop("c10d::_reduce_scatter_base_") > 1
        (sums,) = (key for key in private if "reduce_scatter" in key)
        assert private.pop(sums) == buckets
        assert private == plain
