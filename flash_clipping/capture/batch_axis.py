"""Are the rows of what a layer reads the samples? A rehearsal shows it; no size decides.

Before the first step, and when another layer becomes trainable, the model runs on the batch as it
is, and once more in reverse order without the last sample (or with that one twice; in the place of
the first, if the model runs on one size only). Nothing is kept of these runs. What a tapped layer
reads are samples where it derives from the model's inputs, has as many rows as there are samples in
both runs, and the same values for the samples that are in both. What does not derive from the
inputs and does not follow the batch (positions, tables) is a constant: a layer that reads it
computes a function of parameters alone (:mod:`flash_clipping.capture.proxies`). Anything else is
refused, all layers in one error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.folded_rows import find_folded
from flash_clipping.capture.forward_call import ForwardCall, Read
from flash_clipping.capture.inputs import batched_inputs
from flash_clipping.capture.rehearsal import (
    MODELS_OWN,
    Note,
    Rehearsals,
    Run,
    first_size,
    same_rows,
)
from flash_clipping.capture.row_gradients import Reached, rows_reached
from flash_clipping.capture.row_layouts import check_one_layout, laid_out_anew, merged
from flash_clipping.capture.row_values import DIFFERENT, DIFFERENT_HALF
from flash_clipping.capture.seen_shapes import SeenShapes, are_alike
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import FlashClippingError, to_adapt, to_freeze

#: Shapes of inputs that are tried for the same layers where other batch sizes tell nothing.
ATTEMPTS = 3

#: Layers that an error names.
NAMED = 20


class RefusedRows(FlashClippingError):
    """Rows that no rehearsal has shown to be samples; a probe may still find these.

    Attributes:
        paths: of the layers that read them.
    """

    def __init__(self, message: str, paths: set[str]) -> None:
        super().__init__(message)
        self.paths = paths


@dataclass(frozen=True)
class _Finding:
    read: Read
    words: str
    #: Whether it is the values of the rows that differ.
    of_values: bool = False
    #: Whether there may be as many rows for every sample.
    may_be_parts: bool = False


def rehearse(
    root: nn.Module,
    forward: Callable[..., Any],
    session: ClippingSession,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: ForwardCall | None = None,
) -> None:
    """Find out which reads of tapped layers are samples, and leave that in ``session.evidence``.

    ``forward`` runs ``root``. With ``call``, a forward that has run already: what was assumed there
    must turn out right. Leaves buffers, attributes of modules and random number generators as they
    were. Where the model runs on no other batch size, only what derives from its inputs is taken
    for samples, by its shape; this is tried again on inputs of a few other shapes.

    Raises:
        FlashClippingError: layers read what is neither samples nor a constant; all are named.
    """
    shapes = tuple(tensor.shape for tensor in batched_inputs(args, kwargs))
    if call is not None:
        doubtful = frozenset(read[0] for read in call.guesses)
        tried = session.undecided.setdefault(doubtful, set())
        if shapes in tried or len(tried) >= ATTEMPTS:
            for path, *_ in call.ambiguous:
                raise FlashClippingError(_refusal_of_guess(path))
            return
    runs = Rehearsals(root, forward, session, args, kwargs)
    if not runs.first_size():
        return  # no inputs, or no samples in them
    found: set[str] = set()
    # What was found before is to be found again, and what was declared is looked at again.
    before = session.found if call is None else set()
    layouts = session.layouts
    session.folded -= before
    if call is None:
        session.layouts = {}
        session.evidence.forget(before | session.laid_out | session.folded - session.folded_by_rule)
    try:
        keys = _rehearse(runs, call, shapes, found)
        check_one_layout(session.plain, keys, layouts, session.layouts)
        # Where samples lie along another axis, or in another order, rows are none.
        session.plain = session.plain | {key for key in keys if key not in session.layouts}
        session.found = session.found | found
        late = call is not None and bool(session.layouts.keys() - layouts.keys())
        session.layouts = {
            key: merged(key, layouts.get(key, {}), session.layouts.get(key, {}))
            for key in layouts.keys() | session.layouts.keys()
        }
    except BaseException:
        session.folded -= found
        session.layouts = layouts
        session.evidence.forget(found | session.laid_out)
        session.rehearsed_on.pop(root.training, None)
        session.rehearsed = -1  # the next forward rehearses again
        raise
    finally:
        session.folded |= before  # also where a batch has one part of each sample
    if late and (otherwise := laid_out_anew(layouts, session.layouts)):
        raise FlashClippingError(
            f"{', '.join(otherwise)}: reached for the first time, and what was read there was "
            "taken for samples along its first axis, but they lie otherwise in it. It is known now:"
            " clear the gradients and run this step again."
        )


def _rehearse(
    runs: Rehearsals, call: ForwardCall | None, shapes: tuple[torch.Size, ...], found: set[str]
) -> set[str]:
    """The same; ``found`` gets the layers whose rows turn out to be parts of samples. Returns what
    layouts go by, of all that was read."""
    session = runs.session
    if session.saw_no_two_samples():
        shown = session.evidence  # of layers that are proven nothing is noted
        shown.forget({*shown.proven, *shown.constants, *shown.reads})
    try:
        whole, other, sources = runs.pair()
        laid_out: set[str] = set()
        while parts := find_folded(runs, whole, other, sources):
            if parts.folded <= session.folded and parts.layouts.keys() <= session.layouts.keys():
                break  # it did not help
            session.folded |= parts.folded
            session.layouts = session.layouts | parts.layouts
            found |= parts.folded
            laid_out |= parts.paths
            session.laid_out = session.laid_out | parts.paths
            whole, other, sources = runs.pair()
        for _ in range(ATTEMPTS):  # what is computed from such rows has such rows
            followers = _followers(whole, other) - runs.followers
            if not followers:
                break
            runs.followers |= followers
            whole, other, sources = runs.pair()
    except MODELS_OWN as error:
        session.folded -= found
        session.layouts = {}
        found.clear()
        if call is not None and isinstance(error, torch.OutOfMemoryError):
            raise
        return set()  # the forward itself will raise it, or the model cannot be run twice
    findings = _findings(whole, other)
    if any(finding.of_values for finding in findings):
        findings = _without_chance(runs, whole, sources, findings)
        findings = _without_rounding(runs, whole, sources, findings)
    findings = _refused_now(findings, whole, session)
    if findings:
        refusal = _refusal(findings, runs)
        if any(whole.notes[found.read].chosen for found in findings):
            raise FlashClippingError(refusal)  # in the next batch they may lie otherwise
        raise RefusedRows(refusal, {found.read[0] for found in findings})
    for run in (whole, other):
        if run is not None and run.refused is not None:
            raise run.refused
    _conclude(session, whole, other)
    note_seen(session, runs.root, whole.size, runs.args, runs.kwargs, is_late=call is not None)
    if found or laid_out or (call is None and session.folded - session.folded_by_rule):
        _check_reached(runs, whole, sources, found, laid_out)
    if call is None:
        if other is None:
            session.undecided.setdefault(frozenset(), set()).add(shapes)
        else:
            session.undecided.pop(frozenset(), None)
        return _keys(whole)
    tried = session.undecided[frozenset(read[0] for read in call.guesses)]
    for read, answer in call.guesses.items():
        known = session.evidence.known(read, any_call=False)
        if known is None or other is None:
            tried.add(shapes)
        if known is None and read in call.ambiguous:
            raise FlashClippingError(_refusal_of_guess(read[0]))
        if known is not None and known is not answer:
            kinds = ("samples", "the same for all samples")
            raise FlashClippingError(
                f"{read[0]}: this layer was reached for the first time, and what it read was taken "
                f"for {kinds[not answer]}, but is {kinds[answer]}: by its size it could be either. "
                "It is known now: clear the gradients and run this step again."
            )
    return _keys(whole)


def note_seen(
    session: ClippingSession,
    root: nn.Module,
    size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_late: bool = False,
) -> None:
    """It was shown where ``size`` samples lie in a call with these arguments."""
    seen = session.rehearsed_on.setdefault(root.training, SeenShapes(session.batch_axis))
    seen.note(size, batched_inputs(args, kwargs))
    if session.seen_kinds is not None and not is_late:
        of_inputs = first_size(args, kwargs, session.batch_axis)
        session.seen_kinds.note(root, of_inputs, args, kwargs)


def _keys(whole: Run) -> set[str]:
    return {note.key for note in whole.notes.values() if note.answer and not note.beside}


def _check_reached(
    runs: Rehearsals, whole: Run, sources: list[Tensor], found: set[str], laid_out: set[str]
) -> None:
    """Refuse parts of samples whose gradients are not these samples'.

    Those that were found now must be shown to be right; those that were declared, or found before,
    must not be shown to be wrong.
    """
    session = runs.session
    read = {path for path, _, _ in whole.notes}
    try:
        paths = session.folded & read - session.folded_by_rule
        reached = rows_reached(runs, whole.size, sources, paths | laid_out)
    except torch.OutOfMemoryError:
        if found or laid_out:
            raise
        reached = Reached(set(), set())  # of a declaration, which holds without it
    if refused := ((found | laid_out) - reached.own) | reached.strays:
        session.evidence.forget(found | laid_out | reached.strays)
        raise RefusedRows(_refusal_of_strays(refused, whole, runs.root), refused)


def is_rehearsed(
    session: ClippingSession, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether what rehearsals have shown of parts of samples holds for this call as well.

    One sample, or several that are equal, show nothing of samples that reach each other: the first
    batch of more is looked at. A model may lay rows out otherwise in evaluation, for more samples,
    for longer ones, or for another argument: what was found is looked at again there
    (:mod:`flash_clipping.capture.seen_shapes`, :mod:`flash_clipping.capture.seen_kinds`).
    """
    size = first_size(args, kwargs, session.batch_axis)
    doubtful = size > 1 and session.saw_no_two_samples()
    if doubtful and not are_alike(batched_inputs(args, kwargs), session.batch_axis):
        return False
    kinds = session.seen_kinds
    if session.folded <= session.folded_by_rule and not session.layouts:
        if not session.rehearsed_on or kinds is None or not size:
            return True
        return kinds.cover_plain(training, size, args, kwargs)
    seen = session.rehearsed_on.get(training)
    if seen is None:
        return False
    exactly = any(
        layout.outer > 1 for known in session.layouts.values() for layout in known.values()
    )
    if not size:
        return True
    if kinds is not None and not kinds.cover(size, args, kwargs):
        return False
    return seen.covers(size, batched_inputs(args, kwargs), exactly)


