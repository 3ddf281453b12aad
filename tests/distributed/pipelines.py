"""Pipelines of two and four stages: what runs in every process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from flash_clipping import (
    FixedOrder,
    FlashDPOptimizer,
    FlashPrivacyEngine,
    GradSampleModuleFlashClipping,
    Pipeline,
    PoissonSampling,
    PrivateSchedule,
)
from flash_clipping.noise.mechanisms import BandedInverseNoise
from tests.distributed import processes, steps
from tests.distributed.processes import (
    SAMPLES,
    Adapted,
    C,
    Parts,
    batch,
    device,
    error,
    errors_of_sums,
    expected_sums,
    freeze,
    make,
    remembered,
    truth_of,
)
from tests.distributed.steps import ADAPTIVE, Rows
from tests.support.oracle import Truth

NOISE = BandedInverseNoise(2, (0.6,))
PIECES = ("embed", "blocks.0", "blocks.1", "norm", "head")
CUTS = {2: (0, 2, 5), 4: (0, 1, 2, 3, 5)}


class Part(nn.Module):
    """What one stage runs of a net; parameters keep their names."""

    def __init__(self, net: nn.Module, rank: int):
        super().__init__()
        cuts = CUTS[dist.get_world_size()]
        self.names = PIECES[cuts[rank] : cuts[rank + 1]]
        self.blocks = nn.ModuleDict()
        for name in self.names:
            place, _, number = name.partition(".")
            if number:
                self.blocks[number] = net.get_submodule(name)
            else:
                setattr(self, place, net.get_submodule(name))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x.mean(1) if "head" in self.names else x


def schedule_of(
    flash: nn.Module, kind: str = "1F1B", micro: int = 2, loss: Any = F.cross_entropy
) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    stage = PipelineStage(flash, dist.get_rank(), dist.get_world_size(), device())
    cls: Any = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[kind]
    return cls(stage, n_microbatches=micro, loss_fn=loss)


def losses_summed(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="sum")


#: Of 8 samples: as many as fit; fewer; in several rounds; one; none. In "square" a micro-batch has
#: as many samples as positions.
STEPS: dict[str, dict[str, Any]] = {
    "GPipe": {"kind": "GPipe", "size": 4},
    "1F1B": {"size": 2, "micro": 4},
    "uneven": {"size": 5, "samples": 7},
    "rounds": {"size": 2, "micro": 3},
    "square": {"size": 5, "samples": 5},
    "one sample": {"size": 2, "samples": 1},
    "one in a micro-batch": {"size": 1, "micro": 3},
    "empty": {"size": 2, "samples": 0},
    "summed": {"size": 4, "loss": losses_summed, "loss_reduction": "sum"},
    "automatic": {"size": 4, "clipping": "automatic"},
    "LoRA": {"size": 4, "net": {"kind": Adapted}, "frozen": ("embed", "norm", "head")},
    "not finite": {"size": 3, "poisoned": 2},
    "as torch is called": {"size": 4, "only_own": True},
    "compiled blocks": {"size": 2, "micro": 4, "compiled": "blocks"},
    "compiled stages": {"kind": "GPipe", "size": 5, "samples": 7, "compiled": "stage"},
    "compiled, LoRA": {
        "size": 2,
        "micro": 3,
        "compiled": "private",
        "net": {"kind": Adapted},
        "frozen": ("embed", "norm"),
    },
}


def clipped_step(
    rank: int,
    *,
    size: int,
    kind: str = "1F1B",
    micro: int = 2,
    samples: int = SAMPLES,
    loss: Any = F.cross_entropy,
    net: dict[str, Any] | None = None,
    frozen: tuple[str, ...] = (),
    poisoned: int | None = None,
    only_own: bool = False,
    compiled: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Norms and sums of two steps, beside those of every sample by itself; ``compiled``: the
    "blocks" of stages, or each "stage" before or after it is "private"."""
    model, plain = make(**(net or {})), make(**(net or {}))
    for one in (model, plain):
        freeze(one, frozen)
    ids, y = (x[: max(1, samples)] for x in batch())  # a row of nobody stands for none
    whole = remembered(truth_of, plain, *batch())
    keep = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    if poisoned is not None:
        ids = torch.where(ids == 10, 9, ids)
        keep[poisoned] = False
        rest = truth_of(plain, ids[keep], y[keep])
        ids[poisoned] = 10
        with torch.no_grad():
            model.embed.weight[10] = float("inf")
    part = Part(model, rank)
    if compiled:
        torch.compiler.reset()
        counters.clear()
        for module in {"blocks": part.blocks.values(), "stage": (part,)}.get(compiled, ()):
            module.compile(backend="eager")
    flash = GradSampleModuleFlashClipping(part, max_grad_norm=C, **options)
    if compiled == "private":
        flash.compile(backend="aot_eager")
    schedule = PrivateSchedule(schedule_of(flash, kind, micro, loss), microbatch_size=size)
    errors: list[float] = []
    losses: list[Tensor] = []
    first, last = rank == 0, rank == dist.get_world_size() - 1
    for _ in range(2):
        flash.zero_grad(set_to_none=True)
        if only_own or not samples:  # as a loader of make_private announces it
            flash.expect_samples(samples)
        if only_own:
            given = (ids,) if first else ()
            output = schedule.step(*given, target=y if last else None, losses=losses)
        else:
            output = schedule.step(ids, target=y, losses=losses)
        if poisoned is not None:
            norms, expected = rest.norms, expected_sums(rest, options)
            assert flash.get_clipping_coef()[poisoned] == 0
        else:
            norms = whole.norms[:samples]
            expected = expected_sums(first_of(whole, samples), options)
        errors.append(error(flash.get_norm_sample()[keep[:samples]], norms))
        errors += errors_of_sums(part, expected)
    if last:
        assert output.shape[0] == len(ids)
        if poisoned is None and not only_own:
            errors.append(error(output.detach(), plain(ids).detach()))
    return {
        "error": max(errors),
        "losses": len(losses),
        "backwards": flash.backward_count,
        "held": len(schedule._held),
        "graphs": counters["stats"]["unique_graphs"] if compiled else 0,
    }


