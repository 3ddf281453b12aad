"""A loss of one's own: outputs that are broadcast over the batch, and parameters beside the
model."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.engine.loss_graph import LossLook
from tests.support.errors import raises, warns

CROSSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "mse_loss": (lambda o, y: F.mse_loss(o, y), 1),
    "l1_loss": (lambda o, y: F.l1_loss(o, y), 1),
    "huber_loss": (lambda o, y: F.huber_loss(o, y), 1),
    "smooth_l1_loss": (lambda o, y: F.smooth_l1_loss(o, y), 1),
    "by hand": (lambda o, y: ((o - y) ** 2).mean(), 1),
    "by hand, the other way round": (lambda o, y: (y - o).abs().mean(), 1),
    "scaled before": (lambda o, y: (2 * o.tanh() - y).square().mean(), 1),
    "a product": (lambda o, y: -(o * y).mean(), 1),
    "targets with an axis more": (lambda o, y: (o[:, 0] - y[:, None]).square().mean(), 1),
    "of several outputs": (lambda o, y: (o[:, :1] - y).square().mean() + o.square().mean(), 3),
    "pairs": (lambda o, y: (o[:, None, 0] - o[None, :, 0]).square().mean(), 1),
}
RIGHT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "same shape": (lambda o, y: F.mse_loss(o, y[:, None]), 1),
    "squeezed": (lambda o, y: F.mse_loss(o[:, 0], y), 1),
    "classes": (lambda o, y: F.cross_entropy(o, y.long().abs() % 3), 3),
    "centers, eight by chance": (lambda o, y: (o - torch.arange(8.0)).square().mean(), 1),
    "pairs of a sample": (
        lambda o, y: (o[:, :, None] - o[:, None, :]).square().sum((1, 2)).mean(),
        8,
    ),
    "a head": (lambda o, y: (o @ torch.ones(1, 8)).square().mean(), 1),
    "a mean of one": (lambda o, y: (o - o.detach() * y[:, None]).square().mean(), 1),
}


def wrapped(width: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, width))
    return GradSampleModuleFlashClipping(model, **options)


def backward(model: Any, loss: Callable[[Tensor, Tensor], Tensor], size: int) -> Any:
    generator = torch.Generator().manual_seed(size)
    x, y = torch.randn(size, 4, generator=generator), torch.randn(size, generator=generator)
    model.zero_grad()
    loss(model(x), y).backward()
    return model.get_norm_sample()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", CROSSED)
def test_outputs_broadcast_over_the_batch_are_refused(name: str, mode: str) -> None:
    loss, width = CROSSED[name]
    model = wrapped(width, mode=mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the loss: found outputs")
        backward(model, loss, 1)  # of which nothing can be said
    with warns("FC460"):
        backward(model, loss, 8)
    backward(model, loss, 8)
    backward(model, loss, 3)
    for size in (5, 6):
        with raises("FC460"):
            backward(model, loss, size)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_never_refused(name: str, mode: str) -> None:
    loss, width = RIGHT[name]
    model = wrapped(width, mode=mode)
    with warnings.catch_warnings():
        if "chance" not in name:
            warnings.simplefilter("error")
        for size in (8, 8, 5, 8, 3):
            assert backward(model, loss, size).shape == (size,)
    assert model._loss_look.ended


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_head_outside_of_the_model_is_named(mode: str) -> None:
    model, head = wrapped(3, mode=mode), nn.Bilinear(3, 3, 2)
    with warns("FC451", match=r"found 2 parameters, the first of shape \[2(, 3, 3)?\]"):
        backward(model, lambda o, y: head(o, o).square().mean(), 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model, lambda o, y: head(o, o).square().mean(), 5)  # once


def test_a_front_end_outside_of_the_model_is_named() -> None:
    model, front = wrapped(3), nn.Linear(2, 4)
    with warns("FC451", match=r"found 2 parameters, the first of shape \[4(, 2)?\]"):
        model(front(torch.randn(5, 2))).square().mean().backward()
    frozen = wrapped(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frozen(front.requires_grad_(False)(torch.randn(5, 2))).square().mean().backward()


def test_unsharded_parameters_are_none_outside_of_the_model() -> None:
    """A sharded model lists other parameters than those that it computes with; a head is found."""
    model, lent, head = nn.Linear(4, 3), nn.Parameter(torch.randn(4)), nn.Linear(3, 2)
    model.weight.placements = ()  # type: ignore[assignment]
    look = LossLook(model)
    for loss_of, found in ((Tensor.square, 0), (head, 1)):
        output = model(torch.randn(5, 4) * lent)
        look.follow([output], 5, threading.get_ident())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss_of(output).sum().backward()
        assert ["that it reaches" in str(one.message) for one in caught] == [True] * found
        look = LossLook(model)


def test_an_output_that_nobody_goes_back_from_is_freed() -> None:
    model = wrapped(3)
    output = model(torch.randn(5, 4))
    loss = output.square().mean()
    seen = weakref.ref(output)
    gc.collect()
    gc.disable()
    try:
        held = [weakref.ref(output)]
        del output, loss
        assert held[0]() is None and seen() is None
    finally:
        gc.enable()
    assert model._session.live_calls() == 0
