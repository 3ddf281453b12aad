"""Batches of few shapes, so that CUDA graphs that were captured are met again.

Rows that are no samples (copies of the last one) fill a batch up to one of a few sizes; they add
exactly 0 to the clipped sum. Padding on the right fills texts up to one of a few lengths.
No text gets longer than the longest that the collator has made: nobody else knows what fits.

A new shape is captured, which takes as long as several calls. So once it is known that replays are
worth it, a batch is first filled up to a shape that was met, at most half larger. Once this filling
has cost as much as a capture, the batch's own shape is captured.

A draw that is larger than a usual batch is cut: a replay of one more part costs the host little,
and memory is that of a usual batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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

#: What a capture costs, in calls of its shape; and how many times larger than a batch's own the
#: shape may be that it is filled up to until then.
CAPTURE, LARGER = 4.0, 1.5


class Shape(NamedTuple):
    """Of a batch.

    Attributes:
        rows: samples, and rows that fill up.
        widths: of arguments ``[B, T]`` that may be padded, by name.
        others: all that cannot be: names and shapes of rows.
    """

    rows: int
    widths: tuple[tuple[str, int], ...]
    others: tuple[tuple[str, torch.Size], ...]

    @property
    def area(self) -> int:
        """Rows and positions, which time goes with."""
        return self.rows * max(1, sum(width for _, width in self.widths))

    def covers(self, other: Shape) -> bool:
        """Whether ``other`` can be filled up to this shape."""
        if self.others != other.others or len(self.widths) != len(other.widths):
            return False
        pairs = zip(self.widths, other.widths, strict=True)
        return self.rows >= other.rows and all(a[0] == b[0] and a[1] >= b[1] for a, b in pairs)


class FewShapes:
    """Rounds the sizes of batches up, while the model's calls are replayed.

    Args:
        usual: samples of a usual batch. Draws of as many differ by its square root; so batches are
            rounded to a multiple of about half of that.
        enabled: whether batches are rounded.
    """

    def __init__(self, usual: int, enabled: bool):
        self.usual, self.enabled = usual, enabled
        self.step = 1 << max(0, math.floor(math.log2(max(1, usual)) / 2) - 1)
        #: Of each argument ``[B, T]``: the longest T that was met.
        self._widest: dict[str, int] = {}
        #: Shapes that were met; of others, what filling up to those has cost, in calls.
        self._met: set[Shape] = set()
        self._cost: defaultdict[Shape, float] = defaultdict(float)

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
        widths = self._widths(part, tensors)
        limit = max(1, size, most)
        others = tuple((key, x.shape[1:]) for key, x in tensors.items() if key not in widths)
        rows = min(max(1, -(-size // self.step)) * self.step, limit)
        shape = Shape(rows, tuple(widths.items()), others)
        if hooks._graphs.choice.is_made:  # which compares calls of one shape
            shape = self._near(shape, limit)
        self._met.add(shape)
        fills = _paddings(getattr(hooks._module, "config", None))
        wider = dict(tensors)
        for key, width in shape.widths:
            wider[key] = pad(tensors[key], (0, width - tensors[key].shape[1]), value=fills[key])
        if (rows := shape.rows) != size:
            device = next(hooks._module.parameters()).device
            row_R = torch.arange(rows, device=device).clamp_(max=max(0, size - 1))
            wider = {key: x.index_select(0, row_R) for key, x in wider.items()}
        drawn, filled = (sum(x.numel() for x in of.values()) for of in (tensors, wider))
        hooks._graphs.choice.fill = drawn / max(1, filled)
        return type(inputs)({**inputs, **wider}), rows  # as Trainer rebuilds batches

    def _near(self, wanted: Shape, most: int) -> Shape:
        """A shape that was met, of so many rows at most, in place of one that was not."""
        if wanted in self._met:
            return wanted
        larger = [x for x in self._met if x.rows <= most and x.covers(wanted)]
        nearest = min(larger, key=lambda x: x.area, default=wanted)
        more = nearest.area / wanted.area
        self._cost[wanted] += more - 1
        return nearest if more <= LARGER and self._cost[wanted] < CAPTURE else wanted

    def _widths(self, part: Any, tensors: dict[str, Tensor]) -> dict[str, int]:
        """Rounded lengths of the texts, ``[B, T]``, that may be padded on the right.

        Args:
            part: as it was collated, on the host.
        """
        if "attention_mask" not in tensors or not all(map(_is_known, tensors, tensors.values())):
            return {}
        widths = {key: x.shape[1] for key, x in tensors.items() if x.dim() == 2}
        for key, width in widths.items():
            self._widest[key] = max(width, self._widest.get(key, 0))
        rounded: dict[str, int] = {}
        for width in set(widths.values()):
            keys = [key for key in widths if widths[key] == width]
            name = next((key for key in ("attention_mask", "labels") if key in keys), None)
            if name is None or part[name].is_cuda:
                continue
            # On the left padding moves positions, and is what the first token is predicted from.
            if not bool((part[name][:, 0] == _TEXTS[name]).any()):
                most = min(self._widest[key] for key in keys)
                rounded |= dict.fromkeys(keys, min(round_up(width), most))
        return dict(sorted(rounded.items()))


def _paddings(config: Any) -> dict[str, int]:
    """What texts of a model with this configuration are padded with."""
    of_padding = getattr(config, "pad_token_id", None)
    token = of_padding if isinstance(of_padding, int) and of_padding > 0 else 0
    return {key: token if fill is None else fill for key, fill in _TEXTS.items()}


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
