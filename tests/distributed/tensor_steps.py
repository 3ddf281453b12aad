"""What runs in every process of a model whose layers are cut: steps, training, noise, refusals."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset

from flash_clipping import Documents, GradSampleModuleFlashClipping
from flash_clipping.distributed.parameter_slots import local_of
from flash_clipping.distributed.tensor_parallel import TensorParallelBackwardPass
from flash_clipping.factors import LinearGrad
from tests.distributed import decoders, processes, steps
from tests.distributed.decoders import around_loss, batch, cut, loss_of
from tests.distributed.processes import (
    C,
    all_of,
    device,
    error,
    errors_of_sums,
    expected_sums,
    freeze,
    remembered,
    with_a_row,
)
from tests.support import packed
from tests.support.oracle import Truth, per_sample_truth
from tests.support.sums import norm_of


def meshes(data: int = 1) -> tuple[Any, Any]:
    """The tensor mesh of this process, and its data mesh, if there are several parts of a batch."""
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    if data == 1:
        return init_device_mesh(device().type, (world,), mesh_dim_names=("tp",)), None
    mesh = init_device_mesh(device().type, (data, world // data), mesh_dim_names=("dp", "tp"))
    return mesh["tp"], mesh["dp"]


def sharded(
    model: Any,
    tensor: Any,
    data: Any,
    kind: str = "layers",
    tied: bool = False,
    how: str = "blocks",
) -> Any:
    cut(model, tensor, kind, tied)
    return model if data is None else processes.sharded(model, how, mesh=data)


#: Of the decoders' batch.
SAMPLES = 4


def truth_of(model: Any, ids: Tensor, y: Tensor) -> Truth:
    return per_sample_truth(model, (ids, y), lambda m, b: loss_of(m(b[0]), b[1], "none"))


def clipped_step(
    tensor: Any,
    data: Any = None,
    cuts: tuple[int, ...] = (0, 4),
    *,
    kind: str = "layers",
    net: dict[str, Any] | None = None,
    length: int = 6,
    tied: bool = False,
    how: str = "blocks",
    frozen: tuple[str, ...] = (),
    micro: int = 1,
    times: int = 1,
    dtype: torch.dtype = torch.float64,
    of_row: tuple[int, ...] = (),
    compiled: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Norms and sums of some steps, beside those of every sample by itself in float64; ``of_row``:
    the unit of every row, where units are samples; ``compiled``: the backend for every block, or
    for the "whole" model."""
    net = {"dtype": dtype} | (net or {})
    plain: Any = decoders.make(**net | {"checkpointed": False}).double()
    if tied:
        plain.head.weight = plain.embed.weight
    freeze(plain, frozen)
    model = freeze(sharded(decoders.make(**net), tensor, data, kind, tied, how), frozen)
    if options.get("clipping") == "per_layer":
        trained = [p for p in model.parameters() if p.requires_grad]
        options["max_grad_norm"] = [C / 4 + C / 40 * i for i in range(len(trained))]
    options |= {"unit": Documents("unit")} if of_row else {}
    if compiled:
        torch.compiler.reset()
        counters.clear()
        name, whole = compiled.removeprefix("whole, "), compiled.startswith("whole")
        for module in (model,) if whole else model.blocks:
            module.compile(backend=name, fullgraph=not whole)
    flash = GradSampleModuleFlashClipping(model, **{"max_grad_norm": C} | options)
    words = net.get("words", 12)
    ids, y = batch(cuts[-1], length, words)
    truth = remembered(truth_of, plain, ids, y)
    if of_row:
        truth = truth.of_units(torch.tensor(of_row, device=truth.norms.device))
    clipped = expected_sums(truth, options)
    place = 0 if data is None else data.get_local_rank()
    mine = slice(cuts[place], cuts[place + 1])
    if data is None and mine.start == mine.stop:  # nobody has samples
        clipped = {name: torch.zeros_like(total) for name, total in clipped.items()}
    wrapped: Any = flash
    errors = []
    for _ in range(times):
        flash.zero_grad(set_to_none=True)
        for part in range(micro):
            some = slice(mine.start + part, mine.stop, micro)
            units = {"unit": torch.tensor(of_row[some]).unique(return_inverse=True)[1]}
            rows, labels = with_a_row(flash, ids[some], y[some])
            units["unit"] = units["unit"] if len(ids[some]) else torch.zeros(1, dtype=torch.long)
            with around_loss(kind):
                loss_of(flash(rows, **units if of_row else {}), labels).backward()
        expected = truth.norms[mine.start + micro - 1 : mine.stop : micro]
        if of_row:
            expected = truth.norms[sorted({*of_row[mine]})]
        norms = flash.get_norm_sample()
        if of_row and norms.is_cuda:  # fully_shard put the map on the GPU, where nobody looks how
            assert not norms[len(expected) :].any()  # many units it has: rows, at most
            norms = norms[: len(expected)]
        errors.append(error(norms, expected))
        errors += errors_of_sums(model, clipped)
    coefs = flash.get_clipping_coef()
    others = [torch.empty_like(coefs) for _ in range(tensor.size())]
    dist.all_gather(others, coefs, group=tensor.get_group())
    return {
        "error": max(errors),
        "alike": all(torch.equal(coefs, other) for other in others),
        "settled": wrapped._sharded.together._settled_with == flash._trainable.count,
        "graphs": counters["stats"]["unique_graphs"] if compiled else 0,
    }


