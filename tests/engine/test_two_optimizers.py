"""Two optimizers of one model, copies of a wrapped model, and checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import schedulers
from torch import nn
from torch.utils.data import DataLoader

from flash_clipping import FlashClippingError, FlashDPOptimizer
from tests.support.private import SLACK, Private, Released, TwoLayers, data


@pytest.mark.parametrize("wrap_model", [True, False])
def test_two_optimizers_on_one_model(wrap_model: bool) -> None:
    model = TwoLayers()
    first = Private(model, parameters=[*model.body.parameters()], wrap_model=wrap_model)
    second = first.wrapper if wrap_model else model
    with pytest.raises(ValueError, match="has a private optimizer already|One model has one opt"):
        Private(second, parameters=[*model.head.parameters()], wrap_model=wrap_model)
    another = FlashDPOptimizer(
        torch.optim.SGD(model.head.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    with pytest.raises(ValueError, match="has a private optimizer already"):
        another.follow(first.wrapper)
    assert first.wrapper.max_grad_norm == 0.1
    first.wrapper.cleanup()
    fresh = Private(model)
    fresh.step()


def test_private_again_with_the_same_optimizer(released: Released) -> None:
    private = Private()
    private.step()
    model, optimizer, criterion, _ = private.engine.make_private(
        module=private.wrapper,
        optimizer=private.optimizer,
        data_loader=DataLoader(data(), batch_size=16),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=0.02,
        poisson_sampling=False,
    )
    assert model is private.wrapper and model.max_grad_norm == optimizer.max_grad_norm == 0.02
    x, y = (part[:1] for part in data().tensors)
    optimizer.zero_grad()
    criterion(model(x), y).backward()
    with pytest.raises(ValueError, match="was replaced"):
        private.optimizer.step()
    optimizer.step()
    assert released.releases[-1][1] == pytest.approx(0.02) and released.ratio() <= SLACK


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_wrapped_model_have_no_optimizer(copied: Callable[[Any], Any]) -> None:
    private = Private()
    private.step()
    private.backward()
    twin = copied(private.wrapper)
    assert twin.backward_count == 0 and twin.running_step.follower is None
    x, y = (part[:4] for part in data().tensors)
    for module in (private.wrapper, twin):
        module.zero_grad(set_to_none=True)
        F.cross_entropy(module(x), y).backward()
    for p, q in zip(private.wrapper.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    twin._module.head = nn.Linear(8, 3)
    with pytest.raises(FlashClippingError, match="head"):
        twin(x)
    private.wrapper(x)


def test_checkpoints_in_the_middle_of_training(released: Released) -> None:
    private = Private(max_grad_norm=0.3)
    scheduler = schedulers.ExponentialGradClip(private.optimizer, gamma=0.5)
    private.step()
    scheduler.step()
    private.optimizer.zero_grad()
    file = io.BytesIO()
    private.engine.save_checkpoint(
        path=file,
        module=private.wrapper,
        optimizer=private.optimizer,
        grad_clip_scheduler=scheduler,
    )
    file.seek(0)
    private.backward()
    state = private.optimizer.state_dict()
    private.engine.load_checkpoint(
        path=file,
        module=private.wrapper,
        optimizer=private.optimizer,
        grad_clip_scheduler=scheduler,
    )
    private.optimizer.load_state_dict(state)
    private.optimizer.step()
    assert released.releases[-1][1] == pytest.approx(0.15) and released.ratio() <= SLACK
