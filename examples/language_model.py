"""Private language model: bytes of Python's own documentation, a small decoder.

    python examples/language_model.py                  # flash clipping, ε ≤ 8 at δ = 1e-5
    python examples/language_model.py --method ghost   # the same with Opacus' ghost clipping
    python examples/language_model.py --device cuda --precision bf16
    python examples/language_model.py --ffn moe --router product-key --residual mhc --lora 16

The last has the layers of current language models: experts with LoRA on a frozen base, a
product-key router, and hyper-connections in place of one residual stream. All of it is private.
In examples/, `flash-clipping check language_model:subject` compares it with one sample at a time.

In shards, and with --resume in another number of processes, if you like:

    torchrun --nproc-per-node 2 examples/language_model.py --shard fsdp2
    torchrun --nproc-per-node 2 examples/language_model.py --shard tp     # parts of layers

The text is `pydoc_data.topics`, which CPython ships (about 470 kB). The unit of privacy is one
chunk of `--chunk-length` bytes. B chunks, T positions, d features, H heads, k features of a head,
f hidden features of the feed-forward layer, V byte values.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import sharding
import torch
import torch.nn.functional as F
from torch import distributed as dist, nn
from training import InMemoryDataset, Report, Task, argument_parser, run

from flash_clipping.layers import (
    HyperConnections,
    MixtureOfExperts,
    ProductKeyRouter,
    RoutedExperts,
    TopKRouter,
)

V = 256
HELD_OUT = 0.1  # share of the chunks


class Attention(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.k = d // heads
        self.query = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, d, bias=False)
        self.value = nn.Linear(d, d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x_BTd: torch.Tensor) -> torch.Tensor:
        q_BHTk, k_BHTk, v_BHTk = (
            project(x_BTd).unflatten(-1, (-1, self.k)).transpose(1, 2)  # the heads of this process
            for project in (self.query, self.key, self.value)
        )
        y_BHTk = F.scaled_dot_product_attention(
            rotate(q_BHTk), rotate(k_BHTk), v_BHTk, is_causal=True
        )
        return self.out(y_BHTk.transpose(1, 2).flatten(-2))


def rotate(x_BHTk: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: turns feature pairs by an angle that grows with the position."""
    T, k = x_BHTk.shape[-2:]
    position_T = torch.arange(T, device=x_BHTk.device, dtype=torch.float32)
    frequency_k = 1000.0 ** -torch.linspace(0, 1, k // 2, device=x_BHTk.device)
    angle_Tk = torch.outer(position_T, frequency_k)
    cos_Tk, sin_Tk = angle_Tk.cos().to(x_BHTk.dtype), angle_Tk.sin().to(x_BHTk.dtype)
    a_BHTk, b_BHTk = x_BHTk.chunk(2, dim=-1)
    return torch.cat((a_BHTk * cos_Tk - b_BHTk * sin_Tk, a_BHTk * sin_Tk + b_BHTk * cos_Tk), dim=-1)


class SwiGLU(nn.Module):
    def __init__(self, d: int, f: int):
        super().__init__()
        self.gate = nn.Linear(d, f, bias=False)
        self.up = nn.Linear(d, f, bias=False)
        self.down = nn.Linear(f, d, bias=False)

    def forward(self, x_BTd: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_BTd)) * self.up(x_BTd))


