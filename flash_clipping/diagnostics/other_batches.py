"""Other batches of the same samples: one sample less, or as many as another axis has entries."""

from __future__ import annotations

import math
import statistics
from typing import TypeAlias

from flash_clipping.diagnostics.oracle import FLOOR, largest_norm_error
from flash_clipping.diagnostics.report import RemovalReport
from flash_clipping.diagnostics.watch import Flash, Subject, described, fallbacks, floats

#: Of every sample, over all parameters.
Norms: TypeAlias = tuple[float, ...]

#: Batches that are made to have the size of another axis have at most so many samples.
LARGEST_SIZE = 64


def remove_samples(
    subject: Subject, flash: Flash, norms: Norms, removals: int, tolerance: float
) -> tuple[RemovalReport, ...]:
    """Steps without one sample: the norms of all others must stay as they are.

    Args:
        flash: does the steps, and holds the last one's afterwards.
        norms: of the whole batch.
        removals: how many samples to remove, one at a time.
    """
    found = tuple(
        _removed(subject, flash, norms, sample, tolerance) for sample in _chosen(subject, removals)
    )
    _judge(subject, found, removals)
    return found


def _chosen(subject: Subject, removals: int) -> list[int]:
    """Samples to remove: all, or as many as asked for, evenly spaced."""
    B = subject.samples.size
    if B < 2:
        return []
    count = min(B, removals)
    return [index * B // count for index in range(count)]


def _removed(
    subject: Subject, flash: Flash, norms: Norms, sample: int, tolerance: float
) -> RemovalReport:
    expected = norms[:sample] + norms[sample + 1 :]
    try:
        flash.step(subject.samples.without(sample), flash.bound)
        found = floats(flash.norms)
    except Exception as failure:
        return RemovalReport(sample, math.nan, described(failure), False)
    if len(found) != len(expected):
        reason = f"found {len(found)} norms for {len(expected)} samples"
        return RemovalReport(sample, math.nan, reason, False)
    typical = (statistics.median(expected),) * len(expected)
    error = largest_norm_error(found, expected, typical, FLOOR[flash.dtype])
    return RemovalReport(sample, error, "", error <= tolerance)


def _judge(subject: Subject, removals: tuple[RemovalReport, ...], asked_for: int) -> None:
    failed = [removal for removal in removals if not removal.passed]
    if not removals and asked_for:
        subject.notes.append(
            "One sample only: whether samples are independent of each other was not checked. "
            "Use a batch of at least two."
        )
    if not failed:
        return
    errors = [removal for removal in failed if removal.reason]
    if errors:
        subject.failures.append(
            f"With sample {errors[0].sample} removed the step fails: {errors[0].reason} "
            "(A constant input whose leading axis merely has the size of the batch, such as "
            "positions torch.arange(T) with T == B, looks like this: expand it over the batch.)"
        )
        return
    worst = max(failed, key=lambda removal: removal.error)
    subject.failures.append(
        f"Removing sample {worst.sample} changes the norms of other samples by "
        f"{worst.error:.1e}: samples are not independent. A layer or the loss mixes them "
        "(batch statistics, a mean over all tokens of the batch, a lookup of the batch's own "
        "order)."
    )


def check_sizes(subject: Subject, flash: Flash, norms: Norms, tolerance: float) -> None:
    """As many samples as some other axis of the inputs has: no size may decide what they are.

    Samples are taken in turn, again and again if there are too few; by the copy that has seen
    the whole batch, and by a new one that sees nothing else.
    """
    sizes = [size for size in subject.samples.other_sizes() if size <= LARGEST_SIZE]
    if not sizes:
        subject.notes.append(
            "No other axis of the inputs has a size that a batch could have, so the batch was "
            "not tried with the size of another axis (as many samples as positions)."
        )
    for size in sizes:
        chosen = [b % subject.samples.size for b in range(size)]
        expected = tuple(norms[b] for b in chosen)
        typical = (statistics.median(expected),) * size
        for copied in (flash, subject.wrapped()):
            try:
                with fallbacks([]):  # noted already
                    copied.step(subject.samples.take(chosen), flash.bound)
                found = floats(copied.norms)
            except Exception as failure:
                reason = described(failure)
            else:
                if len(found) == size:
                    error = largest_norm_error(found, expected, typical, FLOOR[flash.dtype])
                    if error <= tolerance:
                        continue
                    reason = f"norms change by {error:.1e}"
                else:
                    reason = f"found {len(found)} norms"
            subject.failures.append(
                f"With {size} samples, as many as another axis of the inputs has, the step is "
                f"wrong: {reason}"
            )
            return
