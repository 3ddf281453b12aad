"""``p.grad`` between backward and step: the step's clipped sum, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping import FlashPrivacyEngine, GraphedStep
from tests.support.errors import raises
from tests.support.private import SLACK, Private, Released, TwoLayers, data

# -- p.grad between backward and step -------------------------------------------------------------


def clip_again(private: Private) -> None:
    torch.nn.utils.clip_grad_norm_(private.plain.parameters(), 1.0)


def add_by_hand(private: Private) -> None:
    private.plain.head.weight.grad += 100.0


def replace_by_hand(private: Private) -> None:
    private.plain.head.weight.grad = private.plain.head.weight.grad * 100


def ordinary_backward(private: Private) -> None:
    x, y = (part[:1] for part in data().tensors)
    private.wrapper.disable_hooks()
    F.cross_entropy(private.model(x), y).backward()
    private.wrapper.enable_hooks()


def only_ordinary_backward(private: Private) -> None:
    private.optimizer.zero_grad()
    ordinary_backward(private)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
@pytest.mark.parametrize(
    "change",
    [clip_again, add_by_hand, replace_by_hand, ordinary_backward, only_ordinary_backward],
)
def test_a_gradient_that_is_not_the_clipped_sum(
    change: Callable[[Private], None], mode: str, released: Released
) -> None:
    private = Private(mode=mode)
    private.backward()
    change(private)
    before = [p.detach().clone() for p in private.plain.parameters()]
    with raises("FC501|FC503", ValueError):
        private.optimizer.step()
    assert not released.releases
    for was, param in zip(before, private.plain.parameters(), strict=True):
        assert torch.equal(was, param)
    private.step()  # cleared, and all is well
    assert released.ratio() <= SLACK


def test_what_gradients_held_before_backward(released: Released) -> None:
    private = Private()
    for param in private.plain.parameters():
        param.grad = torch.ones_like(param)
    private.backward()
    with raises("FC503", ValueError, match="was not cleared"):
        private.optimizer.step()
    assert not released.releases


@pytest.mark.parametrize("again", [False, True])
def test_two_backward_passes_on_a_batch_of_the_engine_s_loader(again: bool) -> None:
    """Also where that loader is given to make_private once more, as it is."""
    private = Private(poisson_sampling=True)
    model, optimizer, criterion, loader = (
        private.model, private.optimizer, private.criterion, private.loader
    )  # fmt: skip
    if again:
        plain = TwoLayers()
        model, optimizer, criterion, loader = FlashPrivacyEngine().make_private(
            module=plain,
            optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=0.1,
            poisson_sampling=False,
        )
    x, y = next(batch for batch in loader if len(batch[0]))
    criterion(model(x), y).backward()
    with raises("FC510", ValueError):
        criterion(model(x), y).backward()
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize("clear", ["none", "zeros", "model", "model_none", "by_hand"])
def test_every_way_to_clear_gradients(clear: str, wrap_model: bool, released: Released) -> None:
    private = Private(wrap_model=wrap_model)
    ways: dict[str, Callable[[], Any]] = {
        "none": private.optimizer.zero_grad,
        "zeros": lambda: private.optimizer.zero_grad(set_to_none=False),
        "model": lambda: private.model.zero_grad(set_to_none=not wrap_model),
        "model_none": lambda: private.model.zero_grad(set_to_none=True),
        "by_hand": lambda: [setattr(p, "grad", None) for p in private.plain.parameters()],
    }
    for _ in range(2):
        private.backward(samples=2)  # is thrown away
        ways[clear]()
        private.backward()
        private.optimizer.step()
        assert released.ratio() <= SLACK
        assert private.optimizer.accumulated_iterations == 1
        private.optimizer.zero_grad(set_to_none=clear != "zeros")


def test_parameters_frozen_between_backward_and_step(released: Released) -> None:
    """The wrapped optimizer steps on whatever has a gradient: without noise, here."""
    private = Private()
    private.backward()
    private.plain.head.requires_grad_(False)
    before = private.plain.head.weight.detach().clone()
    with raises("FC505", ValueError, match=r"head\.weight"):
        private.optimizer.step()
    assert torch.equal(before, private.plain.head.weight) and not released.releases
    private.step()
    assert len(released.sums[-1]) == 2


def test_parameters_frozen_between_parts_of_a_step(released: Released) -> None:
    private = Private()
    private.optimizer.signal_skip_step(True)
    private.step()
    private.plain.head.requires_grad_(False)
    private.optimizer.zero_grad()
    private.backward(start=1)
    with raises("FC505", match="4.*2"):
        private.optimizer.step()
    private.optimizer.discard_step()
    private.plain.head.requires_grad_(True)
    private.step()
    assert released.ratio() <= SLACK and len(released.releases) == 1


def test_parameters_unfrozen_between_backward_and_step() -> None:
    model = TwoLayers()
    model.head.requires_grad_(False)
    private = Private(model)
    private.backward()
    model.head.requires_grad_(True)
    with raises("FC502", ValueError, match=r"head\.weight"):
        private.optimizer.step()


def test_steps_out_of_order(released: Released) -> None:
    private = Private()
    with raises("FC501", ValueError):
        private.optimizer.step()
    private.step()
    with raises("FC532", ValueError):
        private.optimizer.step()
    private.backward()
    with raises("FC532", ValueError):
        private.optimizer.step()
    private.backward()
    private.optimizer.zero_grad()
    with raises("FC501", ValueError):
        private.optimizer.step()
    assert len(released.releases) == 1


def test_an_exception_between_backward_and_step(released: Released) -> None:
    private = Private()
    private.backward(samples=4)
    x, y = (part[:2] for part in data().tensors)
    loss = private.criterion(private.model(x), y)
    hook = private.plain.body[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    private.step()
    assert released.ratio() <= SLACK and len(released.releases) == 1


def step_in(parts: int, private: Private) -> None:
    """Without ``zero_grad()``."""
    for part in range(parts):
        private.optimizer.signal_skip_step(part + 1 < parts)
        private.backward(start=part)
        private.optimizer.step()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_whose_noise_fails(
    parts: int, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ran out, say. The same samples again, without ``zero_grad()``, count once."""
    private = Private()
    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        error = torch.OutOfMemoryError()
        patched.setattr(private.optimizer.stream, "draw", Mock(side_effect=error))
        step_in(parts, private)
    assert not released.releases and len(private.engine.accountant) == 0
    step_in(parts, private)
    assert released.releases[-1][0] <= 0.1 * parts * SLACK


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_is_not_accounted_for_leaves_nothing(
    parts: int, released: Released, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = Private()
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(private.engine.accountant, "step", lambda **_: 1 / 0)
        step_in(parts, private)
    assert all(param.grad is None for param in private.plain.parameters())
    step_in(parts, private)
    assert len(private.engine.accountant) == 1
    assert released.releases[-1][0] <= 0.1 * parts * SLACK


# -- two optimizers, copies -----------------------------------------------------------------------


def test_steps_as_graphs_are_checked_alike(released: Released) -> None:
    """What a replay leaves is as much the step's sum as what backward leaves."""
    from tests.support.graphs import PlayedByHand

    private = Private()

    def step(x: Tensor, y: Tensor) -> None:
        (100 * private.model(x).square().sum(1).mean()).backward()

    graphed: GraphedStep = PlayedByHand(step, private.model)
    x, y = (part[:1] for part in data().tensors)
    for number in range(6):
        private.optimizer.zero_grad()
        graphed(x, y)
        if number == 4:
            private.optimizer.signal_skip_step(True)
        private.optimizer.step()
        assert released.ratio() <= (2 if number == 5 else 1) * SLACK  # two parts
    assert graphed.replays == 3 and len(released.releases) == 5
    assert released.releases[-1][0] == pytest.approx(0.2, rel=1e-3)
    private.optimizer.zero_grad()
    graphed(x, y)
    private.plain.head.weight.grad.mul_(100)
    with raises("FC503", ValueError, match="is not the clipped sum"):
        private.optimizer.step()
