"""Samples along other axes: exact where rehearsals have shown it. Rows that lie apart: refused.

Shape suffixes: B samples, T positions, d features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.row_layouts import Layout
from tests.support.autograd import check_by_autograd, float64s, squares
from tests.support.errors import raises

pytestmark = pytest.mark.without_gate


class Around(nn.Module):
    """``inner`` between two layers that have the batch first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Linear(3, 4), inner, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))))


class TimeFirst(nn.Module):
    """``[T, B, d]``, as fairseq's models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(4), nn.Linear(4, 4)
        self.gain, self.weight = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 2, 2))

    def forward(self, h: Tensor) -> Tensor:
        h = h.transpose(0, 1)
        h = self.ffn(self.norm(h)) * self.gain
        h = torch.einsum("tbd,dhe->tbhe", h, self.weight).flatten(2)
        return h.transpose(0, 1).contiguous()


class Scores(nn.Module):
    """The operation moves samples to the front; heads lie behind them: XLNet, SpeechT5."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.places = nn.Parameter(torch.randn(4, 4)), nn.Embedding(40, 2)

    def forward(self, h: Tensor) -> Tensor:
        B, T = h.shape[:2]
        scores = torch.einsum("tbd,de->bte", h.transpose(0, 1), self.weight)
        by_head = h.unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1).transpose(0, 1)  # [T, BH, e]
        places = self.places(torch.arange(T)[:, None] + torch.arange(T))  # [T, T, e]
        biases = (by_head @ places.mT).transpose(0, 1).unflatten(0, (B, 2))  # [B, H, T, T]
        return scores + biases.sum((1, 3))[..., None]


class Blocks(nn.Module):
    """One matrix for each head in front of all positions of all samples: RecurrentGemma."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2, 2, 2)), nn.Parameter(torch.randn(2, 2))

    def forward(self, h: Tensor) -> Tensor:
        rows = h.reshape(-1, 2, 2).transpose(0, 1)
        out = torch.baddbmm(self.bias[:, None], rows, self.weight)
        return out.transpose(0, 1).reshape(h.shape)


INNER: dict[str, Callable[[], nn.Module]] = {
    "time first": TimeFirst,
    "scores": Scores,
    "blocks": Blocks,
}


@pytest.mark.parametrize(("samples", "mode"), [(1, "one_pass"), (4, "one_pass"), (3, "two_pass")])
@pytest.mark.parametrize("kind", INNER)
def test_other_axes(kind: str, samples: int, mode: str) -> None:
    """With four samples of four positions: all shapes are right along either axis."""
    torch.manual_seed(0)
    check_by_autograd(Around(INNER[kind]()).double(), float64s(samples, 4, 3), squares, mode=mode)


def norms_like_the_truth(model: nn.Module, flash: Any, batch: tuple[Tensor, ...]) -> None:
    model.zero_grad(set_to_none=True)
    squares(flash, batch).backward()
    found = flash.get_norm_sample()
    flash.disable_hooks()
    truth = []
    for b in range(len(batch[0])):
        model.zero_grad(set_to_none=True)
        squares(flash, (batch[0][b : b + 1],)).backward()
        truth.append(math.hypot(*(float(p.grad.norm()) for p in model.parameters())))
    flash.enable_hooks()
    model.zero_grad(set_to_none=True)
    torch.testing.assert_close(found, found.new_tensor(truth), rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", INNER)
def test_other_batches_after_the_first(kind: str) -> None:
    torch.manual_seed(0)
    model = Around(INNER[kind]()).double()
    flash = GradSampleModuleFlashClipping(model)
    for samples, positions in ((3, 4), (2, 4), (4, 4), (1, 6), (5, 2), (3, 6)):
        norms_like_the_truth(model, flash, float64s(samples, positions, 3))


class Windows(nn.Module):
    """Windows of four positions in front of the samples: of a longer text, rows that lie apart."""

    def __init__(self, inner: nn.Module, flat: bool = False) -> None:
        super().__init__()
        self.inner, self.flat = inner, flat

    def forward(self, h: Tensor) -> Tensor:
        w_WBTd = h.unflatten(1, (-1, 4)).transpose(0, 1)
        rows = w_WBTd.flatten(0, 2 if self.flat else 1)
        return self.inner(rows).view(w_WBTd.shape).transpose(0, 1).flatten(1, 2)


class Heads(nn.Module):
    """``torch.cat`` of heads along the batch: they meet parameters there if they are scaled."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.inner = nn.Linear(2, 2) if scaled else nn.Identity()

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (torch.cat(x.chunk(2, -1)) for x in self.qkv(h).chunk(3, -1))
        scores = self.inner(q) @ k.mT
        return torch.cat((scores.softmax(-1) @ v).chunk(2), -1)