def may_tell_more(session: ClippingSession, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no rehearsal has told anything yet, and inputs of these shapes were not tried."""
    tried = session.undecided.get(frozenset())
    if not tried or len(tried) >= ATTEMPTS:
        return False
    return tuple(tensor.shape for tensor in batched_inputs(args, kwargs)) not in tried


def _follows(a: Note, whole: Run, b: Note, other: Run) -> bool:
    """Whether the rows of a read are as many as samples, or as many for each, in both runs."""
    if a.folded:
        parts, rest = divmod(a.rows, max(whole.size, 1))
        return not rest and parts > 0 and b.rows == parts * other.size
    return a.rows == whole.size and b.rows == other.size


def _followers(whole: Run, other: Run | None) -> set[Read]:
    """Reads that derive from nothing and have one row for each sample all the same."""
    found: set[Read] = set()
    if other is None:
        return found
    for read in whole.notes.keys() & other.notes.keys():
        a, b = whole.notes[read], other.notes[read]
        plain = not (a.tainted or b.tainted or a.beside or b.beside)
        if plain and _follows(a, whole, b, other) and same_rows(a, b, other):
            found.add(read)
    return found


def _findings(whole: Run, other: Run | None) -> list[_Finding]:
    """Reads that derive from the samples and are not these."""
    findings = []
    for read, a in whole.notes.items():
        if a.beside or not a.answer or not a.tainted:
            continue
        if other is None:
            # By its shape alone.
            parts, rest = divmod(a.rows, max(whole.size, 1))
            if rest or not parts or (parts > 1 and not a.folded):
                words = f"what it reads has {a.rows} rows for a batch of {whole.size}"
                findings.append(_Finding(read, words, may_be_parts=not rest))
            continue
        b = other.notes.get(read)
        if b is None or b.beside:
            continue
        if not _follows(a, whole, b, other):
            still = "still " if a.rows == b.rows else ""
            words = (
                f"what it reads has {a.rows} rows for a batch of {whole.size}, and {still}{b.rows} "
                f"for a batch of {other.size}"
            )
            parts = a.rows * other.size == b.rows * whole.size and a.rows % whole.size == 0
            findings.append(_Finding(read, words, may_be_parts=parts))
        elif not same_rows(a, b, other):
            sizes = {
                -1: "with one sample less",
                0: "with one sample twice",
                1: "with one sample more",
            }
            words = (
                "what it reads has a row for each sample, but other values for the same samples "
                f"in a batch {sizes[other.size - whole.size]}, in reverse order"
            )
            findings.append(_Finding(read, words, of_values=True))
    return findings


def _without_chance(
    runs: Rehearsals, whole: Run, sources: list[Tensor], findings: list[_Finding]
) -> list[_Finding]:
    """Without those whose values change by chance: they do on the very same batch."""
    try:
        again = runs.run(None, sources, again=1)
    except MODELS_OWN:
        return [finding for finding in findings if not finding.of_values]
    return [
        finding
        for finding in findings
        if not finding.of_values
        or (
            (b := again.notes.get(finding.read)) is not None
            and same_rows(whole.notes[finding.read], b, again)
        )
    ]


def _without_rounding(
    runs: Rehearsals, whole: Run, sources: list[Tensor], findings: list[_Finding]
) -> list[_Finding]:
    """Without those whose values change because other kernels run for another batch size.

    In a deep model in 16 bits that may be a tenth (attention on an H200). Batches of one size are
    computed alike: there a sample's values must be the same whatever the others are. What depends
    on the number of samples shows in half of them.
    """
    size = whole.size
    notes = whole.notes
    doubtful = [finding for finding in findings if finding.of_values and notes[finding.read].low]
    if not doubtful or size < 2:
        return findings
    others = [size - 1, *reversed(range(1, size))]
    same = runs.run_variant(runs.variant(whole, others, sources))
    half = runs.run_variant(runs.variant(whole, [*reversed(range(size // 2))], sources))

    def alike(finding: _Finding, run: Run | None, different: float) -> bool:
        note = None if run is None else run.notes.get(finding.read)
        if run is None or note is None:
            return False
        return same_rows(notes[finding.read], note, run, different)

    rounded = [
        finding
        for finding in doubtful
        if alike(finding, same, DIFFERENT) and alike(finding, half, DIFFERENT_HALF)
    ]
    return [finding for finding in findings if finding not in rounded]


def _refused_now(findings: list[_Finding], whole: Run, session: ClippingSession) -> list[_Finding]:
    """Without those that need no refusal unless a gradient comes back.

    A parameter that scales what compares samples (similarities of all pairs, which CLIP returns
    beside the embeddings) has the gradient 0 where the loss does not read that.
    """
    later = [
        finding for finding in findings if finding.of_values and whole.notes[finding.read].meets
    ]
    for finding in later:
        for name in whole.notes[finding.read].meets:
            session.evidence.mixing[name] = f"{finding.read[0]}: {finding.words}"
    return [finding for finding in findings if finding not in later]


def _conclude(session: ClippingSession, whole: Run, other: Run | None) -> None:
    """Leave what the runs have shown."""
    evidence = session.evidence
    by_path: dict[str, dict[Read, bool]] = {}
    uncertain: set[str] = set()
    for run, against in ((whole, other), (other, whole)):
        for read, note in () if run is None else run.notes.items():
            if against is not None and read not in against.notes:
                uncertain.add(read[0])  # the model does something else now and then
                continue
            # Beside another one, it may have as many rows in one run only.
            answer = note.answer and (against is None or against.notes[read].answer)
            by_path.setdefault(read[0], {})[read] = answer
    for path, answers in by_path.items():
        calls: list[list[bool]] = []
        for (_, call, place), answer in sorted(answers.items()):
            while len(calls) <= call:
                calls.append([])
            if place == len(calls[call]):  # what comes after a gap is not known
                calls[call].append(answer)
        evidence.proven.discard(path)
        evidence.constants.discard(path)
        evidence.reads[path] = calls
        if other is None or path in uncertain or path in session.laid_out:
            continue  # the latter: who asks for no more than a path would take rows for samples
        if all(answers.values()):
            evidence.proven.add(path)
        elif all(answer is (place > 0) for (_, _, place), answer in answers.items()):
            evidence.constants.add(path)


def _refusal(findings: list[_Finding], runs: Rehearsals) -> str:
    """One error that names every layer."""
    by_path: dict[str, str] = {}
    for finding in findings:
        by_path.setdefault(finding.read[0], finding.words)
    lines = [f"{path}: {words}" for path, words in by_path.items()]
    if len(lines) > NAMED:
        lines[NAMED:] = [f"... and {len(lines) - NAMED} more layers"]
    rows = any(not finding.of_values for finding in findings)
    values = any(finding.of_values for finding in findings)
    axis = "first" if runs.session.batch_first else "second"
    parts = all(finding.may_be_parts or finding.of_values for finding in findings)
    declare = "declare modules whose rows are parts of samples (folded_modules=[...]); "
    advice = []
    if rows:
        advice.append(
            "The rows are not samples, and parameters of these layers have no per-sample "
            f"gradients. Keep the batch the {axis} axis of what a layer reads and other axes "
            f"(windows, positions) behind it; {declare if parts else ''}give them a rule of their "
            "own (flash_clipping.register_rule); or freeze their parameters, or train LoRA on "
            "other layers alone."
        )
    if values:
        advice.append(
            "Rows are in another order than the samples, were chosen among those of all samples "
            "(sorted, shuffled, routed to experts), or depend on other samples (a mean over the "
            "batch). Keep the order of the batch and compute each sample by itself, or freeze "
            "the parameters of these layers."
        )
    # Adapters would not help where the model itself mixes samples.
    instead = to_freeze(*by_path) if values else _instead(runs.root, [*by_path])
    return "\n".join((*lines, *advice)) + instead


def _instead(root: nn.Module, paths: list[str]) -> str:
    """Lines that leave these layers out: freeze them, or train adapters of others."""
    refused = {path.partition(" (")[0] for path in paths}
    output = getattr(root, "get_output_embeddings", lambda: None)()
    names = [
        name
        for name, module in root.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if module is not output
    ]
    last = {name.rpartition(".")[2] for name in names if name in refused}
    others = [name for name in names if name.rpartition(".")[2] not in last]
    attention = [name for name in others if "attn" in name.lower() or "attention" in name.lower()]
    targets = sorted({name.rpartition(".")[2] for name in attention or others})
    adapted = to_adapt(targets) if targets and not hasattr(root, "peft_config") else ""
    return to_freeze(*sorted(paths)) + adapted


def _refusal_of_guess(path: str) -> str:
    return (
        f"{path}: no rehearsal has reached this layer, and what it read may hold the samples along "
        "several axes: by its size it could be either. Run it in every forward of training (no "
        "layer drop), keep the batch the first axis of what it reads, or freeze its parameters."
        f"{to_freeze(path)}"
    )


def _refusal_of_strays(paths: set[str], whole: Run, root: nn.Module) -> str:
    """One error that names every layer whose rows are parts of samples by their values only."""
    rows = {read[0]: note.rows for read, note in whole.notes.items()}
    lines = [
        f"{path}: what it reads has {rows[path]} rows for a batch of {whole.size}, and it cannot "
        "be shown that they are parts of samples: one sample's output, run backward, reaches rows "
        "of other samples, or none of its own"
        for path in sorted(paths)
    ]
    if len(lines) > NAMED:
        lines[NAMED:] = [f"... and {len(lines) - NAMED} more layers"]
    return "\n".join(
        (
            *lines,
            "Freeze the parameters of these layers (requires_grad_(False), or use LoRA on other "
            "layers); keep the batch the first axis of what they read; or return what the loss is "
            "computed from, with a row for each sample, if the model returns a loss alone.",
        )
    ) + _instead(root, sorted(paths))
