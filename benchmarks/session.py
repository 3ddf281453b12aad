"""Methods in turn on one device: agreement, memory, then time.

A method that runs out of memory, fails or is not installed becomes a row that says so; the others
go on. Methods stay on the device beside each other while they fit. When one does not fit beside
the others, each is built anew for its turn and is alone on the device.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks import agreement
from benchmarks.agreement import REFERENCES, TOLERANCE, Fingerprint
from benchmarks.measure import Clock, PeakMemory, host_milliseconds, milliseconds, settle
from benchmarks.methods import METHODS, Method, Setting
from benchmarks.records import Row, Status

T = TypeVar("T")

Progress = Callable[[str], None]
"""Called with a line that says what was just done."""

DISTINCT_BATCHES = 4


class Disagreement(Exception):
    """Two methods computed different norms or gradients; nothing was timed."""


class Session:
    """One setting, several methods; ``rows`` holds what is known about each."""

    def __init__(self, setting: Setting, methods: Sequence[str]) -> None:
        self.setting = setting
        self.rows = {
            name: Row(
                method=name,
                model=setting.workload.name,
                batch=setting.workload.batch,
                positions=setting.workload.positions,
            )
            for name in methods
        }
        for name, row in self.rows.items():
            if reason := METHODS[name].missing(setting):
                row.status, row.note = "missing", reason
        self.reference: str | None = None
        self._batches = setting.draw(DISTINCT_BATCHES)
        self._built: dict[str, Method] = {}
        self._warm: set[str] = set()  # methods past their warm-up
        self._one_at_a_time = False

    def running(self) -> list[str]:
        return [name for name, row in self.rows.items() if row.status == "ok"]

    # ---------------------------------------------------------------------------------- agreement

    def check(self, done: Progress = lambda line: None) -> None:
        """Compare every method with a reference; ``reference`` then names it.

        Where none of Opacus' methods was asked for, or none can run, its ghost clipping is set up
        for this alone, on the same model without compilation, checkpointing and graphs.

        Raises:
            Disagreement: with a line for each method that is further off than its tolerance.
        """
        setting = dataclasses.replace(self.setting, optimizer=False)  # so no peer adds its noise
        plain = dataclasses.replace(
            setting, workload=setting.plain or setting.workload, compile=None, graph=False
        )
        candidates = [name for name in self.running() if METHODS[name].flat]
        opacus = [name for name in REFERENCES if name in candidates]
        reference: tuple[str, Fingerprint] | None = None
        wrong: list[str] = []

        def take(name: str, row: Row, setting: Setting) -> Fingerprint | None:
            taken = self._attempt(row, partial(_fingerprint, name, setting, self._batches[0]))
            settle(setting.device)
            shorter = None if taken is None else agreement.shortened(taken, setting.max_grad_norm)
            if shorter is not None and len(shorter):
                row.shortened = shorter.max().item()
                row.doubtful = (shorter > agreement.DOUBTFUL).double().mean().item()
            done(f"checked {name}")
            return taken

        def compare(row: Row, taken: Fingerprint) -> None:
            assert reference is not None
            row.norm_error = agreement.norm_error(taken, reference[1])
            row.gradient_error = agreement.gradient_error(taken, reference[1])
            errors = [e for e in (row.norm_error, row.gradient_error) if e is not None]
            if errors and max(errors) > self.tolerance:
                wrong.append(
                    f"{row.method} disagrees with {reference[0]} by {max(errors):.1e}, "
                    f"more than {self.tolerance:.0e}"
                )

        for name in opacus:
            if taken := take(name, self.rows[name], setting):
                if reference is None:
                    reference = name, taken
                else:
                    compare(self.rows[name], taken)
        if reference is None:
            stand_in = REFERENCES[-1]
            if taken := take(stand_in, Row(stand_in), plain):
                reference = f"{stand_in}, set up for this alone", taken
        for name in candidates:
            if name in opacus or (taken := take(name, self.rows[name], setting)) is None:
                continue
            if reference is not None:
                compare(self.rows[name], taken)
            elif taken.norms_B is not None:
                reference = name, taken
        self.reference = reference[0] if reference else None
        if wrong:
            raise Disagreement("; ".join(wrong))

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.setting.dtype]

    # ------------------------------------------------------------------------------------- memory

    def measure_memory(self, done: Progress = lambda line: None) -> None:
        """Build every method, and measure the peak of a step, its first ones aside."""
        for name in self.running():
            row = self.rows[name]
            self._attempt(row, partial(self._measure_memory, name))
            done(f"memory of {name}")

    def _measure_memory(self, name: str) -> None:
        if self._one_at_a_time:
            self._built.clear()
        with PeakMemory(self.setting.device) as memory:
            method = METHODS[name](self.setting)
            for _ in range(method.settling):
                method.step(*self._batches[0])
            with memory.measured():
                method.step(*self._batches[0])
            method.zero_grad()
        self._built[name] = method
        self.rows[name].peak_bytes = memory.peak

    # --------------------------------------------------------------------------------------- time

    def time(
        self,
        *,
        rounds: int,
        steps: int,
        warmup: int,
        clock: Clock = "wall",
        gc_freeze: bool = False,
        done: Progress = lambda line: None,
    ) -> None:
        """Methods in turn, ``steps`` steps each, for ``rounds`` rounds: one sample a turn.

        Every round starts with the next method: what runs after a method that left the card cool
        is faster by a few percent, and no method is to have that place always.

        With ``gc_freeze``, Python's garbage collector passes over what was made before.
        """
        settle(self.setting.device)
        if gc_freeze:
            gc.freeze()
        try:
            self._take_turns(rounds, steps, warmup, clock, done)
        finally:
            if gc_freeze:
                gc.unfreeze()

    def _take_turns(
        self, rounds: int, steps: int, warmup: int, clock: Clock, done: Progress
    ) -> None:
        for number in range(rounds):
            names = self.running()
            first = number % max(1, len(names))
            for name in names[first:] + names[:first]:
                row = self.rows[name]
                turn = partial(self._turn, name, number, steps, warmup, clock)
                elapsed = self._attempt(row, turn)
                if elapsed is None:
                    row.milliseconds.clear()
                    row.host_milliseconds.clear()
                else:
                    row.milliseconds.append(elapsed[0] / steps)
                    if elapsed[1] is not None:
                        row.host_milliseconds.append(elapsed[1])
                done(f"{name}, round {number + 1}")

    def _turn(
        self, name: str, number: int, steps: int, warmup: int, clock: Clock
    ) -> tuple[float, float | None]:
        """Milliseconds of these steps together, and what the host takes for one."""
        if name not in self._built:  # it did not fit beside the others
            self._built.clear()
            settle(self.setting.device)
            self._built[name] = METHODS[name](self.setting)
            self._warm.discard(name)
        method = self._built[name]
        batches = [self._batches[(number * steps + i) % DISTINCT_BATCHES] for i in range(steps)]

        def take() -> None:
            for inputs, targets in batches:
                method.step(inputs, targets)

        if self.setting.graph:  # a capture is no step to be timed
            warmup = max(warmup, method.settling + 1)
        for _ in range(0 if name in self._warm else warmup):
            method.step(*batches[0])
        self._warm.add(name)
        elapsed = milliseconds(self.setting.device, take, clock)
        host = host_milliseconds(self.setting.device, lambda: method.step(*batches[0]))
        method.zero_grad()  # outside its turn a method holds parameters and optimizer state only
        return elapsed, host

    # ------------------------------------------------------------------------------------- errors

    def _attempt(self, row: Row, work: Callable[[], T]) -> T | None:
        """Do it; what goes wrong becomes the row's status.

        What does not fit beside the other methods is tried once more without them.
        """
        try:
            return work()
        except Exception as error:
            row.status, row.note = _verdict(error)
        # Only here has the traceback, which holds the method's tensors, been let go.
        self._built.pop(row.method, None)
        beside_others = bool(self._built)
        if row.status == "OOM":
            self._built.clear()
        settle(self.setting.device)
        if row.status == "OOM" and beside_others:
            self._one_at_a_time = True
            row.status = "ok"
            return self._attempt(row, work)
        return None


def _fingerprint(name: str, setting: Setting, batch: tuple[Tensor, Tensor]) -> Fingerprint:
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # convolutions to fp32's own precision
    try:
        return agreement.fingerprint(METHODS[name](setting), *batch)
    finally:
        torch.backends.cudnn.allow_tf32 = tf32


def _verdict(error: Exception) -> tuple[Status, str]:
    text = str(error).strip()
    if (
        isinstance(error, (torch.OutOfMemoryError, MemoryError))
        or "out of memory" in text.lower()
        or "can't allocate memory" in text
    ):
        return "OOM", ""
    first = text.splitlines()[0] if text else ""
    return "failed", f"{type(error).__name__}: {first}"[:200]
