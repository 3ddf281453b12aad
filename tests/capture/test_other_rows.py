"""Rows that are no samples, or other samples, in models that run in other ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import float64s, mean_squares, squares
from tests.support.errors import raises
from tests.support.uses import D, Holder, make_around
from tests.support.wrapping import MODES
from tests.zoo.rows import OTHER, mix

pytestmark = pytest.mark.without_gate


@pytest.mark.parametrize(
    "how", ["sorted", "shuffled", "as many tokens as samples", "less their mean"]
)
def test_other_rows_in_a_model_of_one_batch_size_are_refused(how: str) -> None:
    use = OTHER[how]
    model = make_around(lambda: Holder(lambda m, x: use(m, x.view(4, 3, D)), **mix()()))
    with raises("FC202", match=r"mix \(Linear\): what it reads has|expected rounding alone"):
        GradSampleModuleFlashClipping(model)(*float64s(4, 3, 3))


class LastPositionsFirst(nn.Module):
    """Positions and samples in one axis, in no regular order of samples: the last one first."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(0, 1).flip(0)


def test_layers_that_read_other_rows_are_all_named() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), LastPositionsFirst(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
    )
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC201") as error:
        flash(torch.randn(3, 5, 4))
    text = str(error.value)
    for path in ("2 (Linear)", "3 (LayerNorm)", "4 (Linear)"):
        assert f"{path}: what it reads has 15 rows for a batch of 3, and 10 for a batch" in text
    assert "0 (Linear)" not in text
    assert "Declare modules" in text and "folded_modules" in text


def test_layers_that_reach_no_output_are_all_named() -> None:
    """Rows lie together, but none of the outputs has a row for each sample: nothing shows where
    a sample's gradient goes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0, 1), nn.LayerNorm(4), nn.Linear(4, 2))
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC201") as error:
        flash(torch.randn(3, 5, 4))
    text = str(error.value)
    for path in ("2 (LayerNorm)", "3 (Linear)"):
        assert f"{path}: what it reads has 15 rows for a batch of 3, and 10 for a batch" in text
    assert "0 (Linear)" not in text


class Noisy(nn.Module):
    """Draws random numbers for everything, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(torch.tanh(self.first(x)), 0.5)
        x = x + torch.randn_like(x) + torch.rand(x.shape) * torch.randint(3, x.shape)
        x = torch.bernoulli(torch.sigmoid(x)) + x * torch.empty_like(x).uniform_()
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)
        return self.last(torch.tanh(self.mid(x)))


@pytest.mark.parametrize("mode", MODES)
def test_model_that_draws_random_numbers_is_supported(mode: str) -> None:
    flash = GradSampleModuleFlashClipping(Noisy(), mode=mode)
    before = torch.get_rng_state()
    for shape in ((4, 4), (5, 3), (1, 4)):
        squares(flash, (torch.randn(*shape, 4),)).backward()
        assert len(flash.get_norm_sample()) == shape[0]
        flash.zero_grad()
    assert not torch.equal(before, torch.get_rng_state())
    assert flash._session.known.proven == {
        "first (Linear)",
        "mid (Linear)",
        "last (Linear)",
    }


class CallsAPart(nn.Module):
    """A training step calls a part of it, as Lightning's do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def training_step(self, x: Tensor) -> Tensor:
        return mean_squares(self.net(x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("after_a_call", [False, True])
def test_call_of_a_part_of_a_model_is_refused(after_a_call: bool) -> None:
    """A root whose forward is never called: nothing knew how many samples there are."""
    model = CallsAPart()
    model.forward = lambda x: model.net(x)  # type: ignore[method-assign]
    flash = GradSampleModuleFlashClipping(model)
    kept = flash(torch.randn(5, 5, 4)) if after_a_call else None
    with raises("FC401", match=r"net.0 \(Linear\)"):
        model.training_step(torch.randn(5, 5, 4))
    with torch.no_grad():
        model.training_step(torch.randn(5, 5, 4))
    mean_squares(flash(torch.randn(5, 5, 4))).backward()
    assert len(flash.get_norm_sample()) == 5
    del kept


class Beside(nn.Module):
    """Its output is each sample's own. A loss of its own, and what it keeps, are of neighbours."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)
        self.gain, self.how = nn.Parameter(torch.ones(4)), how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).tanh()
        rolled = h.roll(1, 0)
        self.kept = self.other(rolled) if self.how == "layer" else rolled * self.gain
        return self.head(h), self.kept.square().sum()


class Twice(nn.Module):
    """Uses one parameter for its output, and for neighbours in what it keeps, in either order."""

    def __init__(self, how: str, kept_first: bool) -> None:
        super().__init__()
        self.first, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.how, self.kept_first = how, kept_first

    def use(self, x: Tensor) -> Tensor:
        if self.how == "layer":
            return self.other(x)
        return F.linear(x, self.other.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.kept_first:
            self.kept = self.use(h.roll(1, 0))
        shown = self.use(h)
        if not self.kept_first:
            self.kept = self.use(h.roll(1, 0))
        return self.head(shown)


@pytest.mark.parametrize("kept_first", [False, True])
@pytest.mark.parametrize("how", ["layer", "bare parameter"])
def test_call_that_no_output_shows_beside_another_is_refused(how: str, kept_first: bool) -> None:
    torch.manual_seed(0)
    model = Twice(how, kept_first).double()
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC202", match="no output of the model that has a row for each"):
        flash(*float64s(4, 4))
        model.kept.square().sum().backward()


@pytest.mark.parametrize("loss", ["own", "kept"])
@pytest.mark.parametrize("how", ["layer", "bare parameter"])
def test_loss_of_what_no_output_shows_is_refused(how: str, loss: str) -> None:
    torch.manual_seed(0)
    model = Beside(how).double()
    flash = GradSampleModuleFlashClipping(model)
    words = "none has shown which of its rows belong to which sample"
    with raises("FC230", match=words) as caught:
        own = flash(*float64s(4, 4))[1]
        (own if loss == "own" else model.kept.square().sum()).backward()
    # Each of its rows is a whole sample: to declare parts would be wrong.
    assert "folded_modules" not in str(caught.value)
    assert all(param.grad is None for param in model.parameters())
