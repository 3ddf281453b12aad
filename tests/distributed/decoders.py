"""A small decoder like Llama, and plans that cut its layers over processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.processes import device

WIDTH, HEAD = 8, 4


class Attention(nn.Module):
    """Heads are as many as this process has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank, as PEFT has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Linear(WIDTH, 2, bias=False)
        self.B = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.B(self.A(x))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 10, bias=False)
        self.down = nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Logits of the next word, ``[B, T, words]``."""

    def __init__(
        self,
        words: int = 12,
        padding: int | None = None,
        layers: int = 1,
        adapted: bool = False,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH, padding_idx=padding)
        self.blocks = nn.ModuleList(Layer() for _ in range(layers))
        for block in self.blocks if adapted else ():
            attention: Any = block.attention
            attention.q, attention.o = Adapted(attention.q), Adapted(attention.o)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def make(dtype: torch.dtype = torch.float64, **options: Any) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(**options).to(dtype)
    with torch.no_grad():  # by the CPU's generator: the same on every device
        for name, param in model.named_parameters():
            if "norm" in name:
                param.add_(torch.rand_like(param))
    return model.to(device())


def batch(samples: int = 4, length: int = 6, words: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, words, (samples, length + 1), generator=generator)
    ids = ids.to(device())
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """The mean over all words; ``"none"``: over each sample's own."""
    if reduction == "none":
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        return losses.mean(1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def cut(model: Any, mesh: Any, kind: str = "layers", tied: bool = False) -> Any:
    """The same model, by ``parallelize_module``.

    ``kind``: ``"layers"``; ``"loss"``: logits stay cut; ``"sequence"``: norm layers see parts of
    the sequence; ``"sequence, loss"``.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole, along = Replicate(), Shard(1) if "sequence" in kind else Replicate()
    adapted = isinstance(model.blocks[0].attention.q, Adapted)
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=along),
        "head": ColwiseParallel(
            input_layouts=along,
            output_layouts=Shard(-1) if "loss" in kind else whole,
            use_local_output="loss" not in kind,
        ),
    }
    for i in range(len(model.blocks)):
        of_layer: dict[str, Any] = {
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=along),
            "feed_forward.gate": ColwiseParallel(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=along),
        }
        if adapted:
            for name, inner in (("attention.q", "B"), ("attention.o", "A")):
                of_layer[f"{name}.base"] = style = of_layer.pop(name)
                of_layer[f"{name}.{inner}"] = style
        if "sequence" in kind:
            inputs: dict[str, Any] = {"input_layouts": (along,), "desired_input_layouts": (whole,)}
            of_layer |= {
                "attention_norm": SequenceParallel(),
                "feed_forward_norm": SequenceParallel(),
                "attention": PrepareModuleInput(**inputs),
                "feed_forward": PrepareModuleInput(**inputs),
            }
        plan |= {f"blocks.{i}.{name}": style for name, style in of_layer.items()}
    if "sequence" in kind:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    if tied:
        model.head.weight = model.embed.weight
    return model


def around_loss(kind: str) -> AbstractContextManager[Any]:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel() if "loss" in kind else nullcontext()
