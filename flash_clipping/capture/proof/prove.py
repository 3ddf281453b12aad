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

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import nn

from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.no_trace import ModelsOwnError
from flash_clipping.capture.proof.knowledge import Knowledge
from flash_clipping.capture.proof.observe import Finding, observe, refusal, tap_of, taps_of
from flash_clipping.capture.proof.oracle import examine
from flash_clipping.capture.proof.probe import UNREACHED, Probed, SampleLayout, probe
from flash_clipping.capture.proof.runs import Runs, Subject
from flash_clipping.capture.row_layouts import TOGETHER, Layout
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.rules.registry import Rule

#: How often layers that only some forwards reach are looked for, by other draws.
ATTEMPTS = 8


def prove(subject: Subject, call: ForwardCall | None = None) -> Subject:
    """Find out where the samples are in what tapped layers read, and leave that in the session.

    Args:
        subject: a call of the model.
        call: a forward that has run already: what was assumed there must turn out right.

    Returns:
        The call with a few of its samples, and with what is known of these.

    Raises:
        FlashClippingError: layers read what is neither samples nor a constant; all are named. Or
            the call has reached a layer that no look reaches.
    """
    session = subject.session
    samples = subject.samples()
    if not samples.count or not session.options.trainable():
        return subject
    if any(x.is_meta for x in samples.leaves):
        return subject  # without values nothing can be shown, and nothing is released
    guessed = {read[0] for read in call.guesses} if call is not None else set[str]()
    # Where other processes wait, all look as often.
    attempts = ATTEMPTS if guessed and session.proof.has_oracle else 1
    before = session.known
    session.known = before.to_look()
    try:
        runs, findings = Runs(subject), list[Finding]()
        for seed in range(attempts):
            small, found, parts = observe(subject, runs, seed)
            if parts and not session.proof.has_oracle:  # their values have to tell
                session.known.note_parts(parts)
                small, found, _ = observe(small, runs, seed)
            findings += found
            if guessed <= session.known.reads.keys():
                break
        subject = small
        if findings:
            _settle_findings(subject, findings)
        session.known = before.merged_with(session.known)
    except BaseException:
        session.known = before.without_reads()
        session.proof.proven_with = -1  # the next forward looks again
        raise
    session.known.coverage.note(subject.root, subject.args, subject.kwargs)
    if call is not None:
        _check_guesses(session, call)
    return subject


def _settle_findings(subject: Subject, findings: Sequence[Finding]) -> None:
    """Let a probe say where samples are in what these layers read, if the oracle confirms it. Of a
    model that returns its loss alone rows are taken for parts of samples that lie together, if
    there may be as many of each.

    Raises:
        FlashClippingError: it does not.
    """
    session, paths = subject.session, {finding.read[0] for finding in findings}
    batch_first = session.options.batch_first
    if not session.proof.has_oracle:
        raise FlashClippingError(refusal(findings, batch_first))
    saved = session.known
    taps = taps_of(subject.root)
    unruled = [t for t in taps if t.path in paths and t.rule is None and not t.loops]
    whys: dict[str, None] = {}
    for loops in (False, True) if unruled else (False,):
        for tap in unruled:
            tap.loops = loops
        session.known = saved.copied()
        try:
            probed = probe(subject)
            settle(subject.root, session, probed, paths)
            if not probed.reached:
                session.known.unreached.clear()
            # The proof that follows looks at the other half of the samples.
            table = examine(subject, audit=1)
            found = [*table.unfit.values()]
            if table.is_loss and all(finding.may_be_parts for finding in findings):
                return
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
        session.known = saved
    for tap in unruled:
        tap.loops = False
    # Without their lines to paste: the last line is the one that helps.
    found = [why.partition("\n    ")[0] for why in whys]
    raise FlashClippingError(refusal(findings, batch_first, found))


