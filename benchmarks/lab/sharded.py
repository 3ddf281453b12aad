"""``sharded``: steps of a model in shards over several processes, against the same without privacy.

Started by ``torchrun``, one process for each GPU (or several on a CPU, to try it out)::

    torchrun --nproc-per-node 2 -m benchmarks sharded --shards fsdp2 --model decoder-1

By ``fsdp2`` every process has samples of its own, by ``tp`` (tensor parallelism) all have the same.
By ``hsdp`` each process is a replica with a single shard: sums go through both of its reductions.
By ``experts`` they have samples of their own, and other experts of each block
(``--model decoder-experts``); all else is sharded as by ``fsdp2``.
A step is forward, backward and clipping. Before anything is timed, norms and clipped sums are
compared with the plain model's on one sample at a time (:mod:`benchmarks.agreement`), in every
process. Methods take turns; a turn lasts as long as it does in the slowest process. "host" is what
a step needs of the host: time until all is launched on a GPU that had nothing to do; on a CPU,
processor time. What a step sends is counted by PyTorch's profiler: calls of collectives, and
elements of their largest operand (of several tensors in one call it tells none).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, distributed as dist, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import agreement, environment, models, options, records
from benchmarks.agreement import Errors, Fingerprint
from benchmarks.measure import PeakMemory, host_milliseconds, milliseconds, settle
from benchmarks.methods import Setting
from benchmarks.options import DTYPES, UsageError
from benchmarks.report import table
from benchmarks.workload import loss

#: How a decoder of :mod:`benchmarks.models` is cut by tensor parallelism: features that layers
#: give ("outputs") or read ("inputs"), rows of a table ("words").
CUTS = {
    "tokens": "words",
    "blocks.*.attention.query": "outputs",
    "blocks.*.attention.key": "outputs",
    "blocks.*.attention.value": "outputs",
    "blocks.*.attention.out": "inputs",
    "blocks.*.feed_forward.gate": "outputs",
    "blocks.*.feed_forward.up": "outputs",
    "blocks.*.feed_forward.down": "inputs",
    "head": "outputs, gathered",
}

#: Operators by which collectives are counted, and what they are called here.
COLLECTIVES = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
    "c10d::alltoall_base_": "all-to-all",
    "_c10d_functional::all_reduce": "all-reduce",
    "_c10d_functional::all_gather_into_tensor": "all-gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
}


@dataclass
class Row(records.Row):
    """What was measured of one method: by the slowest process, and that with the largest peak.

    Attributes:
        collectives: of one step in the first process: calls and elements, by name.
    """

    collectives: dict[str, list[int]] = field(default_factory=dict)


class Method:
    """A step of a model whose parameters are in shards."""

    def __init__(self, setting: Setting, shards: str, bucket_mb: int) -> None:
        self.model = shard(setting.build(), shards, setting.device, bool(setting.compile))
        self.module: Any = self.model

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.model.zero_grad(set_to_none=True)
        loss(self.module(inputs), targets).backward()

    def norms(self) -> Tensor | None:
        """``[B]``, of this process's samples, if it tells."""
        return None

    def sums(self) -> list[Tensor] | None:
        """The clipped sums over all processes, whole, on the CPU, if it has any."""
        return None


class Flash(Method):
    mode: Any = "one_pass"

    def __init__(self, setting: Setting, shards: str, bucket_mb: int) -> None:
        from flash_clipping import GradSampleModuleFlashClipping

        super().__init__(setting, shards, bucket_mb)
        self.module = GradSampleModuleFlashClipping(
            self.model, max_grad_norm=setting.max_grad_norm, mode=self.mode
        )
        self.module.bucket_mb = bucket_mb

    def norms(self) -> Tensor:
        return self.module.get_norm_sample()

    def sums(self) -> list[Tensor]:
        grads: list[Any] = [p.grad for p in self.model.parameters() if p.requires_grad]
        return [(g.full_tensor() if hasattr(g, "full_tensor") else g).cpu() for g in grads]


class FlashTwoPass(Flash):
    mode = "two_pass"


