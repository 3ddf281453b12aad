"""Documents that reach each other, and layers that cannot serve packed ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import Documents, GradSampleModuleFlashClipping, Offsets, samples
from tests.support.errors import raises
from tests.support.packed import (
    ByOffsets,
    Reader,
    documents,
    losses,
    one_row,
    packed,
)

pytestmark = pytest.mark.without_gate

# -- documents that reach each other ---------------------------------------------------------------

DOCUMENTS = Documents("document")


class ToEverybody(Reader):
    def mask(self, document: Tensor) -> Tensor:
        return torch.ones_like(super().mask(document))


class Causal(Reader):
    def mask(self, document: Tensor) -> Tensor:
        return torch.ones_like(super().mask(document)).tril()


class FirstToLast(Reader):
    """The last document reads the first, and nothing else is wrong."""

    def mask(self, document: Tensor) -> Tensor:
        last = document.amax(1)[:, None, None]
        return super().mask(document) | (document[:, :, None] == last) & (document[:, None] == 0)


class NextToken(nn.Module):
    """Reads the position behind, across documents."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 * x.roll(-1, 1)


class OverPositions(nn.Module):
    """A module of its own that normalizes over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x - x.mean(1, keepdim=True))


@pytest.mark.parametrize("kind", [ToEverybody, Causal, FirstToLast])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_that_reaches_others(kind: Any, dtype: torch.dtype) -> None:
    flash = GradSampleModuleFlashClipping(kind().to(dtype), unit=Documents("document"))
    with raises("FC277", match=r"out \(Linear\)"):
        flash(*one_row())


def test_a_layer_between_that_reaches_others() -> None:
    between = nn.Sequential(NextToken(), nn.Linear(6, 6))
    flash = GradSampleModuleFlashClipping(Reader(between), unit=Documents("document"))
    with raises("FC277", match=r"between.1 \(Linear\)"):
        flash(*one_row())


def test_tokens_that_look_like_places() -> None:
    """Both are consecutive; tokens come first."""
    ids, places, numbers = one_row((3, 4), padding=0)
    flash = GradSampleModuleFlashClipping(
        Causal(), unit=Documents("document"), loss_reduction="sum"
    )
    with raises("FC277"):
        flash(places, places, numbers)
    flash = GradSampleModuleFlashClipping(
        Reader(), unit=Documents("document"), loss_reduction="sum"
    )
    flash(places, places, numbers)


def test_several_documents_come_later() -> None:
    """With one alone nothing can be seen, and nothing is concluded."""
    flash = GradSampleModuleFlashClipping(
        Causal(), unit=Documents("document"), loss_reduction="sum"
    )
    flash(*one_row((5,))).sum().backward()
    with raises("FC277"):
        flash(*one_row())


# -- layers that cannot be served ------------------------------------------------------------------


class Transposed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mT).mT


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return found


class Declared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with samples(torch.zeros(len(x), dtype=torch.long), count=len(x)):
            return self.layer(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x) if x.shape[1] == 1 else self.scaled(x, x)

    def scaled(self, *x: Tensor) -> Tensor:
        return self.gain * x[0]


LAYERS = {
    "convolution": (lambda: Transposed(nn.Conv1d(6, 6, 1)), r"layer \(Conv1d\).*by position"),
    "group norm": (lambda: Transposed(nn.GroupNorm(2, 6)), r"layer \(GroupNorm\).*by position"),
    "two axes": (lambda: nn.LayerNorm((15, 6)), r"between \(LayerNorm\).*by position"),
    "attention": (Attends, r"MultiheadAttention.*by position"),
    "own norm": (OverPositions, r"between \(OverPositions\).*by position"),
    "axes": (lambda: Transposed(nn.Linear(15, 15)), r"layer \(Linear\).*expected \[1, 15, ...\]"),
    "samples": (Declared, r"layer \(Linear\).*inside samples"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_refused(name: str) -> None:
    make, words = LAYERS[name]
    flash = GradSampleModuleFlashClipping(Reader(make()), unit=Documents("document"))
    with raises("FC278", match=words):
        flash(*one_row())


def test_time_first_is_refused() -> None:
    flash = GradSampleModuleFlashClipping(Reader(), unit=Documents("document"), batch_first=False)
    with raises("FC270", match=r"unit=Documents\('document'\).*batch"):
        flash(*one_row())


def test_a_compiled_model_is_refused() -> None:
    flash = GradSampleModuleFlashClipping(Reader(), unit=Documents("document"))
    flash.compile(backend="eager")
    with raises("FC285"):
        flash(*one_row())


def test_a_mean_is_refused() -> None:
    """Over tokens, it would be shared by all documents; the criterion adds up."""
    flash = GradSampleModuleFlashClipping(Reader(), unit=Documents("document"))
    loss = losses(flash(*one_row())).mean()
    with raises("FC276"):
        loss.backward()
    assert all(p.grad is None for p in flash.parameters())
    tokens = losses(flash(*one_row())).flatten()
    flash.check_losses(tokens)
    with raises("FC241", match="1.*15"):
        flash.check_losses(tokens.sum()[None])


def test_offsets_that_are_wrong() -> None:
    for starts, words in (
        (torch.tensor([0, 3, 2, 13]), "do not begin at 0, fall"),
        (torch.tensor([1, 3, 13]), "do not begin at 0"),
        (torch.tensor([0, 3, 16]), "beyond the 15 positions"),
        (torch.tensor([[0, 3]]), r"expected \[U \+ 1\]"),
        (torch.tensor([0.0, 3.0]), "expected an integer tensor"),
    ):
        flash = GradSampleModuleFlashClipping(ByOffsets(), unit=Documents(Offsets("starts")))
        ids, places, _ = one_row()
        with raises("FC270|FC271", match=words):
            flash(ids, places, starts=starts)
    ids, places, _ = packed([[(0, documents()[0])], [(1, documents()[1])]])
    with raises("FC271", match="batch of 2 rows; expected one"):
        flash(ids, places, starts=torch.tensor([0, 3]))


def test_copies_between_steps() -> None:
    flash = GradSampleModuleFlashClipping(
        Reader(), unit=Documents("document"), loss_reduction="sum"
    )
    for _ in range(2):
        losses(flash(*one_row())).sum().backward()
        assert len(flash.get_norm_sample()) == 4
        flash = copy.deepcopy(flash)
        flash.zero_grad()


def test_no_documents() -> None:
    flash = GradSampleModuleFlashClipping(
        Reader(), unit=Documents("document"), loss_reduction="sum"
    )
    empty = torch.zeros(1, 0, dtype=torch.long)
    with raises("FC250"):
        flash(empty, empty, empty)
    flash.expect_samples(0)
    losses(flash(*one_row((4,)))).sum().backward()
    assert flash.get_norm_sample().shape == (0,)
    assert all(not p.grad.any() for p in flash.parameters())
