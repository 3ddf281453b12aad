"""Compare flash clipping with the oracle, parameter by parameter.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flash_clipping.diagnostics.batch import (
    BadBatchError,
    Loss,
    Samples,
    Task,
    cast,
    squared_outputs,
    without_dropout,
)
from flash_clipping.diagnostics.losses import check_losses, common_factor
from flash_clipping.diagnostics.oracle import FLOOR, TOLERANCE, Oracle, largest_norm_error
from flash_clipping.diagnostics.other_batches import OtherBatches
from flash_clipping.diagnostics.parameters import compared_parameters, uncovered_parameters
from flash_clipping.diagnostics.report import FAIL, PASS, UNUSED, CheckReport
from flash_clipping.diagnostics.routes import check_balance, check_routes
from flash_clipping.diagnostics.sections import all_sections
from flash_clipping.diagnostics.watch import Flash, Subject, described, fallbacks


def check_plain_model(subject: Subject) -> tuple[float, str]:
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
    if task.counted not in (None, samples.count):
        return losses[0], (
            f"The loss gives {task.counted} losses, but the batch has {samples.count} samples "
            f"(the size of axis {0 if subject.batch_first else 1} of its first tensor). One of "
            "the two does not count samples: if the batch is the other axis of the inputs, check "
            f"and wrap the model with batch_first={not subject.batch_first}."
        )
    _check_buffers(subject)
    check_routes(subject)
    check_balance(subject)
    return losses[0], ""


def _check_buffers(subject: Subject) -> None:
    """What a forward leaves in buffers is released with the model, without noise."""
    samples = subject.samples
    if samples.count < 2:
        return
    left = []
    for batch in (samples.all, samples.without(0)):
        model = copy.deepcopy(subject.plain)
        subject.task.value(model, batch)
        left.append({n: x for n, x in model.state_dict().items() if isinstance(x, torch.Tensor)})
    whole, fewer = left
    changed = [n for n, x in whole.items() if n in fewer and not torch.equal(x, fewer[n])]
    if changed:
        subject.failures.append(
            f"The forward writes what it sees of the samples into buffers: "
            f"{', '.join(changed)}. They are part of the state dict and get no noise. Use a "
            "layer without running statistics, or do not train or release in this mode."
        )


def check(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    loss_reduction: str = "mean",
    batch_first: bool = True,
    max_grad_norm: float | None = None,
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
    removals: int = 16,
    sections: Mapping[str, Sequence[str]] | None = None,
    seed: int = 0,
    **options: Any,
) -> CheckReport:
    """Compare flash clipping on one batch with per-sample gradients taken in float64.

    The oracle is a plain deep copy of the model in float64 that sees one sample at a time; nothing
    of this library takes part in it. The norm of every sample for every parameter, the clipped
    sums, and the norms of all other samples when one is removed must agree, and so must norms in
    batches that have the size of another axis of the inputs (samples are repeated for that). No
    buffer may depend on a sample. The loss must be that of its samples, also where one of them has
    fewer labels (integers ``[B, T]``, of which some are set to -100 or -1; on a CPU). With another
    sample in the place of one, the outputs of all others must stay, and so must norms among many
    copies of one sample, where modules hand integers to each other (the experts of a router). No
    loss may balance the loads of a batch. Where nothing was found, the model is wrapped once more
    and has to stand the proof that precedes a first step of training.

    ``model`` and ``batch`` are not changed. Dropout is switched off in the copies. Memory: the
    oracle holds one sample's gradients and one sum in float64.

    Args:
        model: the plain ``nn.Module``, on the device and in the dtype to check.
        batch: a tensor, or tensors in tuples, lists and dicts. Tensors whose batch axis has the
            size of the first one's are split into samples; all else is given to every sample.
        loss: ``loss(model, batch)``: losses ``[B]``, or a scalar reduced by ``loss_reduction``.
            Without it, the batch is the model's input (a tuple or list: positional, a dict: by
            keyword) and the loss is a weighted square of its outputs.
        loss_reduction: ``"mean"`` or ``"sum"``; what a scalar loss does over samples.
        batch_first: samples are axis 0 of the inputs of layers, otherwise axis 1.
        max_grad_norm: clipping bound ``C``; by default the median norm, which clips half.
        dtype: cast model and batch first. ``torch.float64`` separates a wrong rule from rounding.
        tolerance: relative error allowed instead of :data:`TOLERANCE`.
        removals: how many samples to remove, one at a time; 0 for none.
        sections: names of the equal parts of a parameter, by parameter name, in addition to those
            of ``nn.MultiheadAttention`` and of recurrent layers:
            ``{"qkv.weight": ("q", "k", "v")}``.
        seed: seed of every forward.
        **options: more arguments of
            :class:`~flash_clipping.GradSampleModuleFlashClipping` (``mode``, ``backend``, ...).

    Returns:
        A report; ``report.passed`` says whether everything agreed.

    Raises:
        BadBatchError: there is nothing to check: no tensors, no samples, no loss.
        TypeError: ``model`` is not a plain module.
    """
    if not isinstance(model, nn.Module) or hasattr(model, "autograd_grad_sample_hooks"):
        raise TypeError(
            f"check() takes a plain nn.Module, found {type(model).__name__}"
            f"{' that is wrapped already' if isinstance(model, nn.Module) else ''}."
        )
    if "clipping" in options:
        raise TypeError("check() checks norms and flat clipped sums; leave out clipping=...")
    plain = without_dropout(copy.deepcopy(model))
    if dtype is not None:
        plain, batch = plain.to(dtype), cast(batch, dtype)
    samples = Samples(batch, batch_first)
    task = Task(loss or squared_outputs(batch_first), loss_reduction, seed)
    options.update(loss_reduction=loss_reduction, batch_first=batch_first)
    found = all_sections(plain, sections or {})
    subject = Subject(plain, samples, task, found, options, notes=[*samples.notes])
    plain_loss, refused = check_plain_model(subject)
    if refused:
        return _uncovered(subject, refused)
    try:
        with fallbacks(subject.notes):
            flash = subject.wrapped()
            flash.step(samples.all, max_grad_norm)
    except Exception as error:  # whatever the user's model raises is the finding
        return _uncovered(subject, described(error))
    try:
        exact, samples = subject.exact()
        oracle = Oracle(exact, task, samples, flash.bound, found)
    except Exception as error:
        return _uncovered(
            subject,
            "The plain model fails on one sample at a time, so there is no oracle: "
            f"{described(error)}",
        )
    if tolerance is None:
        tolerance = TOLERANCE[flash.dtype]
    return _compared(subject, flash, oracle, plain_loss, tolerance, removals)


def _uncovered(subject: Subject, error: str) -> CheckReport:
    """Nothing could be compared."""
    return CheckReport(
        failures=(error, *subject.failures),
        notes=tuple(subject.notes),
        batch_size=subject.samples.count,
        parameters=tuple(uncovered_parameters(subject, error)),
    )


def _compared(
    subject: Subject,
    flash: Flash,
    oracle: Oracle,
    plain_loss: float,
    tolerance: float,
    removals: int,
) -> CheckReport:
    """Everything beside the oracle; then other batches of the same samples."""
    norms, failures = flash.norms, subject.failures
    typical = (statistics.median(oracle.norms),) * len(norms)
    norm_error = largest_norm_error(norms, oracle.norms, typical, FLOOR[flash.dtype])
    parameters = tuple(compared_parameters(subject, flash, oracle, tolerance))
    bad = [parameter.name for parameter in parameters if parameter.status == FAIL]
    if bad:
        failures.append(
            f"{len(bad)} of {len(parameters)} parameters differ from the oracle: "
            f"{', '.join(bad[:5])}{', ...' if len(bad) > 5 else ''}."
        )
    if not norm_error <= tolerance:
        failures.append(
            f"The norms of whole samples differ from the oracle by {norm_error:.1e}, more than "
            f"{tolerance:.0e}.{common_factor(subject, flash, oracle)}"
        )
    check_losses(subject, flash, oracle, plain_loss, tolerance)
    removed = OtherBatches(subject, flash, tolerance).check(removals)
    statuses = {parameter.status for parameter in parameters}
    if not statuses & {PASS, FAIL}:
        failures.append("No parameter takes part: all are frozen or unused.")
    if UNUSED in statuses:
        subject.notes.append(
            "Unused parameters have norm 0 here and still receive noise in a private step; "
            "freeze them if no batch uses them."
        )
    return CheckReport(
        failures=tuple(failures),
        notes=tuple(subject.notes),
        batch_size=subject.samples.count,
        dtype=str(flash.dtype).removeprefix("torch."),
        tolerance=tolerance,
        max_grad_norm=flash.bound,
        norms=norms,
        oracle_norms=tuple(oracle.norms),
        norm_error=norm_error,
        parameters=parameters,
        removals=removed,
    )