class Dilated(nn.Module):
    """Every second position of all samples before the others, as forecasting libraries have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DPLSTM(4, 4)

    def forward(self, h: Tensor) -> Tensor:
        z_TBd = h.transpose(0, 1)
        found = self.inner(torch.cat([z_TBd[::2], z_TBd[1::2]], 1))[0].unflatten(1, (2, len(h)))
        return found.permute(2, 0, 1, 3).flatten(1, 2)


class Columns(nn.Module):
    """A bare parameter meets rows that lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, h: Tensor) -> Tensor:
        rows = h.transpose(0, 1).flatten(0, 1) * self.gain
        return rows.view(h.shape[1], -1, 4).transpose(0, 1)


APART: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Windows(nn.Linear(4, 4)),
    "norm": lambda: Windows(nn.LayerNorm(4)),
    "attention": lambda: Windows(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)),
    "heads": lambda: Heads(scaled=True),
    "recurrence": Dilated,
}
ADVICE = r"(?s)inner\.inner.*a sample's rows together.*mode=\"one_by_one\""


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("kind", APART)
def test_rows_that_lie_apart_are_refused(kind: str, samples: int) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(Around(APART[kind]()).double())
    with raises("FC201", match=ADVICE):
        squares(flash, float64s(samples, 8, 3)).backward()
    assert all(param.grad is None for param in flash.parameters())


def test_rows_that_lie_apart_and_are_declared_as_parts_are_refused() -> None:
    torch.manual_seed(0)
    model = Around(Windows(nn.Linear(4, 4))).double()
    flash = GradSampleModuleFlashClipping(model, folded_modules=["inner.inner"])
    with raises("FC202", match=r"expected rounding alone"):
        squares(flash, float64s(3, 8, 3)).backward()


@pytest.mark.parametrize("inner", [lambda: Heads(scaled=False), Columns])
def test_rows_that_lie_apart_inside_of_a_module_are_exact(inner: Callable[[], nn.Module]) -> None:
    """They meet no parameter, or one of the module's own, which is run for each sample."""
    torch.manual_seed(0)
    check_by_autograd(Around(inner()).double(), float64s(3, 8, 3), squares)


@pytest.mark.parametrize("flat", [False, True])
def test_a_text_with_more_windows_than_the_first(flat: bool) -> None:
    """With one window its rows are samples, or parts of them that lie together; with two they lie
    apart."""
    torch.manual_seed(0)
    model = Around(Windows(nn.Linear(4, 4), flat)).double()
    flash = GradSampleModuleFlashClipping(model)
    for positions in (4, 8, 4, 12):
        if positions == 4:
            norms_like_the_truth(model, flash, float64s(3, positions, 3))
            continue
        with raises("FC201", match=r"inner\.inner"):
            squares(flash, float64s(3, positions, 3)).backward()