def beside_same_operands(tensor: Any, kind: str) -> dict[str, float]:
    """bf16: norms and sums beside those that float64 finds of what layers have recorded.

    Per-sample gradients of shards are put together here from the factors of all processes. Some are
    stored, and rounded to bf16 by that: then it is these that are to be measured and released.
    """
    model = cut(decoders.make(torch.bfloat16), tensor, kind)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    session = flash._session
    own: dict[int, Tensor] = {}

    class Noted(TensorParallelBackwardPass):
        def record(self, path: str, params: Any, factors: Any, readers: Any = None) -> None:
            for param, factor in zip(params, factors, strict=True):
                stored = factor.dense().double() if type(factor) is LinearGrad else None
                exact = in_float64(factor).dense()
                both = torch.stack([exact, exact if stored is None else stored])
                own[id(param)] = both * factor.batch_size  # the loss is a mean
            super().record(path, params, factors, readers)

    assert isinstance(session.calls.backward_pass_class, partial)
    session.calls.backward_pass_class = partial(Noted, **session.calls.backward_pass_class.keywords)
    ids, y = batch()
    loss_of(flash(ids), y).backward()
    grads = {}
    errors = []
    for name, param in model.named_parameters():
        shards: list[Any] = [None] * tensor.size()
        dist.all_gather_object(shards, own[id(param)].cpu(), group=tensor.get_group())
        shards = [shard.to(device()) for shard in shards]
        placement = getattr(param, "placements", (None,))[0]
        if placement is not None and placement.is_shard():
            both = torch.cat(shards, placement.dim + 2)
        elif "sequence" in kind and "norm" in name:  # each has its own positions
            both = sum(shards)
        else:
            both = shards[0]
        found = norm_of(flash, param)
        as_measured = [error(found, grads_B.flatten(1).norm(dim=1)) for grads_B in both]
        errors.append(min(as_measured))
        grads[name] = both[as_measured.index(min(as_measured))].view(len(ids), *param.shape)
        assert param.grad is not None and param.grad.dtype == torch.float32
    norms = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
    coef = (C / (norms + 1e-6)).clamp(max=1)
    sums = {name: torch.einsum("b,b...->...", coef, g) for name, g in grads.items()}
    of_sums = [error(all_of(p.grad), sums[name]) for name, p in model.named_parameters()]
    errors.append(error(flash.get_norm_sample(), norms))
    return {"norms": max(errors), "sums": max(of_sums)}


def in_float64(factor: Any) -> Any:
    """A factor of the same operands."""
    wide = copy.copy(factor)
    for name, value in vars(factor).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            setattr(wide, name, value.double())
    return wide


