"""Which reads of tapped layers are samples, and which are the same for all samples.

The model runs on a few samples of the batch, and once more on these in reverse order: one less, or
one more, and one of them made extreme; where it runs on one size only, on as many. What has a row
for each sample in both runs are samples. What has as many rows in both, and the same values,
and does not derive from an input, is a constant (positions, tables): a layer that reads it computes
a function of parameters alone (:mod:`flash_clipping.capture.proxies`). All else is a *finding*:
rows that are not one for each sample, or with other values for the same samples. Of these, an axis
that grows with the batch is taken for that of the samples, of which each has as many entries
together. That proves nothing alone; the oracle tells (:mod:`flash_clipping.capture.proof.prove`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flash_clipping.capture.no_trace import ModelsOwnError
from flash_clipping.capture.proof.batches import Samples
from flash_clipping.capture.proof.knowledge import Knowledge
from flash_clipping.capture.proof.reads import Note, Read, Reads, layout_of
from flash_clipping.capture.proof.runs import Runs, Subject
from flash_clipping.capture.row_layouts import TOGETHER, Layout
from flash_clipping.capture.tap import Tap
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError, without_code

#: Layers that an error names.
NAMED = 20


@dataclass(frozen=True)
class Finding:
    """A read that derives from the samples and has not one row for each of them.

    Attributes:
        words: what was found.
        of_values: whether it is the values of the rows that differ, not their number.
        may_be_parts: whether there may be as many rows for every sample.
    """

    read: Read
    words: str
    of_values: bool = False
    may_be_parts: bool = False


def observe(subject: Subject, runs: Runs, seed: int) -> tuple[Subject, list[Finding]]:
    """Leave in ``session.known`` which reads are samples, and where samples lie in others.

    Returns:
        The call, with what is known of its samples now; and the reads that are not one row for
        each, of which the oracle has to confirm where samples lie.

    Raises:
        FlashClippingError: by a tapped layer, whatever is taken for samples; or a read is samples
            and the same for all of them by turns.
    """
    shown, corrected = subject.session.known, set[Read]()
    while True:  # until no answer that was taken from sizes is wrong: each is corrected once
        try:
            small, whole, other = _look(subject, runs, seed)
        except (ModelsOwnError, torch.OutOfMemoryError):
            return subject, []  # its own forward will raise it
        wrong = _conclude(shown, whole, other)
        if not wrong:
            break
        if again := wrong & corrected:
            path = min(again)[0]
            raise FlashClippingError(
                f"FC222 {path}: what it reads turns out to be samples when it is taken for the "
                "same for all of them, and the other way round. Expand what is the same for all "
                f"samples over the batch, x.expand(batch_size, ...).{ONE_BY_ONE}"
            )
        corrected |= wrong
        # Layers behind them have read something else.
        shown.forget({*shown.reads} - {path for path, *_ in corrected})
    if other is not None:
        _sum_up(shown, whole, other)
    for look in (whole, other):
        if look is not None and look.refused is not None:
            raise look.refused
    subject = small
    looks = [whole] if other is None else [whole, other]
    sizes, axis = [look.size for look in looks], subject.session.options.batch_axis
    if len({len(look.outputs) for look in looks}) == 1:
        subject.kind.outputs = [
            layout_of(shapes, sizes, axis, has_parts=False)
            for shapes in zip(*(look.outputs for look in looks), strict=True)
        ]
    findings = _findings(whole, other)
    has_oracle = subject.session.proof.has_oracle
    if not has_oracle:  # their values have to tell
        apart = {f.read[0] for f in findings if not _lies_together(f, whole, other)}
        parts = {f.read[0] for f in findings} - apart
        if parts:
            shown.note_parts(parts)
            return observe(subject, runs, seed)
        return subject, findings
    for path in dict.fromkeys(finding.read[0] for finding in findings):
        _lay_out(shown, path, looks, axis)
    return subject, findings


def _lay_out(shown: Knowledge, path: str, looks: Sequence[Reads], batch_axis: int) -> None:
    """Note where samples lie in what this layer reads, as far as shapes tell."""
    if path in shown.folded_by_rule:
        return  # some rules know where samples are
    whole, sizes = looks[0], [look.size for look in looks]
    layouts: dict[str, set[Layout]] = {}
    for read, a in whole.items():
        if read[0] != path or not a.answer or a.beside or any(read not in look for look in looks):
            continue
        layout = layout_of([look[read].shape for look in looks], sizes, a.axis)
        if layout is None:
            continue
        if layout.axis == a.axis:
            layout = TOGETHER
            if a.rows != whole.size:
                shown.note_parts({path})
        elif a.axis or batch_axis:
            return  # a rule has an axis of its own, and is told of no other
        elif after := layout_of([look[read].result for look in looks], sizes, layout.axis):
            shown.layouts_after[a.use] = after
        layouts.setdefault(a.use or path, set()).add(layout)
    for key, of_key in layouts.items():
        if of_key != {TOGETHER}:
            shown.note_laid_out(path, key, of_key)


def _look(subject: Subject, runs: Runs, seed: int) -> tuple[Subject, Reads, Reads | None]:
    """A few samples, and another batch of them if the model runs on any.

    Raises:
        ModelsOwnError: the model raises on the batch as it is.
    """
    small, whole = _first_look(subject, runs, seed)
    small = small.of_bags(whole)
    chosen = small.chosen_samples()
    for samples, order, extreme in _others(small):
        try:
            other = runs.look(samples.batch([chosen[b] for b in order], extreme), seed)
        except (ModelsOwnError, torch.OutOfMemoryError):
            continue
        if other.size == len(order):
            rows = [place for place in range(other.size) if place not in extreme]
            other.places = rows, [order[place] for place in rows]
            return small, whole, other
    return small, whole, None


def _first_look(subject: Subject, runs: Runs, seed: int) -> tuple[Subject, Reads]:
    """The smallest batch of the call's samples that the model runs on, and what layers read."""
    for small in subject.smaller():
        try:
            whole = runs.look(small.given(), seed)
        except ModelsOwnError:
            if small is subject:
                raise
        else:
            if whole.refused is None or small is subject:
                break
    return small, whole


