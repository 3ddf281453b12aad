"""Images without an axis for the samples: the patches of all of them are the rows of one tensor.

Models of ``transformers`` that read images of any size (Qwen2-VL and many others) take them so,
with a grid that says how many patches each image has. Whose they are follows from the text: of
every m² patches the model's tower makes one row, and the rows take the places of the image tokens
of all samples in turn.

N patches, M = N / m² rows that the tower returns, I images or videos, B samples, T positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping.capture.around import FINDERS
from flash_clipping.capture.declared_rows import DeclaredRows, declared, register_parts
from flash_clipping.capture.factor_source import owned_parameters
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.ops.runtime.checks import check_on_device

#: Arguments with patches ``[N, d]`` and with grids ``[I, 3]``, and the token's configuration.
_INPUTS = (
    ("pixel_values", "image_grid_thw", "image_token_id"),
    ("pixel_values_videos", "video_grid_thw", "video_token_id"),
)


@dataclass(frozen=True)
class Patches:
    """The patches of one argument, the sample of each, and of each row and image."""

    pixels: Tensor
    grids: Tensor
    rows: DeclaredRows
    sample_I: Tensor


def _takes(module: nn.Module, *names: str) -> bool:
    return _arguments(getattr(type(module), "forward", None)).issuperset(names)


@lru_cache(maxsize=1024)
def _arguments(forward: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(forward).parameters)
    except (TypeError, ValueError):  # it is not written in Python
        return frozenset()


def _tower_of(module: nn.Module) -> nn.Module | None:
    """The module that makes rows of patches, of one that puts them in the places of tokens."""
    if not _takes(module, "image_grid_thw", "input_ids") or not hasattr(module, "config"):
        return None
    towers = [child for child in module.children() if _takes(child, "grid_thw")]
    fits = len(towers) == 1 and isinstance(getattr(towers[0], "spatial_merge_size", None), int)
    if not fits or owned_parameters(module) or owned_parameters(towers[0]):
        return None
    return towers[0]


class _Tower(Tap):
    patches: tuple[Patches, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        grids = kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]
        patches = () if is_dynamo_compiling() else self.patches
        rows = next((found.rows for found in patches if found.grids is grids), None)
        with nullcontext() if rows is None else declared(rows):
            return self.original(*args, **kwargs)


class _Model(Tap):
    tower: _Tower

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and torch.is_grad_enabled():
            self.tower.patches = _patches(self.layer, self.tower.layer, kwargs)
        try:
            return self.original(*args, **kwargs)
        finally:
            self.tower.patches = ()


def taps_of_patches(root: nn.Module, session: ClippingSession) -> Iterator[Tap]:
    """Around such modules and their towers."""
    paths = {module: path for path, module in root.named_modules()}
    for module, path in paths.items():
        if (layer := _tower_of(module)) is not None:
            tap = _Model(module, path, None, session)
            tap.tower = _Tower(layer, paths[layer], None, session)
            yield from (tap, tap.tower)


def parts_of_samples(root: nn.Module, kwargs: Mapping[str, Any]) -> dict[int, Tensor]:
    """The sample of each row of inputs that have no axis for samples, by the input's id."""
    parts: dict[int, Tensor] = {}
    for module in root.modules():
        if (tower := _tower_of(module)) is not None:
            for found in _patches(module, tower, kwargs):
                parts |= {id(found.pixels): found.rows.index_M, id(found.grids): found.sample_I}
    return parts


def _patches(module: Any, tower: Any, given: Mapping[str, Any]) -> tuple[Patches, ...]:
    """The patches among a call's arguments.

    Raises:
        FlashClippingError: an image takes the places of tokens of several samples; of a
            GPU later, without waiting for it.
    """
    found = []
    ids_BT: Any = given.get("input_ids")
    for pixels_name, grids_name, token_name in _INPUTS:
        pixels: Any = given.get(pixels_name)
        grids: Any = given.get(grids_name)
        token = getattr(module.config, token_name, None)
        if not all(isinstance(x, Tensor) for x in (ids_BT, pixels, grids)) or token is None:
            continue
        merged = tower.spatial_merge_size**2
        M, rest = divmod(len(pixels), merged)
        if pixels.dim() != 2 or rest or not M or not len(grids) or not len(ids_BT):
            continue
        ends_B = (ids_BT == token).sum(1).cumsum(0)
        places = torch.arange(M, device=ids_BT.device)
        # Of rows beyond the last token the model says that they are too many.
        sample_M = torch.searchsorted(ends_B, places, right=True).clamp(max=len(ids_BT) - 1)
        sizes_I = grids.prod(1).to(ids_BT.device) // merged
        ends_I = sizes_I.cumsum(0)
        sample_I = sample_M[(ends_I - sizes_I).clamp(max=M - 1)]
        is_whole_I = sample_M[(ends_I - 1).clamp(max=M - 1)] == sample_I
        check_on_device(
            is_whole_I.all() | (ends_B[-1] != M),  # else the model says that tokens do not fit
            f"FC209 {pixels_name}: found an image that takes the places of tokens of several "
            f"samples of input_ids; expected as many {token_name} in each sample as its images in "
            f"{grids_name} have rows.",
        )
        rows = DeclaredRows(sample_M, len(ids_BT))
        rows = DeclaredRows(sample_M.repeat_interleave(merged), rows.count, rows)
        found.append(Patches(pixels, grids, rows, sample_I))
    return tuple(found)


FINDERS.append(taps_of_patches)
register_parts(parts_of_samples)
