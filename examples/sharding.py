"""One model in shards over the processes of `torchrun`: what the examples need for it.

    torchrun --nproc-per-node 2 examples/language_model.py --shard fsdp2
    torchrun --nproc-per-node 2 examples/language_model.py --shard tp

Shards by `fsdp2` leave every process its own samples and a part of each parameter between steps; by
`tp` (tensor parallelism) all have the same samples, and compute with a part of each layer. Every
process runs the whole script. The first one prints; all of them save and load together, and
a run may go on with another number of processes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist, nn


def start(device: str) -> None:
    """Joins the other processes; `torchrun` has told where they are."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("--shard: start it with torchrun --nproc-per-node N examples/NAME.py ...")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")


def is_running() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_first() -> bool:
    """Whether this process is the one that prints."""
    return not is_running() or dist.get_rank() == 0


def shard(how: str, model: nn.Module, blocks: Iterable[nn.Module], cuts: Mapping[str, str]) -> None:
    """Leaves this process its part of every parameter; before the optimizer is made.

    `blocks` are gathered one at a time ("fsdp2"). `cuts` names the layers of which "tp" leaves this
    process some "outputs" or "inputs" (features), or some "words" (rows of a table); "gathered":
    the next layer reads the outputs of all processes.
    """
    if how == "tp":
        return cut(model, cuts)
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block)
    fully_shard(model)


def cut(model: nn.Module, cuts: Mapping[str, str]) -> None:
    """Tensor parallelism over all processes; what `cuts` does not name stays whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    styles = {
        "outputs": ColwiseParallel(),
        "outputs, gathered": ColwiseParallel(output_layouts=Replicate()),
        "inputs": RowwiseParallel(),
        "words": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh, {name: styles[how] for name, how in cuts.items()})


def save(folder: Path, engine: Any, model: nn.Module, optimizer: Any, extra: Any) -> None:
    """Writes beside the old checkpoint, which it then replaces."""
    from torch.distributed import checkpoint

    from flash_clipping import PrivateState

    unfinished = folder.with_suffix(".partial")
    state = {"run": PrivateState(engine, model, optimizer, extra)}
    checkpoint.save(state, checkpoint_id=unfinished)
    if is_first():
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    dist.barrier()


def load(folder: Path, engine: Any, model: nn.Module, optimizer: Any) -> Any:
    """Restores model, optimizer and accountant; returns what else was saved."""
    from torch.distributed import checkpoint

    from flash_clipping import PrivateState

    state = PrivateState(engine, model, optimizer)
    checkpoint.load({"run": state}, checkpoint_id=folder)
    return state.extra
