"""Kinds of layers that random models are built from, and how one of each is drawn.

Data flows through a model in one of seven layouts; a *family* is a kind of layer that accepts some
of them.

Shapes leave the batch axis out: ``d`` features, ``T`` positions, ``C`` channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.support.models import Attention, Scale

# -- modules without a rule, and structure --------------------------------------------------------


class Prefix(nn.Module):
    """Class token and positions as bare parameters beside a child; some of it expanded."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.5)
        self.positions = nn.Parameter(torch.randn(1, length + 1, width) * 0.5)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), self.project(x)], dim=1)
        return x + self.positions


class ContiguousConv1D(nn.Module):
    """``transformers``' Conv1D, whose own forward cannot read other strides."""

    def __init__(self, width_out: int, width: int):
        super().__init__()
        self.conv1d = Conv1D(width_out, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv1d(x.contiguous())


class SelfAttention(nn.Module):
    """Calls a multi-head attention that takes query, key and value."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.attention = make()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer reduced to its outputs."""

    def __init__(self, make: Callable[[], nn.Module]):
        super().__init__()
        self.recurrent = make()

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]


class ToSequence(nn.Module):
    """``[B, C, *spatial]`` -> ``[B, T, C]``, a view."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mT


class MeanOverPositions(nn.Module):
    """``[B, ..., d]`` -> ``[B, d]``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1, -2).mean(1)


