"""Parts of samples that are folded into the batch: windows, heads, channels, frames and places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Attention
from tests.zoo.case import ModelCase
from tests.zoo.shared import rows

D = 8


class Folded(nn.Module):
    """Something that keeps positions ``[R, P, D]`` or ``[P, R, D]``, on parts of samples."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first

    def turned(self, x: Tensor) -> Tensor:
        return x if self.batch_first else x.transpose(0, 1)


class PatchTST(Folded):
    """``[B, C, P, 4]``: every channel of a sample is a row of the encoder."""

    def __init__(self, batch_first: bool, dropout: float = 0.0, nested: bool = False) -> None:
        super().__init__(batch_first)
        self.embed, self.places = nn.Linear(4, D), nn.Parameter(torch.randn(5, D) * 0.1)
        layer = nn.TransformerEncoderLayer(D, 2, 16, dropout, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        B, C = x.shape[:2]
        h = self.turned((self.embed(x) + self.places).flatten(0, 1))
        if mask is not None:
            mask = mask.flatten(0, 1)
        h = self.turned(self.encoder(h, src_key_padding_mask=mask))
        if mask is not None:
            h = h.masked_fill(mask[..., None], 0.0)
        return self.head(h.unflatten(0, (B, C)).mean(2))


class Video(Folded):
    """``[B, T, 2, 4, 4]``: attention over the places of a frame, then over the frames of a place.
    ``frames_first``: all samples of the first frame lie before all of the second."""

    def __init__(self, batch_first: bool, frames_first: bool = False) -> None:
        super().__init__(batch_first)
        self.frames_first = frames_first
        self.patches, self.head = nn.Conv2d(2, D, 2, 2), nn.Linear(D, 2)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(D, 2, batch_first=batch_first) for _ in range(2)
        )

    def attend(self, number: int, x: Tensor) -> Tensor:
        h = self.turned(self.norms[number](x))
        found: Tensor = self.attention[number](h, h, h, need_weights=bool(number))[0]
        return x + self.turned(found)

    def forward(self, x: Tensor) -> Tensor:
        B, T = x.shape[:2]
        if self.frames_first:
            x = x.transpose(0, 1)
        h = self.attend(0, self.patches(x.flatten(0, 1)).flatten(2).mT)
        if self.frames_first:
            h = h.unflatten(0, (T, B)).transpose(0, 1)
        else:
            h = h.unflatten(0, (B, T))
        h = self.attend(1, h.transpose(1, 2).flatten(0, 1))  # [B * places, T, D]
        return self.head(h.unflatten(0, (B, -1)).mean((1, 2)))