def _not_shown(subject: Subject, findings: Sequence[Finding], probed: Probed) -> list[str]:
    """The layers of findings that the oracle, which compares outputs, says nothing of: a loss that
    the model computes itself, or one of what it keeps, may read them."""
    places = {
        tap.path: (path, tap)
        for path, module in subject.root.named_modules()
        if (tap := tap_of(module)) is not None
    }
    # A module whose forward runs once for each sample covers what is below it as well.
    whole = tuple(f"{path}." for path, tap in places.values() if tap.loops and path)
    lost: dict[str, None] = {}
    for finding in findings:
        name, call, _ = finding.read
        path, tap = places.get(name, ("", None))
        if path.startswith(whole):
            continue
        is_layer = tap is not None and (tap.rule is not None or tap.loops)
        is_called = is_layer and not subject.session.known.is_constant(name)
        is_shown = ((path, call) if is_called else finding.read) in probed.reached
        if not is_shown and name not in subject.session.known.unreached:
            lost[name] = None
    return [*lost]


def settle(
    root: nn.Module, session: ClippingSession, probed: Probed, paths: Collection[str]
) -> None:
    """Tell these layers' taps where the samples are."""
    known, usual = session.known, Layout(session.options.batch_axis)
    for module_path, calls in probed.layouts.items():
        tap = tap_of(root.get_submodule(module_path))
        if tap is None or not module_path:
            continue
        calls = _from_own_axis(tap, calls)
        if not _can_lie_otherwise(tap, calls):
            continue
        name = tap.path
        if name not in paths or known.is_constant(name):
            continue
        if tap.rule is None and not tap.loops:
            continue  # operations tell of it
        known.forget([name])
        known.reads[name] = [[True] * 4 for _ in calls]
        if {*calls} == {UNREACHED}:
            known.note_unreached(name)
            continue
        plain = _layouts(calls) <= {usual, TOGETHER}
        if plain and all(layout.layout is not None for layout in calls):
            known.proven.add(name)
        _note_layouts(known, name, name, calls, plain)
    for use, (name, before, after) in probed.operations.items():
        if name in paths:
            if {*before, *after} == {UNREACHED}:
                known.note_unreached(name)
                continue
            # Indices have no gradient: the rows that they choose are theirs.
            read = before or after
            plain = _layouts(read) <= {TOGETHER}
            _note_layouts(known, name, use, read, plain)
            if not plain and len(layouts := _layouts(after)) == 1:
                known.layouts_after[use] = layouts.pop()


def _layouts(calls: Collection[SampleLayout]) -> set[Layout]:
    return {call.layout for call in calls if call.layout is not None}


def _note_layouts(
    known: Knowledge, name: str, key: str, calls: Collection[SampleLayout], plain: bool
) -> None:
    layouts = _layouts(calls)
    if layouts == {TOGETHER} and any(call.parts > 1 for call in calls):
        known.note_parts({name})
    if not plain:
        known.note_laid_out(name, key, layouts)


def _own_axis(tap: Tap) -> int | None:
    """The axis that the tap's rule knows samples along, if it does."""
    if tap.rule is None or type(tap.rule).batch_axis is Rule.batch_axis:
        return None
    return tap.rule.batch_axis(tap.layer, tap.session.options.batch_axis)


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
    if tap.path in tap.session.known.folded_by_rule:
        return False
    return _own_axis(tap) is None or _layouts(calls) <= {TOGETHER}


def _check_guesses(session: ClippingSession, call: ForwardCall) -> None:
    """Refuse a forward in which something was taken for what it is not, or that has reached what no
    look does."""
    for read, answer in call.guesses.items():
        path, known = read[0], session.known.is_samples(read, any_call=False)
        known = session.known.is_samples(read, any_call=True) if known is None else known
        if known is None:
            raise FlashClippingError(
                f"FC230 {path}: this layer was reached for the first time, and by no look at the "
                "model, so that it is not known whether what it reads is samples. Run it in every "
                f"forward of training (no layer drop, no counter of steps).{ONE_BY_ONE}"
            )
        if known is not answer or path in session.known.laid_out:
            kinds = ("samples", "the same for all samples")
            found = kinds[not known] if known is not answer else "samples that lie otherwise"
            raise FlashClippingError(
                f"FC231 {path}: this layer was reached for the first time, and what it read was "
                f"taken for {kinds[not answer]}, but is {found}: by its size it could be either. "
                "It is known now: clear the gradients and run this step again."
            )
