"""What a check finds with the plain model alone."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from flash_clipping.diagnostics.batch import BadBatchError
from flash_clipping.diagnostics.routes import check_balance, check_routes
from flash_clipping.diagnostics.subject import Subject, described


def run_plain_model(subject: Subject) -> tuple[float, str]:
    """Run the plain model alone.

    Returns:
        The loss, and why no comparison would mean anything: empty where one would.

    Raises:
        BadBatchError: there is no loss, or none that could be checked.
    """
    task, samples = subject.task, subject.samples
    try:
        losses = [task.value(subject.plain, samples.all, seed) for seed in (0, 0, 1)]
    except BadBatchError:
        raise
    except Exception as error:
        return math.nan, f"The plain model fails on this batch: {described(error)}"
    if losses[0] == losses[1] != losses[2]:
        return losses[0], (
            "The loss changes with the random seed although nn.Dropout layers are switched "
            "off, so per-sample gradients cannot be compared. Check the model in eval mode "
            "(model.eval()), or set its remaining dropout rates to 0."
        )
    counted = task.counted
    if counted is not None and counted != samples.size:
        axis = 0 if subject.options["batch_first"] else 1
        return losses[0], (
            f"The loss gives {counted} losses, but the batch has {samples.size} samples "
            f"(the size of axis {axis} of its first tensor). One of the two does not count "
            "samples: if the batch is the other axis of the inputs, check and wrap the model "
            f"with batch_first={not subject.options['batch_first']}."
        )
    _check_buffers(subject)
    check_routes(subject)
    check_balance(subject)
    return losses[0], ""


def _check_buffers(subject: Subject) -> None:
    """What a forward leaves in buffers is released with the model, without noise."""
    samples = subject.samples
    if samples.size < 2:
        return
    state = [_buffers_after(subject, batch) for batch in (samples.all, samples.without(0))]
    changed = [name for name, value in state[0].items() if not _same(value, state[1].get(name))]
    if changed:
        subject.failures.append(
            f"The forward writes what it sees of the samples into buffers: "
            f"{', '.join(changed)}. They are part of the state dict and get no noise. Use a "
            "layer without running statistics, or do not train or release in this mode."
        )


def _buffers_after(subject: Subject, batch: Any) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(subject.plain)
    subject.task.value(model, batch)
    parameters = dict(model.named_parameters())
    return {name: v for name, v in model.state_dict().items() if name not in parameters}


def _same(one: torch.Tensor, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True  # extra state, which need not be comparable
    return torch.equal(one, other)
