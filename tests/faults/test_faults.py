"""Whatever goes wrong in a step, or comes unexpectedly, the next step is right.

Faults are put at operators (anything from forward to the noise may run out of memory) and at lines
of the library (Ctrl-C may come anywhere); after each, nothing of the failed step is alive and the
next step equals, bit for bit, that of a model to which nothing ever happened.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import flash_clipping
from flash_clipping.ops.runtime import backend
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

LIBRARY = str(Path(flash_clipping.__file__).parent)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fault_at_an_operator(variant: str) -> None:
    options = VARIANTS[variant]
    offset = list(VARIANTS).index(variant) * 7  # not the same operators in all variants
    first, other = operators_in_a_step(**options)
    places = spread(first, other, rehearsed=2, own=8, offset=offset)
    assert len(places) >= 9
    # vmap and rehearsals take some for their own
    assert fail_at_operators(options, places, rehearsal=first - other) >= 6


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fault_at_every_operator(variant: str) -> None:
    options = VARIANTS[variant]
    total, _ = operators_in_a_step(**options)
    assert fail_at_operators(options, range(total)) >= 0.7 * total


@functools.cache
def _begins_with(file: str, line: int) -> bool:
    """Whether there is a ``with`` at this line."""
    return linecache.getline(file, line).lstrip().startswith("with ")


class Interrupt:
    """Ctrl-C at the n-th line that runs in the library, or in some functions of it.

    A ``with`` is traced once more when it is left. Python looks for signals after calls and jumps,
    so between the body of a ``with`` and its exit there is no place for one.
    """

    def __init__(self, at: int, functions: tuple[str, ...] = ()):
        self.at = at
        self.functions = functions
        self.count = 0
        self.where = ""
        self.entered: set[tuple[FrameType, int]] = set()

    def __enter__(self) -> Interrupt:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)
        self.entered.clear()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        inside = code.co_filename.startswith(LIBRARY)
        return self.line if inside and code.co_name in (self.functions or (code.co_name,)) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not self._leaves(frame):
            self.count += 1
            if self.count == self.at:
                code = frame.f_code
                self.where = f"{Path(code.co_filename).name}:{code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.line

    def _leaves(self, frame: FrameType) -> bool:
        """Whether this line is a ``with`` that is being left."""
        if not _begins_with(frame.f_code.co_filename, frame.f_lineno):
            return False
        place = (frame, frame.f_lineno)
        left = place in self.entered
        self.entered ^= {place}
        return left


def interrupt_at_lines(
    options: dict[str, Any], some: bool, functions: tuple[str, ...] = ()
) -> Iterator[str]:
    """Interrupt steps at some lines, or at all; yield what went wrong."""
    expected = state_after_one_step(**options)
    trainer = Trainer(**options)
    counts = []
    for _ in range(2):
        with Interrupt(-1, functions) as lines:
            trainer.step(batch())
        assert lines.count
        counts.append(lines.count)
    places = spread(*counts, rehearsed=3, own=5) if some else range(counts[0])
    for at in places:
        trainer = Trainer(**options)
        trainer.update = lambda: None  # type: ignore[method-assign]
        with Interrupt(at + 1, functions) as interrupt, contextlib.suppress(KeyboardInterrupt):
            trainer.step(batch())
        del trainer.update  # type: ignore[method-assign]
        try:
            trainer.step(batch())
            assert_same_state(trainer.state(), expected, interrupt.where)
        except Exception as error:
            yield f"{interrupt.where}: {type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "variant", ["one_pass", "two_pass", pytest.param("generic", marks=pytest.mark.slow)]
)
def test_interrupt_at_a_line(variant: str) -> None:
    precision = [place.fp32_precision for place in backend._SETTINGS]
    assert list(interrupt_at_lines(VARIANTS[variant], some=True)) == []
    assert [place.fp32_precision for place in backend._SETTINGS] == precision


CHANGES = [
    ("one_pass", "parameter_proxies"),
    pytest.param("generic", "bypass", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("variant", "function"), CHANGES)
def test_interrupt_while_a_change_is_undone(variant: str, function: str) -> None:
    assert list(interrupt_at_lines(VARIANTS[variant], True, (function,))) == []


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "function"), CHANGES)
def test_interrupt_at_every_line_of_a_change(variant: str, function: str) -> None:
    assert list(interrupt_at_lines(VARIANTS[variant], False, (function,))) == []
