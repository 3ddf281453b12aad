"""Is the loss of a batch made of its samples' own?

A batch whose samples all have as many labels cannot show whether the loss of one depends on how
many the others have. So the labels of its first sample are cut in half as well.
"""

from __future__ import annotations

import math
import statistics

from flash_clipping.diagnostics.batch import Samples, Task
from flash_clipping.diagnostics.oracle import Oracle, close
from flash_clipping.diagnostics.watch import Flash, Subject

#: What ``cross_entropy`` ignores by default, and what others are often told to ignore.
IGNORED = (-100, -1)

#: Relative difference of losses in float64 (where they are, as in transformers, taken in float32).
TOLERANCE = 1e-5

#: What to write instead, for messages.
INSTEAD = (
    "Take the mean over each sample's own labels:\n"
    "    losses = flash_clipping.per_sample_loss(logits, labels)  # [B]; shift=True for input ids\n"
    "    loss = losses.{reduction}()"
)


def check_losses(
    subject: Subject, flash: Flash, oracle: Oracle, plain_loss: float, tolerance: float
) -> None:
    """The batch's loss: wrapped, plain, and made of its samples' own."""
    if not close(flash.loss, plain_loss, tolerance):
        subject.failures.append(
            f"The wrapped model's loss is {flash.loss:.6g}, the plain model's "
            f"{plain_loss:.6g}: a module without a rule runs one sample at a time, which "
            "changes what it computes if it mixes samples."
        )
    elif not close(plain_loss, oracle.loss, tolerance):
        subject.failures.append(
            f"The loss of the batch is {plain_loss:.6g}, but the {subject.task.reduction} "
            f"of its samples' own losses is {oracle.loss:.6g}: a sample's loss depends on the "
            "other samples (or on how many tokens they have), or loss_reduction is wrong. "
            f"{_instead(subject.task)}"
        )
    else:
        _check_labels(subject)


def _check_labels(subject: Subject) -> None:
    """Tell that the loss is a mean over the labels of the whole batch.

    It is a failure where some labels are ignored already. A batch without any may be of a data set
    in which all samples have the same length, for which that mean is right: then it is a note.
    """
    if subject.samples.count < 2 or not subject.batch_first:
        return
    task = subject.task
    model, exact = subject.exact()
    for ignored in IGNORED:
        for some, batch in exact.with_fewer_labels(ignored):
            samples = Samples(batch, batch_first=True)
            try:
                whole = task.value(model, samples.all)
                own = [task.value(model, samples.take([b])) for b in range(samples.count)]
            except Exception:  # these are no labels, or another number is ignored
                continue
            expected = task.reduced(own)
            if not (math.isfinite(whole) and math.isfinite(expected)):
                continue
            if abs(whole - expected) > TOLERANCE * abs(expected):
                found = subject.failures if some else subject.notes
                found.append(
                    f"With half of the labels of one sample ignored ({ignored}), the loss of the "
                    f"batch is {whole:.6g}, but the {task.reduction} of its samples' own losses is "
                    f"{expected:.6g}: a sample's loss depends on how many labels the others have, "
                    f"which is harmless only if all samples always have as many. {_instead(task)}"
                )
                return


def common_factor(subject: Subject, flash: Flash, oracle: Oracle) -> str:
    """Name the usual reason of a wrong factor that is the same for all samples."""
    B = subject.samples.count
    pairs = zip(flash.norms, oracle.norms, strict=True)
    ratios = [f / e for f, e in pairs if e > 0 and math.isfinite(f)]
    if B < 2 or not ratios or max(ratios) - min(ratios) > 0.01 * max(ratios):
        return ""
    ratio = statistics.fmean(ratios)
    for factor, actual in ((B, "sum"), (1 / B, "mean")):
        if abs(ratio / factor - 1) < 0.01 and actual != subject.task.reduction:
            return (
                f" All are off by a factor of {ratio:.4g}: the loss seems to be reduced by "
                f"{actual!r}, but loss_reduction is {subject.task.reduction!r}."
            )
    return f" All are off by the same factor, {ratio:.4g}."


def _instead(task: Task) -> str:
    return INSTEAD.format(reduction=task.reduction)
