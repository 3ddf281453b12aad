"""Which rows are samples: the proof that is made before the first step of a model.

=========================  ======================================================================
:mod:`.observe`            two forwards: which reads of layers are samples, which are constants
:mod:`.probe`              where samples lie in reads that are not one row for each: a backward
                           pass of single samples shows it
:mod:`.oracle`             gradients through the taps are plain autograd's, whatever else is in
                           the batch; and again in audits of later steps (:mod:`.gate`)
=========================  ======================================================================

Nothing of the user's is changed: parameters, buffers, ``p.grad``, generators and hooks are
afterwards what they were, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence, Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.no_trace import ModelsOwnError
from flash_clipping.capture.proof.observe import Finding, observe, refusal, tap_of, taps_of
from flash_clipping.capture.proof.oracle import examine
from flash_clipping.capture.proof.probe import CONSTANT, UNREACHED, Probed, SampleLayout, probe
from flash_clipping.capture.proof.runs import Runs, Subject
from flash_clipping.capture.row_layouts import TOGETHER, Layout
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.errors import FlashClippingError, to_freeze
from flash_clipping.rules.registry import Rule

#: How often layers that only some forwards reach are looked for.
ATTEMPTS = 3


def prove(subject: Subject, call: ForwardCall | None = None) -> Subject:
    """Find out where the samples are in what tapped layers read, and leave that in the session.

    Args:
        subject: a call of the model.
        call: a forward that has run already: what was assumed there must turn out right.

    Returns:
        The call with what is known of its samples.

    Raises:
        FlashClippingError: layers read what is neither samples nor a constant; all are named.
    """
    session = subject.session
    samples = subject.samples()
    if not samples.count or not session.trainable():
        return subject
    if any(x.is_meta for x in samples.leaves):
        return subject  # without values nothing can be shown, and nothing is released
    guessed = frozenset(read[0] for read in call.guesses) if call is not None else frozenset()
    if call is not None:
        tried = session.looked_for.get(guessed, 0)
        session.looked_for[guessed] = tried + 1
        if tried >= ATTEMPTS:
            for path, *_ in call.ambiguous:
                raise FlashClippingError(_refusal_of_guess(path))
            return subject
    before = _saved(session)
    # What was found before is to be found again; what was declared is looked at again.
    session.folded = session.folded - session.found
    session.found, session.layouts, session.layouts_after, session.laid_out = set(), {}, {}, set()
    session.unreached = set()
    session.doubted = set()
    session.batch_axes.forget([*session.batch_axes.reads])
    try:
        runs = Runs(subject)
        seed = sum(session.looked_for.values())
        subject, findings, parts = observe(subject, runs, seed)
        if parts and not session.has_oracle:  # their values have to tell
            _note_parts(session, parts)
            subject, findings, _ = observe(subject, runs, seed)
        declared = (session.folded - session.folded_by_rule) & session.batch_axes.reads.keys()
        if findings or declared:
            _settle_findings(subject, findings, declared)
        _merge(session, before)
    except BaseException:
        _restore(session, before)
        session.batch_axes.forget([*session.batch_axes.reads])
        session.proven_with = -1  # the next forward looks again
        raise
    session.coverage.note(subject.root, subject.args, subject.kwargs)
    if call is not None:
        _check_guesses(session, call)
    return subject


def _settle_findings(
    subject: Subject, findings: Sequence[Finding], declared: AbstractSet[str]
) -> None:
    """Let a probe say where samples are in what these layers read, if the oracle confirms it; also
    where users have ``declared`` it.

    Raises:
        FlashClippingError: it does not.
    """
    session, paths = subject.session, {finding.read[0] for finding in findings} | declared
    words = refusal(findings, subject.root, session.batch_first)
    if not session.has_oracle:
        if findings:
            raise FlashClippingError(words)
        return
    saved = _saved(session)
    taps = taps_of(subject.root)
    unruled = [t for t in taps if t.path in paths and t.rule is None and not t.loops]
    whys: dict[str, None] = {}
    for loops in (False, True) if unruled else (False,):
        for tap in unruled:
            tap.loops = loops
        try:
            probed = probe(subject)
            settle(subject.root, session, probed, paths)
            # The proof that follows looks at the other half of the samples.
            table = examine(subject, audit=1)
            found = [*table.unfit.values()]
            if table.outputs:
                lost = _not_shown(subject, findings, probed)
                if not lost:
                    return
                found = [
                    f"{', '.join(lost)}: no output of the model that has a row for each sample "
                    "shows where gradients of what is read here go. Return what the loss is "
                    "computed from, with a row for each sample."
                ]
            whys = {**whys, **dict.fromkeys(found)}
        except (ModelsOwnError, FlashClippingError, torch.OutOfMemoryError):
            pass
        _restore(session, saved)
    for tap in unruled:
        tap.loops = False
    if not findings:
        return  # a declaration, which holds if it is not shown to be wrong
    # Without their lines to paste: the last line is the one that helps.
    raise FlashClippingError("\n".join((*[why.partition("\n    ")[0] for why in whys], words)))


def _not_shown(subject: Subject, findings: Sequence[Finding], probed: Probed) -> list[str]:
    """The layers of findings that the oracle, which compares outputs, says nothing of: a loss that
    the model computes itself, or one of what it keeps, may read them."""
    places = {
        tap.path: (path, tap)
        for path, module in subject.root.named_modules()
        if (tap := tap_of(module)) is not None
    }
    # A module whose forward runs once for each sample serves what is below it as well.
    whole = tuple(f"{path}." for path, tap in places.values() if tap.loops and path)
    lost: dict[str, None] = {}
    for finding in findings:
        name, call, _ = finding.read
        path, tap = places.get(name, ("", None))
        if path.startswith(whole):
            continue
        is_layer = tap is not None and (tap.rule is not None or tap.loops)
        is_called = is_layer and not subject.session.batch_axes.is_constant(name)
        is_shown = ((path, call) if is_called else finding.read) in probed.reached
        if not is_shown and name not in subject.session.unreached:
            lost[name] = None
    return [*lost]


def settle(
    root: nn.Module, session: ClippingSession, probed: Probed, paths: Collection[str]
) -> None:
    """Tell these layers' taps where the samples are."""
    batch_axes, usual = session.batch_axes, Layout(session.batch_axis)
    for module_path, calls in probed.layouts.items():
        tap = tap_of(root.get_submodule(module_path))
        if tap is None or not module_path:
            continue
        calls = _from_own_axis(tap, calls)
        if not _can_lie_otherwise(tap, calls):
            continue
        name = tap.path
        if name not in paths or batch_axes.is_constant(name):
            continue
        if tap.rule is None and not tap.loops:
            continue  # operations tell of it
        batch_axes.forget([name])
        batch_axes.reads[name] = [[layout is not CONSTANT] + [True] * 3 for layout in calls]
        if {*calls} == {CONSTANT}:
            batch_axes.constants.add(name)
            continue
        if {*calls} == {UNREACHED}:
            _note_unreached(session, name)
            continue
        plain = _layouts(calls) <= {usual, TOGETHER}
        if plain and all(layout.layout is not None for layout in calls):
            batch_axes.proven.add(name)
        _note_layouts(session, name, name, calls, plain)
    for use, (name, before, after) in probed.operations.items():
        if name in paths:
            if {*before, *after} == {UNREACHED}:
                _note_unreached(session, name)
                continue
            # Indices have no gradient: the rows that they choose are theirs.
            read = before or after
            plain = _layouts(read) <= {TOGETHER}
            _note_layouts(session, name, use, read, plain)
            if not plain and len(layouts := _layouts(after)) == 1:
                session.layouts_after = {**session.layouts_after, use: layouts.pop()}