def first_of(whole: Truth, samples: int) -> Any:
    """The truth of the first samples."""
    from types import SimpleNamespace

    grads = {name: g[:samples] for name, g in whole.grads.items()}
    coef = (C / (whole.norms[:samples] + 1e-6)).clamp(max=1)
    sums = {n: torch.einsum("b,b...->...", coef, g) for n, g in grads.items()}
    return SimpleNamespace(norms=whole.norms[:samples], grads=grads, clipped=lambda _: sums)


def cancelling(rank: int) -> tuple[Tensor, Tensor]:
    """In fp32, of samples whose positions cancel: the bounds that they are clipped by, found by
    two stages and by one process."""

    def both() -> list[nn.Linear]:
        torch.manual_seed(0)
        return [nn.Linear(4, 4, bias=False).to(device()) for _ in range(2)]

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(100 * (out[:, 0] - out[:, 1]), y)

    x = (
        torch.randn(4, 1, 4, generator=torch.Generator().manual_seed(0))
        .expand(4, 2, 4)
        .to(device())
    )
    y = torch.arange(4, device=device())
    alone = GradSampleModuleFlashClipping(nn.Sequential(*both()), max_grad_norm=C)
    loss(alone(x), y).backward()
    flash = GradSampleModuleFlashClipping(nn.Sequential(both()[rank]), max_grad_norm=C)
    PrivateSchedule(schedule_of(flash, loss=loss), microbatch_size=2).step(x, target=y)
    norms = flash.running_step.norms, alone.running_step.norms
    assert norms[0] is not None and norms[1] is not None
    return norms[0].upper, norms[1].upper


def optimizer_of(part: nn.Module, flash: Any, noise: float, lr: float = 1e-2) -> Any:
    from flash_clipping.pipelines.optimizer import PipelineFlashDPOptimizer

    plain = torch.optim.SGD([p for p in part.parameters() if p.requires_grad], lr=lr)
    optimizer = PipelineFlashDPOptimizer(
        plain, noise_multiplier=noise, max_grad_norm=C, expected_batch_size=SAMPLES
    )
    optimizer.follow(flash)
    return optimizer


def noisy(rank: int) -> list[Tensor]:
    """Noise of two steps in units of its standard deviation; all processes are seeded alike."""
    torch.manual_seed(0)
    part = Part(make(), rank)
    flash = GradSampleModuleFlashClipping(part, max_grad_norm=C)
    optimizer = optimizer_of(part, flash, 5.0)
    schedule = PrivateSchedule(schedule_of(flash), microbatch_size=4)
    ids, y = batch()
    params = {name: p for name, p in part.named_parameters() if p.requires_grad}
    return [
        steps.flat(steps.noise_of(optimizer, params, lambda: schedule.step(ids, target=y))[0])
        for _ in range(2)
    ]


def scheduled() -> Callable[[Any, Tensor, Tensor], Any]:
    """Steps of the schedule of a private stage."""
    schedule = cache(lambda flash: PrivateSchedule(schedule_of(flash), microbatch_size=1))
    return lambda flash, ids, y: schedule(flash).step(ids, target=y)


def engine_run(rank: int, **options: Any) -> dict[str, Any]:
    """An epoch of Poisson batches."""
    torch.manual_seed(rank)  # processes draw alike, however they are seeded
    part = Part(make(), rank)
    return steps.epoch(part, Rows(copies=3), scheduled(), distributed=Pipeline(), **options)


def correlated(rank: int) -> dict[str, Any]:
    part = Part(make(), rank)
    return steps.correlated(part, NOISE, scheduled(), distributed=Pipeline())


