"""Batches of few shapes, so that CUDA graphs that were captured are met again.

Rows that are no samples (copies of the last one) fill a batch up to one of a few sizes; they add
exactly 0 to the clipped sum. Padding on the right fills texts up to one of a few lengths.
No text gets longer than the longest that the collator has made: nobody else knows what fits.

A draw that is larger than a usual batch is cut: a replay of one more part costs the host little,
and memory is that of a usual batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_clipping.engine.micro_batches import Parts

#: What texts are padded with, by the argument of the model: ``None`` is the token for padding.
_TEXTS: dict[str, int | None] = {
    "input_ids": None,
    "decoder_input_ids": None,
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "token_type_ids": 0,
    "labels": -100,
}


class FewShapes:
    """Rounds the sizes of batches up, while the model's calls are replayed.

    Args:
        usual: samples of a usual batch. Draws of as many differ by its square root; so batches are
            rounded to a multiple of about that.
        enabled: whether batches are rounded.
    """

    def __init__(self, usual: int, enabled: bool):
        self.usual, self.enabled = usual, enabled
        self.step = 1 << max(0, math.floor(math.log2(max(1, usual)) / 2))
        #: Of each argument ``[B, T]``: the longest T that was met.
        self._widest: dict[str, int] = {}

    def cut(self, batch: Parts, hooks: Any) -> None:
        """Cut parts that are larger than a usual batch, where the model's calls are replayed."""
        for place in reversed(range(len(batch.parts))):
            part, size = batch.parts[place], batch.sizes[place]
            if size > self.usual and self._fills(part, size, hooks):
                batch.split(place, self.usual, self.step)

    def _fills(self, part: Any, size: int, hooks: Any) -> bool:
        """Whether calls are replayed, and it is known which rows of a part are samples."""
        graphs, device = hooks._graphs, next(hooks._module.parameters()).device
        replays = graphs is not None and graphs.may_replay(device)
        # A table that has as many rows by chance must not be filled: other parts tell it.
        self.enabled = self.enabled and _has_rows(part, size)
        return self.enabled and replays and not hooks.running_step.counts_unclipped

    def rounded(
        self, part: Any, size: int, most: int, hooks: Any, prepare: Callable[[Any], Any]
    ) -> tuple[Any, int | None]:
        """A part of a batch as the model takes it, and how many rows it has with those that fill
        it up; ``None``: it was left as it is.

        Args:
            part: of so many samples, as it was collated.
            most: rows that it may have.
            hooks: those of the model.
            prepare: moves a part to the device.
        """
        inputs = prepare(part)
        if not self._fills(inputs, size, hooks):
            return inputs, None
        tensors = {key: x for key, x in inputs.items() if isinstance(x, Tensor)}
        wider = self._wider(part, tensors, getattr(hooks._module, "config", None))
        rows = min(max(1, -(-size // self.step)) * self.step, max(1, size, most))
        if rows != size:
            device = next(hooks._module.parameters()).device
            row_R = torch.arange(rows, device=device).clamp_(max=max(0, size - 1))
            wider = {key: x.index_select(0, row_R) for key, x in wider.items()}
        drawn, filled = (sum(x.numel() for x in of.values()) for of in (tensors, wider))
        hooks._graphs.choice.fill = drawn / max(1, filled)
        return type(inputs)({**inputs, **wider}), rows  # as Trainer rebuilds batches

    def _wider(self, part: Any, tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Texts, ``[B, T]``, of a rounded length, padded on the right; other batches as they are.

        Args:
            part: as it was collated, on the host.
        """
        if "attention_mask" not in tensors or not all(map(_is_known, tensors, tensors.values())):
            return tensors
        of_padding = getattr(config, "pad_token_id", None)
        token = of_padding if isinstance(of_padding, int) and of_padding > 0 else 0
        fills = {key: token if fill is None else fill for key, fill in _TEXTS.items()}
        widths = {key: x.shape[1] for key, x in tensors.items() if x.dim() == 2}
        for key, width in widths.items():
            self._widest[key] = max(width, self._widest.get(key, 0))
        made = dict(tensors)
        for width in set(widths.values()):
            keys = [key for key in widths if widths[key] == width]
            more = min(round_up(width), *[self._widest[key] for key in keys]) - width
            name = next((key for key in ("attention_mask", "labels") if key in keys), None)
            if not more or name is None or part[name].is_cuda:
                continue
            # On the left padding moves positions, and is what the first token is predicted from.
            if not bool((part[name][:, 0] == fills[name]).any()):
                made |= {key: pad(tensors[key], (0, more), value=fills[key]) for key in keys}
        return made


def _has_rows(inputs: Any, size: int) -> bool:
    """Whether each tensor has a row for each sample, and all else is plain."""
    if not isinstance(inputs, Mapping):
        return False
    tensors = [x for x in inputs.values() if isinstance(x, Tensor)]
    is_known = all(isinstance(x, Tensor | int | float | None) for x in inputs.values())
    return bool(tensors) and is_known and all(x.shape[:1] == (max(1, size),) for x in tensors)


def _is_known(key: str, x: Tensor) -> bool:
    """Whether it is known how to pad this argument, or it has no positions."""
    is_text = key in _TEXTS and not (key == "labels" and x.is_floating_point())
    return x.dim() < 2 or (is_text and x.dim() == 2)


def round_up(width: int) -> int:
    """The next of the lengths that texts are padded to: four for each power of two."""
    step = max(8, 1 << max(0, (width - 1).bit_length() - 3))
    return -(-width // step) * step