def _layouts(calls: Collection[SampleLayout]) -> set[Layout]:
    return {call.layout for call in calls if call.layout is not None}


def _note_layouts(
    session: ClippingSession, name: str, key: str, calls: Collection[SampleLayout], plain: bool
) -> None:
    layouts = _layouts(calls)
    if layouts == {TOGETHER} and any(call.parts > 1 for call in calls):
        _note_parts(session, {name})
    if not plain:
        session.laid_out = session.laid_out | {name}
        session.batch_axes.proven.discard(name)
        if len(layouts) == 1:
            session.layouts = {**session.layouts, key: layouts.pop()}


def _note_unreached(session: ClippingSession, name: str) -> None:
    """No gradient has reached this layer: whatever its rows are, that is right while none does."""
    if name not in session.folded:
        session.unreached = session.unreached | {name}
        _note_parts(session, {name})


def _note_parts(session: ClippingSession, names: AbstractSet[str]) -> None:
    """The rows of these layers are parts of samples that lie together."""
    session.found = session.found | (names - session.folded)
    session.folded = session.folded | names


def _own_axis(tap: Tap) -> int | None:
    """The axis that the tap's rule knows samples along, if it does."""
    if tap.rule is None or type(tap.rule).batch_axis is Rule.batch_axis:
        return None
    return tap.rule.batch_axis(tap.layer, tap.session.batch_axis)


