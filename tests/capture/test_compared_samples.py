"""Parameters that scale comparisons of samples: no refusal unless a loss reads these.

Shape suffixes: B samples, d features.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import check_by_autograd, float64s, mean_squares
from tests.support.errors import raises


class Contrasts(nn.Module):
    """Returns embeddings, and the similarities of all pairs: CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))
        self.gain = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x) * self.gain
        return h, h @ h.T * self.scale.exp() + self.shift


def of_embeddings(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return mean_squares(model(*batch)[0])


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_loss_of_embeddings(mode: str) -> None:
    torch.manual_seed(0)
    check_by_autograd(Contrasts().double(), float64s(4, 3), of_embeddings, mode=mode)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_loss_of_similarities_is_refused(mode: str) -> None:
    torch.manual_seed(0)
    model = Contrasts().double()
    flash = GradSampleModuleFlashClipping(model, mode=mode)
    for _ in range(2):
        with raises("FC210", match="output 1: the outputs of a sample change"):
            flash(*float64s(4, 3))[1].square().sum().backward()
        assert all(param.grad is None for param in model.parameters())


class OwnLoss(Contrasts):
    """Computes its loss itself, of all pairs."""

    def forward(self, x: Tensor) -> Any:
        h, pairs = super().forward(x)
        return (h @ h.T).square().mean(), h, pairs


def test_a_loss_that_the_model_computes_of_similarities_is_refused() -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(OwnLoss().double())
    with raises("FC210", match="output 2: the outputs of a sample change"):
        flash(*float64s(4, 3))[0].backward()


class Later(Contrasts):
    """Compares samples only after the first call, by the same parameter and in another place."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, pairs = super().forward(x)
        if self.training:
            return h, pairs
        return (h @ h.T).sum(1, keepdim=True) * self.scale, pairs


def test_another_use_of_such_a_parameter_is_refused() -> None:
    """Once it was seen to compare samples, it is not trusted anywhere."""
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(Later().double())
    batch = float64s(4, 3)
    of_embeddings(flash, batch).backward()
    flash.eval()
    with raises("FC202", match="output 0: the outputs of a sample change"):
        of_embeddings(flash, batch).backward()


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = Contrasts(), nn.Linear(4, 2), reentrant

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, pairs = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.head(h), pairs


@pytest.mark.parametrize("output", [0, 1])
def test_under_activation_checkpointing(output: int) -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(Checkpointed(reentrant=False).double())
    (x,) = float64s(4, 3)
    if not output:
        check_by_autograd(Checkpointed(reentrant=False).double(), (x,), of_embeddings)
        return
    with raises("FC210", match="the outputs of a sample change"):
        flash(x)[output].square().sum().backward()


class Normalizes(nn.Module):
    """Divides by a mean over the batch, which a parameter meets: the only way to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.head = nn.Parameter(torch.ones(3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gain * (x - x.mean(0)))


def test_what_layers_read_behind_it_is_refused() -> None:
    torch.manual_seed(0)
    flash = GradSampleModuleFlashClipping(Normalizes().double())
    with raises("FC202", match=r"head .* other values for the same samples"):
        flash(*float64s(4, 3))
