"""What is refused of layers that are cut over processes; in every process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed as dist, nn
from torch._dynamo import graph_break

from flash_clipping import Documents, GradSampleModuleFlashClipping
from tests.distributed import decoders
from tests.distributed.decoders import WIDTH, batch, cut, loss_of
from tests.distributed.processes import C, Parts, device, freeze, join_anew, message
from tests.distributed.steps import optimizer_of
from tests.distributed.tensor_steps import meshes
from tests.support.hugging_face import llama


def wrap(model: Any, **options: Any) -> Any:
    return GradSampleModuleFlashClipping(model, max_grad_norm=C, **options)


class Scale(nn.Module):
    """No layer that tensor parallelism is built for."""

    def __init__(self, size: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64, device=device()))

    def forward(self, x: Any) -> Any:
        return x * self.weight


class Summed(torch.autograd.Function):
    """As Megatron ends a pair of layers that are cut: by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return Summed.apply(self.down(F.relu(self.up(x))))


def refusals(rank: int, mesh: Any) -> Parts:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    ids, y = batch()

    def step(model: Any, ids: Tensor = ids, **options: Any) -> Any:
        flash = wrap(model, **options)
        loss_of(flash(ids), y).backward()
        return flash

    def unserved() -> None:
        model: Any = decoders.make()
        model.norm = Scale()
        model = cut(model, mesh)
        wrap(parallelize_module(model, mesh, {"norm": SequenceParallel()}))

    def own_heads() -> None:
        """A layer that was left whole reads what only this process has."""
        model = cut(decoders.make(), mesh)
        model.blocks[0].attention.q = nn.Sequential(
            model.blocks[0].attention.q, Scale(WIDTH // mesh.size())
        )
        step(model)

    def two_layouts() -> None:
        """One norm layer for parts of the sequence, and for all of it."""
        model = cut(decoders.make(), mesh, "sequence")
        norm, head = model.norm, model.head

        def twice(x: Any) -> Any:
            whole = DTensor.from_local(x, mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
            return head(norm(x)) + norm.forward(whole).to_local().mean()

        model.norm = nn.Identity()
        model.head = nn.Module()
        model.head.norm, model.head.head, model.head.forward = norm, head, twice
        step(model)

    def positions() -> None:
        model: Any = decoders.make()
        embed, places = model.embed, nn.Embedding(6, WIDTH, device=device(), dtype=torch.float64)
        model.embed = nn.Module()
        model.embed.words, model.embed.places = embed, places
        model.embed.forward = lambda ids: embed(ids) + places(torch.arange(6, device=ids.device))
        step(
            parallelize_module(
                model, mesh, {"embed.places": RowwiseParallel(input_layouts=Replicate())}
            )
        )

    def functional() -> None:
        """A tied head that reads the table past the layer that owns it."""
        model = cut(decoders.make(), mesh)
        embed = model.embed
        model.head = nn.Module()

        def head(x: Tensor) -> Any:
            y: Any = F.linear(DTensor.from_local(x, mesh, [Replicate()]), embed.weight)
            return y.full_tensor()

        model.head.forward = head
        step(model)

    def of_samples() -> None:
        model = decoders.make()
        plan = {"head": ColwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())}
        parallelize_module(model, mesh, plan | {"norm": SequenceParallel(sequence_dim=0)})
        step(model)

    def a_sum() -> None:
        model = decoders.make()
        weight = DTensor.from_local(model.head.weight.detach(), mesh, [Partial()])
        model.head.weight = nn.Parameter(weight)
        wrap(model)

    def two_meshes() -> None:
        from torch.distributed.device_mesh import init_device_mesh

        model = cut(decoders.make(), mesh)
        square = init_device_mesh(device().type, (mesh.size(), 1), mesh_dim_names=("a", "b"))
        gain = distribute_tensor(model.norm.weight.detach(), square, [Replicate(), Replicate()])
        model.norm.weight = nn.Parameter(gain)
        wrap(model)

    def changed() -> None:
        model = cut(decoders.make(), mesh)
        flash = step(model)
        optimizer = optimizer_of(model, flash, 1.0)
        loss_of(flash(ids), y).backward()
        for param in model.parameters():
            param.grad.mul_(2)
        optimizer.step()

    def by_hand() -> None:
        model = decoders.make()
        model.blocks[0].feed_forward = ByHand().to(device()).double()
        step(model)

    def not_laid_out() -> None:
        model = cut(decoders.make(), mesh)
        weight = distribute_tensor(model.norm.weight.detach(), mesh, [Replicate()])
        model.norm.weight = nn.Parameter(weight)
        step(model)

    def by_transformers(**styles: str) -> None:
        """What a plan of transformers does to layers besides cutting them by rows or columns."""
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        model = llama(num_key_value_heads=2).to(device())
        plan = {"q_proj": "colwise"} | styles
        model.tp_plan = {f"model.layers.*.self_attn.{name}": style for name, style in plan.items()}
        if "norm" in styles:
            for layer in model.model.layers:
                layer.self_attn.norm = nn.LayerNorm(4, device=device())
        wrap(apply_tensor_parallelism(model, mesh))

    def broken() -> None:
        model = cut(decoders.make(), mesh)
        model.blocks[0].feed_forward.register_forward_pre_hook(lambda *_: graph_break())
        model.blocks[0].compile(backend="eager")
        step(model)

    def other_units() -> None:
        """Rows of one unit in this process, and of two in the other."""
        flash = wrap(cut(decoders.make(), mesh), unit=Documents("unit"))
        unit = torch.tensor([0, 1, rank, 1])
        loss_of(flash(ids, unit=unit), y).backward()

    def documents(frozen: tuple[str, ...] = ()) -> None:
        """Norm layers see parts of them."""
        model = freeze(cut(decoders.make(), mesh, "sequence"), frozen)
        flash = wrap(model, unit=Documents("document"), loss_reduction="sum")
        flash(ids, document=torch.zeros_like(ids, device="cpu"))

    return {
        "packed": lambda: by_transformers(o_proj="packed_rowwise"),
        "reduced gradients": lambda: by_transformers(norm="replicated_with_grad_allreduce"),
        "unserved": unserved,
        "own heads": own_heads,
        "two layouts": two_layouts,
        "positions": positions,
        "functional": functional,
        "of samples": of_samples,
        "a sum": a_sum,
        "empty shards": lambda: wrap(cut(decoders.make(words=1), mesh)),
        "two meshes": two_meshes,
        "a DTensor": lambda: step(
            cut(decoders.make(), mesh), distribute_tensor(ids, mesh, [Replicate()])
        ),
        "not laid out": not_laid_out,
        "other samples": lambda: step(cut(decoders.make(), mesh), ids.roll(rank, 0)),
        "changed": changed,
        "by hand": by_hand,
        "graph break": broken,
        "other units": other_units,
        "documents": documents,
        "documents, frozen": lambda: documents(("norm", "blocks.0.attention_norm", "blocks")),
    }


def lost(rank: int, folder: str) -> str:
    """The last of all: process 0 fails in forward and ends. What happens to the others?"""
    join_anew(f"{folder}/lost", rank, timedelta(seconds=10))
    mesh, _ = meshes()
    model = cut(decoders.make(), mesh)
    if rank == 0:
        model.blocks[0].feed_forward.register_forward_pre_hook(lambda *_: 1 / 0)
    flash = wrap(model)
    ids, y = batch()
    return message(lambda: loss_of(flash(ids), y).backward())
