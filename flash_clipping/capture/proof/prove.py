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
from typing import Any

from torch import nn

from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.no_trace import MODELS_OWN
from flash_clipping.capture.proof.observe import Finding, observe, refusal, tap_of, taps_of
from flash_clipping.capture.proof.oracle import examine
from flash_clipping.capture.proof.probe import CONSTANT, Probed, SampleLayout, probe
from flash_clipping.capture.proof.runs import Runs, Subject
from flash_clipping.capture.row_layouts import TOGETHER, Layout, Seen
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
    if not subject.samples().count or not session.trainable():
        return subject
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

    Modules without a rule are tried by the generic rule where that is not so.

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
    unruled = [t for t in taps if t.path in paths and t.rule is None and not t.generic]
    whys: dict[str, None] = {}
    for generic in (False, True) if unruled else (False,):
        for tap in unruled:
            tap.generic = generic
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
        except MODELS_OWN:
            pass
        _restore(session, saved)
    for tap in unruled:
        tap.generic = False
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
    # The generic rule serves what is below a module as well.
    whole = tuple(f"{path}." for path, tap in places.values() if tap.generic and path)
    lost: dict[str, None] = {}
    for finding in findings:
        name, call, _ = finding.read
        path, tap = places.get(name, ("", None))
        if path.startswith(whole):
            continue
        is_layer = tap is not None and (tap.rule is not None or tap.generic)
        is_called = is_layer and not subject.session.batch_axes.is_constant(name)
        is_shown = ((path, call) if is_called else finding.read) in probed.reached
        if not is_shown:
            lost[name] = None
    return [*lost]


def settle(
    root: nn.Module, session: ClippingSession, probed: Probed, paths: Collection[str]
) -> None:
    """Tell these layers' taps where the samples are."""
    batch_axes, usual = session.batch_axes, Layout(session.batch_axis)
    for module_path, calls in probed.layouts.items():
        tap = tap_of(root.get_submodule(module_path))
        if tap is None or not module_path or not _can_lie_otherwise(tap, calls):
            continue
        name = tap.path
        if name not in paths or batch_axes.is_constant(name):
            continue
        if tap.rule is None and not tap.generic:
            continue  # operations tell of it
        batch_axes.forget([name])
        batch_axes.reads[name] = [[layout is not CONSTANT] + [True] * 3 for layout in calls]
        if {*calls} == {CONSTANT}:
            batch_axes.constants.add(name)
            continue
        regular = _regular(calls)
        plain = {*regular.values()} <= {usual, TOGETHER}
        if plain and all(layout.layout is not None for layout in calls):
            batch_axes.proven.add(name)
        _note_layouts(session, name, name, regular, plain)
    for use, (name, before, after) in probed.operations.items():
        if name in paths:
            regular = _regular(before)
            plain = {*regular.values()} <= {TOGETHER}
            _note_layouts(session, name, use, regular, plain)
            if not plain:
                known = session.layouts_after.get(use, {})
                session.layouts_after[use] = known | _regular(after)


def _regular(calls: Collection[SampleLayout]) -> Seen:
    return {layout.parts: layout.layout for layout in calls if layout.layout is not None}


def _note_layouts(session: ClippingSession, name: str, key: str, found: Seen, plain: bool) -> None:
    is_layer, of_parts = key == name, {*found} - {1}
    if not plain:
        session.laid_out = session.laid_out | {name}
        session.batch_axes.proven.discard(name)
    if of_parts and all(layout.axis == 0 for layout in found.values()) and (is_layer or plain):
        _note_parts(session, {name})
    if not plain or (is_layer and of_parts):
        session.layouts = {**session.layouts, key: {**session.layouts.get(key, {}), **found}}


def _note_parts(session: ClippingSession, names: AbstractSet[str]) -> None:
    """The rows of these layers are parts of samples that lie together."""
    session.found = session.found | (names - session.folded)
    session.folded = session.folded | names


def _can_lie_otherwise(tap: Tap, layouts: Collection[SampleLayout]) -> bool:
    """Whether a layer's rows can be told to be laid out so: some rules know where samples are."""
    rule, path = tap.rule, tap.path
    if path in tap.session.folded_by_rule:
        return False
    if rule is None or type(rule).batch_axis is Rule.batch_axis:
        return True
    axis = rule.batch_axis(tap.layer, tap.session.batch_axis)
    return axis == 0 and {*_regular(layouts).values()} <= {TOGETHER}


# -- what was shown before -------------------------------------------------------------------------

#: What a proof changes of a session.
_SHOWN = ("batch_axes", "folded", "found", "layouts", "layouts_after", "laid_out")


def _saved(session: ClippingSession) -> dict[str, Any]:
    return copy.deepcopy({name: getattr(session, name) for name in _SHOWN})


def _restore(session: ClippingSession, saved: Mapping[str, Any]) -> None:
    vars(session).update(copy.deepcopy(dict(saved)))


def _merge(session: ClippingSession, before: Mapping[str, Any]) -> None:
    """Keep what was shown of other calls before.

    Raises:
        FlashClippingError: samples lay otherwise there: later calls could be of either kind.
    """
    read = {*session.batch_axes.reads} | session.layouts.keys()
    was_plain, is_plain = session.plain, read - session.layouts.keys()
    for name in ("layouts", "layouts_after"):
        old, new = before[name], getattr(session, name)
        for key in sorted(old.keys() | new.keys()):
            a, b = old.get(key, {}), new.get(key, {})
            apart = [any(layout.axis for layout in seen.values()) for seen in (a, b)]
            turns = (apart[1] and key in was_plain) or (apart[0] and not b and key in read)
            if any(a[n] != b[n] for n in a.keys() & b.keys()) or (turns and name == "layouts"):
                raise FlashClippingError(
                    f"{key}: samples lie in another order in what it reads than they did before: "
                    f"found {b}, expected {a}, by the rows of each sample ({{}}: along the first "
                    "axis). Keep one axis and one order, in training and evaluation and for "
                    "batches of all sizes, or freeze the parameters of this layer."
                    f"{to_freeze(key)}"
                )
        setattr(session, name, {**old, **{key: old.get(key, {}) | new[key] for key in new}})
    session.plain = was_plain | is_plain
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
        if wrong or read[0] in session.layouts or read[0] in session.laid_out:
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