class Queried(Folded):
    """Queries that are learnt, a copy for every row, and a class token before the keys."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__(batch_first)
        self.embed, self.head = nn.Linear(4, D), nn.Linear(D, 3)
        self.queries, self.token = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.randn(D))
        self.attention = nn.MultiheadAttention(D, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        B, C = x.shape[:2]
        h = self.embed(x).flatten(0, 1)
        h = self.turned(torch.cat([self.token.expand(B * C, 1, -1), h], 1))
        queries = self.turned(self.queries.expand(B * C, -1, -1))
        return self.head(self.turned(self.attention(queries, h, h)[0]).unflatten(0, (B, C)))


def padded(*shape: int) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[..., 3:] = torch.rand(*shape[:-1], shape[-1] - 3) < 0.5
    return mask


# -- windows that are declared --------------------------------------------------------------------


class Windowed(nn.Module):
    """Attention within windows of four positions, folded into the batch as Swin does it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.attention = Attention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.bias = nn.Parameter(torch.randn(4, 8) * 0.1)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        windows = x.unflatten(1, (x.shape[1] // 4, 4)).flatten(0, 1)
        windows = windows + self.attention(self.norm(windows))
        return self.head(windows.unflatten(0, (len(x), x.shape[1] // 4)).flatten(1, 2))


class BiasedAttention(nn.Module):
    """Attention with a bare table of biases, to which a mask per window may be added first."""

    def __init__(self, width: int, windows: str):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn(7, 2))
        self.windows = windows

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k, v = heads
        places = torch.arange(4)
        bias = self.table[places[:, None] - places + 3].permute(2, 0, 1)[None]
        scores = q @ k.mT
        if self.windows == "all":  # one mask per row, as transformers' Swin has it
            scores = scores + (bias + mask.repeat(len(x) // len(mask), 1, 1)[:, None])
        else:  # one mask per window of a sample
            bias = bias + mask[:, None]
            scores = (scores.unflatten(0, (-1, len(mask))) + bias).flatten(0, 1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class MaskedWindows(nn.Module):
    def __init__(self, windows: str) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(3, 8), BiasedAttention(8, windows)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x).unflatten(1, (-1, 4)).flatten(0, 1)
        mask = torch.zeros(len(rows) // len(x), 4, 4, dtype=x.dtype)
        mask[-1, :2, 2:] = mask[-1, 2:, :2] = -3
        rows = rows + self.attention(rows, mask)
        return self.head(rows.unflatten(0, (len(x), -1)).flatten(1, 2))


class BiasFromCoordinates(nn.Module):
    """Windows whose bias is computed by a network over a table of coordinates, as in Swin v2."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 2)
        self.attention = nn.ModuleDict({"mix": nn.Linear(8, 8), "bias": nn.Linear(1, 8)})
        self.register_buffer("table", torch.linspace(-1, 2, rows)[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(x).unflatten(1, (-1, 4)).flatten(0, 1)
        bias = self.attention["bias"](self.table.to(x.dtype)).mean(0)
        rows = torch.tanh(self.attention["mix"](rows) + bias)
        return self.head(rows.unflatten(0, (len(x), -1)).flatten(1, 2))


class RepeatedPositions(nn.Module):
    """Heads folded into rows, and keys of positions that are repeated for every sample, as in
    DeBERTa."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.embed, self.head = heads, nn.Linear(3, 8), nn.Linear(8, 2)
        self.map, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8))
        self.scale = nn.Parameter(torch.rand(8))
        self.change: Callable[[Tensor], Any] = lambda keys: None

    def rows(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.rows(self.map(self.embed(x)))
        keys = self.rows(torch.tanh(self.map(self.table * self.scale))[None]).repeat(len(x), 1, 1)
        self.change(keys)
        scores = torch.bmm(q, keys.transpose(-1, -2)).softmax(-1)
        out = (torch.bmm(scores, keys) + q).unflatten(0, (len(x), -1))
        return self.head(out.transpose(1, 2).flatten(2))


def windowed() -> nn.Module:
    model = Windowed()
    model.bias.requires_grad_(False)
    return model


def thawed(last: bool) -> Callable[[], nn.Module]:
    """A frozen encoder, or its last layer alone is trained."""

    def build() -> nn.Module:
        model: Any = PatchTST(batch_first=True)
        model.encoder.requires_grad_(False)
        model.encoder.layers[-1].requires_grad_(last)
        return model

    return build


PATCHES, FRAMES = (4, 3, 5, 4), (4, 3, 2, 4, 4)
FOLDED = ["*attention*", "*norm"]
#: A function by itself takes attention's rows for samples.
WHOLE_SAMPLES = ("functorch",)
DECLARED = {"folded_modules": ["*attention*"], "strict": False}


def shape_of(kind: type[Folded]) -> tuple[int, ...]:
    return FRAMES if kind is Video else PATCHES


CASES: dict[str, ModelCase] = {
    **{
        f"{kind.__name__}, batch first {first}": ModelCase(
            lambda kind=kind, first=first: kind(batch_first=first),
            rows(*shape_of(kind)),
            without=WHOLE_SAMPLES,
        )
        for kind in (PatchTST, Video, Queried)
        for first in (True, False)
    },
    **{
        f"{kind.__name__}, as many of everything, batch first {first}": ModelCase(
            lambda kind=kind, first=first: kind(batch_first=first),
            rows(*shape),
            without=WHOLE_SAMPLES,
        )
        for kind, shape, first in (
            (Video, (4, 4, 2, 4, 4), True),
            (PatchTST, (5, 5, 5, 4), False),
        )
    },
    **{
        f"PatchTST, padded, batch first {first}, training {train}": ModelCase(
            lambda first=first, train=train: PatchTST(first, nested=first).train(train),
            lambda: (torch.randn(*PATCHES), padded(*PATCHES[:3])),
            without=WHOLE_SAMPLES,
        )
        for first, train in ((True, False), (False, True))
    },
    "PatchTST, dropout": ModelCase(
        lambda: PatchTST(batch_first=False, dropout=0.2),
        rows(*PATCHES),
        draws=True,
        without=WHOLE_SAMPLES,
    ),
    **{
        f"PatchTST, frozen, last layer {last}": ModelCase(
            thawed(last), rows(*PATCHES), without=WHOLE_SAMPLES
        )
        for last in (True, False)
    },
    "Video, frames before samples": ModelCase(
        lambda: Video(batch_first=False, frames_first=True),
        rows(*FRAMES),
        refused="FC201",
        match=r"(?s)attention\.0.*a sample's rows lie apart",
    ),
    "declared windows": ModelCase(
        windowed,
        rows(3, 12, 3),
        options={"folded_modules": FOLDED},
        without=WHOLE_SAMPLES,
        always=("units",),
    ),
    **{
        f"masks of {windows} windows {shape}": ModelCase(
            lambda windows=windows: MaskedWindows(windows), rows(*shape, 3), options=DECLARED
        )
        for windows, shape in (("all", (3, 12)), ("all", (2, 8)), ("own", (3, 4)), ("own", (3, 12)))
    },
    **{
        f"bias of {count} coordinates, {samples} samples": ModelCase(
            lambda count=count: BiasFromCoordinates(count),
            rows(samples, 12, 3),
            options=DECLARED,
        )
        for count, samples in ((3, 3), (6, 2), (12, 3))
    },
    **{
        f"positions repeated for {heads} heads, {samples} samples": ModelCase(
            lambda heads=heads: RepeatedPositions(heads), rows(samples, 4, 3)
        )
        for heads, samples in ((1, 3), (2, 1), (2, 3))
    },
}
