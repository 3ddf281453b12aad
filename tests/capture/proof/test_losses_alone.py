"""A loss is all that is looked at, layers that no look reaches, and inputs that are written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture.proof.gate import FIRST_AUDIT
from tests.support.errors import raises

B, K = 4, 6


class LossAlone(nn.Module):
    """A head that sees samples as they are is called last; the other may see them mixed."""

    def __init__(self, mixes: str = "") -> None:
        super().__init__()
        self.mixes = mixes
        self.first, self.last, self.beside = (nn.Linear(K, n) for n in (K, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.flip(0)).flip(0) if self.mixes == "reverse" else self.first(x)
        if self.mixes == "largest":
            h = h / h.detach().abs().max()
        if self.mixes == "last":
            h = torch.cat([h[:-1], h[-1:] + 0.1 * h[:1].detach()])
        return self.last(h.tanh()).square().sum() + self.beside(x).square().sum()


@pytest.mark.parametrize("mixes", ["reverse", "largest", "last"])
def test_every_sample_of_a_loss_alone_counts(mixes: str) -> None:
    torch.manual_seed(0)
    right, wrong = (
        GradSampleModuleFlashClipping(LossAlone(how), loss_reduction="sum") for how in ("", mixes)
    )
    right(torch.randn(B, K)).backward()
    with raises("FC202", match=r"(first|last) \(Linear\): what it reads"):
        wrong(torch.randn(B, K)).backward()


def test_a_sum_is_no_mean() -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(LossAlone())
    with raises("FC444", match='4 times .* loss_reduction="mean"'):
        flash(torch.randn(B, K)).backward()


class OwnLoss(nn.Module):
    """Its loss compares samples, or is a mean over samples, or over those that count."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed, self.drop = how, nn.Linear(K, 5), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x))
        if self.how == "contrasts":
            return nn.functional.cross_entropy(h @ h.T, torch.arange(len(h)))
        if self.how == "deviation":
            return h.square().mean(1).std()
        if self.how == "mean of some":
            counts = (x[:, 0] > 0).float()
            return (h.square().sum(1) * counts).sum() / counts.sum().clamp(min=1)
        return h.square().mean()


@pytest.mark.parametrize("how", ["contrasts", "deviation"])
def test_a_loss_that_compares_samples_is_refused(how: str) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(OwnLoss(how))
    with raises("FC444"):
        flash(torch.randn(B, K)).backward()
    assert all(param.grad is None for param in flash.parameters())


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_mean_of_losses_is_not(count: int) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(OwnLoss("mean"))
    flash(torch.randn(count, K)).backward()
    assert flash.get_norm_sample().shape == (count,)


@pytest.mark.parametrize("counts", [(1, -1), (1, 1, -1, 1)])
def test_a_mean_over_what_counts_in_the_batch_is_refused(counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(OwnLoss("mean of some"))
    x = torch.randn(len(counts), K)
    x[:, 0] = torch.tensor(counts)
    with raises("FC444"):
        flash(x).backward()


@pytest.mark.parametrize("how", ["contrasts", "deviation", "mean of some"])
@pytest.mark.parametrize("calls", [2, FIRST_AUDIT + 2])
def test_a_loss_that_begins_to_compare_samples_is_refused_by_an_audit(calls: int, how: str) -> None:
    torch.manual_seed(0)
    model = OwnLoss(how)
    loss, begun = model.forward, False
    model.forward = lambda x: loss(x) if begun else model.embed(x).square().mean()
    flash = GradSampleModuleFlashClipping(model, strict=False)
    for _ in range(calls):
        flash.zero_grad()
        flash(torch.randn(B, K)).backward()
    begun = True
    with raises("FC444"):
        for _ in range(2 * FIRST_AUDIT):
            flash.zero_grad()
            flash(torch.randn(B, K)).backward()


class MaskedLoss(nn.Module):
    """Beside rows that are each sample's own, a mean over what a mask, or labels, count."""

    def __init__(self, by_sample: bool) -> None:
        super().__init__()
        self.by_sample, self.embed, self.drop = by_sample, nn.Linear(1, 3), nn.Dropout(0.3)

    def forward(
        self, x: Tensor, mask: Tensor | None, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        h = self.drop(self.embed(x[..., None]))
        counts = (labels != -100 if mask is None else mask).float()
        errors = h.square().mean(2)
        if self.by_sample:
            return ((errors * counts).sum(1) / counts.sum(1).clamp(min=1)).mean(), h
        return (errors * counts).sum() / counts.sum(), h


MASKS = {
    "bool": (torch.ones(B, 8, dtype=torch.bool),),
    "float": (torch.ones(B, 8),),
    "labels": (None, torch.tensor([[1, 2, 0, 1, 2, 2, 1, 2]]).repeat(B, 1)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("count", [1, B])
def test_a_batch_of_equal_samples_shows_what_is_counted(mask: Any, count: int) -> None:
    """The samples of the first batch have as many labels, those of others need not."""
    torch.manual_seed(0)
    x, given = torch.randn(count, 8), [None if y is None else y[:count] for y in mask]
    right, wrong = (GradSampleModuleFlashClipping(MaskedLoss(own)) for own in (True, False))
    right(x, *given)[0].backward()
    loss, h = wrong(x, *given)
    with raises("FC444", match="output 0"):
        loss.backward()
    h.square().mean((1, 2)).mean().backward()  # the other output is each sample's own


class OfItsBatch(nn.Module):
    """A loss that needs all samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(K, 5)

    def forward(self, x: Tensor, partner: Tensor) -> Tensor:
        return (self.embed(x) - x.sum(1)[partner][:, None]).square().mean()


def test_a_loss_of_no_single_sample_is_refused() -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(OfItsBatch())
    with raises("FC444", match="Index"):
        flash(torch.randn(B, K), torch.arange(B).roll(1)).backward()


B_OF_REACHED, T, K_OF_REACHED = 4, 3, 6


class EveryThird(nn.Module):
    """Calls its second layer in every third step, with samples in their order, or in reverse."""

    def __init__(self, reverses: bool) -> None:
        super().__init__()
        self.reverses, self.steps = reverses, 0
        self.first, self.second, self.last = (
            nn.Linear(K_OF_REACHED, K_OF_REACHED) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.first(x).tanh()
        if self.steps % 3 == 0:
            h = self.second(h.flip(0)).flip(0) if self.reverses else self.second(h)
        return self.last(h)


@pytest.mark.parametrize("reverses", [False, True])
def test_a_layer_that_no_look_reaches_is_refused(reverses: bool) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(EveryThird(reverses))
    for _ in range(2):
        flash(torch.randn(B_OF_REACHED, T, K_OF_REACHED)).square().sum().backward()
    with raises("FC230", match="second"):
        flash(torch.randn(B_OF_REACHED, T, K_OF_REACHED))


B_OF_INPUTS_WRITTEN_TO, T_OF_INPUTS_WRITTEN_TO, K_OF_INPUTS_WRITTEN_TO = 4, 3, 6
