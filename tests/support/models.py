"""Small models that between them use every rule, with a batch and a loss per sample for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping.layers import HyperConnections
from tests.support.oracle import LossPerSample


def squared_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Half the squared outputs, weighted so that no gradient is constant; ``[B]``."""
    output = model(*batch)
    weight = torch.linspace(0.5, 1.5, output.shape[1:].numel(), device=output.device)
    return (output.flatten(1).square() * weight.to(output.dtype)).sum(1) / 2


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: LossPerSample = squared_loss


class Wrapped(nn.Module):
    """A layer between two nonlinearities, so that its input requires grad and is not its own."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layers(x))


class TransposedBlock(nn.Module):
    def __init__(self, bias: bool = True):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.first = Conv1D(6, 5)
        self.second = Conv1D(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Connected(nn.Module):
    """Three streams around a linear layer; their parameters nowhere near where they begin."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.hc, self.layer = HyperConnections(width, 3, iterations=3), nn.Linear(width, width)
        for param in self.hc.parameters():
            nn.init.normal_(param, std=0.7)

    def forward(self, x: Tensor) -> Tensor:
        streams = torch.stack([x, x.roll(1, -1), x.tanh()], dim=2)
        h, post, comb = self.hc(streams)
        return self.hc.combine(streams, self.layer(h), post, comb)


