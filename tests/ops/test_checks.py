"""Checks of values on a device, played on a CPU: what a GPU finds is read later.

A tensor on the CPU stands for one on a GPU where ``is_awaited`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_clipping
from flash_clipping import FlashClippingError
from flash_clipping.errors import InvalidValue
from flash_clipping.noise.discrete import discrete_noisy_means
from flash_clipping.ops.noise import gated, noisy_means
from flash_clipping.ops.runtime import checks
from flash_clipping.ops.runtime.checks import DeviceChecks, check_on_device, device_checks
from flash_clipping.randomness import Draw, Purpose
from tests.support.private import Private

YES, NO = torch.tensor(True), torch.tensor(False)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is read at once, as on a GPU."""
    monkeypatch.setattr(checks, "is_awaited", lambda holds: True)
    yield
    device_checks.__init__()  # type: ignore[misc]


def test_a_cpu_is_asked_at_once() -> None:
    check_on_device(YES, "fine")
    with pytest.raises(InvalidValue, match="mine"):
        check_on_device(NO, "mine", InvalidValue)
    with pytest.raises(FlashClippingError, match="mine"):
        check_on_device(NO, "mine")
    assert device_checks.gate() is None


def test_what_a_gpu_finds_is_raised_later_by_name(later: None) -> None:
    for holds, message in ((YES, "one"), (NO, "two"), (torch.tensor([True]), "three")):
        check_on_device(holds, message)
    device_checks.raise_found()  # nothing was sent
    assert not device_checks.gate()
    assert device_checks.gate() is None
    with pytest.raises(FlashClippingError, match=r"^two \(A GPU found it"):
        device_checks.raise_found()
    device_checks.raise_found()


def test_checks_that_no_step_follows(later: None) -> None:
    """They are sent without being asked for, and hold the next step back."""
    check_on_device(NO, "first")
    for _ in range(99):
        check_on_device(YES, "others")
    assert len(device_checks.sent) == 1
    with pytest.raises(FlashClippingError, match="first"):
        device_checks.raise_found()
    assert not device_checks.gate()
    check_on_device(NO, "last")
    with pytest.raises(FlashClippingError, match="last"):
        device_checks.raise_found(wait=True)


def test_what_is_not_there_yet_is_not_waited_for() -> None:
    class Event:
        there = False

        def query(self) -> bool:
            return self.there

        def synchronize(self) -> None:
            self.there = True

    found, event = DeviceChecks(), Event()
    found.sent.append((torch.tensor([False]), event, [(NO, "mine", InvalidValue)]))  # type: ignore[arg-type]
    found.raise_found()
    with pytest.raises(InvalidValue, match="mine"):
        found.raise_found(wait=True)
    assert event.there and not found.sent


def test_looks_wait_and_graphs_keep_theirs(later: None) -> None:
    with device_checks.at_once(), pytest.raises(FlashClippingError, match="look"):
        check_on_device(NO, "look")
    with device_checks.captured() as found:
        check_on_device(NO, "of a graph")
    assert device_checks.gate() is None and [message for _, message, _ in found] == ["of a graph"]


@pytest.mark.parametrize("value", [1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("way", ["torch", "triton", "no noise", "grid", "discrete"])
def test_a_closed_gate_lets_noise_through_alone(way: str, value: float) -> None:
    sums = [torch.full((700,), value), torch.full((3, 5), value)]
    draw = Draw(bytes(range(32)), Purpose.NOISE, 1, 20)

    def noisy(sums: list[Tensor], gate: Tensor | None) -> list[Tensor]:
        if way == "discrete":
            dtypes = [torch.float32] * 2
            return discrete_noisy_means(gated(sums, gate), 2.0, 1.0, 4.0, draw=draw, dtypes=dtypes)
        options: Any = {"draw": draw, "gate": gate, "grid": way == "grid"}
        options["backend"] = "triton" if way == "triton" else "torch"
        return noisy_means(sums, 0.0 if way == "no noise" else 2.0, 4.0, **options)

    if way == "triton":
        pytest.importorskip("triton")
    zeros = noisy([torch.zeros_like(x) for x in sums], None)
    for found, expected in zip(noisy(sums, NO), zeros, strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(noisy(sums, YES), noisy(sums, None), strict=True):
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    if value == 1.0:
        assert not torch.equal(noisy(sums, YES)[0], zeros[0])


def test_a_step_that_a_gpu_refuses_releases_noise_alone(later: None) -> None:
    private = Private(noise_multiplier=0.0, lr=1.0)
    model = private.plain
    private.step(4)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    private.optimizer.zero_grad()
    private.backward(4)
    check_on_device(NO, "of this step")
    private.optimizer.step()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert len(private.engine.accountant.history) == 1  # accounted: noise was released
    private.optimizer.zero_grad()
    with pytest.raises(FlashClippingError, match="of this step"):
        private.backward(4)
    private.step(4)
    assert not torch.equal(model.head.bias, before["head.bias"])


def test_epsilon_waits_for_what_was_found(later: None) -> None:
    private = Private(noise_multiplier=1.0)
    private.step(4)
    check_on_device(NO, "at the end")
    with pytest.raises(FlashClippingError, match="at the end"):
        private.engine.get_epsilon(1e-3)


def test_no_check_is_an_assertion_of_the_device() -> None:
    from pathlib import Path

    package = Path(flash_clipping.__file__).parent
    for file in package.rglob("*.py"):
        assert "assert_async" not in file.read_text(), file
