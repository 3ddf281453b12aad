"""Models, cases and processes of these tests.

Processes talk by gloo over the loopback interface. With ``FLASH_CLIPPING_TEST_BACKEND=nccl`` each
has a GPU of its own, and they talk by NCCL; cases that need more GPUs than there are are skipped.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.compiled.regions import Region
from flash_clipping.ops.runtime.checks import device_checks
from tests.support.autograd import truth_by_autograd
from tests.support.oracle import Truth
from tests.support.starting import Group, start_processes
from tests.support.sums import norm_of

SAMPLES, VOCAB, CLASSES, C = 8, 11, 3, 0.1
BACKEND = os.environ.get("FLASH_CLIPPING_TEST_BACKEND", "gloo")


def device() -> torch.device:
    """Of models and batches: this process's GPU if processes talk by NCCL."""
    if BACKEND == "nccl" and dist.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")  # also where the processes' results are looked at


class FeedForward(nn.Module):
    """Reads one input twice, as q, k and v do."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = (nn.Linear(width, 6, bias=False) for _ in range(2))
        self.down = nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self, width: int):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.A, self.B = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.B(self.A(x)))


class Net(nn.Module):
    """11 words, blocks, a head: shards are uneven. ``bare``: the root uses a parameter itself."""

    def __init__(
        self,
        kind: Callable[[int], nn.Module] = FeedForward,
        bare: bool = False,
        tied: bool = False,
        checkpointed: bool | str = False,
        blocks: int = 2,
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(kind(8) for _ in range(blocks))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, VOCAB if tied else CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        if bare:
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.bare, self.checkpointed = bare, checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.bare:
            x = x * self.scale
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=self.checkpointed == "re-entrant")
            else:
                x = block(x)
        return self.head(self.norm(x)).mean(1)


def make(dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).to(device(), dtype)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (SAMPLES, 5), generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return ids.to(device()), y.to(device())


_TRUTHS: dict[str, Truth] = {}


def remembered(truth: Callable[..., Truth], model: Any, ids: Tensor, y: Tensor) -> Truth:
    """Of single samples; of models that are made alike once."""
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    weights = sum(float(param.detach().sum()) for param in model.parameters())
    name = f"{truth.__name__} {model} {trained} {tuple(ids.shape)} {weights}"
    if name not in _TRUTHS:
        _TRUTHS[name] = truth(model, ids, y)
    return _TRUTHS[name]


def truth_of(model: nn.Module, ids: Tensor, y: Tensor) -> Truth:
    return truth_by_autograd(
        model, (ids, y), lambda m, given: F.cross_entropy(m(given[0]), given[1])
    )


def sharded(model: Any, how: str = "blocks", experts: bool = False, **options: Any) -> Any:
    """``experts``: those of the model lie in parallel, over the same mesh."""
    from torch.distributed.fsdp import fully_shard

    from flash_clipping.hugging_face.experts_in_parallel import distribute_experts

    if experts:
        options["ignored_params"] = distribute_experts(model, options["mesh"])
    for module in model.modules() if how == "leaves" else model.blocks:
        if how == "blocks" or (module._parameters and module is not model):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest element."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    expected = expected.to(found.device)  # norms of offloaded parameters are on the CPU
    scale = expected.abs().max().clamp(min=1e-30) if expected.numel() else 1.0
    return float(((found - expected).abs() / scale).max()) if expected.numel() else 0.0


def errors_of_sums(model: nn.Module, expected: dict[str, Tensor]) -> list[float]:
    """Of the gradients of all trained parameters of a model; others have none."""
    errors = []
    for name, param in model.named_parameters():
        assert (param.grad is not None) == param.requires_grad, name
        if param.grad is not None:
            errors.append(error(all_of(param.grad), expected[name.replace("_orig_mod.", "")]))
    return errors


def all_of(x: Any) -> Tensor:
    """All of a tensor, whether it is cut or not."""
    x = x.to(device())  # what was offloaded too: NCCL gathers from GPUs alone
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full


def local(rank: int, cuts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """This process's part of the batch."""
    ids, y = batch()
    return ids[cuts[rank] : cuts[rank + 1]], y[cuts[rank] : cuts[rank + 1]]


def with_a_row(flash: Any, *given: Tensor) -> Any:
    """These rows of a process's batch; where there are none, one of nobody, as loaders give it."""
    flash.expect_samples(None if len(given[0]) else 0)
    if len(given[0]):
        return given
    return [x.new_ones(1, *x.shape[1:]) for x in given]


