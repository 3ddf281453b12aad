"""An exception that someone keeps holds nothing of the failed step."""

from __future__ import annotations

import random

import pytest
import torch

from flash_clipping.capture import refused_forwards
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
