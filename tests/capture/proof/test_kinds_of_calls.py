"""What makes a call one that must be looked at: modes of parts, arguments, a first look that shows
nothing."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import FlashClippingError, GradSampleModuleFlashClipping
from flash_clipping.capture.proof.coverage import VALUES

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
    with pytest.raises(FlashClippingError, match="booked to others"):
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
    proofs = flash._session.epoch
    step(flash, step=VALUES + 2)
    assert flash._session.epoch == proofs
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
    with pytest.raises(FlashClippingError, match="others in its batch|booked to others"):
        flash(x).square().sum().backward()


def test_samples_that_are_always_alike_are_not_looked_at_for_ever() -> None:
    gate = GradSampleModuleFlashClipping(nn.Sequential(nn.Linear(K, 3)))
    runs = []
    gate._module[0].register_forward_hook(lambda *_: runs.append(1))
    counts = []
    for _ in range(8):
        runs.clear()
        gate(torch.zeros(B, K)).square().sum().backward()
        counts.append(len(runs))
    assert counts[5:] == [1, 1, 1]


MET: list[Tensor] = []


class Columns(nn.Module):
    """A row of a table: a category of fifty, one of three, and the time of a day."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few, self.hours = (nn.Embedding(n, K) for n in (50, 3, 24))
        self.last = nn.Linear(K, 2)

    def forward(self, x: Tensor) -> Tensor:
        MET.append(x.long().amax(0).cpu())
        columns = zip((self.many, self.few, self.hours), x.long().T, strict=True)
        rows = [table(ids) for table, ids in columns]
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
