"""Noise is for the bound that the step's sums were clipped by (:mod:`tests.support.private`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opacus import schedulers

from tests.support.errors import raises
from tests.support.private import SLACK, Private, Released

PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [0.01, 0.02, 0.03, 0.04]}


def test_noise_is_for_the_bound_that_the_sum_was_clipped_by(released: Released) -> None:
    private = Private(max_grad_norm=10.0)
    private.backward()
    private.optimizer.max_grad_norm = 0.01
    private.optimizer.step()
    assert released.releases[-1][0] == pytest.approx(10.0, rel=1e-4)
    assert released.ratio() <= SLACK  # was 1000
    private.step()  # from the next step on
    assert released.releases[-1][0] == pytest.approx(0.01, rel=1e-3)
    assert released.releases[-1][1] == pytest.approx(0.01)


@pytest.mark.parametrize("options", [{}, PER_LAYER, {"clipping": "automatic"}])
@pytest.mark.parametrize("setter", ["model", "optimizer"])
def test_model_and_optimizer_have_one_bound(
    setter: str, options: dict[str, Any], released: Released
) -> None:
    private = Private(**options)
    if setter == "optimizer":
        private.optimizer.max_grad_norm = 1e-3
    else:
        private.wrapper.max_grad_norm = [5e-4] * 4 if options == PER_LAYER else 1e-3
    private.step()
    assert private.optimizer.max_grad_norm == pytest.approx(1e-3)
    found = private.wrapper.max_grad_norm
    total = torch.tensor(found).norm().item()
    assert total == pytest.approx(1e-3)
    assert released.releases[-1][1] == pytest.approx(1e-3)
    assert released.ratio() <= SLACK


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: schedulers.ExponentialGradClip(optimizer, gamma=0.1),
    "lambda": lambda optimizer: schedulers.LambdaGradClip(
        optimizer, scheduler_function=lambda epoch: 0.1**epoch
    ),
    "step": lambda optimizer: schedulers.StepGradClip(optimizer, step_size=1, gamma=0.1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("options", [{}, PER_LAYER])
def test_clip_schedulers_move_clipping_and_noise(
    options: dict[str, Any], name: str, released: Released
) -> None:
    """Per-layer bounds stayed as they were while the noise shrank with the schedule: 100 times."""
    private = Private(**options)
    scheduler = SCHEDULERS[name](private.optimizer)
    first = private.optimizer.max_grad_norm
    for epoch in range(3):
        private.step()
        assert released.releases[-1][1] == pytest.approx(first * 0.1**epoch)
        assert released.ratio() <= SLACK
        scheduler.step()
    if options:
        expected = [bound * 1e-3 for bound in PER_LAYER["max_grad_norm"]]  # type: ignore[attr-defined]
        assert private.optimizer.max_grad_norms == pytest.approx(expected)


NOISE_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda optimizer: schedulers.ExponentialNoise(optimizer, gamma=2.0),
    "lambda": lambda optimizer: schedulers.LambdaNoise(
        optimizer, noise_lambda=lambda epoch: 2.0**epoch
    ),
    "step": lambda optimizer: schedulers.StepNoise(optimizer, step_size=1, gamma=2.0),
}


@pytest.mark.parametrize("name", NOISE_SCHEDULERS)
@pytest.mark.parametrize("options", [{}, PER_LAYER])
def test_noise_schedulers_are_accounted_as_drawn(
    options: dict[str, Any], name: str, released: Released
) -> None:
    private = Private(**options)
    scheduler = NOISE_SCHEDULERS[name](private.optimizer)
    for _ in range(3):
        private.step()
        scheduler.step()
    drawn = [std / private.optimizer.max_grad_norm for _, std in released.releases]
    accounted = [multiplier for multiplier, *_ in private.engine.accountant.history]
    assert drawn == pytest.approx(accounted)
    assert drawn == pytest.approx([1.0, 2.0, 4.0])


@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_clips_by_one_bound(skipped: bool) -> None:
    private = Private()
    private.optimizer.signal_skip_step(True)
    private.backward()
    if skipped:
        private.optimizer.step()
        private.optimizer.zero_grad()
    private.wrapper.max_grad_norm = 0.05
    text = r"max_grad_norm=0\.05, but the step .* max_grad_norm=0\.1 so far"
    with raises("FC520", match=text):
        private.backward()
    private.wrapper.clipping, private.wrapper.max_grad_norm = "automatic", 0.1
    with raises("FC520", match="clipping='automatic'"):
        private.backward()
    private.wrapper.clipping = "flat"
    private.backward(start=1)  # the step goes on


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), [0.1, -0.1], "1"])
def test_a_bound_that_bounds_nothing_is_refused(value: Any) -> None:
    private = Private()
    for holder in (private.wrapper, private.optimizer):
        with raises("FC302", ValueError, match=r"max_grad_norm: found .* in \(0, inf\)"):
            holder.max_grad_norm = value
    assert private.wrapper.max_grad_norm == private.optimizer.max_grad_norm == 0.1
