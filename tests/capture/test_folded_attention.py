"""Attention over parts of samples that are folded into the batch: channels (PatchTST), frames and
places (video models); recognised without a declaration, whatever ``batch_first`` is inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import (
    check_by_autograd,
    check_with_dropout,
    squares,
    truth_by_autograd,
)
from tests.support.errors import raises
from tests.support.oracle import assert_close

pytestmark = pytest.mark.without_gate

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


class Decoded(Folded):
    """An encoder and a decoder, of which both read folded rows."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__(batch_first)
        self.embed, self.head = nn.Linear(4, D), nn.Linear(D, 3)
        self.layers = nn.Transformer(D, 2, 1, 1, 16, 0.0, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.turned(self.embed(x).flatten(0, 1))
        found = self.layers(rows, rows[:, :3] if self.batch_first else rows[:3])
        return self.head(self.turned(found).unflatten(0, x.shape[:2]))


def made(kind: type[Folded], *shape: int, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return kind(**options).double(), (torch.randn(*shape, dtype=torch.float64),)


PATCHES, FRAMES = (4, 3, 5, 4), (4, 3, 2, 4, 4)


@pytest.mark.parametrize(("first", "mode"), [(True, "one_pass"), (False, "two_pass")])
@pytest.mark.parametrize("kind", [PatchTST, Video, Queried, Decoded])
def test_folds_around_attention_are_exact(kind: type[Folded], first: bool, mode: str) -> None:
    shape = FRAMES if kind is Video else PATCHES
    model, batch = made(kind, *shape, batch_first=first)
    check_by_autograd(model, batch, squares, mode=mode)


@pytest.mark.parametrize("first", [True, False])
def test_frames_before_samples_are_refused(first: bool) -> None:
    model, batch = made(Video, *FRAMES, batch_first=first, frames_first=True)
    flash: Any = GradSampleModuleFlashClipping(model)
    with raises("FC201", match=r"(?s)attention\.0.*a sample's rows lie apart"):
        squares(flash, batch).backward()


@pytest.mark.parametrize("first", [True, False])
def test_as_many_of_everything(first: bool) -> None:
    check_by_autograd(*made(Video, 4, 4, 2, 4, 4, batch_first=first), squares)
    check_by_autograd(*made(PatchTST, 5, 5, 5, 4, batch_first=first), squares)


def padded(*shape: int) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[..., 3:] = torch.rand(*shape[:-1], shape[-1] - 3) < 0.5
    return mask


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_padding_masks_also_where_an_encoder_has_a_way_of_its_own(first: bool, train: bool) -> None:
    model, (x,) = made(PatchTST, *PATCHES, batch_first=first, nested=first)
    model.train(train)
    check_by_autograd(model, (x, padded(*PATCHES[:3])), squares)


@pytest.mark.parametrize(("first", "mode"), [(True, "two_pass"), (False, "one_pass")])
def test_dropout_draws_what_it_draws_for_the_plain_model(first: bool, mode: str) -> None:
    model, batch = made(PatchTST, *PATCHES, batch_first=first, dropout=0.2)

    def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return model(*batch).flatten(1).square().sum(1)

    check_with_dropout(model, batch, losses, mode=mode)


@pytest.mark.parametrize("first", [True, False])
def test_under_autocast(first: bool) -> None:
    model, batch = made(PatchTST, *PATCHES, batch_first=first)
    model, batch = model.float(), (batch[0].float(),)
    with torch.autocast("cpu", torch.bfloat16):
        truth = truth_by_autograd(copy.deepcopy(model), batch, squares)
        flash: Any = GradSampleModuleFlashClipping(model)
        squares(flash, batch).backward()
    assert_close(flash.get_norm_sample(), truth.norms, 0.05)


def test_rows_of_a_frozen_encoder_and_of_its_last_layer_alone() -> None:
    for last in (False, True):
        model, batch = made(PatchTST, *PATCHES, batch_first=True)
        model.encoder.requires_grad_(False)  # type: ignore[union-attr]
        model.encoder.layers[-1].requires_grad_(last)  # type: ignore[union-attr, index]
        check_by_autograd(model, batch, squares)
