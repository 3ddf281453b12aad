"""Which rows are samples: the proof that is made before the first step of a model.

=========================  ======================================================================
:mod:`.observe`            two forwards: which reads of layers are samples, which are constants, and
                           along which axis samples lie in others
:mod:`.oracle`             gradients through the taps are plain autograd's, whatever else is in
                           the batch; and again in audits of later steps (:mod:`.gate`)
=========================  ======================================================================

Nothing of the user's is changed: parameters, buffers, ``p.grad``, generators and hooks are
afterwards what they were, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.no_trace import ModelsOwnError
from flash_clipping.capture.proof.observe import Finding, observe, refusal, taps_of
from flash_clipping.capture.proof.oracle import Examination, Table, examine
from flash_clipping.capture.proof.reads import REPEATED
from flash_clipping.capture.proof.repeatable import perturbed
from flash_clipping.capture.proof.runs import Runs, Subject
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tap import Tap
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError

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
            small, found = observe(subject, runs, seed)
            findings += found
            if guessed <= session.known.reads.keys():
                break
        subject = small
        if findings:
            _confirm(subject, findings)
        session.known = before.merged_with(session.known)
    except BaseException:
        session.known = before.without_reads()
        session.proof.proven_with = -1  # the next forward looks again
        raise
    session.proof.kinds.note(subject.root, subject.args, subject.kwargs)
    if call is not None:
        _check_guesses(session, call)
    return subject


def _confirm(subject: Subject, findings: Sequence[Finding]) -> None:
    """Let the oracle confirm where samples lie in what these layers read.

    Raises:
        FlashClippingError: it does not.
    """
    session, paths = subject.session, {finding.read[0] for finding in findings}
    batch_first = session.options.batch_first
    if not session.proof.has_oracle:
        raise FlashClippingError(refusal(findings, batch_first))
    whys: list[str] = []
    try:
        # The proof that follows looks at the other half of the samples.
        table = examine(subject, Examination(audit=1))
        whys = [*table.unfit.values(), *table.losses.values()]
        # Of a loss alone norms are compared, so that a row for each sample needs more.
        of_values = any(finding.of_values for finding in findings)
        if table.outputs or (table.fit_losses and not of_values):
            lost = _not_shown(subject, taps_of(subject.root), paths, table)
            if not lost:
                return
            whys = [
                f"{', '.join(lost)}: no output of the model that has a row for each sample shows "
                "where gradients of what is read here go. Return what the loss is computed from, "
                "with a row for each sample."
            ]
    except (ModelsOwnError, FlashClippingError, torch.OutOfMemoryError):
        pass
    # Without their lines to paste: the last line is the one that helps.
    found = [why.partition("\n    ")[0] for why in whys]
    raise FlashClippingError(refusal(findings, batch_first, found))


def _not_shown(
    subject: Subject, taps: Sequence[Tap], paths: Collection[str], table: Table
) -> list[str]:
    """The layers of which what the oracle has compared does not reach all calls: others may go into
    what the model keeps. Where it reaches none of them the gradient must stay 0."""
    runs = Runs(subject)
    # Gradients of unfit outputs are refused.
    compared = {*table.outputs, *table.fit_losses, *table.unfit}
    places = range(len(subject.chosen_samples()))
    with perturbed(runs.params):
        uses, reached = runs.run(
            subject.given(), places, lambda run: (run.uses, run.reached(compared)), taps=True
        )
    counts = Counter(key for _, keys in reached for key in keys)
    called = {tap.path for tap in taps if any(uses[id(param)] for param in tap.trainable()[1])}
    lost, unreached = list[str](), list[str]()
    for path in sorted({path.removesuffix(REPEATED) for path in paths}):
        own = {key for name, keys in reached if name == path for key in keys}
        if not own and path in called:
            unreached.append(path)
        elif not own or any(counts[key] < uses[key] for key in own):
            lost.append(path)
    for path in unreached if not lost else ():
        subject.session.known.note_unreached(path)
    return lost


def _check_guesses(session: ClippingSession, call: ForwardCall) -> None:
    """Refuse a forward in which something was taken for what it is not, or that has reached what no
    look does."""
    for read, answer in call.guesses.items():
        path, known = read[0], session.known.is_samples(read, any_call=False)
        known = session.known.is_samples(read, any_call=True) if known is None else known
        if known is not answer or path in session.known.laid_out:
            raise FlashClippingError(
                f"FC230 {path}: this layer was reached for the first time, after the first step, "
                "and what it reads is not what its size told. Clear the gradients and run this "
                "step again. Where that does not help, no look at the model reaches the layer: "
                "run it in every forward of training (no layer drop, no counter of "
                f"steps).{ONE_BY_ONE}"
            )
