"""Samples with fewer labels than the others: does the loss of one depend on how many these have?

A batch whose samples all have as many labels cannot show it. So the labels of its first sample are
cut in half, and the loss of the batch is compared with those of its samples alone.
"""

from __future__ import annotations

import copy
import math

import torch

from flash_clipping.diagnostics.batch import Samples, Task, cast
from flash_clipping.diagnostics.watch import Subject

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


def check_labels(subject: Subject) -> None:
    """Tell that the loss is a mean over the labels of the whole batch.

    It is a failure where some labels are ignored already. A batch without any may be of a data set
    in which all samples have the same length, for which that mean is right: then it is a note.
    """
    samples, task = subject.samples, subject.task
    if samples.size < 2 or not subject.options["batch_first"]:
        return
    model = copy.deepcopy(subject.plain).double()
    for ignored in IGNORED:
        for some, batch in samples.with_fewer_labels(ignored):
            try:
                shorter = Samples(cast(batch, torch.float64), True, model)
                whole = task.value(model, shorter.all)
                own = [task.value(model, shorter.take([b])) for b in range(shorter.size)]
            except Exception:  # these are no labels, or another number is ignored
                continue
            expected = math.fsum(own) / (len(own) if task.reduction == "mean" else 1)
            if not (math.isfinite(whole) and math.isfinite(expected)):
                continue
            if abs(whole - expected) > TOLERANCE * abs(expected):
                found = subject.failures if some else subject.notes
                found.append(
                    f"With half of the labels of one sample ignored ({ignored}), the loss of the "
                    f"batch is {whole:.6g}, but the {task.reduction} of its samples' own losses is "
                    f"{expected:.6g}: a sample's loss depends on how many labels the others have, "
                    f"which is harmless only if all samples always have as many. {instead(task)}"
                )
                return


def instead(task: Task) -> str:
    return INSTEAD.format(reduction=task.reduction)
