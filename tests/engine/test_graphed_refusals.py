"""Steps that no graph can replay are refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping, GraphedStep
from flash_clipping.ops.runtime import tables
from flash_clipping.ops.runtime.tables import to_device
from tests.support.errors import raises
from tests.support.graphs import GraphedTraining, PlayedByHand, batches, small_network
from tests.support.oracle import assert_close


@pytest.mark.parametrize(("wrap", "set_to_none"), [(False, True), (True, True), (True, False)])
def test_a_step_that_clears_gradients_is_refused(wrap: bool, set_to_none: bool) -> None:
    training = GraphedTraining(None, wrap=wrap)

    def step(x: Tensor) -> None:
        training.model.zero_grad(set_to_none=set_to_none)
        training.step(x)

    graphed = PlayedByHand(step, training.model)
    x = batches(1)[0]
    graphed(x)
    graphed(x)
    with raises("FC703", match=r"clears gradients.*Call zero_grad\(\) outside"):
        graphed(x)


def test_a_step_that_clears_some_gradients_is_refused() -> None:
    parts = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

    def step(x: Tensor) -> None:
        parts[1].zero_grad()
        for part in parts:
            part(x).square().sum().backward()

    graphed = PlayedByHand(step, parts)
    x = batches(1)[0]
    graphed(x)
    graphed(x)
    with raises("FC703", match="clears gradients"):
        graphed(x)


def test_a_step_that_steps_is_refused() -> None:
    training = GraphedTraining(None, wrap=False)
    optimizer = torch.optim.SGD(training.plain.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        training.step(x)
        optimizer.step()

    graphed = PlayedByHand(step, training.model)
    x = batches(1)[0]
    for _ in range(2):
        graphed(x)
        optimizer.zero_grad()
    with raises("FC703", match="changes parameters"):
        graphed(x)


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("kind", ["two losses", "hooks off", "several models", "unused first"])
def test_steps_that_only_add_are_not_refused(kind: str, accumulates: bool) -> None:
    results = []
    for graphed in (True, False):
        torch.manual_seed(0)
        first, second = nn.Linear(6, 5), nn.Linear(6, 5)
        one = GradSampleModuleFlashClipping(first, max_grad_norm=0.5)
        two = GradSampleModuleFlashClipping(second, max_grad_norm=0.5)
        if kind == "hooks off":
            two.disable_hooks()
        whole = nn.ModuleList([one, two])

        def step(x: Tensor, one: Any = one, two: Any = two) -> None:
            if kind != "unused first":
                one(x).square().mean().backward()
            for factor in (1, 2) if kind != "several models" else (1,):
                (two(x) * factor).sin().mean().backward()

        take: Any = PlayedByHand(step, whole) if graphed else step
        for x in batches(6):
            if not accumulates:
                whole.zero_grad(set_to_none=True)
            take(x)
        results.append([p.grad for p in whole.parameters() if p.grad is not None])
        assert not graphed or take.replays == 3
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, 1e-6)  # of two losses, the sum is what is added


def test_sparse_gradients_are_refused() -> None:
    plain = nn.Embedding(10, 3, sparse=True)
    step = PlayedByHand(lambda ids: plain(ids).sum().backward(), plain)
    ids = torch.tensor([[1, 2]])
    for _ in range(3):
        plain.zero_grad()
        step(ids)
    with raises("FC703", match="gives sparse gradients"):
        step(ids)


def half_a_pair() -> float:
    """NumPy draws normal numbers two at a time and keeps one, which it gives here."""
    return float(numpy.random.randn())


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: numpy.random.rand(), half_a_pair, lambda: torch.rand([])],
    ids=["random", "numpy", "half of a numpy pair", "torch"],
)
def test_a_step_that_draws_on_the_host_is_refused(draw: Callable[[], Any]) -> None:
    training = GraphedTraining(None)

    def step(x: Tensor) -> None:
        training.step(x * float(draw()))

    graphed = PlayedByHand(step, training.model)
    x = batches(1)[0]
    numpy.random.seed(0)
    numpy.random.randn()
    graphed(x)
    graphed(x)
    with raises("FC703", match="draws random numbers on the host"):
        graphed(x)


def test_a_step_that_changes_an_argument_is_refused() -> None:
    training = GraphedTraining(None)
    graphed = PlayedByHand(lambda x, seen: (training.step(x), seen.add_(1))[1], training.model)
    x, seen = batches(1)[0], torch.zeros(())
    for _ in range(3):
        graphed(x, seen)
    with raises("FC703", match="changes one of its arguments in place"):
        graphed(x, seen)


@pytest.mark.parametrize(("warmup", "graphs"), [(1, 4), (3, -1)])
def test_numbers_that_make_no_sense(warmup: int, graphs: int) -> None:
    with raises("FC702", ValueError, match=f"found warmup={warmup} and graphs={graphs}"):
        GraphedStep(lambda: None, small_network(), warmup=warmup, graphs=graphs)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_rehearsed_as_it_will_be_captured(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that wait for the device in no capture (masks of transformers) can be captured."""
    training, asked = GraphedTraining(None), []

    def asks() -> bool:
        return False

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asks)

    def step(x: Tensor) -> None:
        asked.append(torch.cuda.is_current_stream_capturing())
        training.step(x)
        if fails and asked[-1]:
            raise ZeroDivisionError

    graphed = PlayedByHand(step, training.model)
    x = batches(1)[0]
    graphed(x)
    graphed(x)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        graphed(x)
    assert asked == [False, False, True]
    assert torch.cuda.is_current_stream_capturing is asks


def test_an_upload_that_no_replay_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    with raises("FC701"):
        to_device([1, 2], torch.device("meta"), torch.int64)
