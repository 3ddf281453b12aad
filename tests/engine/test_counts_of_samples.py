"""The loader, the criterion and ``check`` know how many samples there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import mean_squares
from tests.support.errors import raises
from tests.support.wrapping import MODES
from tests.zoo.constants import CASES

# -- what the loader drew -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 16), (16,)])
def test_packed_inputs_are_refused(shape: tuple[int, ...]) -> None:
    """4 sequences of 4 tokens in one row (one sample), or all tokens (16 samples)."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    flash = GradSampleModuleFlashClipping(model)
    ids = torch.randint(9, shape)
    flash.expect_samples(4)
    with raises("FC240", match="drew 4 samples,"):
        flash(ids)
    with torch.no_grad():
        flash(ids)
    mean_squares(flash(ids.view(4, 4))).backward()
    assert len(flash.get_norm_sample()) == 4
    flash.expect_samples(None)
    flash(ids)


def test_a_batch_that_was_filtered_names_the_dataset() -> None:
    """A mode of one sample at a time would not help."""
    flash = GradSampleModuleFlashClipping(nn.Linear(6, 3))
    flash.expect_samples(4)
    with raises("FC240", match=r"drew 4 .*\n    dataset = Subset\(") as error:
        flash(torch.randn(3, 6))
    assert "one_by_one" not in str(error.value)
    with raises("FC240", match=r"drew 4 samples(?s:.*)one_by_one"):
        flash(torch.randn(8, 6))


# -- the criterion and check know how many losses there are ---------------------------------------


class Recurrent(nn.Module):
    """Reads ``[T, B]`` and gives ``[B, classes]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids_TB: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids_TB))).mean(0)


@pytest.mark.parametrize("mode", MODES)
def test_time_first_input_is_refused_by_the_criterion(mode: str) -> None:
    """``[T, B]`` with ``batch_first=True``: ``T`` samples. The targets know better."""
    from opacus.optimizers import DPOptimizerFastGradientClipping

    from flash_clipping.engine.criterion import FlashLoss

    ids, target = torch.randint(9, (6, 4)), torch.randint(3, (4,))
    for batch_first in (True, False):
        model = Recurrent()
        flash = GradSampleModuleFlashClipping(model, mode=mode, batch_first=batch_first)
        optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(model.parameters(), lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=4,
        )
        criterion = FlashLoss(flash, optimizer, nn.CrossEntropyLoss(), "mean")
        if batch_first:
            with raises("FC241", match="4 losses, .*6 samples"):
                criterion(flash(ids), target)
        else:
            criterion(flash(ids), target)


def test_tokens_are_refused_by_the_criterion() -> None:
    """``[total]``: every token a sample, but one loss for each sequence."""
    from opacus.optimizers import DPOptimizerFastGradientClipping

    from flash_clipping.engine.criterion import FlashLoss

    class Sequences(Recurrent):
        def forward(self, ids_N: Tensor) -> Tensor:
            return self.head(self.embed(ids_N)).unflatten(0, (4, -1)).mean(1)

    model = Sequences()
    flash = GradSampleModuleFlashClipping(model)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    criterion = FlashLoss(flash, optimizer, nn.CrossEntropyLoss(), "mean")
    with raises("FC241", match="4 losses, .*16 samples"):
        criterion(flash(torch.randint(9, (16,))), torch.randint(3, (4,)))


def test_check_counts_losses() -> None:
    from flash_clipping.diagnostics import check as compare

    batch = (torch.randint(9, (6, 4)), torch.randint(3, (4,)))

    def loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    report = compare(Recurrent(), batch, loss)
    assert not report.passed and "found 4 losses" in report.failures[0]
    assert "called with a batch of 6 samples" in report.failures[0]
    assert compare(Recurrent(), batch, loss, batch_first=False).passed


def test_check_tries_other_sizes() -> None:
    from flash_clipping.diagnostics import check as compare

    seen: list[int] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = CASES["positions, embedding"].make(torch.float32)[0]

        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return self.inner(x)

    assert compare(Watched(), torch.randn(3, 5, 3)).passed
    assert {2, 3, 4, 5} <= set(seen)

    class Wrong(Watched):
        """Goes wrong when there are as many samples as positions."""

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return 2 * y if len(x) == x.shape[1] else y

    report = compare(Wrong(), torch.randn(3, 5, 3))
    assert not report.passed and "With 5 samples, as many as another" in report.failures[0]
