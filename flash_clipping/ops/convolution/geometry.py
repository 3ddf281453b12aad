"""Geometry of a convolution, as kernels and references need it beside the operands.

B samples, O output channels, C input channels of one group, K offsets of the kernel, T output
positions.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_clipping.errors import InvalidValue


class Geometry(NamedTuple):
    """A convolution over one, two or three axes; padding is zeros, on both sides alike.

    Attributes:
        kernel: sizes of the weight's window.
        stride, padding, dilation: along the same axes.
        groups: of channels that do not see each other.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def offsets(self) -> int:
        """Elements of the window, K."""
        return math.prod(self.kernel)

    def settings(self) -> tuple[object, ...]:
        """Arguments of PyTorch's own functions after the operands: strides to groups."""
        no_output_padding = [0] * len(self.kernel)
        return self.stride, self.padding, self.dilation, False, no_output_padding, self.groups

    def is_depthwise(self, x: Tensor) -> bool:
        """Whether every output channel sees one channel of ``x``."""
        return x.shape[1] == self.groups

    def weight_shape(self, x: Tensor, G: Tensor) -> tuple[int, ...]:
        """``(O, C, *kernel)`` of a layer with input ``x`` and output gradient ``G``."""
        return G.shape[1], x.shape[1] // self.groups, *self.kernel

    def in_order_of_weight(self, grads_BON: Tensor) -> Tensor:
        """A view ``[B, O, C, *kernel]`` of elements in the order ``(k, c)``, as kernels leave them:
        for each sample it lies as a weight in ``channels_last`` does."""
        B, O, N = grads_BON.shape  # noqa: E741
        grads = grads_BON.view(B, O, *self.kernel, N // max(1, self.offsets))
        return grads.movedim(-1, 2)

    def out_sizes(self, shape: torch.Size) -> tuple[int, ...]:
        """Sizes of the output along the window's axes, for an input of this shape.

        Raises:
            ValueError: the input has other axes than the window.
        """
        if len(shape) != 2 + len(self.kernel):
            raise InvalidValue(
                f"FC303 x has shape {tuple(shape)}; expected [B, channels] and {len(self.kernel)} "
                f"more axes, as the convolution's window {self.kernel} has."
            )
        return tuple(
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in zip(
                shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )


class InThree(NamedTuple):
    """A convolution with axes before its own, so that there are three: one kernel does all.

    Attributes:
        x_strides: of sample, channel and three axes.
        channels_last: whether a position's channels lie together in ``x``.
        is_flat: whether the window is one element that meets every position once, and these lie at
            one distance.
        is_wide: whether a sample of ``x`` spans more elements than 32 bits count.
    """

    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]
    x_sizes: tuple[int, int, int]
    out_sizes: tuple[int, int, int]
    x_strides: tuple[int, int, int, int, int]
    channels_last: bool
    is_flat: bool
    is_wide: bool


@functools.lru_cache(maxsize=1024)
def in_three(geometry: Geometry, shape: torch.Size, strides: tuple[int, ...]) -> InThree:
    """The convolution over three axes, of an input of this shape and strides."""
    missing = 3 - len(geometry.kernel)
    out_sizes = geometry.out_sizes(shape)

    def filled(values: tuple[int, ...], value: int) -> tuple[int, int, int]:
        first, second, third = (value,) * missing + tuple(values)
        return first, second, third

    spatial = filled(strides[2:], 0)
    # Of samples and axes of one element strides say nothing.
    span = sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    positions = math.prod(shape[2:])
    of_one = set(geometry.kernel) == set(geometry.stride) == {1} and not any(geometry.padding)
    axes = range(2, len(shape) - 1)
    at_one_distance = all(strides[i] == strides[i + 1] * shape[i + 1] for i in axes)
    return InThree(
        filled(geometry.kernel, 1),
        filled(geometry.stride, 1),
        filled(geometry.padding, 0),
        filled(geometry.dilation, 1),
        filled(tuple(shape[2:]), 1),
        filled(out_sizes, 1),
        (strides[0], strides[1], *spatial),
        strides[1] == 1 and positions > 1,
        of_one and at_one_distance,
        span >= 1 << 31,
    )