class Turns(nn.Module):
    """In another order under a condition that does not hold in the first step."""

    def __init__(self, condition: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.ffn, self.condition = nn.Linear(4, 4), condition

    def forward(self, h: Tensor) -> Tensor:
        if self.condition(self, h):
            return self.ffn(h)
        return self.ffn(h.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("when", ["evaluation", "longer"])
def test_another_axis_later(when: str, turned: bool) -> None:
    """Parts of other sizes would do along either axis: in the end it is values that tell."""
    torch.manual_seed(0)
    conditions: dict[str, Callable[[nn.Module, Tensor], object]] = {
        "evaluation": lambda self, h: not self.training,
        "longer": lambda _, h: h.shape[1] > 5,
    }
    model = Around(Turns(lambda m, h: bool(conditions[when](m, h)) != turned)).double()
    flash = GradSampleModuleFlashClipping(model)
    squares(flash, float64s(3, 4, 3)).backward()
    model.zero_grad(set_to_none=True)
    flash.train(when != "evaluation")
    x = float64s(3, 6, 3)
    for _ in range(2):
        with raises("FC201|FC232", match="ffn"):
            squares(flash, x).backward()
        assert all(param.grad is None for param in model.parameters())


class TwoAxes(nn.Module):
    """One layer reads samples along the second axis, and halves of samples along the first."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = nn.Linear(4, 4)

    def forward(self, h: Tensor) -> Tensor:
        halves = self.ffn(h.unflatten(1, (2, -1)).flatten(0, 1)).view(h.shape)
        return halves + self.ffn(h.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_one_layer_along_two_axes_is_refused(samples: int) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(Around(TwoAxes()).double())
    with raises("FC201", match=r"(?s)ffn.*mode=\"one_by_one\""):
        squares(flash, float64s(samples, 4, 3)).backward()


class Reaches(nn.Module):
    """Samples lie along the second axis by their values, but one reads its neighbour's."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.ffn, self.how = nn.Linear(4, 4), how

    def forward(self, h: Tensor) -> Tensor:
        rows = h.transpose(0, 1)
        if self.how == "turned":
            return self.ffn(rows).roll(1, 1).transpose(0, 1)
        if self.how == "chosen":
            places = h[:, 0, 0].argsort()
            out = self.ffn(rows[:, places])
            return torch.empty_like(out).index_copy(1, places, out).transpose(0, 1)
        return self.ffn(0 * rows + rows.mean(1, keepdim=True)).transpose(0, 1)


@pytest.mark.parametrize("how", ["turned", "chosen", "mean"])
def test_samples_that_reach_each_other(how: str) -> None:
    torch.manual_seed(0)
    model = Around(Reaches(how)).double()
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC201", match=r"inner|head"):
        squares(flash, float64s(3, 5, 3)).backward()
    assert all(param.grad is None for param in model.parameters())


def test_an_empty_batch() -> None:
    torch.manual_seed(0)
    model = Around(TimeFirst()).double()
    flash = GradSampleModuleFlashClipping(model)
    norms_like_the_truth(model, flash, float64s(3, 5, 3))
    flash.expect_samples(0)
    flash(torch.full((1, 5, 3), torch.inf).double()).sum().backward()
    assert flash.get_norm_sample().shape == (0,)
    flash.zero_grad()
    flash.expect_samples(None)
    norms_like_the_truth(model, flash, float64s(3, 5, 3))


def test_layouts() -> None:
    x = torch.arange(24).view(2, 12)
    layout = Layout(1)
    assert layout.parts(x, 3) == 4 and layout.parts(x, 5) is None and layout.parts(x, 0) is None
    front = layout.front(x, 3)
    assert front[1].flatten().tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert torch.equal(layout.back(front), x)
    assert layout.only(x, 1, 3).count_nonzero() == 8
    layout.check("layer", torch.zeros(5, 9), 3)
    with raises("FC232", match="layer"):
        layout.check("layer", torch.zeros(6, 5), 3)


def test_what_is_as_long_as_seen_is_not_rehearsed_again() -> None:
    torch.manual_seed(0)
    calls = []
    model = Around(TimeFirst()).double()
    flash = GradSampleModuleFlashClipping(model)
    squares(flash, float64s(3, 4, 3)).backward()
    model.embed.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for positions in (4, 8, 6, 5, 9):
        model.zero_grad(set_to_none=True)
        squares(flash, float64s(3, positions, 3)).backward()
        counts.append(len(calls))
        calls.clear()
    assert [n > 1 for n in counts] == [False, True, False, False, True]
