"""The models that the benchmarks know by the names of ``models.yaml``, written to be read.

Shapes are written as suffixes: B samples, T positions, D model width, V vocabulary.

Our own models are free of buffers and of layers that mix samples, so that every method can run
them.
``flash-clipping bench`` measures a model of your own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import convolutional, huggingface
from benchmarks.ops import experts
from benchmarks.workload import Workload, draw_images, draw_tokens

# -- a Llama-like decoder --------------------------------------------------------------------------


class Attention(nn.Module):
    """Causal self-attention: three projections of one input, SDPA, one projection back."""

    def __init__(self, width: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, width, bias=bias)
        self.value = nn.Linear(width, width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        def split(y_BTD: Tensor) -> Tensor:
            return y_BTD.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            split(self.query(x_BTD)),
            split(self.key(x_BTD)),
            split(self.value(x_BTD)),
            is_causal=True,
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, width: int, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class LanguageModel(nn.Module):
    """Token ids ``[B, T]`` to logits ``[B, T, V]``; embedding and head are not tied.

    Without ``learned_positions`` it has no position encoding at all: causal attention needs none
    to run, and rotary embeddings would slow only the non-private part of the step.
    """

    def __init__(
        self,
        blocks: list[Block],
        *,
        width: int,
        vocab: int,
        learned_positions: int = 0,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(learned_positions, width) if learned_positions else None
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.checkpointing = checkpointing

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(ids_BT)
        if self.positions is not None:
            # One row per sample: every method wants to find the samples in the first dimension.
            index_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
            index_BT = index_T.expand_as(ids_BT).contiguous()
            x_BTD = x_BTD + self.positions(index_BT)
        for block in self.blocks:
            if self.checkpointing:
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
            else:
                x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def decoder(
    name: str,
    *,
    layers: int,
    width: int,
    hidden: int,
    vocab: int,
    batch: int,
    seq: int,
    head: int = 128,
    checkpointing: bool = False,
    lora: int = 0,
    experts: int = 0,
    like: str = "llama",
) -> Workload:
    """Like Llama: LayerNorm, SDPA attention, SwiGLU, no biases in linear layers, untied head; or
    like GPT-2: learned positions, GELU, biases everywhere but in the head.

    ``experts``: so many SwiGLUs in every block, of which each token goes to two.
    """
    gpt2 = like == "gpt2"

    def feed_forward() -> nn.Module:
        if not experts:
            parts = nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width)
            return nn.Sequential(*parts) if gpt2 else SwiGLU(width, hidden)
        from flash_clipping.layers import MixtureOfExperts, RoutedExperts, TopKRouter

        router = TopKRouter(width, experts, k=2)
        return RoutedExperts(router, MixtureOfExperts(width, hidden, experts))

    def build() -> nn.Module:
        blocks = [
            Block(width, Attention(width, width // head, bias=gpt2), feed_forward())
            for _ in range(layers)
        ]
        positions = seq if gpt2 else 0
        return LanguageModel(
            blocks,
            width=width,
            vocab=vocab,
            learned_positions=positions,
            checkpointing=checkpointing,
        )

    draw = functools.partial(draw_tokens, batch=batch, seq=seq, vocab=vocab)
    return Workload(name, build, draw, batch=batch, positions=seq, lora=lora)


def linears(name: str, *, layers: int, width: int, batch: int, seq: int) -> Workload:
    """Linear layers of one width with a ReLU after each."""

    def build() -> nn.Module:
        pairs = [[nn.Linear(width, width), nn.ReLU()] for _ in range(layers)]
        return nn.Sequential(*[module for pair in pairs for module in pair])

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(batch, seq, width, generator=generator)
        return inputs, torch.randint(width, (batch, seq), generator=generator)

    return Workload(name, build, draw, batch=batch, positions=seq)


# -- a convolutional network -----------------------------------------------------------------------


def cnn(name: str, *, batch: int, width: int, layers: int, size: int = 32) -> Workload:
    """3×3 convolutions with GroupNorm, every one but the first halving the image."""

    def build() -> nn.Module:
        parts: list[nn.Module] = []
        channels = 3
        for layer in range(layers):
            grown = width * 2**layer
            stride = 1 if layer == 0 else 2
            parts += [
                nn.Conv2d(channels, grown, 3, stride=stride, padding=1),
                nn.GroupNorm(8, grown),
                nn.ReLU(),
            ]
            channels = grown
        return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))

    draw = functools.partial(draw_images, batch=batch, size=size, classes=10)
    return Workload(name, build, draw, batch=batch)


# -- low-rank adapters -----------------------------------------------------------------------------


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Freeze ``model``, and put adapters of this rank on every ``nn.Linear`` in it. No factor is
    zero, so that both have gradients."""
    import peft

    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    config = peft.LoraConfig(r=rank, target_modules=linears, init_lora_weights=False)
    return peft.inject_adapter_in_model(config, model)


# -- names -----------------------------------------------------------------------------------------

_MAKERS: dict[str, Callable[..., Workload]] = {
    maker.__name__: maker
    for maker in (
        *(decoder, linears, cnn, convolutional.wide_resnet, convolutional.unet),
        *(huggingface.transformer, huggingface.image_classifier, experts.layer),
    )
}
_LIST = Path(__file__).with_name("models.yaml")
_ROWS: dict[str, dict[str, Any]] = {
    name: row
    for name, row in yaml.safe_load(_LIST.read_text(encoding="utf-8")).items()
    if not name.startswith(".")
}
NAMES: tuple[str, ...] = tuple(_ROWS)


def workload(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    layers: int | None = None,
    checkpointing: bool = False,
    lora: int | None = None,
) -> Workload:
    """The named workload, with what was asked for changed.

    Raises:
        ValueError: an unknown name, or an override that this model does not have.
    """
    given = dict(batch=batch, seq=seq, layers=layers, checkpointing=checkpointing or None)
    overrides: dict[str, Any] = {key: x for key, x in given.items() if x is not None}
    if name not in _ROWS:
        raise ValueError(f"unknown model {name!r}: give one of {', '.join(NAMES)}")
    defaults = {"name": name, **_ROWS[name]}
    factory = _MAKERS[defaults.pop("make")]
    try:
        found = factory(**(defaults | overrides))
    except TypeError as error:
        raise ValueError(f"model {name!r} does not take all of {overrides}: {error}") from error
    return found if lora is None else replace(found, lora=lora)
