"""Every kind in a process of its own, with a limit on its time."""

from __future__ import annotations

import importlib
import multiprocessing
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.survey.inputs import SAMPLES
from benchmarks.survey.kinds import Help, Kind
from benchmarks.survey.measure import EXACT, FAILED, REFUSED, Outcome, measure

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


def find(kind: Kind) -> Finding:
    """Measure a kind; where it is refused, with what helps."""
    mixing = (nn.modules.batchnorm._BatchNorm,)
    model, inputs = _made(kind)
    if any(isinstance(module, mixing) for module in model.modules()):
        refused = Outcome(REFUSED, message="BatchNorm mixes samples")
        return Finding(refused, GROUP_NORM, measure(_replaced(model), inputs, SAMPLES))
    outcome = measure(model, inputs, SAMPLES)
    if outcome.verdict != REFUSED:
        return Finding(outcome)
    for help in kind.help:
        model, inputs = _made(kind)
        model = _replaced(model) if help.replaces else model
        for name, param in model.named_parameters():
            if name.startswith(help.frozen):
                param.requires_grad_(False)
        helped = measure(model, inputs, SAMPLES, **help.options)
        if helped.verdict == EXACT:
            return Finding(outcome, help, helped)
    return Finding(outcome)


def _replaced(model: nn.Module) -> nn.Module:
    """What ``ModuleValidator.fix`` does, without its copy of the model, which hooks and
    parametrizations do not allow."""
    from opacus.validators import ModuleValidator

    fixers = ModuleValidator.FIXERS
    for path, module in list(model.named_modules()):
        if path and type(module) in fixers:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, fixers[type(module)](module))
    return model


def _made(kind: Kind) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    torch.set_default_dtype(kind.dtype)  # some models make tensors beside their parameters
    model = kind.build().to(kind.dtype)
    inputs = {
        name: x.to(kind.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in kind.inputs(model).items()
    }
    return model, inputs


def _work(kind: Kind, out: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        out.send(find(kind))
    except Exception as error:  # the survey goes on
        out.send(Finding(Outcome(FAILED, message=f"{type(error).__name__}: {error}")))


def measure_all(
    kinds: Mapping[str, Kind], processes: int, limit: float
) -> Iterator[tuple[str, Finding]]:
    """Every kind and what was found, as they come.

    Args:
        kinds: by name.
        processes: how many run at once.
        limit: seconds for each.
    """
    # Before any process is forked: importing takes each as long as the measurement.
    importlib.import_module("opacus.validators")
    importlib.import_module("transformers.modeling_utils")
    importlib.import_module("transformers.models.auto.modeling_auto")
    context = multiprocessing.get_context("fork")
    waiting = list(kinds.items())
    running: dict[Connection, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            name, kind = waiting.pop(0)
            receive, send = context.Pipe(False)
            process = context.Process(target=_work, args=(kind, send), daemon=True)
            process.start()
            send.close()
            running[receive] = name, process, time.monotonic() + limit
        ready = set(wait(list(running), timeout=1))
        for connection, (name, process, end) in list(running.items()):
            if connection in ready:
                try:
                    finding = connection.recv()
                except EOFError:
                    finding = Finding(Outcome(FAILED, message="the process died"))
            elif time.monotonic() > end:
                finding = Finding(Outcome(FAILED, message=f"more than {limit:.0f} s"))
            else:
                continue
            process.kill()
            process.join()
            connection.close()
            del running[connection]
            yield name, finding
