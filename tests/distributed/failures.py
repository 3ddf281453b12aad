"""One process fails in a step: what becomes of the other, which waits for it?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn
from torch.utils.data import DataLoader

from flash_clipping import (
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    PrivateSchedule,
)
from tests.distributed import decoders
from tests.distributed.pipelines import Part, schedule_of
from tests.distributed.processes import (
    BACKEND,
    C,
    Parts,
    batch,
    device,
    join_anew,
    local,
    make,
    message,
    sharded,
)
from tests.distributed.steps import ADAPTIVE, Rows, sgd

#: Of operations of several processes, in seconds. Stages wait for each other as long as their group
#: was told when it was made, when processes start a little apart.
SOON, LATER = timedelta(seconds=2), timedelta(seconds=5)


def boom(*_: Any) -> None:
    raise ZeroDivisionError


def in_forward(module: nn.Module) -> None:
    module.register_forward_pre_hook(boom)


def in_backward(module: nn.Module) -> None:
    def fails(_: Any, __: Any, output: Tensor) -> None:
        output.register_hook(boom)

    module.register_forward_hook(fails)


def shards(rank: int, where: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A step, and what lets it fail."""
    model = sharded(make())
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    flash._sharded.reducer.bucket_bytes = 1
    ids, y = local(rank, (0, 5, 8))

    def fail() -> None:
        if where == "finish":
            flash._sharded.slots.check = boom
        elif where == "reduction":  # three buckets are on their way
            flash._sharded.slots.add_to_grad = boom
        else:
            (in_forward if where == "forward" else in_backward)(model.blocks[1].norm)

    return lambda: F.cross_entropy(flash(ids), y).backward(), fail


def first_step(rank: int, where: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same in the step in which it is seen who is a sample."""
    model = sharded(make())
    ids, y = local(rank, (0, 5, 8))
    steps = iter([model, GradSampleModuleFlashClipping])

    def step() -> None:
        make_private = next(steps)
        private: Any = model if make_private is model else make_private(model, max_grad_norm=C)
        F.cross_entropy(private(ids), y).backward()

    return step, lambda: in_forward(model.blocks[1].norm)


def adaptive(rank: int, where: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The optimizer counts samples within the bound, over all processes."""
    model = sharded(make())
    flash, optimizer, _, _ = FlashPrivacyEngine().make_private(
        module=model,
        optimizer=sgd(model, 0.1),
        data_loader=DataLoader(Rows(), batch_size=4),
        criterion=nn.CrossEntropyLoss(),
        max_grad_norm=C,
        clipping=ADAPTIVE,
        poisson_sampling=False,
        noise_multiplier=0.1,
    )
    ids, y = local(rank, (0, 5, 8))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(flash(ids), y).backward()
        optimizer.step()

    def fail() -> None:
        optimizer._checked = boom

    return step, fail


def tensors(rank: int, where: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Layers that are cut: processes add their norms up."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("tp",))
    model = decoders.cut(decoders.make(), mesh)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    ids, y = decoders.batch()

    def fail() -> None:
        if where == "norms":
            flash._session.calls.plans.find = boom  # type: ignore[method-assign, assignment]
        else:
            (in_forward if where == "forward" else in_backward)(model.blocks[0].feed_forward)

    return lambda: decoders.loss_of(flash(ids), y).backward(), fail


def stages(rank: int, where: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    part = Part(make(), rank)
    flash = GradSampleModuleFlashClipping(part, max_grad_norm=C)
    schedule = PrivateSchedule(schedule_of(flash), microbatch_size=4)
    ids, y = batch()

    def fail() -> None:
        if where == "finish":
            schedule._norms = boom  # type: ignore[method-assign, assignment]
        else:
            (in_forward if where == "forward" else in_backward)(next(iter(part.blocks.values())))

    return lambda: schedule.step(ids, target=y), fail


#: Where the other process waits on its GPU alone.
ENDED_BY_NCCL = (
    "fully_shard, first step",
    "fully_shard, optimizer",
    "tensor, norms",
    "pipeline, finish",
)

#: The process that fails, and where.
CASES: dict[str, tuple[Any, int, str]] = {
    "fully_shard, forward": (shards, 0, "forward"),
    "fully_shard, backward": (shards, 0, "backward"),
    "fully_shard, finish": (shards, 1, "finish"),
    "fully_shard, reduction": (shards, 0, "reduction"),
    "fully_shard, first step": (first_step, 1, "forward"),
    "fully_shard, optimizer": (adaptive, 0, "optimizer"),
    "tensor, forward": (tensors, 1, "forward"),
    "tensor, backward": (tensors, 0, "backward"),
    "tensor, norms": (tensors, 1, "norms"),
    "pipeline, backward": (stages, 1, "backward"),
    "pipeline, finish": (stages, 0, "finish"),
}


def main(rank: int) -> Parts:
    """At the end of a pipeline's step NCCL's processes wait on their GPUs alone, until its watchdog
    ends them."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    return {
        f"failure {name}": partial(failed, rank, str(folder[0]), name)
        for name in CASES
        if BACKEND != "nccl" or name != "pipeline, finish"
    }


def failed(rank: int, folder: str, name: str) -> dict[str, Any]:
    """In a group of its own: what has lost its peer cannot go on."""
    kind, failing, where = CASES[name]
    join_anew(f"{folder}/{name}", rank, LATER if kind is stages else None)
    step, fail = kind(rank, where)
    step()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(SOON, dist.group.WORLD)
    ended = Path(folder) / f"{name}.ended"
    if rank == failing:
        fail()
    start = time.monotonic()
    said = message(step)
    seconds = time.monotonic() - start
    if rank != failing:
        ended.touch()
    while not ended.exists():  # a process that has failed and stays
        time.sleep(0.05)
    return {"said": said, "seconds": seconds}
