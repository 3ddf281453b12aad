"""Declared rows: what a wrapped model does with them beside a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping, samples
from tests.support.autograd import float64s, mean_squares, squares
from tests.support.errors import raises
from tests.zoo.declared import Experts, declared, outside, right, two_layers
from tests.zoo.shared import held


@pytest.mark.parametrize("T", [1, 4])
def test_reentrant_checkpoint_inside_of_samples_is_refused(T: int) -> None:
    """With as many rows as samples nothing else would be noticed."""
    layers = {"first": nn.Linear(6, 6), "layer": nn.Linear(6, 6)}
    flash = GradSampleModuleFlashClipping(held(outside(True), lambda: layers).build())
    loss = squares(flash, (torch.randn(3, T, 6),))
    with raises("FC262", match=r"layer \(Linear\)"):
        loss.backward()


def test_rows_of_one_sample_alone_leave_the_others_nothing() -> None:
    class OfOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            with samples(torch.zeros(x.shape[1], dtype=torch.long), count=len(x)):
                return self.layer(x[0])

    flash = GradSampleModuleFlashClipping(OfOne(), loss_reduction="sum")
    flash(torch.randn(3, 5, 6)).square().sum().backward()
    norms = flash.get_norm_sample()
    assert norms[0] > 0
    assert norms[1:].tolist() == [0, 0]


def test_samples_of_a_plain_model_do_nothing() -> None:
    model, batch = Experts().double(), float64s(3, 5, 6)
    expected = copy.deepcopy(model)(*batch)
    assert torch.equal(model(*batch), expected)


def test_declared_rows_of_time_first_are_refused() -> None:
    model = held(declared(right), two_layers).build()
    with raises("FC263"):
        mean_squares(GradSampleModuleFlashClipping(model, batch_first=False)(torch.randn(5, 3, 6)))


def test_declared_rows_of_a_compiled_model_are_refused() -> None:
    torch._dynamo.reset()
    flash = GradSampleModuleFlashClipping(held(declared(right), two_layers).build())
    flash.compile(backend="eager", fullgraph=True)
    with raises("FC261", Exception):
        squares(flash, (torch.randn(3, 5, 6),)).backward()
    torch._dynamo.reset()
