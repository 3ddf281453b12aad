"""Models whose experts lie in several processes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.survey.kinds import all_kinds
from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.hugging_face.experts_in_parallel import distribute_experts
from flash_clipping.layers import MixtureOfExperts, RoutedExperts, TopKRouter
from tests.distributed import cases, steps, uses
from tests.distributed.processes import (
    VOCAB,
    C,
    Parts,
    all_of,
    batch,
    device,
    error,
    errors_of_sums,
    freeze,
    make,
    refusals,
    sharded,
)
from tests.support.autograd import truth_by_autograd
from tests.support.mixtures import mixture


class Router(TopKRouter):
    """``dropped``: some tokens reach no expert. ``one``: all tokens are the first process's."""

    def __init__(self, width: int, experts: int, k: int, routes: str):
        # Weights that add up to 1 would leave a router no gradient where one expert is chosen.
        super().__init__(width, experts, k, normalize=False)
        self.routes = routes

    def extra_repr(self) -> str:
        return f"k={self.k}, {self.routes}"

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        ids, weights = super().forward(x)
        if self.routes == "one":
            ids = torch.zeros_like(ids)
        if self.routes == "dropped":
            ids = torch.where(x[..., :1] > 0, ids, -1)
        return ids, weights


class Routed(nn.Module):
    """A block of four experts."""

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
    """A block that is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Tied(Routed):
    """Two layers of experts with the same matrices."""

    def __init__(self, width: int):
        super().__init__(width)
        self.more = RoutedExperts(Router(width, 4, 2, ""), MixtureOfExperts(width, 6, 4))
        for name in ("gate_up", "down"):
            setattr(self.more.experts, name, getattr(self.mixture.experts, name))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.more(self.norm(x))


NET: dict[str, Any] = {"kind": Routed}
TOP_1: dict[str, Any] = {"kind": partial(Routed, k=1)}
LORA: dict[str, Any] = {"kind": partial(Routed, rank=2)}
REST = ("embed", "norm", "head", *(f"blocks.{i}.{n}" for i in "01" for n in ("norm", "mixture.r")))

BY_TWO: dict[str, dict[str, Any]] = {
    "even": {"cuts": cases.EVEN, "net": NET},
    "uneven, top-1": {"cuts": cases.UNEVEN, "net": TOP_1},
    "empty": {"cuts": cases.EMPTY, "net": NET},
    "LoRA": {"cuts": cases.UNEVEN, "net": LORA},
    "LoRA alone": {"cuts": (0, 0, 8), "net": LORA, "frozen": REST},
    "dropped": {"cuts": cases.UNEVEN, "net": {"kind": partial(Routed, routes="dropped")}},
    "no token for a process": {
        "cuts": cases.UNEVEN,
        "net": {"kind": partial(Routed, routes="one")},
    },
    "twice": {"cuts": cases.UNEVEN, "net": {"kind": Twice}},
    "tied": {"cuts": cases.UNEVEN, "net": {"kind": Tied}},
    "frozen": {"cuts": cases.EMPTY, "net": NET, "frozen": ("blocks.0.mixture.experts",)},
    "accumulated": {"cuts": cases.EVEN, "net": NET, "micro": 2},
    "per layer": {"cuts": cases.EMPTY, "net": LORA, "clipping": "per_layer"},
    "checkpointed": {"cuts": cases.EMPTY, "net": NET | {"checkpointed": True}},
    "re-entrant": {"cuts": cases.UNEVEN, "net": LORA | {"checkpointed": "re-entrant"}},
}

#: 5 samples of 5 positions in the second process, and none in the third.
FOUR = (0, 2, 7, 7, 8)
#: (data, expert) = (2, 2), or four processes with an expert each.
BY_FOUR: dict[str, dict[str, Any]] = {
    "(2, 2)": {"cuts": FOUR, "net": NET},
    "(2, 2), LoRA": {"cuts": FOUR, "net": LORA},
    "(2, 2), top-1": {"cuts": (0, 2, 4, 6, 8), "net": TOP_1},
    "(4,)": {"cuts": FOUR, "net": LORA},
}


def families() -> dict[str, Any]:
    """Mixtures of ``transformers``, in whose norm layers float64 is rounded to fp32."""
    others = all_kinds()["Experts with a forward of their own"]

    def of_its_own(name: str) -> Any:
        torch.manual_seed(0)
        model: Any = replace(others[name]).build(False)
        for param in model.parameters():
            nn.init.normal_(param, std=0.3 if param.dim() > 1 else 0.1)
        return model.double().train()

    def without_sinks(name: str) -> Any:  # which shards do not serve
        return freeze(mixture(name), ("model.layers.0.self_attn.sinks",))

    return {
        "Qwen3Moe": partial(mixture, "Qwen3Moe"),
        "GptOss": partial(without_sinks, "GptOss"),
        "Dbrx": partial(of_its_own, "DbrxForCausalLM"),
        "Llama4": partial(of_its_own, "Llama4ForCausalLM"),
    }


def of_transformers(rank: int, mesh: Any, build: Any) -> float:
    """A mixture of ``transformers``; all of it is gathered with the root."""
    from torch.distributed.fsdp import fully_shard

    plain, model = build().to(device()), build().to(device())
    fully_shard(model, mesh=mesh, ignored_params=distribute_experts(model, mesh))
    return uses.steps_beside_single_samples(
        model, plain, slice(uses.CUTS[rank], uses.CUTS[rank + 1])
    )


def ordinary(rank: int, mesh: Any, disabled: str) -> float:
    """Ordinary gradients: of a model that nobody has wrapped, or whose hooks are disabled before or
    after forward."""
    plain = make(**NET)
    parts = [slice(*cases.UNEVEN[i : i + 2]) for i in range(2)]
    ids, y = batch()
    for part in parts:
        F.cross_entropy(plain(ids[part]), y[part]).backward()
    model: Any = sharded(make(**NET), mesh=mesh, experts=True)
    flash = GradSampleModuleFlashClipping(model) if disabled else None
    if disabled == "before":
        flash.disable_hooks()
    loss = F.cross_entropy((flash or model)(ids[parts[rank]]), y[parts[rank]])
    if disabled == "after":
        flash.disable_hooks()
    loss.backward()
    errors = []
    for name, param in model.named_parameters():
        processes = 1 if "mixture.experts" in name else 2  # over which FSDP takes the mean
        errors.append(error(all_of(param.grad) * processes, plain.get_parameter(name).grad))
    return max(errors)


def poisoned(rank: int, mesh: Any) -> float:
    """Sums where a word of the first sample is infinite, beside those of the other samples."""
    plain, model = make(**NET), make(**NET)
    ids, y = batch()
    ids[ids == VOCAB - 1], ids[0, 2] = 0, VOCAB - 1
    clipped = truth_by_autograd(
        plain, (ids[1:], y[1:]), lambda m, b: F.cross_entropy(m(b[0]), b[1])
    )
    with torch.no_grad():
        model.embed.weight[-1] = torch.inf
    sharded(model, mesh=mesh, experts=True)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    mine = slice(cases.UNEVEN[rank], cases.UNEVEN[rank + 1])
    F.cross_entropy(flash(ids[mine]), y[mine]).backward()
    assert flash.get_clipping_coef()[0] == 0 or rank
    return max(errors_of_sums(model, clipped.clipped(C)))


def refused(mesh: Any) -> Parts:
    """What is not served, and what is said of it."""
    from torch.distributed.fsdp import fully_shard

    def without_fully_shard() -> None:
        model = make(**NET)
        distribute_experts(model, mesh)
        GradSampleModuleFlashClipping(model)

    def two_passes() -> None:
        model = make(**NET)
        experts = distribute_experts(model, mesh)
        fully_shard(model, mesh=mesh, ignored_params=experts)
        GradSampleModuleFlashClipping(model, mode="two_pass")

    def odd() -> None:
        distribute_experts(MixtureOfExperts(8, 6, 3), mesh)

    def late() -> None:
        distribute_experts(sharded(make(**NET), mesh=mesh), mesh)

    def adapted(late: bool) -> None:
        from peft import LoraConfig, get_peft_model

        model: Any = mixture("Qwen3Moe").to(device())
        experts = distribute_experts(model, mesh) if late else set()
        matrices = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = get_peft_model(model, LoraConfig(r=2, target_parameters=matrices)).double()
        if not late:
            distribute_experts(model, mesh)
        fully_shard(model, mesh=mesh, ignored_params=experts)
        uses.token_losses(GradSampleModuleFlashClipping(model), batch()[:1])

    def own_forward() -> None:
        model: Any = mixture("Qwen3Moe").to(device())
        experts = model.model.layers[0].mlp.experts
        experts.__class__ = type("Scaled", (type(experts),), {"forward": lambda *_: None})
        distribute_experts(model, mesh)

    return {
        "without fully_shard": without_fully_shard,
        "two passes": two_passes,
        "adapters": lambda: adapted(late=False),
        "late adapters": lambda: adapted(late=True),
        "own forward": own_forward,
        "odd": odd,
        "no experts": lambda: distribute_experts(make(), mesh),
        "late": late,
    }


def by_two(rank: int) -> Parts:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("expert",))
    shards = {"mesh": mesh, "experts": True}
    return {
        **{
            f"experts {name}": partial(cases.clipped, rank, case | {"shards": shards})
            for name, case in BY_TWO.items()
        },
        **{
            f"experts of {name}": partial(of_transformers, rank, mesh, build)
            for name, build in families().items()
        },
        "experts poisoned": lambda: poisoned(rank, mesh),
        **{
            f"experts ordinary {disabled}": partial(ordinary, rank, mesh, disabled)
            for disabled in ("", "before", "after")
        },
        "experts trained": lambda: steps.trained(rank, shards, LORA),
        "experts engine": lambda: steps.engine_run(shards, net=NET),
        **refusals(refused(mesh), "experts refuse"),
    }


def by_four(rank: int) -> Parts:
    from torch.distributed.device_mesh import init_device_mesh

    names = ("data", "expert")
    both = init_device_mesh(device().type, (2, 2), mesh_dim_names=names)
    alone = init_device_mesh(device().type, (4,), mesh_dim_names=("expert",))
    meshes = {name: both if name.startswith("(2") else alone for name in BY_FOUR}
    return {
        **{
            f"experts {name}": partial(
                cases.clipped, rank, case | {"shards": {"mesh": meshes[name], "experts": True}}
            )
            for name, case in BY_FOUR.items()
        },
        "experts noise": lambda: steps.noisy(rank, {"mesh": both, "experts": True}, NET),
        "experts trained": lambda: steps.trained(rank, {"mesh": both, "experts": True}, NET),
    }


REFUSED = {
    "without fully_shard": r"mixture.experts: found experts in parallel.*\n    fully_shard\(",
    "two passes": r"Net: found mode='two_pass' and experts in parallel.*\n    mode=\"one_pass\"",
    "adapters": "mlp.experts.*found adapters around experts",
    "late adapters": "mlp.experts.*some lie in parts over a mesh",
    "own forward": r"mlp.experts \(Scaled\): found adapters.*or a forward of your own",
    "odd": "found 3 experts and 2 processes.*divides 3",
    "no experts": "Net: found no experts",
    "late": "mixture.experts: found parameters on the meta device, or DTensors",
}