def _others(subject: Subject) -> Iterator[tuple[Samples, list[int], list[int]]]:
    """Other batches that the model may run on: samples, their order, and extreme places."""
    samples, size = subject.samples(), len(subject.chosen_samples())
    less, more = [*reversed(range(size - 1))], [size - 1, *reversed(range(size))]
    if size == 4:
        less = [1, 2, 0]  # the oracle replaces those that are kept here
    orders = [less, more] if size > 2 else [more, less]
    if size > 1:
        orders.append(more[:size])
    for extreme in (True, False):
        for order in filter(None, orders):
            yield samples, order, [0] if extreme and len(order) > 1 else []


# -- conclusions ----------------------------------------------------------------------------------


def _fits(a: Note, size: int) -> bool:
    return a.rows == size or (a.folded and size > 0 and a.rows % size == 0 and a.rows > 0)


def _follows(a: Note, whole: Reads, b: Note, other: Reads) -> bool:
    """Whether the rows of a read are as many as samples, or as many for each, in both runs."""
    if a.folded:
        return _fits(a, whole.size) and b.rows * whole.size == a.rows * other.size
    return a.rows == whole.size and b.rows == other.size


def _answer(a: Note, whole: Reads, b: Note | None, other: Reads | None) -> bool:
    """Whether a read is samples."""
    if other is None or b is None:
        return a.answer
    if a.beside or b.beside:
        return _fits(a, whole.size) and _fits(b, other.size)
    if a.sure or b.sure:
        return True
    if _follows(a, whole, b, other):
        return whole.size != other.size or a.answer or not a.is_alike(b)
    return a.rows != b.rows or not a.is_alike(b)


def _conclude(shown: Knowledge, whole: Reads, other: Reads | None) -> set[Read]:
    """Note what two runs have shown, read by read; returns the first read of each layer that was
    given a wrong answer, of which nothing is known behind that."""
    answers: dict[str, list[list[bool]]] = {}
    wrong: dict[str, Read] = {}
    for read, a in sorted(whole.items()):
        path, call, place = read
        b = None if other is None else other.get(read)
        if (other is not None and b is None) or path in wrong:
            continue  # the model does something else now and then
        answer = _answer(a, whole, b, other)
        if answer is not a.answer or (b is not None and answer is not b.answer):
            wrong[path] = read
        calls = answers.setdefault(path, [])
        calls += [[] for _ in range(call + 1 - len(calls))]
        if place == len(calls[call]):  # what comes after a gap is not known
            calls[call].append(answer)
    shown.forget(answers)
    shown.reads.update(answers)
    return {*wrong.values()}


