"""Batches of few shapes, so that CUDA graphs that were captured are met again.

Rows that are no samples (copies of the last one) fill a batch up to one of a few sizes; they add
exactly 0 to the clipped sum. Padding fills texts up to one of a few lengths, as the collator's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

#: What texts are padded with, by the argument of the model: ``None`` is the token for padding.
_TEXTS: dict[str, int | None] = {
    "input_ids": None,
    "decoder_input_ids": None,
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "token_type_ids": 0,
    "labels": -100,
}


#: How a configuration of ``transformers`` says how long texts may be.
_LONGEST = ("max_position_embeddings", "n_positions", "max_encoder_position_embeddings")


class FewShapes:
    """Rounds the sizes of batches up, while the model's calls are replayed.

    Args:
        usual: samples of a usual batch. Draws of as many differ by its square root; so batches are
            rounded to a multiple of about that.
        enabled: whether batches are rounded.
    """

    def __init__(self, usual: int, enabled: bool):
        self.enabled = enabled
        self.step = 1 << max(0, math.floor(math.log2(max(1, usual)) / 2))

    def rounded(
        self, part: Any, size: int, hooks: Any, prepare: Callable[[Any], Any]
    ) -> tuple[Any, int | None]:
        """A part of a batch as the model takes it, and how many rows it has with those that fill
        it up; ``None``: it was left as it is.

        Args:
            part: of so many samples, as it was collated.
            hooks: those of the model.
            prepare: moves a part to the device.
        """
        graphs = hooks._graphs if self.enabled else None
        inputs = prepare(part)
        if graphs is None or not _may_be_filled(inputs, size, hooks):
            return inputs, None
        tensors = {key: x for key, x in inputs.items() if isinstance(x, Tensor)}
        wider = _wider(part, tensors, getattr(hooks._module, "config", None))
        rows = max(1, -(-size // self.step)) * self.step
        if rows != size:
            device = next(iter(wider.values())).device
            row_R = torch.arange(rows, device=device).clamp_(max=max(0, size - 1))
            wider = {key: x.index_select(0, row_R) for key, x in wider.items()}
        count, most = (sum(x.numel() for x in held.values()) for held in (tensors, wider))
        graphs.choice.fill = count / most
        return type(inputs)({**inputs, **wider}), rows  # as Trainer rebuilds batches


def _may_be_filled(inputs: Any, size: int, hooks: Any) -> bool:
    """Whether each tensor has a row for each sample, and nothing but the sum depends on rows."""
    if not isinstance(inputs, Mapping) or hooks.running_step.counts_unclipped:
        return False
    if hooks._session.rows.units_of_calls.are_known:
        return False
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    return (
        bool(tensors)
        and all(isinstance(x, Tensor | int | float | None) for x in inputs.values())
        and all(x.shape[:1] == (max(1, size),) for x in tensors)
        and hooks._graphs.may_replay(tensors[0].device)
    )


def _wider(part: Any, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Texts, ``[B, T]``, of a rounded length, padded on the side that the collator pads; other
    batches as they are.

    Args:
        part: as it was collated, on the host.
    """
    limits = [limit for name in _LONGEST if isinstance(limit := getattr(config, name, None), int)]
    known = all(key in _TEXTS or x.dim() < 2 for key, x in tensors.items())
    if not known or "attention_mask" not in tensors:
        return tensors
    of_padding = getattr(config, "pad_token_id", None)
    fills = {key: (of_padding or 0) if fill is None else fill for key, fill in _TEXTS.items()}
    widths = {key: x.shape[1] for key, x in tensors.items() if x.dim() == 2}
    made = dict(tensors)
    for width in set(widths.values()):
        keys = [key for key in widths if widths[key] == width]
        more = round_up(width) - width
        shown = next((part[key] for key in ("attention_mask", "labels") if key in keys), None)
        # Positions of some models begin at 2.
        too_long = width + more > min(limits, default=width + more + 2) - 2
        if not more or too_long or shown is None or shown.is_cuda:
            continue
        fill = fills["attention_mask" if "attention_mask" in keys else "labels"]
        on_left = bool((shown[:, 0] == fill).any())
        for key in keys:
            sides = (more, 0) if on_left else (0, more)
            made[key] = pad(tensors[key], sides, value=fills[key])
    return made


def round_up(width: int) -> int:
    """The next of the lengths that texts are padded to: four for each power of two."""
    step = max(8, 1 << max(0, (width - 1).bit_length() - 3))
    return -(-width // step) * step
