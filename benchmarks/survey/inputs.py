"""Inputs of small models, as ``kinds.yaml`` names them: what each is called with, of a few samples.

No size of an axis is the number of samples unless a model leaves no choice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: Samples in a batch.
SAMPLES = 3

Inputs: TypeAlias = Callable[[Any], dict[str, Any]]


def ids(model: Any, length: int = 7) -> Tensor:
    """Token ids ``[B, length]``, none of a special one."""
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None) or 40
    return torch.randint(6, min(vocabulary, 40), (SAMPLES, length))


def together(*parts: Inputs) -> Inputs:
    return lambda model: {name: x for part in parts for name, x in part(model).items()}


def fixed(**given: Any) -> Inputs:
    """What is the same for all samples: flags."""
    return lambda _: given


# -- texts -----------------------------------------------------------------------------------------


def text(length: int = 7) -> Inputs:
    return lambda model: {"input_ids": ids(model, length)}


def decoder_ids(length: int = 5) -> Inputs:
    return lambda model: {"decoder_input_ids": ids(model, length)}


def text_to_text(length: int = 7) -> Inputs:
    return together(text(length), decoder_ids())


def ended(name: str = "input_ids", length: int = 7) -> Inputs:
    """Token ids whose last one ends the text."""

    def made(model: Any) -> dict[str, Any]:
        given = ids(model, length)
        given[:, -1] = model.config.eos_token_id
        return {name: given}

    return made


def choices(length: int = 7, of: int = 2) -> Inputs:
    """Several texts of each sample."""
    return lambda model: {"input_ids": torch.stack([ids(model, length) for _ in range(of)], 1)}


def two_texts(length: int = 7) -> Inputs:
    """Two texts of each sample, as rows of one batch."""
    return lambda model: {"input_ids": ids(model, length).repeat_interleave(2, 0)}


def codes(length: int = 7) -> Inputs:
    """Two code books of each sample, as rows of one batch."""
    return lambda _: {"input_ids": torch.randint(0, 40, (SAMPLES * 2, length))}


def boxes(length: int = 7) -> Inputs:
    """Where each token stands on a page: left, top, right, bottom."""

    def made(_: Any) -> dict[str, Any]:
        corners = torch.randint(0, 20, (SAMPLES, length, 2, 2)).sort(2).values
        return {"bbox": corners.flatten(2)}

    return made


# -- images, sound, numbers ------------------------------------------------------------------------


def image(side: int = 32, channels: int = 3, name: str = "pixel_values") -> Inputs:
    return lambda _: {name: torch.randn(SAMPLES, channels, side, side)}


def video(frames: int = 4, side: int = 32, name: str = "pixel_values") -> Inputs:
    return lambda _: {name: torch.randn(SAMPLES, frames, 3, side, side)}


def wave(length: int = 1200) -> Inputs:
    return lambda _: {"input_values": torch.randn(SAMPLES, length)}


def image_and_text(side: int = 32, length: int = 7) -> Inputs:
    return together(image(side), text(length))


def tokens_of_image(token: int, count: int, side: int = 32) -> Inputs:
    """Text with ``count`` places that features of an image will take, and the image."""

    def made(model: Any) -> dict[str, Any]:
        given = ids(model, count + 5)
        given[:, 2 : 2 + count] = token
        return {"input_ids": given, **image(side)(model)}

    return made


def patches(side: int = 4) -> Inputs:
    """Images as Qwen2-VL reads them: the patches of all samples as rows."""

    def made(model: Any) -> dict[str, Any]:
        vision = model.config.vision_config
        size = vision.patch_size**2 * vision.temporal_patch_size * 3
        count = side * side
        merged = count // vision.spatial_merge_size**2
        given = ids(model, merged + 5)
        given[:, 2 : 2 + merged] = model.config.image_token_id
        return {
            "input_ids": given,
            "mm_token_type_ids": (given == model.config.image_token_id).long(),
            "pixel_values": torch.randn(SAMPLES * count, size),
            "image_grid_thw": torch.tensor([[1, side, side]] * SAMPLES),
        }

    return made


def _made(make: Callable[..., Tensor]) -> Callable[..., Inputs]:
    """Of shapes by the names of arguments, behind the samples."""
    return lambda **shapes: lambda _: {name: make(SAMPLES, *shapes[name]) for name in shapes}


#: Normal numbers, numbers between 0 and 1, and ones; zeros are whole numbers.
floats, uniform, ones = map(_made, (torch.randn, torch.rand, torch.ones))
zeros = _made(partial(torch.zeros, dtype=torch.long))


def counted(**lengths: int) -> Inputs:
    """0, 1, 2 and so on, alike for each sample."""
    return lambda _: {name: torch.arange(n).repeat(SAMPLES, 1) for name, n in lengths.items()}