def _sum_up(shown: Knowledge, whole: Reads, other: Reads) -> None:
    """Note the layers all of whose reads are samples, and those that read constants alone."""
    uncertain = {read[0] for read in whole.keys() ^ other.keys()}
    for path, calls in shown.reads.items():
        if path in uncertain:
            continue
        if all(map(all, calls)):
            shown.proven.add(path)
        elif all(answers == [place > 0 for place in range(len(answers))] for answers in calls):
            shown.constants.add(path)


def _findings(whole: Reads, other: Reads | None) -> list[Finding]:
    """Reads that derive from the samples and have not a row for each of them."""
    findings = []
    for read, a in whole.items():
        if a.beside or not a.answer:
            continue
        if other is None:  # by its shape alone
            if not _fits(a, whole.size):
                words = f"what it reads has {a.rows} rows for a batch of {whole.size}"
                parts = whole.size > 0 and a.rows % whole.size == 0
                findings.append(Finding(read, words, may_be_parts=parts))
            continue
        b = other.get(read)
        if b is None or b.beside:
            continue
        if not _follows(a, whole, b, other):
            still = "still " if a.rows == b.rows else ""
            words = (
                f"what it reads has {a.rows} rows for a batch of {whole.size}, and {still}{b.rows} "
                f"for a batch of {other.size}"
            )
            parts = a.rows * other.size == b.rows * whole.size and a.rows % whole.size == 0
            findings.append(Finding(read, words, may_be_parts=parts))
        elif not a.is_alike(b, _rows(a, whole, other.places[1]), _rows(b, other, other.places[0])):
            size = ("twice", "more", "less")[other.size - whole.size]
            words = (
                "what it reads has a row for each sample, but other values for the same samples "
                f"in a batch with one sample {size}, in reverse order"
            )
            findings.append(Finding(read, words, of_values=True))
    return findings


def _lies_together(finding: Finding, whole: Reads, other: Reads | None) -> bool:
    """Whether the parts of each sample have the same values in both runs where they lie together,
    and other values than those of the samples beside it."""
    if other is None:
        return False
    a, b = whole[finding.read], other[finding.read]
    places, samples = other.places
    if not finding.may_be_parts or a.digest is None or len(samples) < 2:
        return False
    rows = _rows(b, other, places)
    others = [*samples[1:], samples[0]]
    return a.is_alike(b, _rows(a, whole, samples), rows) and not a.is_alike(
        b, _rows(a, whole, others), rows
    )


def _rows(note: Note, look: Reads, samples: Sequence[int]) -> Tensor:
    """The rows of these samples, of which each may have several that lie together."""
    parts = note.rows // look.size
    return torch.tensor([b * parts + part for b in samples for part in range(parts)])


def taps_of(root: nn.Module) -> list[Tap]:
    """The taps that stand in for forwards of a model's modules."""
    forwards = [vars(module).get("forward") for module in root.modules()]
    found = [getattr(forward, "__self__", forward) for forward in forwards]
    return [tap for tap in found if isinstance(tap, Tap)]


# -- words ----------------------------------------------------------------------------------------


def refusal(findings: Sequence[Finding], batch_first: bool, whys: Sequence[str] = ()) -> str:
    """One error that names every layer, after what else was found (``whys``)."""
    by_path: dict[str, str] = {}
    for finding in findings:
        by_path.setdefault(finding.read[0], finding.words)
    lines = [f"{path}: {words}" for path, words in by_path.items()]
    if len(lines) > NAMED:
        lines[NAMED:] = [f"... and {len(lines) - NAMED} more layers"]
    rows = any(not finding.of_values for finding in findings)
    values = any(finding.of_values for finding in findings)
    axis = "first" if batch_first else "second"
    parts = all(finding.may_be_parts or finding.of_values for finding in findings)
    declare = "Declare modules whose rows are parts of samples (folded_modules=[...]). "
    advice = []
    if rows:
        advice.append(
            f"The rows are not samples, or a sample's rows lie apart. {declare if parts else ''}"
            f"Keep the batch the {axis} axis of what a layer reads, and a sample's rows together: "
            "x_BWTd.flatten(0, 1), or torch.stack([a, b], 1).flatten(0, 1) in place of "
            "torch.cat([a, b]); or give the layers a rule (flash_clipping.register_rule)."
        )
    if values:
        advice.append(
            "Rows are in another order than the samples, were chosen among those of all samples "
            "(sorted, shuffled, routed to experts), or depend on other samples (a mean over the "
            "batch). Keep the order of the batch and compute each sample by itself."
        )
    lines = [*map(without_code, whys), *lines, *advice]
    return f"{'FC201' if rows else 'FC202'} " + "\n".join(lines) + ONE_BY_ONE
