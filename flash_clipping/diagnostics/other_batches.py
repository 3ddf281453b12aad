"""Steps on other batches of the same samples: each one's norm must be what it is in the batch.

Capacities that are full, and experts that choose their tokens, leave every layer's rows in their
places, so that no layer can be refused for them: mixing that no clipping bounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flash_clipping.capture.proof.batches import EXTREMES
from flash_clipping.capture.proof.gate import FIRST_AUDIT
from flash_clipping.diagnostics.oracle import FLOOR, largest_norm_error
from flash_clipping.diagnostics.report import RemovalReport
from flash_clipping.diagnostics.watch import Flash, Subject, described, fallbacks

#: Batches that are larger than the user's have at most so many samples.
LARGEST_SIZE = 64

#: How many audits of later steps a model has to stand, besides the proof before a first step.
AUDITS = 2


class OtherBatches:
    """Steps on batches of some of the samples, in any order.

    Args:
        subject: its failures and notes get what is found.
        flash: has taken a step on the whole batch; afterwards it holds the last other one.
        tolerance: relative error of norms.
    """

    def __init__(self, subject: Subject, flash: Flash, tolerance: float):
        self.subject, self.flash, self.tolerance = subject, flash, tolerance
        self.norms = flash.norms

    def check(self, removals: int) -> tuple[RemovalReport, ...]:
        """Look at all kinds of other batches.

        Args:
            removals: how many samples to remove, one at a time.
        """
        removed = self._without_single_samples(removals)
        found: dict[str, str] = {}
        for words, flash, samples, batch in self._others():
            if words in found:
                continue
            try:
                _, reason = self._step(flash, samples, batch)
            except torch.OutOfMemoryError:
                self.subject.notes.append(f"{words}: this batch did not fit.")
                continue
            if reason:
                found[words] = f"{words}: {reason}"
        self.subject.failures += found.values()
        self._stand_proof()
        return removed

    def _others(self) -> Iterator[tuple[str, Flash, Sequence[int], Any]]:
        """Batches: in words, who takes the step, the samples, and what stands for them if others
        than these do.

        * As many samples as another axis of the inputs has: no size may decide what they are. By
          the copy that has seen the whole batch, and by a new one that sees nothing else.
        * Many copies of one sample, which want the same experts.
        * The first sample as far from the others as the model takes it: its values may not decide
          where rows of the others lie.
        """
        subject, B = self.subject, self.subject.samples.count
        sizes = [size for size in subject.samples.other_sizes() if size <= LARGEST_SIZE]
        if not sizes:
            subject.notes.append(
                "No other axis of the inputs has a size that a batch could have, so the batch was "
                "not tried with the size of another axis (as many samples as positions)."
            )
        for size in sizes:
            words = f"With {size} samples, as many as another axis of the inputs has"
            for flash in (self.flash, Flash(subject)):
                yield words, flash, [b % B for b in range(size)], None
        size = min(LARGEST_SIZE, 4 * B)
        yield f"In a batch of {size} copies of sample 0", self.flash, [0] * size, None
        for kind in EXTREMES[:2] if B > 1 else ():
            subject.samples.stays_in_range = kind == "in range"
            (batch,), _ = subject.samples.batch(range(B), extreme=[0])
            try:
                subject.task.value(subject.plain, batch)
            except Exception:  # the model takes no such sample
                continue
            yield "Where the values of sample 0 are extreme", self.flash, range(B), batch

    def _step(self, flash: Flash, samples: Sequence[int], batch: Any = None) -> tuple[float, str]:
        """The largest error of a norm, and why it is no rounding, if it is none. ``batch``: stands
        for these samples, with another one in the first place."""
        skipped = int(batch is not None)
        expected = [self.norms[b] for b in samples[skipped:]]
        try:
            with fallbacks([]):  # noted already
                batch = self.subject.samples.take(samples) if batch is None else batch
                flash.step(batch, self.flash.bound)
        except Exception as failure:
            is_larger = len(samples) > len(self.norms)
            if is_larger and isinstance(failure, torch.OutOfMemoryError):
                raise  # nobody has said that it fits
            return math.nan, described(failure)
        if len(flash.norms) != len(samples):
            return math.nan, f"found {len(flash.norms)} norms for {len(samples)} samples"
        typical, found = [statistics.median(expected)] * len(expected), flash.norms[skipped:]
        error = largest_norm_error(found, expected, typical, FLOOR[self.flash.dtype])
        if error <= self.tolerance:
            return error, ""
        return error, (
            f"norms change by {error:.1e}. Let a sample's outputs depend on that sample alone: no "
            "capacity that tokens of all samples share, no experts that choose their tokens, no "
            "order by values, no statistics of the batch."
        )

    def _without_single_samples(self, removals: int) -> tuple[RemovalReport, ...]:
        """All samples are removed, or as many as asked for, evenly spaced."""
        subject, B = self.subject, self.subject.samples.count
        count = min(B, removals) if B > 1 else 0
        if not count and removals:
            subject.notes.append(
                "One sample only: whether samples are independent of each other was not checked. "
                "Use a batch of at least two."
            )
        found = []
        for sample in (index * B // count for index in range(count)):
            error, reason = self._step(self.flash, [b for b in range(B) if b != sample])
            failure = reason if math.isnan(error) else ""
            found.append(RemovalReport(sample, error, failure, not reason))
        failed = [removal for removal in found if not removal.passed]
        if errors := [removal for removal in failed if removal.reason]:
            subject.failures.append(
                f"With sample {errors[0].sample} removed the step fails: {errors[0].reason} "
                "(A constant input whose leading axis merely has the size of the batch, such as "
                "positions torch.arange(T) with T == B, looks like this: expand it over the batch.)"
            )
        elif failed:
            worst = max(failed, key=lambda removal: removal.error)
            subject.failures.append(
                f"Removing sample {worst.sample} changes the norms of other samples by "
                f"{worst.error:.1e}: samples are not independent. A layer or the loss mixes them "
                "(batch statistics, a mean over all tokens of the batch, a lookup of the batch's "
                "own order)."
            )
        return tuple(found)

    def _stand_proof(self) -> None:
        """The batch once more, by a copy that nobody watches: as in training, it is proven that
        what is clipped is each sample's own, before a first step and in audits of later ones."""
        flash = Flash(self.subject, watched=False)
        for audit in range(AUDITS + 1):
            if audit:
                gate = flash.module._watch.gate
                gate.calls, gate.next_audit = FIRST_AUDIT << (audit - 1), 0
            _, reason = self._step(flash, range(len(self.norms)))
            if reason:
                self.subject.failures.append(reason)
                return
