"""What makes a call one that must be looked at: modes of parts, arguments, a first look that shows
nothing."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof.kinds import VALUES
from tests.support.errors import raises

B, K = 4, 6


class Order(enum.Enum):
    AS_GIVEN = 1
    REVERSED = 2


class Reverses(nn.Module):
    """Its first layer reads samples in reverse order where that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(K, K), nn.Linear(K, 3)

    def forward(self, x: Tensor, how: Any = None, step: int = 0) -> Tensor:
        turned = how in (Order.REVERSED, torch.float64, "reversed") or not self.first.training
        h = self.first(x.flip(0)).flip(0) if turned else self.first(x)
        return self.last(h.tanh())


def step(flash: GradSampleModuleFlashClipping, *args: Any, **kwargs: Any) -> None:
    flash.zero_grad()
    flash(torch.randn(B, K), *args, **kwargs).square().sum().backward()


def refused(flash: GradSampleModuleFlashClipping, *args: Any, **kwargs: Any) -> None:
    with raises("FC202", match="booked to others"):
        step(flash, *args, **kwargs)


@pytest.mark.parametrize(
    ("usual", "other"), [(Order.AS_GIVEN, Order.REVERSED), (torch.float32, torch.float64)]
)
def test_values_of_arguments_make_other_kinds(usual: Any, other: Any) -> None:
    flash = GradSampleModuleFlashClipping(Reverses())
    step(flash, usual)
    refused(flash, other)


def test_the_mode_of_a_part_makes_another_kind() -> None:
    model = Reverses()
    flash = GradSampleModuleFlashClipping(model)
    step(flash)
    step(flash)
    model.first.eval()
    refused(flash)


def test_an_argument_that_counts_steps_does_not_hide_another() -> None:
    flash = GradSampleModuleFlashClipping(Reverses())
    for number in range(VALUES + 2):
        step(flash, step=number)
    proofs = flash._session.proof.epoch
    step(flash, step=VALUES + 2)
    assert flash._session.proof.epoch == proofs
    refused(flash, "reversed", step=VALUES + 3)


class Centres(nn.Linear):
    """Takes the mean of the batch off, or reads samples in the order of their sums."""

    how = "mean"

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mean":
            return super().forward(x - x.mean(0))
        order = x.sum(1).argsort()
        return super().forward(x[order])[order.argsort()]


@pytest.mark.parametrize("how", ["mean", "order"])
def test_samples_that_are_alike_show_nothing(how: str) -> None:
    layer = Centres(K, 3)
    layer.how = how
    flash = GradSampleModuleFlashClipping(nn.Sequential(layer, nn.Tanh()))
    for _ in range(2):  # to warm up
        flash(torch.zeros(B, K)).square().sum().backward()
    x = torch.arange(float(B), 0, -1)[:, None] * torch.rand(B, K)
    with raises("FC210", match="others in its batch|booked to others"):
        flash(x).square().sum().backward()


MET: list[Tensor] = []


class Columns(nn.Module):
    """A row of a table: a category of fifty, one of three, and the time of a day."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few, self.hours = (nn.Embedding(n, K) for n in (50, 3, 24))
        self.last = nn.Linear(K, 2)

    def forward(self, x: Tensor) -> Tensor:
        columns = zip((self.many, self.few, self.hours), x.long().T, strict=True)
        rows = [table(ids) for table, ids in columns]
        MET.append(x.long().amax(0).cpu())
        return self.last(torch.stack(rows).prod(0) * (x[:, 2:] + 1).log())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_no_index_is_tried_that_no_sample_has_there(device: str, dtype: torch.dtype) -> None:
    """A GPU does not survive one that is too large; a CPU raises, and the proof would go on."""
    MET.clear()
    model = Columns().to(device)
    flash = GradSampleModuleFlashClipping(model)
    x = torch.tensor([[49, 0, 5.5], [3, 2, 6.25], [40, 1, 22.5], [30, 0, 8.75]])
    x = x.to(device, dtype)
    for _ in range(3):
        flash.zero_grad()
        flash(x).square().sum().backward()
    assert torch.stack(MET).amax(0).tolist() == [49, 2, 22]
    assert model.few.weight.grad is not None


class Bounded(nn.Module):
    """Takes no large numbers."""

    def __init__(self, after: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.first, self.last, self.after = nn.Linear(K, K), nn.Linear(K, 2), after

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 20:
            raise ValueError("too large")
        return self.after(self.last(self.first(x).tanh()))


def test_a_model_that_runs_on_no_extreme_sample_is_looked_at_without() -> None:
    x = torch.randn(B, K)
    flash = GradSampleModuleFlashClipping(Bounded())
    flash(x).square().sum().backward()
    kinds = flash._session.proof.kinds.values()
    assert [kind.why for kind in kinds] == [{(1, 0): ""}], "it was not compared"
    with raises("FC210", match="output 0: the outputs of a sample change"):
        model = Bounded(lambda y: y - y.mean(0).detach())
        GradSampleModuleFlashClipping(model)(x).square().sum().backward()


class Codes(nn.Module):
    """Takes two columns for indices, and others' into account where they are close together."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few, self.last = nn.Embedding(20, K), nn.Embedding(7, K), nn.Linear(K, 2)

    def forward(self, x: Tensor) -> Tensor:
        many, few = x.long().T
        h = self.many(many) + self.few(few)
        return self.last(h * 0.5 if (many - few).min() < 8 else h)


def test_what_may_be_an_index_is_extreme_among_those_of_its_place() -> None:
    x = torch.tensor([[14, 3.5], [16, 6.5], [11, 0.5], [12, 2.5]])
    with raises("FC202", match="output 0: the outputs of a sample change"):
        GradSampleModuleFlashClipping(Codes())(x).square().sum().backward()


class Counts(nn.Module):
    """Takes numbers as such, and others' into account where one is far out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(K, K), nn.Linear(K, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.float())
        return self.last(h * 0.5 if h.detach().abs().max() > 30 else h)


def test_floats_that_are_no_indices_are_extreme() -> None:
    x = torch.randint(-5, 5, (B, K)).float()
    with raises("FC202", match="output 0: the outputs of a sample change"):
        GradSampleModuleFlashClipping(Counts())(x).square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_inputs_of_dtypes_that_have_few_operations_are_looked_at(dtype: torch.dtype) -> None:
    model = nn.Sequential(Counts(), nn.Softmax(0))
    with raises("FC202|FC210", match="output 0: the outputs of a sample change"):
        GradSampleModuleFlashClipping(model)(torch.randint(0, 8, (B, K)).to(dtype)).sum().backward()
