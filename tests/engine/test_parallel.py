"""Two processes: Poisson batches that keep in step, and PyTorch's own data parallelism refused."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import Tensor, distributed as dist, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import (
    FlashClippingError,
    FlashPrivacyEngine,
    GradSampleHooksFlashClipping,
    GradSampleModuleFlashClipping,
)
from tests.support.draws import drawn as drawn_by
from tests.support.empty import ReshapingAttention
from tests.support.errors import raises
from tests.support.oracle import per_sample_truth
from tests.support.private import made
from tests.support.starting import ByGloo, fixture_of

WORLD, SAMPLES, STEPS, C = 2, 30, 15, 0.02
needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch without gloo")


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(
        x, torch.randint(0, 3, (SAMPLES,), generator=generator), torch.arange(SAMPLES)
    )


def private(
    model: nn.Module, dataset: TensorDataset | None = None, engine: Any = None, **options: Any
) -> Any:
    loader = DataLoader(dataset or data(), batch_size=SAMPLES // STEPS)
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.5)} | options
    return made(model, loader, engine, noise_multiplier=0.0, max_grad_norm=C, **options)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


# -- in every process ------------------------------------------------------------------------------


def train() -> dict[str, Any]:
    """One epoch, with every process seeded alike."""
    torch.manual_seed(0)
    plain = ReshapingAttention().double()
    start = copy.deepcopy(plain.state_dict())
    engine = FlashPrivacyEngine(accountant="rdp")
    model, optimizer, criterion, loader = private(
        DifferentiallyPrivateDistributedDataParallel(plain), engine=engine
    )
    drawn = []
    for x, y, index in loader:
        samples = drawn_by(model)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        drawn.append(index.tolist() if samples else [])
    history = engine.accountant.history
    return {"start": start, "drawn": drawn, "end": plain.state_dict(), "history": history}


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (FlashClippingError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def around(parallel: Callable[[nn.Module], Any], wrap: bool) -> str:
    """What is said when this is put around a private model, at once or in its first step."""
    model = net()
    cls: Any = GradSampleModuleFlashClipping if wrap else GradSampleHooksFlashClipping
    hooks = cls(model, max_grad_norm=C)

    def step() -> None:
        outer = parallel(hooks if wrap else model)
        outer(torch.randn(6, 4)).sum().backward()

    return message(step)


def inside(parallel: Callable[[nn.Module], Any]) -> str:
    return message(lambda: private(parallel(net())))


def refusals() -> dict[str, str]:
    from torch.distributed._composable import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh, cpu = init_device_mesh("cpu", (WORLD,)), torch.device("cpu")

    def of_layers(model: nn.Module) -> nn.Module:
        for module in list(model.modules()):
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh)
        return model

    forms: dict[str, Callable[[nn.Module], Any]] = {
        "ddp": DistributedDataParallel,
        "deep": lambda model: DistributedDataParallel(nn.Sequential(model)),
        "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=cpu),
        "fsdp1_orig": lambda model: FullyShardedDataParallel(
            model, device_id=cpu, use_orig_params=True
        ),
        "fully_shard": lambda model: fully_shard(model, mesh=mesh),
        "layers": of_layers,
        "replicate": lambda model: replicate(model, device_mesh=mesh),
    }
    found = {}
    for name, parallel in forms.items():
        found[f"{name}/around"] = around(parallel, True)
        found[f"{name}/around hooks"] = around(parallel, False)
        found[f"{name}/inside"] = inside(parallel)
    found["data_parallel/inside"] = inside(nn.DataParallel)
    found["alone"] = message(lambda: private(net()))
    found["alone, meant"] = message(lambda: private(net(), distributed=False))
    found["wrapped twice"] = message(
        lambda: private(
            GradSampleModuleFlashClipping(DifferentiallyPrivateDistributedDataParallel(net()))
        )
    )
    rank = dist.get_rank()
    part = TensorDataset(*(x[: SAMPLES - rank] for x in data().tensors))
    parallel = DifferentiallyPrivateDistributedDataParallel
    found["loaders"] = message(lambda: private(parallel(ReshapingAttention().double()), part))
    try:
        from accelerate import Accelerator
    except ImportError:
        return found
    prepare = Accelerator(cpu=True).prepare
    for wrap in (True, False):
        found[f"accelerate/around {wrap}"] = around(prepare, wrap)
    found["accelerate/inside"] = inside(prepare)
    return found


def find(rank: int) -> dict[str, Any]:
    # Accelerate reads these, and finds the process group that is there.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29500",
    )  # fmt: skip
    return {"train": train(), "refused": refusals()}


drawn_by_two = fixture_of(ByGloo("drawn_by_two", lane=1, find=find, world=WORLD))


@pytest.fixture
def processes(drawn_by_two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return drawn_by_two


# -- sampling --------------------------------------------------------------------------------------


@needs_gloo
def test_processes_keep_in_step_and_draw_their_own(processes: list[dict[str, Any]]) -> None:
    drawn = [found["train"]["drawn"] for found in processes]
    assert [len(batches) for batches in drawn] == [STEPS, STEPS]
    for found in processes:
        assert found["train"]["history"] == [(0.0, pytest.approx(1 / STEPS), STEPS)]
    assert any(not batch for batch in drawn[0] + drawn[1])  # empty here, and not there
    seen = [{index for batch in batches for index in batch} for batches in drawn]
    assert seen[0] and seen[1] and not seen[0] & seen[1]
    places = [[[index // WORLD for index in batch] for batch in batches] for batches in drawn]
    assert places[0] != places[1]  # processes that are seeded alike


@needs_gloo
def test_the_sum_is_that_of_all_processes_samples(processes: list[dict[str, Any]]) -> None:
    """Against per-sample gradients in float64, step by step."""
    drawn = [found["train"]["drawn"] for found in processes]
    model = ReshapingAttention().double()
    model.load_state_dict(processes[0]["train"]["start"])
    x, y, _ = data().tensors

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        # The target is passed as a one-hot row: the oracle wants floating-point inputs or rows.
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    for mine, other in zip(*drawn, strict=True):
        index = mine + other
        if not index:
            continue
        truth = per_sample_truth(model, (x[index], y[index]), loss)
        for name, param in model.named_parameters():
            param.data -= 0.5 * truth.clipped(C)[name] / (SAMPLES / STEPS)
    for found in processes:
        for name, param in model.named_parameters():
            torch.testing.assert_close(
                found["train"]["end"][name], param.detach(), rtol=1e-9, atol=1e-12
            )


# -- PyTorch's data parallelism --------------------------------------------------------------------


@needs_gloo
def test_every_form_is_refused_and_says_what_to_do(processes: list[dict[str, Any]]) -> None:
    for found in processes:
        refused = found["refused"]
        for name, said in refused.items():
            if name in ("alone, meant", "fully_shard/inside"):
                assert said == "not refused"
            elif name == "loaders":
                assert "rank 0: 30 samples" in said and "rank 1: 29 samples" in said
            else:
                assert "DifferentiallyPrivateDistributedDataParallel" in said, (name, said)
        assert "distributed=False" in refused["alone"]
        assert len(refused) >= 25


@needs_gloo
def test_accelerates_prepare_is_refused(processes: list[dict[str, Any]]) -> None:
    pytest.importorskip("accelerate")
    refused = processes[0]["refused"]
    for name in ("accelerate/around True", "accelerate/around False", "accelerate/inside"):
        assert "DistributedDataParallel" in refused[name] and "prepare()" in refused[name]


def test_a_replica_of_data_parallel_is_refused() -> None:
    """What ``DataParallel`` runs on each of several GPUs; on one it runs the model itself."""
    model = net()
    GradSampleHooksFlashClipping(model, max_grad_norm=C)
    replica: Any = model._replicate_for_data_parallel()
    with raises("FC601", match=r"DataParallel around.*make_private\(module="):
        replica(torch.randn(3, 4))
