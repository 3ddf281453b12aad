"""Criteria that compare samples, or learn, or remember; and those that only seem to."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flash_clipping import FlashPrivacyEngine
from flash_clipping.engine.separable import compares_samples
from tests.support.errors import raises

CLASSES = 4
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 5.0])


def pairs(output: Tensor, target: Tensor) -> Tensor:
    z = F.normalize(output, dim=1)
    alike = z @ z.T / 0.5
    alike = alike.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(alike, torch.arange(len(z)).roll(1))


def barlow(output: Tensor, target: Tensor) -> Tensor:
    z = (output - output.mean(0)) / output.std(0)
    return ((z.T @ z / len(z)) - torch.eye(z.shape[1])).square().sum()


def scored(output: Tensor, target: Tensor) -> Tensor:
    y = (target - target.float().mean()) / target.float().std()
    return (output[:, 0] - y).square().mean()


def dice(output: Tensor, target: Tensor) -> Tensor:
    p, y = output.sigmoid(), F.one_hot(target, CLASSES)
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


def triplets_in_rows(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    losses = (output - output.mean(0)).square().sum(1)
    return losses if reduction == "none" else losses.mean()


def crosswise(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, :1] - target).square().mean()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls.append(1)
        return F.cross_entropy(output, target) * (1 + 0.5 * len(self.calls))


class Draws(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(output, 0.5), target)


def by_sample_dice(output: Tensor, target: Tensor) -> Tensor:
    p, y = output.sigmoid(), F.one_hot(target, CLASSES)
    return (1 - 2 * (p * y).sum(1) / (p.sum(1) + y.sum(1))).mean()


generator = torch.Generator().manual_seed(3)
calls = itertools.count(1)

COMPARE: dict[str, Callable[..., Tensor]] = {
    "pairs": pairs,
    "a little": lambda output, target: F.cross_entropy(output, target) + 1e-3 * output.var(0).sum(),
    "barlow": barlow,
    "scored": scored,
    "dice": dice,
    "rows": triplets_in_rows,
    "crosswise": crosswise,
    "weights": lambda output, target: F.cross_entropy(output, target, weight=WEIGHT),
    "ignored": lambda output, target: F.cross_entropy(output, target, ignore_index=0),
}
ALONE: dict[str, Callable[..., Tensor]] = {
    "PyTorch's": nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=1),
    "function": F.cross_entropy,
    "smoothed": lambda output, target: F.cross_entropy(output, target, label_smoothing=0.2),
    "dice": by_sample_dice,
    "divided by a constant": lambda output, target: (
        F.cross_entropy(output, target, reduction="sum") / 10
    ),
    "with a constant": lambda output, target: F.cross_entropy(output, target) + 3.0,
    "counts": Counts(),
    "draws": Draws(),
    "draws of its own": lambda output, target: F.cross_entropy(
        output + torch.randn(output.shape, generator=generator), target
    ),
    "grows": lambda output, target: F.cross_entropy(output, target) * next(calls),
    "focal": lambda output, target: (
        (1 - output.softmax(1)[range(len(target)), target]).pow(2)
        * F.cross_entropy(output, target, reduction="none")
    ).mean(),
    "centers": lambda output, target: (
        (output[:, :1] - torch.linspace(-1, 1, 16)[None]).square().mean()
    ),
}


def private(criterion: Any, batch: int = 16, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    data = TensorDataset(torch.randn(64, 5), torch.randint(CLASSES, (64,)))
    made = FlashPrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(data, batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **{"poisson_sampling": False, **options},
    )
    return *made, data.tensors


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", COMPARE)
def test_a_criterion_that_compares_samples_is_refused(name: str, mode: str) -> None:
    model, _, criterion, _, (x, y) = private(COMPARE[name], mode=mode)
    for _ in range(2):  # who goes on is refused again
        with raises("FC440"):
            criterion(model(x[:16]), y[:16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_one_that_does_not_trains(name: str, dtype: torch.dtype) -> None:
    model, optimizer, criterion, _, (x, y) = private(ALONE[name])
    for size in (2, 16, 7, 16):  # of a batch that cannot be halved nothing is known
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = criterion(model(x[:size]), y[:size])
        loss.backward()
        assert model.get_norm_sample().shape == (size,)
        optimizer.step()


def test_it_is_looked_at_once_and_leaves_no_trace() -> None:
    counts = Counts()
    model, _, criterion, _, (x, y) = private(counts)
    with torch.no_grad():
        criterion(model(x[:16]), y[:16])
    assert len(counts.calls) == 1
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for number in range(3):
        criterion(model(x[:16]), y[:16])
        assert len(counts.calls) == 2 + number
    torch.testing.assert_close(torch.rand(3), expected)


class Center(nn.Module):
    """A center loss: its centers are trained, or follow the samples."""

    def __init__(self, learns: bool):
        super().__init__()
        self.learns = learns
        if learns:
            self.centers = nn.Parameter(torch.randn(CLASSES, CLASSES))
        else:
            self.register_buffer("centers", torch.randn(CLASSES, CLASSES))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = (output - self.centers[target].clone()).square().sum(1).mean()
        if not self.learns and self.training:
            with torch.no_grad():
                self.centers[target] += 0.1 * (output - self.centers[target])
        return loss


def test_a_criterion_that_learns_is_warned_of() -> None:
    criterion = Center(learns=True)
    for learns in (True, False):
        model, _, loss, _, (x, y) = private(criterion.requires_grad_(learns))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", UserWarning)
            loss(model(x[:16]), y[:16]).backward()
        said = ["Center.centers" in str(one.message) for one in found]
        assert said.count(True) == learns


def test_a_criterion_that_remembers_is_refused() -> None:
    model, _, criterion, _, (x, y) = private(Center(learns=False))
    for size in (1, 16):
        with raises("FC450", match="'centers'") as error:
            criterion(model(x[:size]), y[:size])
    exec(str(error.value).splitlines()[-1].strip(), {"criterion": criterion})
    criterion(model(x[:16]), y[:16]).backward()
    assert model.get_norm_sample().shape == (16,)


def test_a_criterion_that_runs_out_of_memory_in_float64_is_no_comparison() -> None:
    def loss(output: Tensor) -> Tensor:
        if output.dtype == torch.float64:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return (output - output.mean(0)).square()

    output = torch.randn(8, 3, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError):
        compares_samples(loss, (output,), {}, 8)
