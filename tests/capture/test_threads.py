"""Two threads on one wrapped model: an error by name, never a mixture of their samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from tests.support.errors import raises


class Gate:
    """Lets another thread run where it stands."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            assert self.go_on.wait(20)


class Slow(nn.Module):
    def __init__(self, gate: Gate | None):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.gate is not None:
            self.gate()
        return self.second(torch.tanh(x))


class Thread(threading.Thread):
    def __init__(self, work: Callable[[], Any]):
        super().__init__(daemon=True)
        self.work, self.error = work, None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # for the main thread to see
            self.error = error

    def end(self) -> None:
        self.join(20)
        if self.error is not None:
            raise self.error


def expected(model: nn.Module, x: Tensor) -> Tensor:
    module = GradSampleModuleFlashClipping(
        nn.Sequential(model.first, nn.Tanh(), model.second), max_grad_norm=0.1
    )
    module(x).square().sum(1).mean().backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    module.to_standard_module().zero_grad()
    return found


def made(in_forward: bool, mode: str) -> tuple[Any, Gate, Tensor, Tensor]:
    torch.manual_seed(0)
    gate, x = Gate(), torch.randn(3, 4)
    model = Slow(gate if in_forward else None)
    truth = expected(model, x)
    return GradSampleModuleFlashClipping(model, max_grad_norm=0.1, mode=mode), gate, x, truth


def assert_sums(module: Any, truth: Tensor) -> None:
    found = torch.cat([p.grad.flatten() for p in module.parameters()])
    torch.testing.assert_close(found, truth)


@contextmanager
def at_its_gate(work: Callable[[], Any], module: Any, gate: Gate, truth: Tensor) -> Iterator[None]:
    """While another thread stands in its step there, which is right in the end."""
    thread = Thread(work)
    thread.start()
    assert gate.reached.wait(20)
    yield
    gate.go_on.set()
    thread.end()
    assert_sums(module, truth)
    assert module.backward_count == 1


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_a_forward_during_another_threads_forward(mode: str, grad: bool) -> None:
    module, gate, x, truth = made(True, mode)
    ready = module(torch.randn(3, 4)).sum()
    words = "backward was called while another thread's"

    def step() -> None:
        module(x).square().sum(1).mean().backward()

    with at_its_gate(step, module, gate, truth):
        two = raises("FC435")
        with torch.set_grad_enabled(grad), two:
            module(x)
        if mode == "one_pass":
            with raises("FC435", match=words):
                ready.backward()


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_another_threads_backward_is_not_joined(mode: str) -> None:
    module, gate, x, truth = made(False, mode)
    ready = module(torch.randn(3, 4)).sum()

    def hooked() -> None:
        output = module(x)
        if mode == "one_pass":
            output.register_hook(gate)  # after the model's own
        else:
            module._module.first.weight.register_hook(gate)
        output.square().sum(1).mean().backward()

    with at_its_gate(hooked, module, gate, truth):
        with raises("FC435", match="forward.* backward runs"):
            module(x)
        with raises("FC435", match="backward.* backward runs"):
            ready.backward()


def test_after_a_failed_forward_any_thread_may_go_on() -> None:
    module, _, x, truth = made(False, "one_pass")
    fail = module._module.first.register_forward_hook(lambda *_: 1 / 0)
    thread = Thread(lambda: module(x))
    thread.start()
    with pytest.raises(ZeroDivisionError):
        thread.end()
    fail.remove()
    module(x).square().sum(1).mean().backward()
    assert_sums(module, truth)
