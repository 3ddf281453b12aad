"""Inputs of small models: what each is called with, of a few samples.

No size of an axis is the number of samples unless a model leaves no choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

#: Samples in a batch.
SAMPLES = 3

Inputs: TypeAlias = Callable[[nn.Module], dict[str, Any]]


def ids(model: Any, length: int = 7) -> Tensor:
    """Token ids ``[B, length]``, none of a special one."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or 40
    return torch.randint(6, min(vocabulary, 40), (SAMPLES, length))


def text(length: int = 7, **more: Any) -> Inputs:
    return lambda model: {"input_ids": ids(model, length), **more}


def text_to_text(length: int = 7, target: int = 5) -> Inputs:
    return lambda model: {
        "input_ids": ids(model, length),
        "decoder_input_ids": ids(model, target),
    }


def boxes(length: int = 7) -> Inputs:
    """Where each token stands on a page: left, top, right, bottom."""

    def made(_: nn.Module) -> dict[str, Any]:
        corners = torch.randint(0, 20, (SAMPLES, length, 2, 2)).sort(2).values
        return {"bbox": corners.flatten(2)}

    return made


def ended(length: int = 7) -> Inputs:
    """Token ids whose last one ends the text."""

    def made(model: Any) -> dict[str, Any]:
        given = ids(model, length)
        given[:, -1] = model.config.eos_token_id
        return {"input_ids": given}

    return made


def choices(length: int = 7, of: int = 2) -> Inputs:
    """Several texts of each sample."""
    return lambda model: {
        "input_ids": torch.stack([ids(model, length) for _ in range(of)], 1),
    }


def image(side: int = 32, channels: int = 3, **more: Any) -> Inputs:
    return lambda _: {"pixel_values": torch.randn(SAMPLES, channels, side, side), **more}


def video(frames: int = 4, side: int = 32, name: str = "pixel_values") -> Inputs:
    return lambda _: {name: torch.randn(SAMPLES, frames, 3, side, side)}


def wave(length: int = 1200, name: str = "input_values") -> Inputs:
    return lambda _: {name: torch.randn(SAMPLES, length)}


def image_and_text(side: int = 32, length: int = 7) -> Inputs:
    return lambda model: {**image(side)(model), **text(length)(model)}


def tokens_of_image(token: int, count: int, side: int = 32) -> Inputs:
    """Text with ``count`` places that features of an image will take, and the image."""

    def made(model: nn.Module) -> dict[str, Any]:
        given = ids(model, count + 5)
        given[:, 2 : 2 + count] = token
        return {"input_ids": given, **image(side)(model)}

    return made


def floats(**shapes: tuple[int, ...]) -> Inputs:
    """Random numbers; of each shape, behind the samples."""
    return lambda _: {name: torch.randn(SAMPLES, *shape) for name, shape in shapes.items()}


def together(*parts: Inputs) -> Inputs:
    return lambda model: {name: x for part in parts for name, x in part(model).items()}


def fixed(**given: Any) -> Inputs:
    """What is the same in every call: tensors of all samples, flags."""
    return lambda _: given
