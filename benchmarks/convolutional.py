"""Networks of convolutions that people train, written to be read.

GroupNorm stands where the originals have BatchNorm, which mixes samples.

B samples, C channels, H and W the sides of an image, T positions of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workload import Workload, draw_images

GROUPS = 16
"""Of GroupNorm, as in De et al. 2022, whose networks these are."""


class Block(nn.Module):
    """Two 3×3 convolutions, each behind GroupNorm and an activation."""

    def __init__(
        self, inputs: int, outputs: int, stride: int = 1, act: Any = F.silu, bias: bool = True
    ) -> None:
        super().__init__()
        self.act = act
        self.norm_1 = nn.GroupNorm(GROUPS, inputs)
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)
        self.norm_2 = nn.GroupNorm(GROUPS, outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=bias)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        seen = self.act(self.norm_1(x_BCHW))
        y_BCHW = self.conv_2(self.act(self.norm_2(self.conv_1(seen))))
        if self.shortcut is None:
            return y_BCHW + x_BCHW
        # A wide residual network's reads what is normalized.
        return y_BCHW + self.shortcut(seen if self.act is F.relu else x_BCHW)


def wide_resnet(
    name: str, *, depth: int, widen: int, batch: int, size: int = 32, classes: int = 10
) -> Workload:
    """WRN-``depth``-``widen`` (Zagoruyko and Komodakis 2016): three stages of ``(depth - 4) / 6``
    blocks."""

    def build() -> nn.Module:
        parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
        channels = 16
        for stage, width in enumerate((16 * widen, 32 * widen, 64 * widen)):
            for block in range((depth - 4) // 6):
                stride = 2 if stage and not block else 1
                parts.append(Block(channels, width, stride, F.relu, bias=False))
                channels = width
        parts += [nn.GroupNorm(GROUPS, channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*parts, nn.Linear(channels, classes))

    draw = functools.partial(draw_images, batch=batch, size=size, classes=classes)
    return Workload(name, build, draw, batch=batch)


class ImageAttention(nn.Module):
    """Every position looks at all others of its image."""

    def __init__(self, channels: int, head: int) -> None:
        super().__init__()
        self.heads = channels // head
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BTC = self.norm(x_BCHW).flatten(2).transpose(1, 2)
        heads = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
        return x_BCHW + self.out(mixed).transpose(1, 2).unflatten(-1, x_BCHW.shape[2:])


class UNet(nn.Module):
    """Images to one row of logits for every pixel, ``[B, T, classes]``; coarse levels attend."""

    def __init__(self, width: int, levels: tuple[int, ...], classes: int, head: int) -> None:
        super().__init__()
        channels = [width * grown for grown in levels]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        before = width
        for level, count in enumerate(channels):
            parts = [Block(before, count), Block(count, count)]
            if level:
                parts.append(ImageAttention(count, head))
            self.down.append(nn.Sequential(*parts))
            before = count
        shrink = [nn.Conv2d(count, count, 3, stride=2, padding=1) for count in channels[:-1]]
        self.shrink = nn.ModuleList(shrink)
        for count in reversed(channels[:-1]):
            self.up.append(Block(before + count, count))
            before = count
        self.norm = nn.GroupNorm(GROUPS, before)
        self.last = nn.Conv2d(before, classes, 3, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BCHW = self.first(x_BCHW)
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            x_BCHW = block(x_BCHW)
            if level < len(self.shrink):
                kept.append(x_BCHW)
                x_BCHW = self.shrink[level](x_BCHW)
        for block in self.up:
            x_BCHW = F.interpolate(x_BCHW, scale_factor=2.0, mode="nearest")
            x_BCHW = block(torch.cat([x_BCHW, kept.pop()], 1))
        return self.last(F.silu(self.norm(x_BCHW))).flatten(2).transpose(1, 2)


def unet(
    name: str,
    *,
    width: int = 128,
    levels: tuple[int, ...] = (1, 2, 2),
    batch: int = 64,
    size: int = 32,
    classes: int = 8,
    head: int = 64,
) -> Workload:
    """A U-Net as diffusion models have it (Ho et al. 2020); its loss is that of one class for every
    pixel."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x_BCHW = torch.randn(batch, 3, size, size, generator=generator)
        return x_BCHW, torch.randint(classes, (batch, size * size), generator=generator)

    return Workload(name, lambda: UNet(width, levels, classes, head), draw, batch=batch)