def refusals(rank: int) -> Parts:
    """What is not served, and what is said of it. Processes that fail alike wait for nobody."""
    ids, y = batch()

    def wrap(**options: Any) -> Any:
        options = {"max_grad_norm": C} | options
        return GradSampleModuleFlashClipping(Part(make(), rank), **options)

    def private(loss: Any = F.cross_entropy, **options: Any) -> Any:
        return PrivateSchedule(schedule_of(wrap(**options), loss=loss), microbatch_size=4)

    def alone() -> None:
        # By itself: in a step the others would wait for this stage.
        flash = wrap()
        stage = schedule_of(flash)._stage
        stage.forward_maybe_with_nosync(
            ids if rank == 0 else torch.zeros(8, 5, 8, dtype=torch.float64, device=device())
        )

    def plain_step() -> None:
        schedule = private()
        schedule.step(ids, target=y)
        schedule._stage.backward_one_chunk(0)

    def other_optimizer() -> None:
        flash = wrap()
        optimizer = FlashDPOptimizer(
            torch.optim.SGD(flash.parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=C,
            expected_batch_size=SAMPLES,
        )
        optimizer.follow(flash)
        PrivateSchedule(schedule_of(flash), microbatch_size=4).step(ids, target=y)

    def changed() -> None:
        schedule = private()
        optimizer = optimizer_of(schedule.module._module, schedule.module, 1.0)
        schedule.step(ids, target=y)
        nn.utils.clip_grad_norm_(schedule.module.parameters(), 1e-9)
        optimizer.step()

    def counted_apart() -> None:
        private().step(ids[: 8 - rank], target=y[: 8 - rank])

    def engine(**options: Any) -> None:
        part = Part(make(), rank)
        FlashPrivacyEngine(secure_mode=False).make_private(
            module=part,
            optimizer=torch.optim.SGD(part.parameters(), lr=0.5),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(Rows(), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=C,
            distributed=Pipeline(),
            **options,
        )

    def out_of_order() -> None:
        part = Part(make(), rank)
        flash, optimizer, _, loader = FlashPrivacyEngine(accountant="pld").make_private(
            module=part,
            optimizer=torch.optim.SGD(part.parameters(), lr=0.5),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(Rows(), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=C,
            distributed=Pipeline(),
            mechanism=FixedOrder(NOISE),
        )
        batches = iter(loader)
        next(batches)
        x, labels, _ = next(batches)  # in some runs of the same labels: its order is secret
        schedule = PrivateSchedule(schedule_of(flash), microbatch_size=1)
        schedule.step(x.to(device()), target=labels.to(device()))
        optimizer.step()

    def interleaved() -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

        world = dist.get_world_size()
        stages = [PipelineStage(wrap(), rank + i * world, 2 * world, device()) for i in range(2)]
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=F.cross_entropy)
        PrivateSchedule(schedule, microbatch_size=4)

    def in_parts() -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        flash = GradSampleModuleFlashClipping(make(), max_grad_norm=C)
        whole = torch.zeros(8, 4 * dist.get_world_size(), dtype=torch.long, device=device())
        mesh = init_device_mesh(device().type, (dist.get_world_size(),))
        with pytest.MonkeyPatch.context() as patch:
            # PyTorch 2.11 does not put it back after an error.
            patch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
            with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[1]):
                assert whole.shape == (8, 4)
                flash(whole)

    def not_wrapped() -> None:
        PrivateSchedule(schedule_of(Part(make(), rank)), microbatch_size=4)

    return {
        "alone": alone,
        "plain step": plain_step,
        "other optimizer": other_optimizer,
        "changed": changed,
        "counted apart": counted_apart,
        "no count": lambda: private().step(),
        "two counts": lambda: private().step(ids, target=y[:7]),
        "out of order": out_of_order,
        "interleaved": interleaved,
        "not wrapped": not_wrapped,
        "context parallel": in_parts,
        "two_pass": lambda: private(mode="two_pass"),
        "per layer": lambda: private(clipping="per_layer", max_grad_norm=[1.0]),
        "reduction": lambda: private(loss=nn.CrossEntropyLoss(reduction="sum")),
        "engine, two_pass": lambda: engine(mode="two_pass"),
        "engine, not Poisson": lambda: engine(poisson_sampling=False),
        "engine, adaptive": lambda: engine(clipping=ADAPTIVE),
    }


#: What four stages run.
BY_FOUR = ("GPipe", "1F1B", "uneven", "not finite")


def main(rank: int) -> Parts:
    def step(name: str, **more: Any) -> Callable[[], Any]:
        return lambda: clipped_step(rank, **STEPS[name] | more)

    if dist.get_world_size() == 4:
        return {f"pipeline, {name}": step(name, micro=4) for name in BY_FOUR}
    return {
        **{f"pipeline, {name}": step(name) for name in STEPS},
        "pipeline cancelling": lambda: cancelling(rank),
        "pipeline noise": lambda: noisy(rank),
        "pipeline engine": lambda: engine_run(rank),
        "pipeline truncated": lambda: engine_run(rank, mechanism=PoissonSampling(2)),
        "pipeline in parts": lambda: engine_run(rank, part=1),
        "pipeline truncated, in parts": lambda: engine_run(
            rank, part=1, mechanism=PoissonSampling(2)
        ),
        "pipeline correlated": lambda: correlated(rank),
        **processes.refusals(refusals(rank), "pipeline refuses"),
    }