class Scale(nn.Module):
    """A module with a bare parameter and no rule."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


class Gain(nn.Module):
    """A module without a rule."""

    def __init__(self, width: int):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Tokens(nn.Module):
    """Class token and position embedding as bare parameters beside children."""

    def __init__(self, width: int = 6, length: int = 4):
        super().__init__()
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.5)
        self.positions = nn.Parameter(torch.randn(1, length + 1, width) * 0.5)
        self.embed = nn.Linear(3, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        x = self.norm(torch.tanh(x))
        return self.head(x.mean(1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        y = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, 2)
        self.norm2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.scale = Scale(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.scale(self.down(F.silu(self.gate(y)) * self.up(y)))


class Mixed(nn.Module):
    """Every rule in one model: tokens and an image in, a few numbers out."""

    def __init__(self, width: int = 8, vocab: int = 11, checkpointing: str = "none"):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        self.conv = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.group = nn.GroupNorm(2, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor, image: Tensor) -> Tensor:
        patches = self.group(F.relu(self.conv(image), inplace=True)).flatten(2).mT
        x = torch.cat([patches, self.embed(ids)], dim=1)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.norm(x))


def floats(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def ids(*shape: int, vocab: int = 11) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, vocab, shape),)


def mixed_batch(size: int = 5) -> tuple[Tensor, ...]:
    return torch.randint(0, 11, (size, 7)), torch.randn(size, 3, 6, 6)


class Bags(nn.Module):
    """Embedding bags of fixed length, with a head."""

    def __init__(self, mode: str):
        super().__init__()
        self.bag = nn.EmbeddingBag(11, 6, mode=mode, padding_idx=2)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bag(ids)))


class TorchAttention(nn.Module):
    """``nn.MultiheadAttention`` as it is, between tapped layers."""

    def __init__(self, cross: bool = False, **options: Any):
        super().__init__()
        self.cross = cross
        self.first = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.cross:
            other = torch.tanh(x[:, :3])
            return self.attention(x, other, other * 2, need_weights=False)[0]
        output, weights = self.attention(x, x, x)
        return torch.cat([output.flatten(1), weights.flatten(1)], dim=1)


class OpacusAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = DPMultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class OpacusRecurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any):
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True, **options)
        self.head = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def materialized(model: nn.Module, batch: Tensor) -> nn.Module:
    with torch.no_grad():
        model(batch)
    return model


CASES: dict[str, Case] = {
    "linear_2d": Case(lambda: Wrapped(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), floats(5, 4)),
    "linear_3d": Case(
        lambda: Wrapped(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)), floats(5, 7, 4)
    ),
    "linear_5d": Case(
        lambda: Wrapped(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), floats(3, 2, 3, 2, 4)
    ),
    "transposed_linear": Case(TransposedBlock, floats(4, 7, 5)),
    "embedding": Case(
        lambda: nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 3)), ids(5, 9)
    ),
    "embedding_padding": Case(
        lambda: nn.Sequential(nn.Embedding(11, 6, padding_idx=3), nn.Linear(6, 3)), ids(5, 9)
    ),
    "embedding_flat": Case(
        lambda: nn.Sequential(nn.Embedding(11, 6), nn.Tanh(), nn.Linear(6, 3)), ids(5)
    ),
    "layer_norm": Case(
        lambda: Wrapped(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)), floats(5, 7, 4)
    ),
    "layer_norm_2d": Case(
        lambda: Wrapped(nn.LayerNorm((3, 4)), nn.Linear(4, 2), nn.LayerNorm(2, bias=False)),
        floats(5, 6, 3, 4),
    ),
    "layer_norm_plain": Case(
        lambda: Wrapped(nn.Linear(4, 6), nn.LayerNorm(6, elementwise_affine=False)),
        floats(5, 7, 4),
    ),
    "rms_norm": Case(
        lambda: Wrapped(nn.Linear(4, 6), nn.RMSNorm(6), nn.Linear(6, 3), nn.RMSNorm(3, eps=1e-3)),
        floats(5, 7, 4),
    ),
    "group_norm": Case(
        lambda: Wrapped(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.Tanh(), nn.Conv2d(6, 2, 1)),
        floats(4, 2, 5, 6),
    ),
    "group_norm_2d": Case(
        lambda: Wrapped(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)), floats(5, 4)
    ),
    "conv1d": Case(
        lambda: Wrapped(nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2), nn.Conv1d(4, 2, 2)),
        floats(4, 3, 11),
    ),
    "conv2d_groups": Case(
        lambda: Wrapped(
            nn.Conv2d(4, 8, (3, 2), stride=(1, 2), padding=(1, 0), groups=2),
            nn.Tanh(),
            nn.Conv2d(8, 8, 3, groups=8, bias=False),
        ),
        floats(3, 4, 6, 7),
    ),
    "conv2d_same": Case(
        lambda: Wrapped(
            nn.Conv2d(3, 4, (2, 4), padding="same", dilation=(1, 2)), nn.Conv2d(4, 2, 1)
        ),
        floats(3, 3, 6, 7),
    ),
    "conv2d_reflect": Case(
        lambda: Wrapped(
            nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="reflect"),
            nn.Tanh(),
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", stride=2),
            nn.Conv2d(4, 2, 3, padding=1, padding_mode="replicate"),
        ),
        floats(3, 3, 6, 7),
    ),
    "conv3d": Case(
        lambda: Wrapped(
            nn.Conv3d(2, 4, (1, 2, 3), padding=(0, 1, 1)), nn.Tanh(), nn.Conv3d(4, 2, 2)
        ),
        floats(3, 2, 3, 4, 5),
    ),
    "generic": Case(lambda: Wrapped(nn.Linear(4, 6), Scale(6), nn.Linear(6, 3)), floats(5, 7, 4)),
    "hyper_connections": Case(Connected, floats(5, 7, 4)),
    "parameter_proxies": Case(Tokens, floats(5, 4, 3)),
    "instance_norm1d": Case(
        lambda: Wrapped(
            nn.Conv1d(2, 4, 3, bias=False), nn.InstanceNorm1d(4, affine=True), nn.Conv1d(4, 2, 1)
        ),
        floats(4, 2, 7),
    ),
    "instance_norm3d": Case(
        lambda: Wrapped(
            nn.Conv3d(2, 4, 1, bias=False), nn.InstanceNorm3d(4, affine=True), nn.Conv3d(4, 2, 1)
        ),
        floats(3, 2, 3, 4, 2),
    ),
    "embedding_bag_sum": Case(lambda: Bags("sum"), ids(5, 6)),
    "embedding_bag_mean": Case(lambda: Bags("mean"), ids(5, 6)),
    "torch_attention": Case(TorchAttention, floats(4, 6, 8)),
    "torch_attention_cross": Case(lambda: TorchAttention(cross=True), floats(4, 6, 8)),
    "torch_attention_options": Case(
        lambda: TorchAttention(add_bias_kv=True, add_zero_attn=True), floats(4, 6, 8)
    ),
    "torch_attention_sizes": Case(
        lambda: TorchAttention(cross=True, kdim=8, vdim=8, bias=False), floats(4, 6, 8)
    ),
    "opacus_attention": Case(OpacusAttention, floats(4, 6, 8)),
    "opacus_rnn": Case(
        lambda: materialized(OpacusRecurrent(DPRNN), torch.randn(1, 1, 4)), floats(3, 5, 4)
    ),
    "opacus_gru": Case(
        lambda: materialized(OpacusRecurrent(DPGRU, num_layers=2), torch.randn(1, 1, 4)),
        floats(3, 5, 4),
    ),
    "opacus_lstm": Case(
        lambda: materialized(OpacusRecurrent(DPLSTM, bidirectional=True), torch.randn(1, 1, 4)),
        floats(3, 5, 4),
    ),
    "attention": Case(lambda: Attention(8, 2), floats(4, 6, 8)),
    "mixed": Case(Mixed, mixed_batch),
}
