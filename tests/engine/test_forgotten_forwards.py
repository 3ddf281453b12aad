"""A forward whose result is kept and never goes backward: ``zero_grad()`` forgets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_draws import private, step
from tests.support.errors import raises
from tests.support.private import Private, data

CLEARED = {
    "optimizer": lambda module, optimizer: optimizer.zero_grad(),
    "model": lambda module, optimizer: module.zero_grad(),
}
MODES = pytest.mark.parametrize("mode", ["one_pass", "two_pass"])


@MODES
@pytest.mark.parametrize("by", CLEARED)
def test_a_look_before_training_is_forgotten(mode: str, by: str) -> None:
    """As notebooks keep ``loss0``, and as an interrupt between forward and backward leaves it."""
    made = private(mode=mode)
    module, optimizer, criterion, loader = made
    looks = []
    for x, y in loader:
        looks.append(criterion(module(x), y))
        CLEARED[by](module, optimizer)
        break
    for x, y in loader:
        looks.append(criterion(module(x), y))  # an interrupt here
        break
    for x, y in loader:
        CLEARED[by](module, optimizer)
        loss = criterion(module(x), y)
        loss.backward()
        found = [p.grad.clone() for p in module.parameters()]
        optimizer.zero_grad()
        del loss
        criterion(module(x), y).backward()
        for sums, p in zip(found, module.parameters(), strict=True):
            assert torch.allclose(sums, p.grad, atol=1e-7)
        optimizer.step()
    assert len(looks) == 2


def test_without_clearing_the_message_says_what_to_do() -> None:
    made = private()
    module, optimizer, criterion, loader = made
    looks = [criterion(module(x), y) for x, y in [next(iter(loader))]]
    x, y = next(iter(loader))
    with raises("FC510", match="batches 0, 1"):
        criterion(module(x), y).backward()
    step(made, x, y)
    assert looks


def in_turn(made: Any, clear: Callable[[], None], x: Tensor) -> None:
    first = made.model(x)
    clear()
    second = made.model(2 * x)
    clear()
    (first.square().sum(1) + second.sum(1)).mean().backward()


@MODES
def test_what_a_backward_reaches_counts(mode: str) -> None:
    """Gradients may be cleared between forward and backward: nothing of it is forgotten."""
    x, sums = data().tensors[0][:8], []
    for cleared in (False, True):
        made = Private(mode=mode)
        in_turn(made, made.optimizer.zero_grad if cleared else lambda: None, x)
        assert len(made.wrapper.get_norm_sample()) == 8
        sums.append([p.grad.clone() for p in made.plain.parameters()])
    assert all(map(torch.equal, *sums))


def test_each_call_by_itself_after_clearing() -> None:
    made, alone = Private(), Private()
    x = data().tensors[0][:8]
    outputs = [made.model(x), made.model(2 * x)]
    made.optimizer.zero_grad()
    for inputs, output in zip((x, 2 * x), outputs, strict=True):
        output.square().sum(1).mean().backward()
        alone.model(inputs).square().sum(1).mean().backward()
        for p, other in zip(made.plain.parameters(), alone.plain.parameters(), strict=True):
            assert torch.equal(p.grad, other.grad)
        made.optimizer.zero_grad()
        alone.optimizer.zero_grad()