# -- families -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What flows between steps, without its batch axis.

    ``layout`` is ``vector`` (d), ``sequence`` (T, d), ``grid`` (.., .., d or more), or, channels
    first, ``signal`` (C, L), ``image`` (C, H, W), ``volume`` (C, D, H, W), or ``ids`` (T or none).
    """

    layout: str
    dims: tuple[int, ...]

    @property
    def features(self) -> int:
        return self.dims[0] if self.layout in SPATIAL else self.dims[-1]


#: Layout -> number of spatial axes.
SPATIAL = {"signal": 1, "image": 2, "volume": 3}
FEATURES_LAST = ("vector", "sequence", "grid")
FLOATING = (*FEATURES_LAST, *SPATIAL)
VOCABULARY = 6

#: (draw, shape) -> (how to make the layer, shape of its output)
Drawn = tuple[Callable[[], nn.Module], Shape]


@dataclass(frozen=True)
class Family:
    layouts: tuple[str, ...]
    draw: Callable[[Any, Shape], Drawn]


widths = st.sampled_from([1, 2, 3, 4, 6])


def _width_out(shape: Shape, width: int) -> Shape:
    if shape.layout in SPATIAL:
        return replace(shape, dims=(width, *shape.dims[1:]))
    return replace(shape, dims=(*shape.dims[:-1], width))


def _linear(draw: Any, shape: Shape) -> Drawn:
    width = draw(widths)
    return partial(nn.Linear, shape.features, width, bias=draw(st.booleans())), _width_out(
        shape, width
    )


def _conv1d_transformers(draw: Any, shape: Shape) -> Drawn:
    width = draw(widths)
    return partial(ContiguousConv1D, width, shape.features), _width_out(shape, width)


def _convolution(draw: Any, shape: Shape) -> Drawn:
    n = SPATIAL[shape.layout]
    channels, spatial = shape.dims[0], shape.dims[1:]
    groups = draw(st.sampled_from([g for g in (1, 2, 3) if channels % g == 0]))
    out_channels = groups * draw(st.sampled_from([1, 2]))
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    kernel, stride, dilation, padding = [], [], [], []
    for size in spatial:
        kernel.append(draw(st.integers(1, min(3, size))))
        dilation.append(draw(st.integers(1, 2)))
        stride.append(draw(st.integers(1, 2)))
        span = (kernel[-1] - 1) * dilation[-1] + 1
        least = max(0, math.ceil((span - size) / 2))
        # reflect must leave the edge out, circular may wrap once; least is 1 at most.
        most = {"reflect": size - 1, "circular": size}.get(mode, 2)
        if least > most:
            dilation[-1], least = 1, 0
        padding.append(draw(st.integers(least, min(2, max(least, most)))))
    pad: Any = tuple(padding)
    spans = zip(kernel, dilation, spatial, strict=True)
    wraps_once = all((k - 1) * e <= size for k, e, size in spans)
    if mode != "reflect" and (mode == "zeros" or wraps_once) and draw(st.integers(0, 5)) == 0:
        pad, stride = "same", [1] * n
    out = tuple(
        size if pad == "same" else (size + 2 * p - (k - 1) * e - 1) // s + 1
        for size, p, k, e, s in zip(spatial, padding, kernel, dilation, stride, strict=True)
    )
    make = partial(
        (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1],
        channels,
        out_channels,
        tuple(kernel),
        stride=tuple(stride),
        padding=pad,
        dilation=tuple(dilation),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    return make, replace(shape, dims=(out_channels, *out))


def _layer_norm(draw: Any, shape: Shape) -> Drawn:
    axes = draw(st.integers(1, len(shape.dims)))
    affine, bias = draw(st.sampled_from([(True, True), (True, True), (True, False)]))
    return partial(
        nn.LayerNorm, shape.dims[-axes:], elementwise_affine=affine, bias=bias, eps=1e-3
    ), shape


def _rms_norm(draw: Any, shape: Shape) -> Drawn:
    axes = draw(st.integers(1, min(2, len(shape.dims))))
    return partial(nn.RMSNorm, shape.dims[-axes:], eps=draw(st.sampled_from([1e-3, 1e-2]))), shape


def _group_norm(draw: Any, shape: Shape) -> Drawn:
    channels = shape.dims[0]
    groups = draw(st.sampled_from([g for g in (1, 2, 3) if channels % g == 0]))
    return partial(nn.GroupNorm, groups, channels, eps=1e-3), shape


def _instance_norm(draw: Any, shape: Shape) -> Drawn:
    kind = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[SPATIAL[shape.layout] - 1]
    return partial(kind, shape.dims[0], affine=True, eps=1e-3), shape


def _scale(draw: Any, shape: Shape) -> Drawn:
    return partial(Scale, shape.dims[-1]), shape


def _prefix(draw: Any, shape: Shape) -> Drawn:
    T, width = shape.dims
    return partial(Prefix, T, width), replace(shape, dims=(T + 1, width))


def _heads(draw: Any, width: int) -> int:
    return draw(st.sampled_from([h for h in (1, 2, 3) if width % h == 0]))


def _attention(draw: Any, shape: Shape) -> Drawn:
    return partial(Attention, shape.dims[-1], _heads(draw, shape.dims[-1])), shape


def _multihead(kind: type[nn.Module], draw: Any, shape: Shape) -> Drawn:
    width = shape.dims[-1]
    make = partial(
        kind,
        width,
        _heads(draw, width),
        bias=draw(st.booleans()),
        add_bias_kv=draw(st.booleans()),
        add_zero_attn=draw(st.booleans()),
        batch_first=True,
    )
    return partial(SelfAttention, make), shape


def _recurrent(kind: type[nn.Module], draw: Any, shape: Shape) -> Drawn:
    hidden, both = draw(st.integers(1, 3)), draw(st.booleans())
    make = partial(
        kind,
        shape.dims[-1],
        hidden,
        num_layers=draw(st.integers(1, 2)),
        bias=draw(st.booleans()),
        bidirectional=both,
        batch_first=True,
    )
    return partial(Recurrent, make), _width_out(shape, hidden * (1 + both))


def _embedding(draw: Any, shape: Shape) -> Drawn:
    width = draw(widths)
    make = partial(
        nn.Embedding, VOCABULARY, width, padding_idx=draw(st.sampled_from([None, None, 0, 3]))
    )
    layout = "sequence" if shape.dims else "vector"
    return make, Shape(layout, (*shape.dims, width))


def _embedding_bag(draw: Any, shape: Shape) -> Drawn:
    width = draw(widths)
    make = partial(
        nn.EmbeddingBag,
        VOCABULARY,
        width,
        mode=draw(st.sampled_from(["sum", "mean"])),
        padding_idx=draw(st.sampled_from([None, 0])),
    )
    return make, Shape("vector", (width,))


FAMILIES: dict[str, Family] = {
    "linear": Family(FEATURES_LAST, _linear),
    "transformers_conv1d": Family(FEATURES_LAST, _conv1d_transformers),
    "convolution": Family(tuple(SPATIAL), _convolution),
    "layer_norm": Family(FLOATING, _layer_norm),
    "rms_norm": Family(FLOATING, _rms_norm),
    "group_norm": Family(tuple(SPATIAL), _group_norm),
    "scale": Family(FLOATING, _scale),
    "prefix": Family(("sequence",), _prefix),
    "attention": Family(("sequence",), _attention),
    "embedding": Family(("ids",), _embedding),
    "embedding_bag": Family(("ids",), _embedding_bag),
    "instance_norm": Family(tuple(SPATIAL), _instance_norm),
    "multihead_attention": Family(("sequence",), partial(_multihead, nn.MultiheadAttention)),
    "dp_multihead_attention": Family(("sequence",), partial(_multihead, DPMultiheadAttention)),
    "dp_rnn": Family(("sequence",), partial(_recurrent, DPRNN)),
    "dp_gru": Family(("sequence",), partial(_recurrent, DPGRU)),
    "dp_lstm": Family(("sequence",), partial(_recurrent, DPLSTM)),
}

#: Families that treat all axes but the last alike, and so run with time first.
POINTWISE = ("linear", "transformers_conv1d", "layer_norm", "rms_norm", "embedding")
