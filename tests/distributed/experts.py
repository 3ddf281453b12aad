"""What runs in every process of a model whose experts lie in several: steps, training, refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.distributed.experts import distribute_experts
from flash_clipping.layers import MixtureOfExperts, RoutedExperts, TopKRouter
from tests.distributed import processes, steps
from tests.distributed.processes import (
    C,
    Parts,
    all_of,
    device,
    error,
    expected_sums,
    freeze,
    local,
    sharded,
)
from tests.support.mixtures import VOCABULARY, mixture
from tests.support.oracle import Truth


class Router(TopKRouter):
    """``dropped``: some tokens reach no expert. ``one``: all tokens are the first process's."""

    def __init__(self, width: int, experts: int, k: int, routes: str):
        super().__init__(width, experts, k)
        self.routes = routes

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        ids, weights = super().forward(x)
        if self.routes == "one":
            ids = torch.zeros_like(ids)  # twice to one expert, if k is 2
        if self.routes == "dropped":
            ids = torch.where(x.sum(-1, keepdim=True) > 0, ids, -1)
        return ids, weights


class Routed(nn.Module):
    """A block of experts."""

    def __init__(self, width: int, k: int = 2, rank: int = 0, routes: str = ""):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        experts = MixtureOfExperts(width, 6, 4, rank=rank, lora_alpha=3.0 if rank else None)
        for param in experts.parameters():
            nn.init.normal_(param, std=0.5)  # B of LoRA as well
        self.mixture = RoutedExperts(Router(width, 4, k, routes), experts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(self.norm(x))


class Twice(Routed):
    """One block that is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


_TRUTHS: dict[str, Truth] = {}


def truth_of(model: nn.Module, loss: Any, *batch: Tensor) -> Truth:
    """Of single samples, one after the other, in one process with all experts."""
    name = f"{model} {[n for n, p in model.named_parameters() if p.requires_grad]}"
    if name in _TRUTHS:
        return _TRUTHS[name]
    found: dict[str, list[Tensor]] = {}
    for b in range(len(batch[0])):
        model.zero_grad()
        loss(model, *(x[b : b + 1] for x in batch)).backward()
        for param_name, param in model.named_parameters():
            if param.requires_grad:
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                found.setdefault(param_name, []).append(grad.detach().clone())
    grads = {param_name: torch.stack(of_samples) for param_name, of_samples in found.items()}
    norms = {param_name: g.flatten(1).norm(dim=1) for param_name, g in grads.items()}
    _TRUTHS[name] = Truth(torch.stack([*norms.values()]).norm(dim=0), norms, grads)
    return _TRUTHS[name]


def cross_entropy(model: Any, ids: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(ids), y)


def next_words(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def parallel(model: Any, mesh: Any) -> Any:
    """The same model, with its experts and all else over ``mesh``."""
    experts = distribute_experts(model, mesh)
    if hasattr(model, "blocks"):
        return sharded(model, mesh=mesh, ignored_params=experts)
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=experts)
    return fully_shard(model, mesh=mesh, ignored_params=experts)


def clipped_step(
    rank: int,
    mesh: Any,
    cuts: tuple[int, ...],
    *,
    block: type[Routed] = Routed,
    net: dict[str, Any] | None = None,
    checkpointed: bool | str = False,
    frozen: tuple[str, ...] = (),
    family: str = "",
    times: int = 2,
    micro: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Norms and sums of some steps in all processes, beside those of every sample by itself."""
    kind = partial(block, **(net or {}))
    if family:
        plain, model = mixture(family).to(device()), mixture(family).to(device())
        generator = torch.Generator().manual_seed(1)
        batch: tuple[Tensor, ...] = (
            torch.randint(3, VOCABULARY, (8, 7), generator=generator).to(device()),
        )
        loss: Any = next_words
    else:
        plain = processes.make(kind=kind)
        model = processes.make(kind=kind, checkpointed=checkpointed)
        batch, loss = processes.batch(), cross_entropy
    for one in (plain, model):
        freeze(one, frozen)
    truth = truth_of(plain, loss, *batch)
    parallel(model, mesh)
    if options.get("clipping") == "per_layer":
        count = sum(param.requires_grad for param in model.parameters())
        options["max_grad_norm"] = [C / 4 + C / 40 * i for i in range(count)]
    flash = GradSampleModuleFlashClipping(model, **{"max_grad_norm": C} | options)
    clipped = expected_sums(truth, options)
    mine = slice(cuts[rank], cuts[rank + 1])
    errors = []
    for _ in range(times):
        flash.zero_grad(set_to_none=True)
        for part in range(micro):
            loss(flash, *(x[mine][part::micro] for x in batch)).backward()
        of_part = slice(micro - 1, None, micro)
        errors.append(error(flash.get_norm_sample(), truth.norms[mine][of_part]))
        for name, param in model.named_parameters():
            assert (param.grad is not None) == param.requires_grad, name
            if param.requires_grad:
                found: Any = param._norm_sample
                scale = truth.norms.max()  # of a sample that reaches no expert, or one of none
                expected = truth.param_norms[name][mine][of_part]
                errors.append(float(((found - expected) / scale).abs().max()) if len(found) else 0)
                errors.append(error(all_of(param.grad), clipped[name]))
    return {
        "error": max(errors),
        "settled": flash._sharded.together._settled_with == flash._guards.count,
    }


EVEN, UNEVEN, EMPTY = (0, 4, 8), (0, 5, 8), (0, 8, 8)
ONLY_EXPERTS = ("embed", "norm", "head", *(f"blocks.{i}.{n}" for i in (0, 1) for n in ("norm", "mixture.router")))

CASES: dict[str, dict[str, Any]] = {
    "even": {"cuts": EVEN},
    "uneven, top-1": {"cuts": UNEVEN, "net": {"k": 1}},
    "empty": {"cuts": EMPTY},
    "empty in the first": {"cuts": (0, 0, 8), "net": {"rank": 2}},
    "LoRA": {"cuts": UNEVEN, "net": {"rank": 2}},
    "LoRA alone": {"cuts": EMPTY, "net": {"rank": 2}, "frozen": ONLY_EXPERTS},
    "dropped": {"cuts": UNEVEN, "net": {"routes": "dropped"}},
    "no tokens for a process": {"cuts": UNEVEN, "net": {"routes": "one"}},
    "twice": {"cuts": UNEVEN, "block": Twice},
    "accumulated": {"cuts": EVEN, "micro": 2},
    "per layer": {"cuts": EMPTY, "clipping": "per_layer", "net": {"rank": 2}},
    "checkpointed": {"cuts": EMPTY, "checkpointed": True},
    "two_pass": {"cuts": EMPTY, "mode": "two_pass", "net": {"rank": 2}},
    "two_pass, twice": {"cuts": UNEVEN, "mode": "two_pass", "block": Twice},
}
