"""An exception that someone keeps holds nothing of the failed step."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.capture import refused_forwards
from flash_clipping.finish.backward_pass import BackwardPass
from tests.support.errors import raises
from tests.support.faults import (
    VARIANTS,
    Trainer,
    assert_same_state,
    batch,
    fail_at_operators,
    operators_in_a_step,
    spread,
    state_after_one_step,
)
from tests.support.wrapping import MODES


def passes_alive() -> list[BackwardPass]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is BackwardPass]


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param("one_pass", marks=pytest.mark.slow),
        pytest.param("two_pass", marks=pytest.mark.slow),
        "reentrant",
    ],
)
def test_fault_that_is_remembered(variant: str) -> None:
    """As an interactive session does in ``sys.last_exc``, with every frame of the failed step."""
    options = VARIANTS[variant]
    first, other = operators_in_a_step(**options)
    places = spread(first, other, rehearsed=3, own=14, offset=3)
    assert fail_at_operators(options, places, remember=True, rehearsal=first - other) >= 13


def raise_in_forward(trainer: Trainer) -> Any:
    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("injected")

    return trainer.plain.head.register_forward_pre_hook(fail)


def raise_in_backward(trainer: Trainer) -> Any:
    def fail(grad: Tensor) -> None:
        raise RuntimeError("injected")

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    return trainer.plain.block.norm2.register_forward_hook(watch)


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_is_captured_as_a_graph(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays would read the addresses of the captured step."""
    trainer = Trainer(mode=mode)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(refused_forwards, "is_current_stream_capturing", lambda: True)
        with raises("FC701"):
            trainer.step(batch())
    trainer = Trainer(mode=mode)
    trainer.step(batch())
    assert_same_state(trainer.state(), state_after_one_step(mode=mode), "after a refusal")


@pytest.mark.parametrize("fail", [raise_in_forward, raise_in_backward])
@pytest.mark.parametrize("mode", MODES)
def test_fault_in_a_hook_of_the_user(mode: str, fail: Callable[[Trainer], Any]) -> None:
    trainer = Trainer(mode=mode)
    handle = fail(trainer)
    with pytest.raises(RuntimeError, match="injected"):
        trainer.step(batch())
    assert not passes_alive()
    handle.remove()
    trainer.step(batch())
    assert_same_state(trainer.state(), state_after_one_step(mode=mode), fail.__name__)


class SometimesFolded(nn.Module):
    """Its layer is right at first; ``folded`` puts positions in front of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.folded = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.folded:
            return self.first(x)
        rows = self.first(x).transpose(0, 1).flatten(0, 1)
        rows = rows[torch.arange(len(rows)) * 5 % len(rows)]  # in an order of their own
        return self.first(rows).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def test_refusal_that_is_remembered() -> None:
    module = GradSampleModuleFlashClipping(SometimesFolded())
    module._module.folded = True
    with raises("FC201", match=r"first \(Linear\)") as remembered:
        module(torch.randn(3, 2, 4)).flatten(1).sum(1).mean().backward()
    module._module.folded = False
    module(torch.randn(3, 2, 4)).flatten(1).sum(1).mean().backward()
    assert remembered.value is not None
    assert all(param.grad is not None for param in module.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_step_is_the_same_wherever_its_memory_is(variant: str) -> None:
    """No decision may depend on addresses, which are used again within a step."""
    options = VARIANTS[variant]
    expected = state_after_one_step(**options)
    draw = random.Random(0)
    for attempt in range(6):
        if attempt % 3 == 0:  # a rehearsal decides, too
            trainer = Trainer(**options)
        trainer.start_again()
        scattered = [torch.empty(draw.randrange(1, 300)) for _ in range(draw.randrange(30))]
        draw.shuffle(scattered)
        del scattered[::2]
        trainer.step(batch())
        assert_same_state(trainer.state(), expected, f"attempt {attempt}")
