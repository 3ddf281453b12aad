"""Parts of samples in the batch axis: declarations, later changes, and a second backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.autograd import TOLERANCE, check_truth, truth_of_one_forward
from tests.support.errors import raises
from tests.zoo.case import ModelCase
from tests.zoo.folded import CASES, FOLDED, RepeatedPositions
from tests.zoo.shared import rows

WINDOWS = CASES["declared windows"]


def test_declaration_that_names_no_module_is_refused() -> None:
    model, batch = WINDOWS.make()
    with raises("FC174", ValueError, match="'window'"):
        GradSampleModuleFlashClipping(model, folded_modules=["window"])


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda keys: keys[0].mul_(2),
    "a position of every row": lambda keys: keys.transpose(0, 1)[0].mul_(3),
    "all": lambda keys: keys.mul_(2),
    "all by another name": lambda keys: keys.mT.mul_(2),
}


@pytest.mark.every_pair
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("samples", "heads"), [(1, 2), (3, 2)])
def test_repeated_rows_changed_in_place_are_exact(
    samples: int, heads: int, change: str, mode: str
) -> None:
    """From some step on, which is not rehearsed: rows are then no longer what was repeated."""
    model, (x,) = ModelCase(lambda: RepeatedPositions(heads), rows(samples, 4, 3)).make()
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=1.0, mode=mode, strict=False)
    flash(x).square().sum((1, 2)).mean().backward()
    plain = RepeatedPositions(heads).double()
    plain.load_state_dict(model.state_dict())
    plain.change = model.change = CHANGES[change]
    truth = truth_of_one_forward(plain(x).square().sum((1, 2)), plain)
    model.zero_grad()
    flash(x).square().sum((1, 2)).mean().backward()
    check_truth(flash, model, truth, 1.0, TOLERANCE)


@pytest.mark.parametrize("declared", [True, False])
def test_second_backward_through_one_forward_is_the_first(declared: bool) -> None:
    """Rows are still parts of its samples, and its sums those of the first."""
    model, (x,) = WINDOWS.make()
    options = {"folded_modules": FOLDED} if declared else {}
    flash = GradSampleModuleFlashClipping(model, max_grad_norm=0.1, **options)
    loss = flash(x).square().mean()
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    flash.zero_grad()
    loss.backward()
    for name, grad in first.items():
        assert torch.equal(model.get_parameter(name).grad, grad), name
