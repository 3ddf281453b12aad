"""Where a rehearsal does not find the samples, a probe does, if the oracle confirms it.

:mod:`oracle` compares gradients through the taps with plain autograd's, :mod:`probe` finds where
the samples are in what layers return, :mod:`gate` asks before the first step and in some later
ones. Nothing of the user's is changed: parameters, buffers, ``p.grad``, generators and hooks are
afterwards what they were, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from flash_clipping.capture.batch_axis import note_seen
from flash_clipping.capture.no_trace import MODELS_OWN
from flash_clipping.capture.proof.layout import CONSTANT, SampleLayout
from flash_clipping.capture.proof.oracle import examine
from flash_clipping.capture.proof.probe import probe
from flash_clipping.capture.proof.runs import Subject
from flash_clipping.capture.rehearsal import first_size
from flash_clipping.capture.row_layouts import TOGETHER, Layout, merged
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.rules.registry import Rule


def settle(
    root: nn.Module, session: ClippingSession, layouts: Mapping[str, Sequence[SampleLayout]]
) -> None:
    """Tell the taps where the samples are."""
    evidence = session.evidence
    for path, calls in layouts.items():
        tap = tap_of(root.get_submodule(path))
        if tap is None or has_own_axis(tap) or not path:
            continue
        name = tap.path
        evidence.forget([name])
        evidence.reads[name] = [[layout is not CONSTANT] + [True] * 3 for layout in calls]
        if {*calls} == {CONSTANT}:
            evidence.constants.add(name)
            continue
        regular = [layout for layout in calls if layout.layout is not None]
        seen = {layout.parts: layout.layout for layout in regular if layout.layout is not None}
        usual = Layout(session.batch_axis)
        plain = all(layout in (usual, TOGETHER) for layout in seen.values())
        if plain and len(regular) == len(calls):
            evidence.proven.add(name)
        if not plain:
            session.laid_out = session.laid_out | {name}
        if {*seen} - {1} and all(layout.axis == 0 for layout in seen.values()):
            session.folded.add(name)
        if not plain or {*seen} - {1}:
            session.layouts = {
                **session.layouts,
                name: merged(name, session.layouts.get(name, {}), seen),
            }


def settled_by_probe(subject: Subject, paths: Collection[str]) -> bool:
    """Whether a probe finds the samples where rehearsals did not, and the oracle confirms all
    outputs; otherwise nothing is changed.

    Modules without a rule, of these paths, are tried by the generic rule where that is not so.
    """
    session = subject.session
    before = copy.deepcopy(vars(session.evidence))
    rows = session.folded.copy(), session.layouts, session.laid_out
    taps = [tap for module in subject.root.modules() if (tap := tap_of(module)) is not None]
    unruled = [t for t in taps if t.path in paths and t.rule is None and not t.generic]
    for generic in (False, True) if unruled else (False,):
        for tap in unruled:
            tap.generic = generic
        try:
            settle(subject.root, session, probe(subject).layouts)
            # The proof that follows looks at the other half of the samples.
            table = examine(subject, audit=1)
            if table.outputs and not table.unfit:
                size = first_size(subject.args, subject.kwargs, session.batch_axis)
                note_seen(session, subject.root, size, subject.args, subject.kwargs)
                return True
        except MODELS_OWN:
            pass
        vars(session.evidence).update(copy.deepcopy(before))
        session.folded, session.layouts, session.laid_out = rows[0].copy(), *rows[1:]
    for tap in unruled:
        tap.generic = False
    return False


def tap_of(module: nn.Module) -> Tap | None:
    """The tap that stands in for a module's forward."""
    forward = vars(module).get("forward")
    tap = getattr(forward, "__self__", forward)
    return tap if isinstance(tap, Tap) else None


def has_own_axis(tap: Tap) -> bool:
    """Whether its rule knows by itself where samples are."""
    own = tap.rule is not None and type(tap.rule).batch_axis is not Rule.batch_axis
    return own or tap.path in tap.session.folded_by_rule
