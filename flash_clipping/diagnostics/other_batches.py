"""Steps on other batches of the same samples: each one's norm must be what it is in the batch.

Capacities that are full, and experts that choose their tokens, leave every layer's rows in their
places, so that no layer can be refused for them: mixing that no clipping bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flash_clipping.capture.proof.gate import FIRST_AUDIT
from flash_clipping.diagnostics.oracle import largest_error, typical
from flash_clipping.diagnostics.watch import Flash, Subject, described

#: Batches that are larger than the user's have at most so many samples.
LARGEST_SIZE = 64

#: How many audits of later steps a model has to stand, besides the proof before a first step.
AUDITS = 2

_NOT_INDEPENDENT = (
    "samples are not independent. Let a sample's loss depend on that sample alone: no capacity "
    "that tokens of all samples share, no experts that choose their tokens, no order by values, no "
    "statistics of the batch, no mean over all of its tokens."
)


#: In words, who takes the step, the samples, and what stands for them if others than these do: with
#: another one in the first place.
Step = tuple[str, Flash, Sequence[int], Any]


def changes_in_other_batches(
    subject: Subject, flash: Flash, max_grad_norm: float, removals: int
) -> tuple[float, ...]:
    """Largest relative change of a norm in each other batch, but where a step fails.

    Args:
        subject: is told of failures and notes.
        flash: has taken a step on the whole batch; afterwards it holds another one.
        max_grad_norm: the bound of steps.
        removals: how many samples to remove, one at a time, evenly spaced.
    """
    norms_B, changes = flash.norms_B, list[float]()
    for words, model, samples, batch in _others(subject, flash, removals):
        expected_B, skipped = norms_B[list(samples)], int(batch is not None)
        try:
            batch = subject.samples.take(samples) if batch is None else batch
            model.step(batch, max_grad_norm)
        except Exception as failure:
            if len(samples) > len(norms_B) and isinstance(failure, torch.OutOfMemoryError):
                subject.notes.append(f"{words}: this batch did not fit.")
                continue  # nobody has said that it fits
            subject.fail(described(failure), words)
            continue
        error = math.inf
        if len(model.norms_B) == len(samples):
            least = subject.floor * typical(expected_B)
            error = largest_error(model.norms_B[skipped:], expected_B[skipped:], least)
        if not error <= subject.tolerance:
            subject.fail(_NOT_INDEPENDENT, f"{words} (norms change by {error:.1e})")
        changes.append(error)
    return tuple(changes)


def _others(subject: Subject, flash: Flash, removals: int) -> Iterator[Step]:
    """All kinds of other batches.

    * Without single samples.
    * As many samples as another axis of the inputs has: no size may decide what they are. By the
      copy that has seen the whole batch, and by a new one that sees nothing else.
    * Many copies of one sample, which want the same experts.
    * The first sample as far from the others as the model takes it: its values may not decide where
      rows of the others lie.
    * The batch itself, with the proof.
    """
    B = subject.samples.count
    count = min(B, removals) if B > 1 else 0
    if not count and removals:
        subject.notes.append(
            "One sample only: whether samples are independent of each other was not checked. "
            "Use a batch of at least two."
        )
    for sample in (index * B // count for index in range(count)):
        yield f"without sample {sample}", flash, [b for b in range(B) if b != sample], None
    sizes = {n: None for x in subject.samples.leaves if subject.samples.holds(x) for n in x.shape}
    for size in [n for n in sizes if 1 < n <= LARGEST_SIZE and n != B]:
        words = f"with {size} samples, as many as another axis of the inputs has"
        for model in (flash, Flash(subject)):
            yield words, model, [b % B for b in range(size)], None
    size = min(LARGEST_SIZE, 4 * B)
    yield f"in a batch of {size} copies of sample 0", flash, [0] * size, None
    if B > 1:
        (batch,), _ = subject.samples.batch(range(B), extreme=[0])
        try:
            subject.task.value(subject.plain, batch)
        except Exception:  # the model takes no such sample
            pass
        else:
            yield "where the values of sample 0 are extreme", flash, range(B), batch
    yield from _with_proof(subject)


def _with_proof(subject: Subject) -> Iterator[Step]:
    """The batch once more: as in training, it is proven that what is clipped is each sample's own,
    before a first step and in audits of later ones."""
    flash, failed = Flash(subject, proven=True), len(subject.causes)
    yield "in the proof of a first step", flash, range(subject.samples.count), None
    for audit in range(AUDITS if flash.has_taps else 0):
        if len(subject.causes) > failed:
            return
        gate = flash.module._watch.gate
        gate.calls, gate.next_audit = FIRST_AUDIT << audit, 0
        words = f"in audit {audit + 1} of later steps"
        yield words, flash, range(subject.samples.count), None
