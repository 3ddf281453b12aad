"""Private language model: bytes of Python's own documentation, a small decoder.

    python examples/language_model.py                  # flash clipping, ε ≤ 8 at δ = 1e-5
    python examples/language_model.py --method ghost   # the same with Opacus' ghost clipping
    python examples/language_model.py --device cuda --precision bf16

The text is `pydoc_data.topics`, which CPython ships (about 470 kB). The unit of privacy is one
chunk of `--chunk-length` bytes. B chunks, T positions, d features, H heads, k features of a head,
f hidden features of the feed-forward layer, V byte values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from training import InMemoryDataset, Report, Task, argument_parser, run

V = 256
HELD_OUT = 0.1  # share of the chunks


class Attention(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, d, bias=False)
        self.value = nn.Linear(d, d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x_BTd: torch.Tensor) -> torch.Tensor:
        q_BHTk, k_BHTk, v_BHTk = (
            project(x_BTd).unflatten(-1, (self.heads, -1)).transpose(1, 2)
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


class Block(nn.Module):
    def __init__(self, d: int, heads: int, f: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(d)
        self.attention = Attention(d, heads)
        self.feed_forward_norm = nn.RMSNorm(d)
        self.feed_forward = SwiGLU(d, f)

    def forward(self, x_BTd: torch.Tensor) -> torch.Tensor:
        x_BTd = x_BTd + self.attention(self.attention_norm(x_BTd))
        return x_BTd + self.feed_forward(self.feed_forward_norm(x_BTd))


class Decoder(nn.Module):
    def __init__(self, d: int, heads: int, f: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(V, d)
        self.blocks = nn.Sequential(*(Block(d, heads, f) for _ in range(layers)))
        self.norm = nn.RMSNorm(d)
        self.head = nn.Linear(d, V, bias=False)

    def forward(self, id_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(id_BT))))


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
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    train, held_out = data(args.chunk_length, args.max_chunks, args.device)

    def bits_per_byte(model: nn.Module) -> float:
        """Mean over all held-out bytes, in pieces so that the logits stay small."""
        total = torch.zeros((), device=args.device)
        chunk_loss = ChunkLoss(reduction="none")
        for x_BT, y_BT in zip(*(t.split(256) for t in held_out.tensors), strict=True):
            total += chunk_loss(model(x_BT), y_BT).sum()
        return total.item() / len(held_out) / math.log(2)

    task = Task(
        name="language_model",
        model=Decoder(args.width, args.heads, f=args.width * 8 // 3, layers=args.layers),
        criterion=ChunkLoss(),
        train=train,
        evaluate=bits_per_byte,
        metric="held-out bits per byte",
        metric_format="{:.3f} bits",
    )
    return run(args, task)


if __name__ == "__main__":
    main()