def cut_reader(tensor: Any, data: Any, model: Any) -> Any:
    """A model for packed documents, of which tables and layers are cut."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    of_whole = RowwiseParallel(input_layouts=Replicate())
    plan: dict[str, Any] = dict.fromkeys(("table", "places", "out"), of_whole)
    plan |= {"between.0": ColwiseParallel(), "between.2": RowwiseParallel()}
    plan |= {"head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, tensor, plan)
    return model if data is None else processes.sharded(model, "leaves", mesh=data)


def documents(tensor: Any, data: Any = None, **options: Any) -> dict[str, Any]:
    """Documents packed into rows, which all processes of a tensor mesh read."""
    place, parts = (0, 1) if data is None else (data.get_local_rank(), data.size())
    prepare = partial(cut_reader, tensor, data)
    return steps.documents_in_rows(place, parts, prepare, **options)


def lost_document(tensor: Any) -> dict[str, Any]:
    """Sums where a document is not finite in one process's columns, and in no other layer that is
    trained, beside those of the others."""
    every = packed.documents((3, 5, 1, 4, 2))
    word = int(every[3][0])
    every = [torch.where(d == word, (d + 1) % packed.VOCABULARY, d) for d in every[:3]] + every[3:4]
    models = [
        freeze(steps.reader(), ("table", "places", "norm", "scale", "qkv", "out")) for _ in range(2)
    ]
    with torch.no_grad():
        for model in models:  # a product of the two alone is infinite
            model.table.weight[word], model.between[0].weight[-1] = 1e100, 1e250
    truth = packed.truth_of(models[0].cpu(), [[*enumerate(every[:3])]])
    model = cut_reader(tensor, None, models[1])
    flash = GradSampleModuleFlashClipping(
        model, max_grad_norm=C, loss_reduction="sum", unit=Documents("document")
    )
    row = [part.to(device()) for part in packed.packed([[*enumerate(every)]])]
    flash.expect_samples(4)
    packed.losses(flash(*row)).sum().backward()
    errors = [error(flash.get_norm_sample()[:3], truth.norms)]
    errors += errors_of_sums(model, truth.clipped(C))
    return {"error": max(errors), "coefs": flash.get_clipping_coef()}


def poisoned(tensor: Any) -> dict[str, Any]:
    """Sums where a word of the first sample is infinite, beside those of the other samples."""
    plain = decoders.make()
    model = cut(decoders.make(), tensor)
    ids, y = batch()
    ids[ids == 11], ids[0, 2] = 0, 11
    clipped = truth_of(plain, ids[1:], y[1:]).clipped(C)
    with torch.no_grad():
        if tensor.get_local_rank():
            local_of(model.embed.weight)[-1] = torch.inf
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    loss_of(flash(ids), y).backward()
    return {
        "error": max(errors_of_sums(model, clipped)),
        "coefs": flash.get_clipping_coef(),
    }


def trained(tensor: Any, data: Any = None) -> float:
    """Training of all processes differs from that of one with the whole batch by ..."""

    def end(model: Any, ids: Tensor, y: Tensor) -> dict[str, Tensor]:
        return steps.end_of_training(model, lambda m: loss_of(m(ids), y), SAMPLES)

    ids, y = batch()
    mine = slice(None) if data is None else slice(*((0, 3), (3, 4))[data.get_local_rank()])
    found = end(sharded(decoders.make(), tensor, data, "sequence"), ids[mine], y[mine])
    alone = end(decoders.make(), ids, y)
    return max(error(found[name], alone[name]) for name in alone)


def noisy(tensor: Any, data: Any = None) -> dict[str, Any]:
    """Noise of one step in units of its standard deviation, by parameter; blocks of it drawn."""
    torch.manual_seed(0)  # all processes alike: that must not matter
    model = sharded(decoders.make(), tensor, data)
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=C)
    optimizer = steps.optimizer_of(model, flash, 5.0, SAMPLES)
    ids, y = batch()
    named = dict(model.named_parameters())
    noise, drawn = steps.noise_of(
        optimizer, named, lambda: loss_of(flash(ids), y).backward(), SAMPLES
    )
    places = [
        None
        if not hasattr(p, "placements")
        else tuple(not placement.is_replicate() for placement in p.placements)
        for p in named.values()
    ]
    return {
        "noise": noise,
        "cut": dict(zip(named, places, strict=True)),
        "drawn": drawn,
        "own": steps.blocks_of(noise),
    }


class Rows(TensorDataset):
    """The batch three times over, with the number of every sample."""

    def __init__(self) -> None:
        ids, y = (x.cpu() for x in batch())
        super().__init__(ids.repeat(3, 1), y.repeat(3, 1), torch.arange(12))


def engine_run(tensor: Any, data: Any = None, **options: Any) -> dict[str, Any]:
    """One epoch by Poisson batches; processes are seeded differently."""
    torch.manual_seed(dist.get_rank())
    model = sharded(decoders.make(), tensor, data)
    return steps.epoch(model, Rows(), steps.by_loss(loss_of), **options)


def replayed(drawn: list[list[int]]) -> dict[str, Tensor]:
    """What one process would end with, sample by sample, of these batches."""
    ids, y, _ = Rows().tensors
    model = decoders.make()
    steps.descend(model, drawn, lambda index: truth_of(model, ids[index], y[index]))
    return {name: param.detach() for name, param in model.named_parameters()}