class ProductKeys(nn.Module):
    """A product-key router as `RoutedExperts` takes one: experts, and weights (not logarithms)."""

    def __init__(self, d: int, experts: int, k: int):
        super().__init__()
        self.router = ProductKeyRouter(d, experts, k)

    def forward(self, x_BTd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        score_BTk, expert_BTk = self.router(x_BTd)
        return expert_BTk, score_BTk.exp()


@dataclass(frozen=True)
class Layout:
    """What blocks are made of.

    Attributes:
        d, heads: features, and heads of attention.
        ffn: "swiglu", or "moe" for experts.
        router: of experts: "softmax" or "product-key".
        residual: "plain", or "mhc" for hyper-connections.
        lora: rank of LoRA on experts, which are then frozen; 0 trains the experts.
    """

    d: int = 64
    heads: int = 4
    ffn: str = "swiglu"
    router: str = "softmax"
    residual: str = "plain"
    lora: int = 0
    experts: int = 16
    k: int = 4
    streams: int = 4

    @property
    def f(self) -> int:
        return self.d * 8 // 3

    def feed_forward(self) -> nn.Module:
        if self.ffn == "swiglu":
            return SwiGLU(self.d, self.f)
        make_router = ProductKeys if self.router == "product-key" else TopKRouter
        router = make_router(self.d, self.experts, self.k)
        return RoutedExperts(
            router, MixtureOfExperts(self.d, self.f // 2, self.experts, rank=self.lora)
        )


class Residual(nn.Module):
    """A sublayer behind a normalization, and what becomes of its output."""

    def __init__(self, layout: Layout, sublayer: nn.Module):
        super().__init__()
        self.norm, self.sublayer = nn.RMSNorm(layout.d), sublayer
        self.connections: HyperConnections | None = None
        if layout.residual == "mhc":
            self.connections = HyperConnections(layout.d, layout.streams)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[B, T, d]`, or with hyper-connections `[B, T, streams, d]`."""
        if self.connections is None:
            return x + self.sublayer(self.norm(x))
        h_BTd, post, comb = self.connections(x)
        return self.connections.combine(x, self.sublayer(self.norm(h_BTd)), post, comb)


class Decoder(nn.Module):
    def __init__(self, layout: Layout, layers: int):
        super().__init__()
        self.layout = layout
        self.embedding = nn.Embedding(V, layout.d)
        self.blocks = blocks(layout, layers)
        self.norm = nn.RMSNorm(layout.d)
        self.head = nn.Linear(layout.d, V, bias=False)

    def forward(self, id_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(through(self.blocks, self.embedding(id_BT), self.layout)))


def blocks(layout: Layout, layers: int) -> nn.Sequential:
    """Attention and feed-forward in turn."""
    sublayers: list[nn.Module] = []
    for _ in range(layers):
        sublayers.append(Residual(layout, Attention(layout.d, layout.heads)))
        sublayers.append(Residual(layout, layout.feed_forward()))
    return nn.Sequential(*sublayers)


def through(blocks: nn.Module, x_BTd: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What blocks make of this; with hyper-connections, in as many streams, which are added up."""
    if layout.residual != "mhc":
        return blocks(x_BTd)
    return blocks(x_BTd.unsqueeze(2).expand(-1, -1, layout.streams, -1)).sum(2)


def cuts_of(model: Decoder) -> dict[str, str]:
    """How `--shard tp` cuts layers: attention by heads, SwiGLU by hidden features, table and head
    by byte values. Routers, experts, connections and norm layers stay whole."""
    how = {"embedding": "words", "head": "outputs, gathered"}
    for path, module in model.named_modules():
        if isinstance(module, Attention):
            how |= {f"{path}.{name}": "outputs" for name in ("query", "key", "value")}
            how[f"{path}.out"] = "inputs"
        elif isinstance(module, SwiGLU):
            how |= {f"{path}.gate": "outputs", f"{path}.up": "outputs", f"{path}.down": "inputs"}
    return how


class ChunkLoss(nn.Module):
    """Cross-entropy (nats per byte) of a chunk; `reduction` is over the chunks of the batch."""

    def __init__(self, reduction: str = "mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, logits_BTV: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        loss_BT = F.cross_entropy(logits_BTV.transpose(1, 2).float(), target_BT, reduction="none")
        loss_B = loss_BT.mean(dim=1)
        return loss_B if self.reduction == "none" else loss_B.mean()


def data(
    chunk_length: int, max_chunks: int | None, device: str
) -> tuple[InMemoryDataset, InMemoryDataset]:
    """Training and held-out chunks; a chunk's input is its bytes shifted by one, zero first."""
    text = "\n".join(f"{name}\n{body}" for name, body in sorted(topics.items())).encode()
    usable = len(text) - len(text) % chunk_length
    target_BT = torch.tensor(list(text[:usable]), device=device).view(-1, chunk_length)
    input_BT = F.pad(target_BT[:, :-1], (1, 0))
    order_B = torch.randperm(len(target_BT), generator=torch.Generator().manual_seed(0))
    order_B = order_B[:max_chunks].to(device)
    held_out_B, train_B = order_B.tensor_split([round(HELD_OUT * len(order_B))])
    return (
        InMemoryDataset(input_BT[train_B], target_BT[train_B]),
        InMemoryDataset(input_BT[held_out_B], target_BT[held_out_B]),
    )


def layout_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Layout:
    if args.ffn != "moe" and (args.lora or args.router != "softmax"):
        parser.error("--lora and --router are of experts: add --ffn moe.")
    if args.router == "product-key" and math.isqrt(args.experts) ** 2 != args.experts:
        parser.error(f"--router product-key needs a square of --experts, found {args.experts}.")
    return Layout(
        d=args.width,
        heads=args.heads,
        ffn=args.ffn,
        router=args.router,
        residual=args.residual,
        lora=args.lora,
        experts=args.experts,
        k=args.choices,
    )


def refuse_uneven(
    parser: argparse.ArgumentParser, args: argparse.Namespace, layout: Layout
) -> None:
    """Every process needs as many heads, and as many hidden features, as the others."""
    processes = dist.get_world_size()
    for name, size in (("heads", args.heads), ("hidden features", layout.f)):
        if size % processes:
            parser.error(
                f"--shard tp: {size} {name} cannot be shared by {processes} processes. Choose "
                "another --nproc-per-node, --heads or --width."
            )


#: Experts with LoRA, product keys and hyper-connections.
CURRENT = Layout(ffn="moe", router="product-key", residual="mhc", lora=16)


def subject() -> tuple[nn.Module, torch.Tensor]:
    """A model of the current layers and a batch, for `flash-clipping check`."""
    torch.manual_seed(0)
    model = Decoder(CURRENT, layers=1)
    for name, param in model.named_parameters():
        if name.endswith("_B"):  # of LoRA: at first 0, and then A has no gradient
            nn.init.normal_(param, std=0.1)
    train, _ = data(chunk_length=24, max_chunks=8, device="cpu")
    return model, train.tensors[0][:5]


def main(argv: Sequence[str] | None = None) -> Report:
    parser = argument_parser(
        "Train a byte-level language model on Python's documentation, privately.",
        epochs=12,
        batch_size=330,
        lr=0.01,
        epsilon=8,
    )
    parser.add_argument("--chunk-length", type=int, default=64, help="bytes (%(default)s)")
    parser.add_argument("--max-chunks", type=int, help="use only so many, for a quick try")
    parser.add_argument("--width", type=int, default=64, help="features d (%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="(%(default)s)")
    add = parser.add_argument
    add("--ffn", choices=("swiglu", "moe"), default="swiglu", help="(%(default)s)")
    add("--router", choices=("softmax", "product-key"), default="softmax", help="of experts")
    add("--residual", choices=("plain", "mhc"), default="plain", help="(%(default)s)")
    add("--lora", type=int, default=0, metavar="R", help="freeze experts, train LoRA of rank R")
    add("--experts", type=int, default=16, help="(%(default)s)")
    add("--choices", type=int, default=4, help="experts of a byte (%(default)s)")
    add(
        "--shard", choices=("none", "fsdp2", "tp"), default="none", help="over torchrun's processes"
    )
    args = parser.parse_args(argv)
    layout = layout_of(parser, args)
    if args.shard != "none":
        sharding.start(args.device)
    if args.shard == "tp":
        refuse_uneven(parser, args, layout)
    torch.manual_seed(args.seed)
    train, held_out = data(args.chunk_length, args.max_chunks, args.device)

    def bits_per_byte(model: nn.Module) -> float:
        """Mean over all held-out bytes, in pieces so that the logits stay small."""
        total = torch.zeros((), device=args.device)
        chunk_loss = ChunkLoss(reduction="none")
        for x_BT, y_BT in zip(*(t.split(256) for t in held_out.tensors), strict=True):
            total += chunk_loss(model(x_BT), y_BT).sum()
        return total.item() / len(held_out) / math.log(2)

    model = Decoder(layout, layers=args.layers)
    task = Task(
        name="language_model",
        model=model,
        criterion=ChunkLoss(),
        train=train,
        evaluate=bits_per_byte,
        metric="held-out bits per byte",
        metric_format="{:.3f} bits",
        blocks=list(model.blocks),
        cuts=cuts_of(model),
    )
    return run(args, task)


if __name__ == "__main__":
    main()
