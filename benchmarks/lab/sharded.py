"""``sharded``: steps of a model in shards over several processes, against the same without privacy.

Started by ``torchrun``, one process for each GPU (or several on a CPU, to try it out)::

    torchrun --nproc-per-node 2 -m benchmarks sharded --shards fsdp2 --model decoder-1

By ``fsdp2`` every process has samples of its own, by ``tp`` (tensor parallelism) all have the same.
By ``hsdp`` each process is a replica with a single shard: sums go through both of its reductions.
By ``experts`` they have samples of their own, and other experts of each block
(``--model decoder-experts``); all else is sharded as by ``fsdp2``.
A step is forward, backward and clipping. Before anything is timed, norms and clipped sums are
compared with the plain model's on one sample at a time (:mod:`benchmarks.agreement`), in every
process. Methods take turns; a turn lasts as long as it does in the slowest process. What a step
sends is counted by PyTorch's ``CommDebugMode``: calls of collectives, by operator.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, distributed as dist, nn
from torch.distributed.tensor.debug import CommDebugMode

from benchmarks import environment, models, options, step
from benchmarks.agreement import Fingerprint
from benchmarks.measure import settle
from benchmarks.methods import Method, NonPrivate
from benchmarks.options import UsageError
from benchmarks.records import summaries, write_json
from benchmarks.session import DISTINCT_BATCHES, Group, Session


class Processes(Group):
    """All of ``torchrun``.

    Args:
        own: whether each has samples of its own, over all of which sums are.
    """

    def __init__(self, device: torch.device, own: bool) -> None:
        self.device, self.own = device, own

    def worst(self, found: float | None) -> float | None:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        return max(every) if None not in every else None

    def together(self, found: Fingerprint) -> Fingerprint:
        settle(self.device)  # NCCL takes memory beside PyTorch's
        for total in found.gradients or () if self.own else ():
            moved = total.to(self.device)
            dist.all_reduce(moved)
            total.copy_(moved)
        return found

    def meet(self) -> None:
        dist.barrier()


def methods_of(shards: str, bucket_mb: int, compiled: bool) -> dict[str, type[Method]]:
    """Steps of a model whose parameters are in shards."""
    from flash_clipping import GradSampleModuleFlashClipping

    class Plain(NonPrivate):
        def _set_up(self, model: nn.Module) -> None:
            super()._set_up(shard(model, shards, self.setting.device, compiled))

    class Flash(Plain):
        flat = ours = True
        mode: Any = "one_pass"

        def _set_up(self, model: nn.Module) -> None:
            super()._set_up(model)
            self.module = GradSampleModuleFlashClipping(
                self.module, max_grad_norm=self.setting.max_grad_norm, mode=self.mode
            )
            self.module._sharded.reducer.bucket_bytes = bucket_mb << 20

        def norms(self) -> Tensor:
            return self.module.get_norm_sample()

        def gradients(self) -> Iterator[Tensor]:
            grads = (p.grad for p in self._trainable())
            return (g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)

    class FlashTwoPass(Flash):
        mode = "two_pass"

    return {"nonprivate": Plain, "flash": Flash, "flash-two-pass": FlashTwoPass}


def shard(model: Any, how: str, device: torch.device, compiled: bool) -> nn.Module:
    """Leave this process its part of a model of :mod:`benchmarks.models`; by ``tp``, of one of its
    decoders without adapters."""
    blocks: Any = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    if compiled:
        for block in blocks:
            block.compile()
    from torch.distributed.device_mesh import init_device_mesh

    if how in ("fsdp2", "hsdp", "experts"):
        from torch.distributed.fsdp import fully_shard

        from flash_clipping.hugging_face.experts_in_parallel import distribute_experts

        replicas = (dist.get_world_size(),) if how == "hsdp" else ()
        shards = 1 if replicas else dist.get_world_size()
        names = ("replicas", "data")[-1 - len(replicas) :]
        mesh = init_device_mesh(device.type, (*replicas, shards), mesh_dim_names=names)
        ignored = distribute_experts(model, mesh) if how == "experts" else None
        for block in blocks:
            fully_shard(block, mesh=mesh, ignored_params=ignored)
        return fully_shard(model, mesh=mesh, ignored_params=ignored)
    if not isinstance(model, models.LanguageModel) or any(
        not p.requires_grad for p in model.parameters()
    ):
        raise UsageError("--shards tp: found another model than a decoder without --lora.")
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    # Features that a layer gives, or reads; of the table, rows.
    cuts: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        **{f"blocks.*.attention.{n}": ColwiseParallel() for n in ("query", "key", "value")},
        **{f"blocks.*.feed_forward.{n}": ColwiseParallel() for n in ("gate", "up")},
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(),
    }
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, cuts)
    for block in model.blocks:  # of which each process has its own
        block.attention.heads //= mesh.size()
    return model


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sharded",
        help="steps of a model in shards over the processes of torchrun",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shards", choices=["fsdp2", "hsdp", "tp", "experts"], default="fsdp2")
    step.add_options(parser)
    parser.add_argument(
        "--bucket", type=int, default=256, metavar="MB", help="of sums sent at once"
    )
    model = "decoder-1" if on_gpu else "tiny"
    parser.set_defaults(model=[model], methods="nonprivate,flash", rounds=5, steps=8, run=run)


def run(chosen: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if a norm or a sum of ours is wrong."""
    known = methods_of(chosen.shards, chosen.bucket, chosen.compile)
    if unknown := set(chosen.methods.split(",")) - known.keys():
        raise UsageError(f"--methods: found {sorted(unknown)}; expected some of {list(known)}")
    if len(chosen.model) > 1:
        raise UsageError(f"--model: found {len(chosen.model)}; expected one model of blocks")
    if "LOCAL_RANK" not in os.environ:
        raise UsageError("start it with torchrun --nproc-per-node N -m benchmarks sharded ...")
    device = torch.device(chosen.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        is_first = dist.get_rank() == 0
        return _run(chosen, known, console if is_first else Console(quiet=True), device)
    finally:
        dist.destroy_process_group()


def _run(
    chosen: argparse.Namespace,
    known: dict[str, type[Method]],
    console: Console,
    device: torch.device,
) -> int:
    asked = options.setting(
        chosen, chosen.model[0], batch=chosen.batch, seq=(chosen.seq or [None])[0]
    )
    setting = dataclasses.replace(asked, device=device, compile=False)  # blocks are compiled
    own = chosen.shards != "tp"  # by which all compute with one batch
    seeded = dataclasses.replace(setting, seed=dist.get_rank() if own else 0)
    session = Session(
        setting,
        chosen.methods.split(","),
        known=known,
        group=Processes(device, own),
        batches=seeded.draw(1) * DISTINCT_BATCHES,
    )
    if not step.is_measured(session, chosen, console):
        return 1
    rows = list(session.rows.values())
    sent = {name: _collectives(session.step_of(name)) for name in session.running()}
    for name, collectives in sent.items():
        each = ", ".join(f"{calls} {kind}" for kind, calls in collectives.items())
        console.print(f"{name}: {each}", markup=False)
    if dist.get_rank() == 0:
        started = f"torchrun --nproc-per-node {dist.get_world_size()} "
        record = {
            "kind": "sharded",
            "environment": environment.describe(device, chosen.revision),
            "command": started + chosen.command.removeprefix("python "),
            "processes": dist.get_world_size(),
            "dtype": str(setting.dtype).removeprefix("torch."),
            "rows": [
                dataclasses.asdict(row)
                | {"summary": it and dataclasses.asdict(it), "collectives": sent.get(row.method)}
                for row, it in zip(rows, summaries(rows), strict=True)
            ],
        }
        write_json(chosen.json, record)
    return int(any(row.status == "failed" for row in rows if known[row.method].ours))


def _collectives(work: Callable[[], None]) -> dict[str, int]:
    """Calls of collectives in one step of this process, by operator."""
    with CommDebugMode() as found:
        work()
    return {operator.__name__: calls for operator, calls in found.get_comm_counts().items()}