def freeze(model: Any, names: tuple[str, ...]) -> Any:
    """The same model, of which these parts are not trained."""
    for name, param in model.named_parameters():
        param.requires_grad_(param.requires_grad and not name.startswith(names or ("-",)))
    return model


def clipped_step(
    rank: int,
    cuts: tuple[int, ...],
    *,
    net: dict[str, Any] | None = None,
    frozen: tuple[str, ...] = (),
    how: str = "blocks",
    shards: dict[str, Any] | None = None,
    micro: int = 1,
    steps: int = 2,
    compiled: str = "",
    bucket: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Norms and sums of some steps in all processes, beside those of every sample by itself."""
    model = make(**(net or {}))
    plain: Any = make(**(net or {}) | {"checkpointed": False})
    for one in (model, plain):
        freeze(one, frozen)
    if compiled:
        torch.compiler.reset()  # it counts how often one function is compiled anew
        counters.clear()
        for module in {"root": (model,), "blocks": model.blocks}.get(compiled, ()):
            module.compile(backend="eager")
    sharded(model, how, **(shards or {}))
    if compiled == "shards":
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend="eager")
    flash = GradSampleModuleFlashClipping(model, **{"max_grad_norm": C} | options)
    if bucket is not None:
        flash._sharded.reducer.bucket_bytes = bucket
    if compiled == "private":
        flash.compile(backend="eager")
    ids, y = local(rank, cuts)
    whole = remembered(truth_of, plain, *(x[: cuts[-1]] for x in batch()))
    errors = []
    for _ in range(steps):
        flash.zero_grad(set_to_none=True)
        for part in range(micro):
            some = slice(part, None, micro)
            rows, labels = with_a_row(flash, ids[some], y[some])
            F.cross_entropy(flash(rows), labels).backward()
        mine = range(cuts[rank], cuts[rank + 1])[micro - 1 :: micro]
        errors.append(error(flash.get_norm_sample(), whole.norms[mine]))
        errors += errors_of_sums(model, expected_sums(whole, options))
        for name, param in model.named_parameters():
            if param.requires_grad and len(mine):
                of_param = norm_of(flash, param)
                expected = whole.param_norms[name.replace("_orig_mod.", "")][mine]
                off = (of_param - expected.to(of_param.device)).abs().max()
                errors.append(float(off / whole.norms.max()))
    together = flash._sharded.together
    settled = together._settled_with == flash._trainable.count
    flash.to_standard_module()
    left = [x for module in model.modules() for x in vars(module).values()]
    assert not any(isinstance(x, Region) for x in left)
    return {
        "error": max(errors),
        "settled": settled,
        "graphs": counters["stats"]["unique_graphs"] if compiled else 0,
        "breaks": sum(counters["graph_break"].values()),
    }


def expected_sums(whole: Truth, options: dict[str, Any]) -> dict[str, Tensor]:
    bound, clipping = options.get("max_grad_norm", C), options.get("clipping", "flat")
    if clipping == "flat":
        return whole.clipped(bound)
    if clipping == "automatic":
        coef = bound / (whole.norms + 0.01)
        return {n: torch.einsum("b,b...->...", coef, g) for n, g in whole.grads.items()}
    return {
        name: torch.einsum("b,b...->...", (c / (whole.param_norms[name] + 1e-6)).clamp(max=1), g)
        for (name, g), c in zip(whole.grads.items(), bound, strict=True)
    }


def message(call: Callable[[], Any]) -> str:
    """The error that this ends with; what a GPU found is waited for."""
    try:
        call()
        device_checks.raise_found(wait=True)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "not refused"


#: What processes do, by name, one after the other. A part that fails fails the tests that ask for
#: it; those after it are run by new processes.
Parts = dict[str, Callable[[], Any]]

#: By NCCL processes start slowly. Some pairs of them share the GPUs, with a share of the parts.
LANES = 3 if BACKEND == "nccl" else 1
#: Seconds after which a part says where it is, and a little later is ended.
PATIENCE = 30 if BACKEND == "nccl" else 120
#: When nothing more is begun, in seconds after the start.
DEADLINE = time.monotonic() + float(os.environ.get("FLASH_CLIPPING_TEST_SECONDS", "inf"))


def refusals(calls: Parts, prefix: str = "refuses") -> Parts:
    """What is said of each."""
    return {f"{prefix} {name}": partial(message, call) for name, call in calls.items()}


class Found(dict[str, Any]):
    """What the parts of one process have returned; or why a part has not."""

    def __init__(self, folder: Path, rank: int):
        super().__init__()
        self.folder, self.rank = folder, rank

    def __missing__(self, name: str) -> Any:
        file = self.folder / f"{self.rank}.{name}.pt"
        if not file.exists():
            said = [f.read_text() for f in sorted(self.folder.glob(f"*.{name}.failed"))]
            raise AssertionError(
                f"{name}: " + "\n".join(said or ["not run, or a process has ended in it"])
            )
        self[name] = torch.load(file, weights_only=False, map_location="cpu")
        return self[name]


def initialize(store: str, rank: int, world: int, timeout: timedelta | None) -> None:
    """Let this process join the others."""
    if BACKEND == "nccl":
        torch.cuda.set_device(rank)
    elif sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    method = f"file://{store}"
    dist.init_process_group(
        BACKEND, init_method=method, rank=rank, world_size=world, timeout=timeout
    )


@contextmanager
def as_torchrun(port: int) -> Iterator[None]:
    """The variables by which ``torchrun`` tells a process which one it is."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, rank)
        patch.setenv("WORLD_SIZE", world)
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(port))
        yield


