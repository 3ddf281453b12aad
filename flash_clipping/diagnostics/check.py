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
from flash_clipping.diagnostics.labels import check_labels, instead
from flash_clipping.diagnostics.oracle import FLOOR, TOLERANCE, Oracle, close, largest_norm_error
from flash_clipping.diagnostics.other_batches import check_sizes, remove_samples
from flash_clipping.diagnostics.parameters import compared_parameter, uncovered_parameters
from flash_clipping.diagnostics.report import FAIL, PASS, UNUSED, CheckReport
from flash_clipping.diagnostics.routes import check_balance, check_crowd, check_routes
from flash_clipping.diagnostics.sections import all_sections, owned_parameters
from flash_clipping.diagnostics.watch import Flash, Subject, described, fallbacks, floats


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
    loss may balance the loads of a batch.

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
        plain = plain.to(dtype)
    samples = Samples(batch if dtype is None else cast(batch, dtype), batch_first, plain)
    task = Task(loss or squared_outputs(batch_first), loss_reduction, samples.size, seed)
    options.update(loss_reduction=loss_reduction, batch_first=batch_first)
    found = all_sections(plain, sections or {})
    subject = Subject(plain, samples, task, found, options, notes=[*samples.notes])
    plain_loss, refused = run_plain_model(subject)
    if refused:
        return _uncovered(subject, refused)
    try:
        with fallbacks(subject.notes):
            flash = subject.wrapped()
            flash.step(samples.all, max_grad_norm)
    except Exception as error:  # whatever the user's model raises is the finding
        return _uncovered(subject, described(error))
    oracle, reason = _oracle(subject, flash.bound)
    if oracle is None:
        return _uncovered(
            subject,
            f"The plain model fails on one sample at a time, so there is no oracle: {reason}",
        )
    if tolerance is None:
        tolerance = TOLERANCE[flash.dtype]
    return _compared(subject, flash, oracle, plain_loss, tolerance, removals)


def _oracle(subject: Subject, bound: float) -> tuple[Oracle | None, str]:
    """In float64, or in the model's own dtype where code insists on that; else why not."""
    reason = ""
    for dtype in (torch.float64, None):
        try:
            oracle = Oracle(
                subject.plain, subject.task, subject.samples, bound, subject.sections, dtype
            )
        except Exception as error:
            reason = reason or described(error)
            continue
        if dtype is None:
            subject.notes.append(
                f"The model or the loss does not run in float64 ({reason}); the oracle ran in "
                "the model's own dtype, so rounding is on both sides."
            )
        return oracle, ""
    return None, reason


def _uncovered(subject: Subject, error: str) -> CheckReport:
    """Nothing could be compared."""
    return CheckReport(
        failures=(error, *subject.failures),
        notes=tuple(subject.notes),
        batch_size=subject.samples.size,
        parameters=uncovered_parameters(subject, error),
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
    floor = FLOOR[flash.dtype]
    norms = floats(flash.norms)
    typical = (statistics.median(oracle.norms),) * len(norms)
    norm_error = largest_norm_error(norms, oracle.norms, typical, floor)
    parameters = tuple(
        compared_parameter(subject, *owned, flash, oracle, tolerance, floor)
        for owned in owned_parameters(subject.plain)
    )
    bad = [parameter.name for parameter in parameters if parameter.status == FAIL]
    if bad:
        subject.failures.append(
            f"{len(bad)} of {len(parameters)} parameters differ from the oracle: "
            f"{', '.join(bad[:5])}{', ...' if len(bad) > 5 else ''}."
        )
    if not norm_error <= tolerance:
        subject.failures.append(
            f"The norms of whole samples differ from the oracle by {norm_error:.1e}, more than "
            f"{tolerance:.0e}.{_hint(subject, norms, oracle.norms)}"
        )
    _check_losses(subject, flash, oracle, plain_loss, tolerance)
    # From here on, flash holds the last removal's step, not the whole batch's.
    removed = remove_samples(subject, flash, norms, removals, tolerance)
    check_sizes(subject, flash, norms, tolerance)
    check_crowd(subject, flash, norms, tolerance)
    if not any(parameter.status in (PASS, FAIL) for parameter in parameters):
        subject.failures.append("No parameter takes part: all are frozen or unused.")
    if any(parameter.status == UNUSED for parameter in parameters):
        subject.notes.append(
            "Unused parameters have norm 0 here and still receive noise in a private step; "
            "freeze them if no batch uses them."
        )
    return CheckReport(
        failures=tuple(subject.failures),
        notes=tuple(subject.notes),
        batch_size=subject.samples.size,
        dtype=str(flash.dtype).removeprefix("torch."),
        tolerance=tolerance,
        max_grad_norm=flash.bound,
        norms=norms,
        oracle_norms=oracle.norms,
        norm_error=norm_error,
        parameters=parameters,
        removals=removed,
    )


def _hint(subject: Subject, found: Sequence[float], expected: Sequence[float]) -> str:
    """Name the usual reason of a wrong factor that is the same for all samples."""
    B = subject.samples.size
    ratios = [f / e for f, e in zip(found, expected, strict=True) if e > 0 and math.isfinite(f)]
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


def _check_losses(
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
            f"{instead(subject.task)}"
        )
    else:
        check_labels(subject)
