"""Other batches of the same samples: every sample must have the norm that it has in the batch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from flash_clipping.diagnostics.oracle import FLOOR, largest_norm_error
from flash_clipping.diagnostics.report import RemovalReport
from flash_clipping.diagnostics.routes import ADVICE
from flash_clipping.diagnostics.watch import Flash, Subject, described, fallbacks

#: Batches that are made to have the size of another axis have at most so many samples.
LARGEST_SIZE = 64


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
        self._of_other_sizes()
        self._crowd()
        if not self.subject.failures:
            self._first_step()
        return removed

    def _step(self, flash: Flash, samples: Sequence[int]) -> tuple[float, str]:
        """The largest error of a norm, and why it is no rounding, if it is none."""
        try:
            return self._norm_error(flash, samples)
        except Exception as failure:
            return math.nan, described(failure)

    def _norm_error(self, flash: Flash, samples: Sequence[int]) -> tuple[float, str]:
        """As :meth:`_step`, and raises what the step does."""
        expected = [self.norms[b] for b in samples]
        with fallbacks([]):  # noted already
            flash.step(self.subject.samples.take(samples), self.flash.bound)
        if len(flash.norms) != len(samples):
            return math.nan, f"found {len(flash.norms)} norms for {len(samples)} samples"
        typical = [statistics.median(expected)] * len(expected)
        error = largest_norm_error(flash.norms, expected, typical, FLOOR[self.flash.dtype])
        return error, "" if error <= self.tolerance else f"norms change by {error:.1e}"

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

    def _of_other_sizes(self) -> None:
        """As many samples as some other axis of the inputs has: no size may decide what they are.

        Samples are taken in turn, again and again if there are too few; by the copy that has seen
        the whole batch, and by a new one that sees nothing else.
        """
        subject = self.subject
        sizes = [size for size in subject.samples.other_sizes() if size <= LARGEST_SIZE]
        if not sizes:
            subject.notes.append(
                "No other axis of the inputs has a size that a batch could have, so the batch was "
                "not tried with the size of another axis (as many samples as positions)."
            )
        for size in sizes:
            chosen = [b % subject.samples.count for b in range(size)]
            for new in (False, True):
                flash = subject.wrapped() if new else self.flash
                _, reason = self._step(flash, chosen)
                if reason:
                    subject.failures.append(
                        f"With {size} samples, as many as another axis of the inputs has, the "
                        f"step is wrong: {reason}"
                    )
                    return

    def _crowd(self) -> None:
        """Many copies of one sample, which want the same experts. Only for models whose modules
        hand integers of samples to each other."""
        subject = self.subject
        if not subject.has_routes:
            return
        size = min(LARGEST_SIZE, 4 * subject.samples.count)
        try:
            _, reason = self._norm_error(self.flash, [0] * size)
        except torch.OutOfMemoryError:
            subject.notes.append(
                f"A batch of {size} copies of one sample, which fills the capacities of experts, "
                "did not fit."
            )
            return
        except Exception as failure:
            reason = described(failure)
        if reason:
            subject.failures.append(
                f"In a batch of {size} copies of sample 0: {reason}. Copies are in each other's "
                f"way. {ADVICE}"
            )

    def _first_step(self) -> None:
        """The batch once more, by a copy that nobody watches: as before a first step of training,
        it is proven that what is clipped is each sample's own."""
        _, reason = self._step(self.subject.wrapped(watched=False), range(len(self.norms)))
        if reason:
            self.subject.failures.append(reason)
