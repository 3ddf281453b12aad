"""Models, cases and processes of these tests: gloo on the loopback interface."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.oracle import Truth, per_sample_truth
from tests.support.shared import filled_once

SAMPLES, VOCAB, CLASSES, C = 8, 11, 3, 0.1


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
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.blocks = nn.ModuleList(kind(8) for _ in range(2))
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
    return Net(**options).to(dtype)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (SAMPLES, 5), generator=generator)
    return ids, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


_TRUTHS: dict[str, Truth] = {}


def truth_of(model: nn.Module, ids: Tensor, y: Tensor) -> Truth:
    """Of the whole batch; of models that are made alike once."""
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    name = f"{model} {trained}"
    if name not in _TRUTHS:
        _TRUTHS[name] = _truth_of(model, ids, y)
    return _TRUTHS[name]


def _truth_of(model: nn.Module, ids: Tensor, y: Tensor) -> Truth:
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return per_sample_truth(model, (ids, y), loss)


def sharded(model: Any, how: str = "blocks", **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for module in model.modules() if how == "leaves" else model.blocks:
        if how == "blocks" or (module._parameters and module is not model):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest element."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    scale = expected.abs().max().clamp(min=1e-30) if expected.numel() else 1.0
    return float(((found - expected).abs() / scale).max()) if expected.numel() else 0.0


def all_of(x: Any) -> Tensor:
    """All of a tensor, whether it is cut or not."""
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full


def local(rank: int, cuts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """This process's part of the batch."""
    ids, y = batch()
    return ids[cuts[rank] : cuts[rank + 1]], y[cuts[rank] : cuts[rank + 1]]


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
    **options: Any,
) -> dict[str, Any]:
    """Norms and sums of some steps in all processes, beside those of every sample by itself."""
    model = make(**(net or {}))
    plain: Any = make(**(net or {}) | {"checkpointed": False})
    for one in (model, plain):
        freeze(one, frozen)
    if compiled:
        torch.compiler.reset()  # it counts how often one function is compiled anew
        for module in (model,) if compiled == "root" else model.blocks:
            module.compile(backend="eager")
    sharded(model, how, **(shards or {}))
    flash = GradSampleModuleFlashClipping(model, **{"max_grad_norm": C} | options)
    ids, y = local(rank, cuts)
    whole = truth_of(plain, *batch())
    errors = []
    for _ in range(steps):
        flash.zero_grad(set_to_none=True)
        for part in range(micro):
            some = slice(part, None, micro)
            F.cross_entropy(flash(ids[some]), y[some]).backward()
        expected = whole.norms[cuts[rank] : cuts[rank + 1]][micro - 1 :: micro]
        errors.append(error(flash.get_norm_sample(), expected))
        clipped = expected_sums(whole, options)
        for name, param in model.named_parameters():
            assert (param.grad is not None) == param.requires_grad, name
            if param.grad is not None:
                errors.append(error(param.grad.full_tensor(), clipped[name]))
    together = flash._sharded.together
    return {"error": max(errors), "settled": together._settled_with == flash._guards.count}


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
    try:
        call()
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return "not refused"


def _worker(rank: int, world: int, main: Callable[[int], dict[str, Any]], folder: str) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    try:
        found = main(rank)
    except BaseException:
        # At once: the others wait for this process, and their errors say nothing of the cause.
        print(f"rank {rank}:", traceback.format_exc(), flush=True)
        os._exit(1)
    torch.save(found, f"{folder}/{rank}.pt")
    os._exit(0)  # some tests end with processes that have lost each other


def run(
    factory: pytest.TempPathFactory, name: str, world: int, main: Callable[[int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """What ``main`` returned in each of ``world`` processes, which are started once."""

    def fill(folder: Path) -> None:
        mp.spawn(_worker, args=(world, main, str(folder)), nprocs=world)

    folder = filled_once(factory, name, fill)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
