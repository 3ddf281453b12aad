"""Hugging Face models as they are, with the sizes of models that people use and random weights.

Shapes are written as suffixes: B samples, T positions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workload import Workload, draw_images, draw_tokens


class Logits(nn.Module):
    """A Hugging Face model as a map from its one input to logits; a decoder reads the input, too,
    where there is one beside an encoder."""

    def __init__(self, model: nn.Module, cls: str) -> None:
        super().__init__()
        self.model = model
        self.argument = "pixel_values" if "Image" in cls else "input_ids"
        self.seq2seq = "ConditionalGeneration" in cls
        self.options = {} if "Classification" in cls else {"use_cache": False}

    def forward(self, x: Tensor) -> Tensor:
        given = {self.argument: x} | ({"decoder_input_ids": x} if self.seq2seq else {})
        return self.model(**given, **self.options).logits


def transformer(
    name: str,
    *,
    cls: str,
    config: dict[str, Any],
    batch: int,
    seq: int,
    layers: int | None = None,
    checkpointing: bool = False,
) -> Workload:
    """A language model of this class of ``transformers``, trained on the next token, or a
    classifier of sequences into two classes."""
    draw = draw_labelled if "Classification" in cls else draw_tokens
    drawn = functools.partial(draw, batch=batch, seq=seq, vocab=config["vocab_size"])
    build = functools.partial(_build, cls, of_depth(config, layers), checkpointing)
    return Workload(name, build, drawn, batch=batch, positions=seq)


def image_classifier(
    name: str,
    *,
    cls: str,
    config: dict[str, Any],
    batch: int,
    positions: int = 1,
    size: int = 224,
    layers: int | None = None,
) -> Workload:
    """GroupNorm takes the place of BatchNorm, which mixes samples."""
    draw = functools.partial(draw_images, batch=batch, size=size, classes=config["num_labels"])
    build = functools.partial(_build, cls, of_depth(config, layers))
    return Workload(name, build, draw, batch=batch, positions=positions)


def of_depth(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """With so many layers, where they are a number."""
    if layers is None:
        return config
    named = [name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in config]
    if not named:
        raise TypeError("this model has stages, no number of layers")
    return config | {named[0]: layers}


def _build(cls: str, config: dict[str, Any], checkpointing: bool = False) -> nn.Module:
    import transformers

    from benchmarks.survey.modes import with_group_norm

    kind = getattr(transformers, cls)
    model = with_group_norm(kind(kind.config_class(**config)))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Logits(model, cls)


def draw_labelled(
    generator: torch.Generator, *, batch: int, seq: int, vocab: int
) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, vocab, (batch, seq), generator=generator)  # no padding
    return ids, torch.randint(2, (batch,), generator=generator)
