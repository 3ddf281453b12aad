"""Networks of convolutions that people train, written to be read.

GroupNorm stands where the originals have BatchNorm, which mixes samples.

B samples, C channels, H and W the sides of an image, T positions of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workload import Named, Workload, draw_images

GROUPS = 16
"""Of GroupNorm, as in De et al. 2022, whose networks these are."""


def images(
    name: str, build: Callable[[], nn.Module], *, batch: int, size: int, classes: int
) -> Workload:
    """Random images, each with a class."""
    draw = functools.partial(draw_images, batch=batch, size=size, classes=classes)
    return Workload(name, build, draw, batch=batch)


# --------------------------------------------------------------------------------------------------
# Wide residual networks (Zagoruyko and Komodakis 2016)
# --------------------------------------------------------------------------------------------------


class WideBlock(nn.Module):
    """Two 3×3 convolutions, each behind GroupNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(GROUPS, inputs)
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm_2 = nn.GroupNorm(GROUPS, outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        seen = F.relu(self.norm_1(x_BCHW))
        y_BCHW = self.conv_2(F.relu(self.norm_2(self.conv_1(seen))))
        return y_BCHW + (x_BCHW if self.shortcut is None else self.shortcut(seen))


def wide_resnet(
    name: str, *, depth: int, widen: int, batch: int, size: int = 32, classes: int = 10
) -> Workload:
    """WRN-``depth``-``widen``: three stages of ``(depth - 4) / 6`` blocks."""

    def build() -> nn.Module:
        parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
        channels = 16
        for stage, width in enumerate((16 * widen, 32 * widen, 64 * widen)):
            for block in range((depth - 4) // 6):
                parts.append(WideBlock(channels, width, 2 if stage and not block else 1))
                channels = width
        parts += [nn.GroupNorm(GROUPS, channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*parts, nn.Linear(channels, classes))

    return images(name, build, batch=batch, size=size, classes=classes)


# --------------------------------------------------------------------------------------------------
# Residual networks with bottlenecks (He et al. 2016)
# --------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, each before GroupNorm."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv_1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm_1 = nn.GroupNorm(GROUPS, width)
        self.conv_2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm_2 = nn.GroupNorm(GROUPS, width)
        self.conv_3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm_3 = nn.GroupNorm(GROUPS, outputs)
        self.shortcut: nn.Module | None = None
        if inputs != outputs or stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(GROUPS, outputs)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.relu(self.norm_1(self.conv_1(x_BCHW)))
        y_BCHW = F.relu(self.norm_2(self.conv_2(y_BCHW)))
        y_BCHW = self.norm_3(self.conv_3(y_BCHW))
        return F.relu(y_BCHW + (x_BCHW if self.shortcut is None else self.shortcut(x_BCHW)))


def resnet(
    name: str,
    *,
    blocks: tuple[int, ...] = (3, 4, 6, 3),
    width: int = 64,
    batch: int = 128,
    size: int = 224,
    classes: int = 1000,
) -> Workload:
    """ResNet-50, of four stages of bottlenecks."""

    def build() -> nn.Module:
        parts: list[nn.Module] = [
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.GroupNorm(GROUPS, width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        channels = width
        for stage, count in enumerate(blocks):
            grown = width * 2**stage
            for block in range(count):
                parts.append(Bottleneck(channels, grown, 2 if stage and not block else 1))
                channels = 4 * grown
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        return nn.Sequential(*parts)

    return images(name, build, batch=batch, size=size, classes=classes)


# --------------------------------------------------------------------------------------------------
# ConvNeXt (Liu et al. 2022)
# --------------------------------------------------------------------------------------------------


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of every position."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.norm(x_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """A depthwise 7×7 convolution, then two linear layers at every position."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BHWC = self.norm(self.depthwise(x_BCHW).permute(0, 2, 3, 1))
        return x_BCHW + self.down(F.gelu(self.up(y_BHWC))).permute(0, 3, 1, 2)


def convnext(
    name: str,
    *,
    blocks: tuple[int, ...] = (3, 3, 9, 3),
    width: int = 96,
    batch: int = 128,
    size: int = 224,
    classes: int = 1000,
) -> Workload:
    """ConvNeXt-T, without the scales of its layers."""

    def build() -> nn.Module:
        parts: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), ChannelNorm(width)]
        for stage, count in enumerate(blocks):
            channels = width * 2**stage
            if stage:
                half = channels // 2
                parts += [ChannelNorm(half), nn.Conv2d(half, channels, 2, stride=2)]
            parts += [ConvNeXtBlock(channels) for _ in range(count)]
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(channels)]
        return nn.Sequential(*parts, nn.Linear(channels, classes))

    return images(name, build, batch=batch, size=size, classes=classes)


# --------------------------------------------------------------------------------------------------
# A U-Net as diffusion models have it (Ho et al. 2020)
# --------------------------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions, each behind GroupNorm and SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(GROUPS, inputs)
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm_2 = nn.GroupNorm(GROUPS, outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = self.conv_1(F.silu(self.norm_1(x_BCHW)))
        y_BCHW = self.conv_2(F.silu(self.norm_2(y_BCHW)))
        return y_BCHW + (x_BCHW if self.shortcut is None else self.shortcut(x_BCHW))


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
            parts = [ResidualBlock(before, count), ResidualBlock(count, count)]
            if level:
                parts.append(ImageAttention(count, head))
            self.down.append(nn.Sequential(*parts))
            before = count
        shrink = [nn.Conv2d(count, count, 3, stride=2, padding=1) for count in channels[:-1]]
        self.shrink = nn.ModuleList(shrink)
        for count in reversed(channels[:-1]):
            self.up.append(ResidualBlock(before + count, count))
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
    """A U-Net whose loss is that of one class for every pixel."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x_BCHW = torch.randn(batch, 3, size, size, generator=generator)
        return x_BCHW, torch.randint(classes, (batch, size * size), generator=generator)

    return Workload(name, lambda: UNet(width, levels, classes, head), draw, batch=batch)


NAMED: Named = {
    "wrn-16-4": (wide_resnet, dict(depth=16, widen=4, batch=512)),
    "wrn-40-4": (wide_resnet, dict(depth=40, widen=4, batch=256)),
    "resnet50-gn": (resnet, {}),
    "convnext-t": (convnext, {}),
    "unet": (unet, {}),
    "wrn-tiny": (wide_resnet, dict(depth=10, widen=1, batch=4, size=8)),
    "resnet-tiny": (resnet, dict(blocks=(1, 1), width=16, batch=4, size=16, classes=10)),
    "convnext-tiny": (convnext, dict(blocks=(1, 1), width=8, batch=4, size=16, classes=10)),
    "unet-tiny": (unet, dict(width=16, levels=(1, 2), batch=4, size=8, head=16)),
}