def join_anew(store: str, rank: int, timeout: timedelta | None) -> None:
    """Let this process join the others in a new group, where waiting too long is an error."""
    world = dist.get_world_size()
    dist.destroy_process_group()
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # by default it is the end of the process
    initialize(store, rank, world, timeout)


def _say(*words: object) -> None:
    print(f"{time.strftime('%X')} rank {dist.get_rank()}:", *words, file=sys.stderr, flush=True)


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Say where this process is if it takes longer; end it if it goes on."""
    faulthandler.dump_traceback_later(seconds)
    if hasattr(signal, "alarm"):
        signal.alarm(int(seconds) + 10)  # whatever it waits for, and in whatever language
    yield
    if hasattr(signal, "alarm"):
        signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()


def _worker(
    rank: int,
    world: int,
    main: Callable[[int], Parts],
    folder: str,
    lane: int,
    start: int,
    deadline: float,
) -> None:
    torch.set_num_threads(1)
    printed = f"{folder}/printed.{lane}.{start}.{rank}"
    os.dup2(os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    name = "the start"
    try:
        initialize(f"{folder}/store.{lane}.{start}", rank, world, timedelta(seconds=60))
        with _patience(2 * PATIENCE):  # they meet here for the first time
            parts = main(rank)
        names = list(parts)[lane::LANES]
        Path(folder, f"names.{lane}").write_text("\n".join(names))
        for name in names[start:]:
            if (began := time.monotonic()) > deadline:
                break
            with _patience(PATIENCE):
                torch.save(parts[name](), f"{folder}/{rank}.{name}.pt")
            _say(f"{time.monotonic() - began:.1f} s", name)
    except BaseException:
        # At once: the others wait for this process, and their errors say nothing of the cause.
        _say("failed:", name, traceback.format_exc())
        Path(folder, f"{rank}.{name}.failed").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # some have lost each other


@dataclass(frozen=True, kw_only=True)
class ProcessGroup(Group):
    """``world`` processes, which run the parts of ``main`` one after the other."""

    world: int
    main: Callable[[int], Parts]

    def fill(self, folder: Path) -> None:
        with ThreadPoolExecutor(LANES) as pool:
            [*pool.map(lambda lane: _run_lane(folder, self.world, self.main, lane), range(LANES))]

    def read(self, folder: Path) -> list[Found]:
        return [Found(folder, rank) for rank in range(self.world)]

    def found(self, factory: pytest.TempPathFactory) -> list[Found]:
        if not dist.is_available() or not dist.is_backend_available(BACKEND):
            pytest.skip(f"PyTorch without {BACKEND}")
        if BACKEND == "nccl" and torch.cuda.device_count() < self.world:
            found = torch.cuda.device_count()
            pytest.skip(f"{self.name}: {self.world} processes, and {found} GPUs")
        return super().found(factory)


def _run_lane(folder: Path, world: int, main: Callable[[int], Parts], lane: int) -> None:
    """Until every part of this lane has returned or failed."""
    first, names = 0, [""]
    while first < len(names) and time.monotonic() < DEADLINE:
        try:
            args = (world, main, str(folder), lane, first, DEADLINE)
            start_processes(_worker, args, world, fork=BACKEND == "gloo")
            failed = False
        except mp.ProcessExitedException:
            failed = True
        if not (folder / f"names.{lane}").exists():
            printed = [file.read_text() for file in folder.glob(f"printed.{lane}.*")]
            raise AssertionError("processes have failed at their start:\n" + "\n".join(printed))
        names, before = (folder / f"names.{lane}").read_text().splitlines(), first
        while first < len(names) and all(
            (folder / f"{rank}.{names[first]}.pt").exists() for rank in range(world)
        ):
            first += 1
        first = max(first + failed, before + 1)
