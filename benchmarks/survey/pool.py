"""Every kind in a process of its own, in one mode after another, with a limit on their time."""

from __future__ import annotations

import importlib
import multiprocessing
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.survey.inputs import SAMPLES
from benchmarks.survey.kinds import Help, Kind, all_kinds
from benchmarks.survey.measure import EXACT, FAILED, REFUSED, Outcome, measure
from benchmarks.survey.modes import MODES, Where, mixes_by_batch_norm, with_group_norm

GROUP_NORM = Help(
    "GroupNorm in the place of BatchNorm (`opacus.validators.ModuleValidator.fix(model)`)"
)


@dataclass(frozen=True)
class Finding:
    """What became of a kind as it is, and with help, where help was needed."""

    outcome: Outcome
    help: Help | None = None
    helped: Outcome | None = None

    def line(self) -> str:
        """For the screen."""
        parts = [_words(self.outcome)]
        if self.help is not None and self.helped is not None:
            parts.append(f"with {self.help.words}: {_words(self.helped)}")
        return "; ".join(parts)


def _words(outcome: Outcome) -> str:
    if outcome.message:
        return f"{outcome.verdict}: {outcome.message}"
    notes = "".join(f" ({note.splitlines()[0][:160]})" for note in outcome.notes[:1])
    return f"{outcome.verdict} {outcome.norms:.0e}, {outcome.sums:.0e}{notes}"


def find(kind: Kind, mode: str = "whole", where: Where | None = None) -> Finding | None:
    """Measure a kind in a mode; as it is, where it is refused, with what helps. ``None``: there is
    nothing to run."""
    where = where or Where()
    if mode != "whole":
        outcome = MODES[mode].run(kind, where)
        return None if outcome is None else Finding(outcome)
    model, inputs = where.made(kind)
    measured = partial(measure, tolerance=where.tolerance)
    if mixes_by_batch_norm(model):
        refused = Outcome(REFUSED, message="BatchNorm mixes samples")
        return Finding(refused, GROUP_NORM, measured(with_group_norm(model), inputs, SAMPLES))
    outcome = measured(model, inputs, SAMPLES)
    if outcome.verdict != REFUSED:
        return Finding(outcome)
    if (help := kind.help) is not None:
        model, inputs = where.made(kind)
        model = with_group_norm(model) if help.replaces else model
        for name, param in model.named_parameters():
            if name.startswith(tuple(help.frozen)):
                param.requires_grad_(False)
        helped = measured(model, inputs, SAMPLES, **help.options)
        if helped.verdict == EXACT:
            return Finding(outcome, help, helped)
    return Finding(outcome)


def _findings(
    name: str, modes: Sequence[str], where: Where
) -> Iterator[tuple[str, Finding | None]]:
    """Every mode of a kind, and what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    kind = next(kinds[name] for kinds in all_kinds().values() if name in kinds)
    for mode in modes:
        try:
            yield mode, find(kind, mode, where)
        except Exception as error:  # the survey goes on
            yield mode, Finding(Outcome(FAILED, message=f"{type(error).__name__}: {error}"))


def _work(name: str, modes: Sequence[str], where: Where, out: Connection) -> None:
    for _, finding in _findings(name, modes, where):
        out.send(finding)


#: What takes longer to import than a measurement.
_IMPORTS = ("opacus.validators", "transformers.modeling_utils")
_IMPORTS += ("transformers.models.auto.modeling_auto", "benchmarks.survey.modes")


@dataclass
class _Running:
    """A process and what it has still to measure, the first of it now."""

    name: str
    modes: list[str]
    process: Any
    end: float


def measure_all(
    names: Iterable[str],
    processes: int,
    limit: float,
    modes: Sequence[str] = ("whole",),
    where: Where | None = None,
) -> Iterator[tuple[str, str, Finding | None]]:
    """Every kind, mode, and what was found, as they come.

    Args:
        names: of kinds.
        processes: how many run at once; 0: all kinds run in this process, one after the other,
            without a limit, so that one that ends a process or breaks its device is noticed.
        limit: seconds for each kind in each mode.
    """
    where = where or Where()
    if not processes:
        for name in names:
            yield from ((name, mode, found) for mode, found in _findings(name, modes, where))
        return
    if where.device == "cpu":
        for module in _IMPORTS:  # before any process is forked
            importlib.import_module(module)
        context: Any = multiprocessing.get_context("fork")
    else:  # a process that was forked from one that asked for a device has none
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_IMPORTS))
    waiting = [(name, list(modes)) for name in names]
    running: dict[Connection, _Running] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            name, of_kind = waiting.pop(0)
            receive, send = context.Pipe(False)
            process = context.Process(target=_work, args=(name, of_kind, where, send), daemon=True)
            process.start()
            send.close()
            running[receive] = _Running(name, of_kind, process, time.monotonic() + limit)
        ready = set(wait(list(running), timeout=1))
        for connection, run in list(running.items()):
            is_over = True
            if connection in ready:
                try:
                    finding, is_over = connection.recv(), False
                except EOFError:
                    finding = Finding(Outcome(FAILED, message="the process died"))
            elif time.monotonic() > run.end:
                finding = Finding(Outcome(FAILED, message=f"more than {limit:.0f} s"))
            else:
                continue
            mode, run.end = run.modes.pop(0), time.monotonic() + limit
            if is_over or not run.modes:
                run.process.kill()
                run.process.join()
                connection.close()
                del running[connection]
                if run.modes:
                    waiting.insert(0, (run.name, run.modes))
            yield run.name, mode, finding
