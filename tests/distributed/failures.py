"""One process fails in a step: what becomes of the other, which waits for it?"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn

from flash_clipping import GradSampleModuleFlashClipping, PrivateSchedule
from tests.distributed.pipelines import Part, schedule_of
from tests.distributed.processes import (
    BACKEND,
    C,
    Parts,
    batch,
    join_anew,
    local,
    make,
    message,
    sharded,
)

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
    ids, y = local(rank, (0, 5, 8))

    def fail() -> None:
        if where == "finish":
            flash._sharded.slots.check = boom
        else:
            (in_forward if where == "forward" else in_backward)(model.blocks[1].norm)

    return lambda: F.cross_entropy(flash(ids), y).backward(), fail


def stages(rank: int, where: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    part = Part(make(), rank)
    flash = GradSampleModuleFlashClipping(part, max_grad_norm=C)
    schedule = PrivateSchedule(schedule_of(flash), microbatch_size=4)
    ids, y = batch()

    def fail() -> None:
        if where == "finish":
            schedule._stage.norms = boom  # type: ignore[method-assign, assignment]
        else:
            (in_forward if where == "forward" else in_backward)(next(iter(part.blocks.values())))

    return lambda: schedule.step(ids, target=y), fail


#: The process that fails, and where.
CASES: dict[str, tuple[Any, int, str]] = {
    "fully_shard, forward": (shards, 0, "forward"),
    "fully_shard, backward": (shards, 0, "backward"),
    "fully_shard, finish": (shards, 1, "finish"),
    "pipeline, backward": (stages, 1, "backward"),
    "pipeline, finish": (stages, 0, "finish"),
}


def main(rank: int, folder: str) -> Parts:
    """At the end of a pipeline's step NCCL's processes wait on their GPUs alone, until its watchdog
    ends them."""
    return {
        f"failure {name}": partial(failed, rank, folder, name)
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
