"""Runs the oracle and the probe beside what proves samples today, and notes where they disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flash_clipping import FlashClippingError
from flash_clipping.capture.proof.layout import CONSTANT, UNREACHED, SampleLayout
from flash_clipping.capture.proof.prove import has_own_axis, prove_call, tap_of
from flash_clipping.capture.proof.runs import Subject
from flash_clipping.capture.session import ClippingSession
from flash_clipping.engine.model_watch import ModelWatch


@dataclass
class Shadow:
    """The findings of some proofs.

    Attributes:
        proofs: how many there were.
        disagreements: in words, with what each of the two says.
        undecided: calls of which the oracle could say nothing, and why.
    """

    proofs: int = 0
    disagreements: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)

    def __call__(
        self,
        root: nn.Module,
        forward: Callable[..., Any],
        session: ClippingSession,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unfit: Any,
    ) -> None:
        self.proofs += 1
        last: Any = [*unfit._why.values()][-1:]
        known = {n for of_kind in last for (_, n), why in of_kind.items() if why}
        try:
            table = prove_call(Subject(root, forward, session, args, kwargs))
        except FlashClippingError as error:
            if not known:
                self.disagreements.append(f"the oracle alone refuses: {error}")
            return
        except Exception as error:  # of the model's own; it comes again
            self.undecided.append(f"{type(error).__name__}: {error}")
            return
        if not table.outputs:
            self.undecided.append("; ".join(table.notes))
            return
        if known != table.unfit.keys():
            words = f"unfit outputs: today {known}, the oracle {dict(table.unfit)}"
            self.disagreements.append(words)
        self.disagreements += differences(root, session, table.layouts)


def differences(root: nn.Module, session: ClippingSession, layouts: Any) -> list[str]:
    """Where layers with a rule are taken otherwise by taps than the probe has seen."""
    found = []
    for path, calls in layouts.items():
        tap = tap_of(root.get_submodule(path))
        if tap is None or tap.rule is None or has_own_axis(tap):
            continue
        name = tap.path
        today = _today(session, name)
        for layout in calls:
            if layout is not UNREACHED and not _agrees(today, layout, session, name):
                found.append(f"{name}: today {today}, the probe {layout.kind} {layout.layout}")
    return found


def _today(session: ClippingSession, name: str) -> str:
    if name in session.evidence.constants:
        return "constant"
    if name in session.layouts:
        return f"layouts {session.layouts[name]}"
    return "folded" if name in session.folded else "rows"


def _agrees(today: str, layout: SampleLayout, session: ClippingSession, name: str) -> bool:
    if today == "constant" or layout is CONSTANT:
        reads = session.evidence.reads.get(name, [])
        return layout is CONSTANT and (today == "constant" or any(not all(r) for r in reads))
    if layout.layout is None:
        return False
    if layout.layout.axis == session.batch_axis and layout.parts == 1:
        return today == "rows" or "folded" in today or "axis=0" in today
    if today == "folded":
        return layout.layout.axis == 0 and layout.layout.outer == 1
    return f"{layout.layout}" in today


@contextmanager
def shadowed() -> Iterator[Shadow]:
    """Proofs in here are made twice."""
    shadow = Shadow()
    before, ModelWatch.shadow = ModelWatch.shadow, shadow
    try:
        yield shadow
    finally:
        ModelWatch.shadow = before
