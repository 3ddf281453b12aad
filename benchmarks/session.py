"""Methods in turn on one device: agreement, memory, then time.

A method that runs out of memory, fails or is not installed becomes a row that says so; the others
go on. Methods stay on the device beside each other while they fit. When one does not fit beside
the others, each is built anew for its turn and is alone on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks import agreement
from benchmarks.agreement import Errors, Fingerprint
from benchmarks.measure import Clock, PeakMemory, host_milliseconds, milliseconds, settle
from benchmarks.methods import METHODS, Method, Setting
from benchmarks.records import Row, Status

T = TypeVar("T")

Progress = Callable[[str], None]
"""Called with a line that says what was just done."""

DISTINCT_BATCHES = 4


class Disagreement(Exception):
    """A method of ours computed wrong norms or sums; nothing was timed."""


class Group:
    """Who measures: this process alone."""

    def worst(self, found: float | None) -> float | None:
        """Of all processes."""
        return found

    def together(self, found: Fingerprint) -> Fingerprint:
        """With the sums over the samples of all processes."""
        return found

    def meet(self) -> None:
        """Wait for all."""


class Session:
    """One setting, several methods; ``rows`` holds what is known about each.

    Args:
        known: methods by name.
        batches: that are trained on; by default those of the setting.
    """

    def __init__(
        self,
        setting: Setting,
        methods: Sequence[str],
        *,
        known: Mapping[str, type[Method]] = METHODS,
        group: Group | None = None,
        batches: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.setting = setting
        self._known = known
        self._group = group or Group()
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
            if reason := self._known[name].missing(setting):
                row.status, row.note = "missing", reason
        self.reference: str | None = None
        #: What the plain model itself is off by in the methods' dtype, where that is asked for: a
        #: method is off by more than is allowed in any case.
        self.rounding: Errors | None = None
        self._reference_dtype: torch.dtype | None = None
        self._batches = batches or setting.draw(DISTINCT_BATCHES)
        self._built: dict[str, Method] = {}
        self._warm: set[str] = set()  # methods past their warm-up
        self._one_at_a_time = False

    def running(self) -> list[str]:
        return [name for name, row in self.rows.items() if row.status == "ok"]

    # ---------------------------------------------------------------------------------- agreement

    def check(self, done: Progress = lambda line: None) -> None:
        """Compare every method with the plain model on one sample at a time.

        Where that does not fit or run, its layers are recomputed in backward; then it is taken in
        the methods' own dtype. ``reference`` names what it was; None: none of these fits.

        Raises:
            Disagreement: with a line for each method of ours that is further off than allowed.
        """
        setting = dataclasses.replace(self.setting, optimizer=False)  # so no peer adds its noise
        wide = agreement.reference_dtype(setting.dtype)
        reference = None
        for dtype, checkpointing in ((wide, False), (wide, True), (setting.dtype, False)):
            row = Row(_one_at_a_time(dtype))
            if reference := self._one_at_a_time_in(row, dtype, checkpointing):
                self.reference, self._reference_dtype = row.method, dtype
                break
        if row.status == "failed":
            raise Disagreement(f"the plain model fails on one sample: {row.note}")
        done(f"took {self.reference}")
        for name in [name for name in self.running() if self._known[name].flat]:
            row = self.rows[name]
            taken = self._attempt(row, partial(self._fingerprint, name, setting))
            settle(setting.device)
            done(f"checked {name}")
            if taken is None:
                continue
            shorter = agreement.shortened(taken, setting.max_grad_norm)
            if shorter is not None and len(shorter):
                row.shortened = self._group.worst(shorter.max().item())
            if reference is not None:
                found = self._errors(taken, reference)
                row.norm_error, row.gradient_error = found.norms, found.gradients
        ours = [row for row in self._off() if self._known[row.method].ours]
        if ours and reference is not None and self._reference_dtype != setting.dtype:
            row = Row(_one_at_a_time(setting.dtype))
            rounded = self._one_at_a_time_in(row, setting.dtype)
            if rounded is not None:
                self.rounding = self._errors(rounded, reference)
            done(f"took {row.method}")
        wrong: list[str] = []
        allowed = self.allowed
        for row in self._off():
            row.note = f"off by {_beyond_told(row).largest:.1e} from {self.reference}"
            if self._known[row.method].ours:
                limits = f"{allowed.norms:.0e} (norms), {allowed.gradients:.0e} (sums)"
                wrong.append(f"{row.method} is {row.note}, more than {limits}")
        if wrong:
            raise Disagreement("; ".join(wrong))

    def _off(self) -> list[Row]:
        """Methods that are further off than allowed."""
        return [row for row in self.rows.values() if _beyond_told(row).exceed(self.allowed)]

    def _errors(self, taken: Fingerprint, reference: Fingerprint) -> Errors:
        found = agreement.errors(taken, reference)
        return Errors(self._group.worst(found.norms), self._group.worst(found.gradients))

    def _fingerprint(self, name: str, setting: Setting) -> Fingerprint:
        """Of the method whose memory was measured, where a new one would compute the same."""
        method = self._built.get(name)
        if setting != self.setting or setting.dtype == torch.float32:
            with _exact_convolutions():
                return agreement.fingerprint(self._known[name](setting), *self._batches[0])
        if method is None:  # it made room for the plain model
            if self._one_at_a_time:
                self._built.clear()
            method = self._built[name] = self._known[name](setting)
        return agreement.fingerprint(method, *self._batches[0])

    def _one_at_a_time_in(
        self, row: Row, dtype: torch.dtype, checkpointing: bool = False
    ) -> Fingerprint | None:
        """The plain model, without compilation and graphs; None: ``row`` says what went wrong."""
        plain = dataclasses.replace(self.setting, compile=False)

        def take() -> Fingerprint:
            with _exact_convolutions():
                taken = agreement.one_at_a_time(plain, *self._batches[0], dtype, checkpointing)
            return self._group.together(taken)

        taken = self._attempt(row, take, lasting=False)
        settle(self.setting.device)
        return taken

    @property
    def allowed(self) -> Errors:
        return agreement.allowed(self.setting.dtype, self.rounding, self._reference_dtype)

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
            method = self._known[name](self.setting)
            self.rows[name].first_milliseconds = milliseconds(
                self.setting.device, partial(method.step, *self._batches[0])
            )
            for _ in range(method.settling - 1):
                method.step(*self._batches[0])
            with memory.measured():
                method.step(*self._batches[0])
            method.zero_grad()
        self._built[name] = method
        self.rows[name].peak_bytes = int(self._group.worst(memory.peak) or 0)

    # --------------------------------------------------------------------------------------- time

    def time(
        self,
        *,
        rounds: int,
        steps: int,
        warmup: int,
        clock: Clock = "wall",
        done: Progress = lambda line: None,
    ) -> None:
        """Methods in turn, ``steps`` steps each, for ``rounds`` rounds: one sample a turn.

        Every round starts with the next method: what runs after a method that left the card cool
        is faster by a few percent, and no method is to have that place always.
        """
        settle(self.setting.device)
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
            self._built[name] = self._known[name](self.setting)
            self._warm.discard(name)
        method = self._built[name]
        batches = [self._batches[(number * steps + i) % DISTINCT_BATCHES] for i in range(steps)]

        def take() -> None:
            for inputs, targets in batches:
                method.step(inputs, targets)

        warmup = max(warmup, method.settling + 1)  # a capture is no step to be timed
        for _ in range(0 if name in self._warm else warmup):
            method.step(*batches[0])
        self._warm.add(name)
        self._group.meet()
        elapsed = self._group.worst(milliseconds(self.setting.device, take, clock))
        host = host_milliseconds(self.setting.device, lambda: method.step(*batches[0]))
        method.zero_grad()  # outside its turn a method holds parameters and optimizer state only
        return elapsed or 0.0, self._group.worst(host)

    def step_of(self, name: str) -> Callable[[], None]:
        """A step of a method that was timed."""
        return partial(self._built[name].step, *self._batches[0])

    # ------------------------------------------------------------------------------------- errors

    def _attempt(self, row: Row, work: Callable[[], T], lasting: bool = True) -> T | None:
        """Do it; what goes wrong becomes the row's status.

        What does not fit beside the other methods is tried once more without them, and if it is
        ``lasting``, all are without others from then on.
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
            self._one_at_a_time |= lasting
            row.status = "ok"
            return self._attempt(row, work, lasting)
        return None


def _beyond_told(row: Row) -> Errors:
    """A method's errors, without what its sums are shorter by for how much it says it shortens."""
    if row.gradient_error is None or row.shortened is None:
        return Errors(row.norm_error, row.gradient_error)
    return Errors(row.norm_error, max(0.0, row.gradient_error - max(0.0, row.shortened)))


def _one_at_a_time(dtype: torch.dtype) -> str:
    letters = "bf" if dtype == torch.bfloat16 else "fp"
    return f"one sample at a time in {letters}{8 * dtype.itemsize}"


@contextmanager
def _exact_convolutions() -> Iterator[None]:
    """Convolutions to fp32's own precision."""
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
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
