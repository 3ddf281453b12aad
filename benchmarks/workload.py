"""A model and the data to train it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        name: what the result is filed under.
        build: makes the model, in float32 on torch's default device.
        draw: makes one batch ``(inputs, targets)`` on the CPU. The model maps ``inputs`` to
            logits ``[B, classes]`` or ``[B, T, classes]``; targets are ``[B]`` or ``[B, T]``.
        batch: samples in a batch.
        positions: tokens in a sample (1 for images).
        lora: rank of the adapters on every linear layer, the rest being frozen; 0 for none.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    batch: int
    positions: int = 1
    lora: int = 0


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over samples of the mean over positions: the loss every method trains on."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def draw_tokens(
    generator: torch.Generator, *, batch: int, seq: int, vocab: int
) -> tuple[Tensor, Tensor]:
    """Random ids and, as targets, the id that follows."""
    ids = torch.randint(vocab, (batch, seq + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def draw_images(
    generator: torch.Generator, *, batch: int, size: int, classes: int
) -> tuple[Tensor, Tensor]:
    images = torch.randn(batch, 3, size, size, generator=generator)
    return images, torch.randint(classes, (batch,), generator=generator)