def _from_own_axis(tap: Tap, calls: Sequence[SampleLayout]) -> list[SampleLayout]:
    """Layouts with the axis of the tap's rule as the first one, if it has one of its own."""
    if not (own := _own_axis(tap)):
        return [*calls]
    turned = {0: own, own: 0}

    def moved(found: SampleLayout) -> SampleLayout:
        if (layout := found.layout) is None:
            return found
        return replace(found, layout=replace(layout, axis=turned.get(layout.axis, layout.axis)))

    return [*map(moved, calls)]


def _can_lie_otherwise(tap: Tap, calls: Collection[SampleLayout]) -> bool:
    """Whether a layer's rows can be told to be laid out so: some rules know where samples are."""
    if tap.path in tap.session.folded_by_rule:
        return False
    return _own_axis(tap) is None or _layouts(calls) <= {TOGETHER}


# -- what was shown before -------------------------------------------------------------------------

#: What a proof changes of a session.
_SHOWN = ("batch_axes", "folded", "found", "unreached", "layouts", "layouts_after", "laid_out")


def _saved(session: ClippingSession) -> dict[str, Any]:
    return copy.deepcopy({name: getattr(session, name) for name in _SHOWN})


def _restore(session: ClippingSession, saved: Mapping[str, Any]) -> None:
    vars(session).update(copy.deepcopy(dict(saved)))


def _merge(session: ClippingSession, before: Mapping[str, Any]) -> None:
    """Keep what was shown of other calls before.

    Raises:
        FlashClippingError: samples lay otherwise there: later calls could be of either kind.
    """
    read = session.batch_axes.reads.keys()
    was_plain, is_plain = session.plain, read - session.layouts.keys()
    for name in ("layouts", "layouts_after"):
        old, new = before[name], getattr(session, name)
        for key in sorted(old.keys() | new.keys()):
            a, b = old.get(key), new.get(key)
            if a != b and (a or key in was_plain) and (b or key in read):
                raise FlashClippingError(
                    f"{key}: samples lie along another axis of what it reads than they did before: "
                    f"found {b}, expected {a} (None: along the batch axis). Keep one axis, in "
                    "training and evaluation and for batches of all sizes, or freeze the "
                    f"parameters of this layer.{to_freeze(key)}"
                )
        setattr(session, name, {**old, **new})
    session.plain = was_plain | is_plain
    shown = (before["found"] - before["unreached"]) | (session.found - session.unreached)
    session.unreached = (before["unreached"] | session.unreached) - shown
    for name in ("found", "folded", "laid_out"):
        setattr(session, name, before[name] | getattr(session, name))
    session.batch_axes.proven -= session.laid_out


def _check_guesses(session: ClippingSession, call: ForwardCall) -> None:
    """Refuse a forward in which something was taken for what it is not."""
    for read, answer in call.guesses.items():
        known = session.batch_axes.known(read, any_call=False)
        if known is None and read in call.ambiguous:
            raise FlashClippingError(_refusal_of_guess(read[0]))
        wrong = known is not None and known is not answer
        if wrong or read[0] in session.laid_out:
            kinds = ("samples", "the same for all samples")
            found = kinds[not known] if wrong else "samples that lie otherwise"
            raise FlashClippingError(
                f"{read[0]}: this layer was reached for the first time, and what it read was taken "
                f"for {kinds[not answer]}, but is {found}: by its size it could be either. "
                "It is known now: clear the gradients and run this step again."
            )


def _refusal_of_guess(path: str) -> str:
    return (
        f"{path}: this layer was not reached before the first step, and what it read may hold the "
        "samples along several axes: by its size it could be either. Run it in every forward of "
        "training (no layer drop), keep the batch the first axis of what it reads, or freeze its "
        f"parameters.{to_freeze(path)}"
    )
