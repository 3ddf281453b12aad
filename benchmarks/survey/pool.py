"""Every kind in a process of its own, in one mode after another, with a limit on their time."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
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


def _work(name: str, modes: Sequence[str], where: Where, out: Connection) -> None:
    """Send what was found of a kind in every mode."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    kind = next(kinds[name] for kinds in all_kinds().values() if name in kinds)
    for mode in modes:
        try:
            out.send(find(kind, mode, where))
        except Exception as error:  # the survey goes on
            out.send(Finding(Outcome(FAILED, message=f"{type(error).__name__}: {error}")))


#: What takes longer to import than a measurement.
_IMPORTS = ["opacus.validators", "transformers.modeling_utils", "benchmarks.__main__"]
_IMPORTS += ["transformers.models.auto.modeling_auto"]


def measure_all(
    names: Iterable[str],
    processes: int,
    limit: float,
    modes: Sequence[str] = ("whole",),
    where: Where | None = None,
) -> Iterator[tuple[str, str, Finding | None]]:
    """Every kind, mode, and what was found, as kinds are done.

    Args:
        names: of kinds.
        processes: how many run at once.
        limit: seconds for each kind in each mode.
    """
    where = where or Where()
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    with ThreadPoolExecutor(processes) as threads:
        measured = [
            threads.submit(_in_a_process, context, name, modes, where, limit) for name in names
        ]
        for of_kind in as_completed(measured):
            yield from of_kind.result()


def _in_a_process(
    context: Any, name: str, modes: Sequence[str], where: Where, limit: float
) -> list[tuple[str, str, Finding | None]]:
    """All modes of a kind; in another process those behind one that did not come to an end."""
    found: list[Finding | None] = []
    while left := modes[len(found) :]:
        receive, send = context.Pipe(False)
        process = context.Process(target=_work, args=(name, left, where, send), daemon=True)
        process.start()
        send.close()
        failed = ""
        while len(found) < len(modes) and not failed:
            try:
                failed = "" if receive.poll(limit) else f"more than {limit:.0f} s"
                found.append(Finding(Outcome(FAILED, message=failed)) if failed else receive.recv())
            except EOFError:
                failed = "the process died"
                found.append(Finding(Outcome(FAILED, message=failed)))
        process.kill()
        process.join()
        receive.close()
    return [(name, mode, finding) for mode, finding in zip(modes, found, strict=True)]