METHODS: dict[str, type[Method]] = {
    "nonprivate": Method,
    "flash": Flash,
    "flash-two-pass": FlashTwoPass,
}


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

    styles = {
        "outputs": ColwiseParallel(),
        "outputs, gathered": ColwiseParallel(output_layouts=Replicate()),
        "inputs": RowwiseParallel(),
        "words": RowwiseParallel(input_layouts=Replicate()),
    }
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {name: styles[how] for name, how in CUTS.items()})
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
    parser.add_argument(
        "--model", default="decoder-1" if on_gpu else "tiny", help="a model of blocks"
    )
    parser.add_argument("--methods", default="nonprivate,flash", help=", ".join(METHODS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if on_gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16 on CUDA, fp32 on a CPU")
    parser.add_argument("--batch", type=int, help="samples of each process")
    parser.add_argument("--seq", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lora", type=int, metavar="R", help="freeze it; rank R on every linear")
    parser.add_argument("--checkpointing", action="store_true", help="recompute each block")
    parser.add_argument("--compile", action="store_true", help="every block")
    parser.add_argument(
        "--bucket", type=int, default=256, metavar="MB", help="of sums sent at once"
    )
    parser.add_argument("--rounds", type=int, default=5, help="samples of each method")
    parser.add_argument("--steps", type=int, default=8, help="in a turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps before a method's first turn")
    options.add_output_options(parser)
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace, console: Console) -> int:
    """Exit status: 0, or 1 if a norm or a sum of ours is wrong."""
    if unknown := set(chosen.methods.split(",")) - METHODS.keys():
        raise UsageError(f"--methods: found {sorted(unknown)}; expected some of {list(METHODS)}")
    if "LOCAL_RANK" not in os.environ:
        raise UsageError("start it with torchrun --nproc-per-node N -m benchmarks sharded ...")
    device = torch.device(chosen.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return _run(chosen, console if dist.get_rank() == 0 else Console(quiet=True), device)
    finally:
        dist.destroy_process_group()


def _run(chosen: argparse.Namespace, console: Console, device: torch.device) -> int:
    names = "batch", "seq", "layers", "lora"
    shape = {name: getattr(chosen, name) for name in names}
    workload = models.workload(chosen.model, **shape, checkpointing=chosen.checkpointing)
    setting = Setting(
        workload,
        device,
        DTYPES[options.dtype_name(chosen)],
        compile="default" if chosen.compile else None,
    )
    # Of their own in each process: but for tensor parallelism, where all compute with one batch.
    own = 0 if chosen.shards == "tp" else dist.get_rank()
    inputs, targets = dataclasses.replace(setting, seed=own).draw(1)[0]
    sizes = workload.name, workload.batch, workload.positions
    rows = [Row(name, *sizes) for name in chosen.methods.split(",")]
    allowed = _check(rows, setting, chosen, inputs, targets)
    for row in rows:
        console.print(f"{row.method}: off by {row.norm_error} (norms), {row.gradient_error} (sums)")
    console.print(f"allowed: {allowed.norms:.1e} (norms), {allowed.gradients:.1e} (sums)")
    for row in rows:
        if Errors(row.norm_error, row.gradient_error).exceed(allowed):
            row.note = "off by more than allowed"
            if issubclass(METHODS[row.method], Flash):
                console.print(f"[bold red]{row.method}: that is too much, nothing is timed[/]")
                return 1
    _measure(rows, setting, chosen, inputs, targets)
    console.print(_table(rows), markup=False)
    if dist.get_rank() == 0:
        records.write_json(chosen.json, _record(rows, setting, chosen))
    return 0


def _check(
    rows: list[Row],
    setting: Setting,
    chosen: argparse.Namespace,
    inputs: Tensor,
    targets: Tensor,
) -> Errors:
    """Note every method's errors; what is allowed of them."""
    plain = dataclasses.replace(setting, compile=None)
    wide = agreement.reference_dtype(setting.dtype)
    together = chosen.shards != "tp"  # sums are over the samples of all processes
    reference, rounded = (
        _over_processes(
            agreement.one_at_a_time(plain, inputs, targets, dtype), together, setting.device
        )
        for dtype in (wide, setting.dtype)
    )
    for row in rows:
        settle(setting.device)
        try:
            method = METHODS[row.method](setting, chosen.shards, chosen.bucket)
            method.step(inputs, targets)
            norms, sums = method.norms(), method.sums()
        except Exception as error:  # alike in all processes
            if issubclass(METHODS[row.method], Flash):
                raise
            row.note = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        of_cpu = None if norms is None else norms.detach().double().cpu()
        found = agreement.errors(Fingerprint(of_cpu, None, sums), reference)
        row.norm_error, row.gradient_error = _worst(found.norms), _worst(found.gradients)
        del method
    plain_errors = agreement.errors(rounded, reference)
    both = Errors(_worst(plain_errors.norms), _worst(plain_errors.gradients))
    return agreement.allowed(setting.dtype, both)


def _over_processes(found: Fingerprint, together: bool, device: torch.device) -> Fingerprint:
    settle(device)  # NCCL takes memory beside PyTorch's
    if together and found.gradients is not None:
        for total in found.gradients:
            moved = total.cuda() if dist.get_backend() == "nccl" else total
            dist.all_reduce(moved)
            total.copy_(moved)
    return found


def _worst(error: float | None) -> float | None:
    """Of all processes."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, error)
    return max(found) if None not in found else None


def _measure(
    rows: list[Row],
    setting: Setting,
    chosen: argparse.Namespace,
    inputs: Tensor,
    targets: Tensor,
) -> None:
    """Memory and collectives of each method that runs, then turns."""
    steps: dict[str, Callable[[], None]] = {}
    running = [row for row in rows if not row.note]
    for row in running:
        with PeakMemory(setting.device) as memory:
            method = METHODS[row.method](setting, chosen.shards, chosen.bucket)
            for _ in range(chosen.warmup):
                method.step(inputs, targets)
            with memory.measured():
                method.step(inputs, targets)
        row.peak_bytes = int(_worst(memory.peak) or 0)
        row.collectives = _collectives(lambda m=method: m.step(inputs, targets))
        steps[row.method] = lambda m=method: m.step(inputs, targets)
        host = _host_milliseconds(setting.device, steps[row.method])
        row.host_milliseconds = [_worst(host) or host]
    for number in range(chosen.rounds):
        first = number % len(running)
        for row in running[first:] + running[:first]:
            dist.barrier()
            step = steps[row.method]

            def turn(step: Callable[[], None] = step) -> None:
                for _ in range(chosen.steps):
                    step()

            took = milliseconds(setting.device, turn) / chosen.steps
            row.milliseconds.append(_worst(took) or took)


def _host_milliseconds(device: torch.device, step: Callable[[], None]) -> float:
    found = host_milliseconds(device, step)
    if found is not None:
        return found
    times = []
    for _ in range(5):
        begin = time.thread_time()  # the backend's own threads are no host of a GPU
        step()
        times.append((time.thread_time() - begin) * 1e3)
    return statistics.median(times)


def _collectives(step: Callable[[], None]) -> dict[str, list[int]]:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        step()
    counted: dict[str, list[int]] = {}
    for event in found.events():
        if name := COLLECTIVES.get(event.name):
            total = counted.setdefault(name, [0, 0])
            total[0] += 1
            total[1] += _elements(event.input_shapes)
    return counted


def _elements(shapes: Any) -> int:
    """Of the operand that is the largest, which is what travels."""
    whole = [shape for shape in shapes if all(isinstance(size, int) for size in shape)]
    return max((torch.Size(shape).numel() for shape in whole if shape), default=0)


def _table(rows: list[Row]) -> str:
    lines = []
    for row, it in zip(rows, records.summaries(rows), strict=True):
        sent = ", ".join(f"{calls} {name}" for name, (calls, _) in row.collectives.items())
        figures = [row.note, "", "", ""]
        if it is not None:
            figures = [f"{it.milliseconds.median:.2f}", f"{it.host_milliseconds or 0:.2f}"]
            figures += [f"{it.ratio.median:.3f}" if it.ratio else "", f"{it.memory_ratio or 0:.3f}"]
        lines.append([row.method, *figures, sent])
    heads = ["method", "ms / step", "host", "ratio", "memory", "collectives of a step"]
    return table(heads, lines)


def _record(rows: list[Row], setting: Setting, chosen: argparse.Namespace) -> dict[str, Any]:
    started = f"torchrun --nproc-per-node {dist.get_world_size()} "
    summaries = [it and dataclasses.asdict(it) for it in records.summaries(rows)]
    return {
        "kind": "sharded",
        "environment": environment.describe(setting.device, chosen.revision),
        "command": started + chosen.command.removeprefix("python "),
        "processes": dist.get_world_size(),
        "dtype": str(setting.dtype).removeprefix("torch."),
        "rows": [
            dataclasses.asdict(row) | {"summary": summary}
            for row, summary in zip(rows, summaries, strict=True)
        ],
    }
