"""Rows that are no samples, or other samples: refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import check_by_autograd, check_steps, float64s, mean_squares, squares
from tests.support.errors import raises
from tests.support.wrapping import MODES

pytestmark = pytest.mark.without_gate

# -- rows that are no samples, or other samples ---------------------------------------------------


class Rows(nn.Module):
    """A layer that reads rows in some other way than one for each sample, in order."""

    def __init__(self, how: str):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mix, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        B, T = x.shape[:2]
        if self.how == "transposed":
            return self.last(torch.tanh(self.mix(x.transpose(0, 1)).transpose(0, 1)))
        if self.how == "flattened":
            return self.last(torch.tanh(self.mix(x.flatten(0, 1)).unflatten(0, (B, T))))
        if self.how == "positions_first":  # as many rows for each sample, and not together
            rows = x.transpose(0, 1).flatten(0, 1)
            return self.last(torch.tanh(self.mix(rows).unflatten(0, (T, B)).transpose(0, 1)))
        if self.how == "sorted":
            order = x.sum((1, 2)).argsort()
            return self.last(torch.tanh(self.mix(x[order])[order.argsort()]))
        if self.how == "shuffled":
            order = torch.arange(B).flip(0)
            return self.last(torch.tanh(self.mix(x[order])[order]))
        if self.how == "routed":  # an expert for the tokens that like it
            flat = x.flatten(0, 1)
            chosen = (flat[:, 0] > flat[:, 0].median()).nonzero().squeeze(1)
            x = flat.index_add(0, chosen, self.mix(flat[chosen])).view(B, T, -1)
            return self.last(torch.tanh(x))
        if self.how == "exactly_B":  # the first token of all B sequences, but those of other ones
            flat = x.flatten(0, 1)
            chosen = flat[:, 0].topk(B).indices  # expert choice with capacity B
            x = flat.index_add(0, chosen, self.mix(flat[chosen])).view(B, T, -1)
            return self.last(torch.tanh(x))
        assert self.how == "mean"
        return self.last(torch.tanh(self.mix(x - x.mean(0))))


#: By the layer that reads them, or by what comes of it.
MIXED = r"mix \(Linear\): what it reads has|expected rounding alone"


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(5, 5), (4, 3), (2, 2), (6, 2)])
@pytest.mark.parametrize(
    "how",
    ["sorted", "shuffled", "routed", "exactly_B", "mean", "positions_first"],
)
def test_other_rows_are_refused(how: str, shape: tuple[int, int], mode: str) -> None:
    if how in ("routed", "exactly_B") and shape == (2, 2):
        pytest.skip("it chooses one token of each sample, in order")
    model = Rows(how).double()
    with raises("FC201|FC202", match=MIXED):
        check_by_autograd(model, float64s(*shape, 4), squares, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(5, 5), (4, 3), (2, 2), (6, 2)])
def test_another_axis_is_exact(shape: tuple[int, int], mode: str) -> None:
    check_by_autograd(Rows("transposed").double(), float64s(*shape, 4), squares, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "shapes", [[(5, 5), (3, 4), (1, 2), (4, 1)], [(2, 2), (6, 2)], [(1, 4), (3, 3)]]
)
def test_rows_that_are_parts_of_samples_are_found(shapes: list[tuple[int, int]], mode: str) -> None:
    model = Rows("flattened").double()
    check_steps(model, [float64s(*shape, 4) for shape in shapes], squares, mode=mode)


@pytest.mark.parametrize("how", ["sorted", "shuffled", "exactly_B", "mean"])
def test_other_rows_in_a_model_of_one_batch_size_are_refused(how: str) -> None:
    class OneSize(Rows):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(4, 3, 4))

    flash = GradSampleModuleFlashClipping(OneSize(how).double())
    with raises("FC202", match=MIXED):
        flash(*float64s(4, 3, 4))


class LastPositionsFirst(nn.Module):
    """Positions and samples in one axis, in no regular order of samples: the last one first."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(0, 1).flip(0)


def test_all_layers_are_named_at_once() -> None:
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


def test_all_layers_that_reach_nowhere_are_named_at_once() -> None:
    """Rows lie together, but none of the outputs has a row for each sample: nothing shows where
    a sample's gradient goes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0, 1), nn.LayerNorm(4), nn.Linear(4, 3))
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
def test_chance_is_not_refused(mode: str) -> None:
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


# -- where the call begins ------------------------------------------------------------------------


class CallsAPart(nn.Module):
    """A training step calls a part of it, as Lightning's do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def training_step(self, x: Tensor) -> Tensor:
        return mean_squares(self.net(x.transpose(0, 1)).transpose(0, 1))


@pytest.mark.parametrize("after_a_call", [False, True])
def test_part_of_a_model_is_refused(after_a_call: bool) -> None:
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


class Rolled(nn.Module):
    """Rows that have the same sum and size, in the place of other samples."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.layer_norm(x, x.shape[-1:]).roll(1, 0))


def test_rows_of_one_sum_and_size() -> None:
    flash = GradSampleModuleFlashClipping(Rolled())
    with raises("FC202", match=r"last \(Linear\).* other values"):
        flash(torch.randn(4, 8))


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
def test_a_call_that_no_output_shows_beside_one_that_an_output_shows(
    how: str, kept_first: bool
) -> None:
    torch.manual_seed(0)
    model = Twice(how, kept_first).double()
    flash = GradSampleModuleFlashClipping(model)
    with raises("FC202", match="no output of the model that has a row for each"):
        flash(*float64s(4, 4))
        model.kept.square().sum().backward()


@pytest.mark.parametrize("loss", ["own", "kept"])
@pytest.mark.parametrize("how", ["layer", "bare parameter"])
def test_what_no_output_shows_is_refused(how: str, loss: str) -> None:
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
