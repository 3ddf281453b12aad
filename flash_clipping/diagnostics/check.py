"""Compare flash clipping with the oracle, parameter by parameter.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from flash_clipping.diagnostics.oracle import (
    FLOOR,
    TOLERANCE,
    BadBatchError,
    Loss,
    Oracle,
    Owned,
    Samples,
    Task,
    cast,
    close,
    largest_norm_error,
    largest_sum_error,
    owned_parameters,
    squared_outputs,
    without_dropout,
)
from flash_clipping.diagnostics.other_batches import OtherBatches
from flash_clipping.diagnostics.report import (
    FAIL,
    FROZEN,
    PASS,
    REFUSED,
    UNCHECKED,
    UNUSED,
    CheckReport,
    ParameterReport,
)
from flash_clipping.diagnostics.watch import Flash, Subject, described, fallbacks, floats
from flash_clipping.errors import InvalidType, InvalidValue, checked_number, without_code

_LOGGER = logging.getLogger(__name__)

# -- is the loss of a batch made of its samples' own? ----------------------------------------------

# A batch whose samples all have as many labels cannot show whether the loss of one depends on how
# many the others have. So the labels of its first sample are cut in half as well.

#: What ``cross_entropy`` ignores by default, and what others are often told to ignore.
IGNORED = (-100, -1)

#: Relative difference of losses in float64 (where they are, as in transformers, taken in float32).
LOSS_TOLERANCE = 1e-5

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
            f"{INSTEAD.format(reduction=subject.task.reduction)}"
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
            try:
                samples = Samples(batch, True, model)
                whole = task.value(model, samples.all)
                own = [task.value(model, samples.take([b])) for b in range(samples.count)]
            except Exception:  # these are no labels, or another number is ignored
                continue
            expected = task.reduced(own)
            if not (math.isfinite(whole) and math.isfinite(expected)):
                continue
            if abs(whole - expected) > LOSS_TOLERANCE * abs(expected):
                found = subject.failures if some else subject.notes
                found.append(
                    f"With half of the labels of one sample ignored ({ignored}), the loss of the "
                    f"batch is {whole:.6g}, but the {task.reduction} of its samples' own losses is "
                    f"{expected:.6g}: a sample's loss depends on how many labels the others have, "
                    "which is harmless only if all samples always have as many. "
                    f"{INSTEAD.format(reduction=task.reduction)}"
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


# -- one parameter beside the oracle: norms, clipped sum -------------------------------------------


def compared_parameters(
    subject: Subject, flash: Flash, oracle: Oracle, tolerance: float
) -> Iterator[ParameterReport]:
    """The norms and the clipped sums of all parameters, beside the oracle's."""
    for owned in owned_parameters(subject.plain):
        if not owned.param.requires_grad:
            yield _report(owned, FROZEN, reason="requires_grad is False")
        elif owned.name not in flash.seen and not oracle.reached[owned.name]:
            reason = "the loss does not depend on it with this batch"
            yield _report(owned, UNUSED, reason=reason)
        else:
            yield _compared_parameter(owned, flash, oracle, tolerance)


def _compared_parameter(
    owned: Owned, flash: Flash, oracle: Oracle, tolerance: float
) -> ParameterReport:
    name, seen = owned.name, flash.seen.get(owned.name)
    (of_param,) = flash.module.running_step.norms_of([flash.params[name]]).norms_PB
    norms, grad = floats(of_param), flash.grad(name)
    norm_error = largest_norm_error(
        norms, oracle.param_norms[name], oracle.norms, FLOOR[flash.dtype]
    )
    sum_error = largest_sum_error(grad, oracle.sums[name], oracle.largest_sum * FLOOR[flash.dtype])
    passed = max(norm_error, sum_error) <= tolerance
    return _report(
        owned,
        PASS if passed else FAIL,
        reason="" if passed or seen is not None else "its gradient never reached a rule",
        rule=" + ".join(seen.rules) if seen else "",
        factor=" + ".join(seen.factors) if seen else "",
        norms=norms,
        oracle_norms=tuple(oracle.param_norms[name]),
        norm_error=norm_error,
        sum_error=sum_error,
    )


def uncovered_parameters(subject: Subject, error: str) -> Iterator[ParameterReport]:
    """Nothing could be compared: which parameters that leaves uncovered, and why."""
    lines = without_code(error).splitlines()  # an error may name several layers, one a line
    for owned in owned_parameters(subject.plain):
        kind = type(owned.owner).__name__
        # As this library names a module, and as Opacus does.
        named = f"{owned.path or 'the model'} ({kind})"
        if not owned.param.requires_grad:
            yield _report(owned, FROZEN, reason="requires_grad is False")
        elif any(line.startswith(named) for line in lines) or f"({owned.path}:{kind}(" in error:
            yield _report(owned, REFUSED, reason=error)
        else:
            reason = "the check stopped before this parameter"
            yield _report(owned, UNCHECKED, reason=reason)


def _report(owned: Owned, status: str, **more: Any) -> ParameterReport:
    return ParameterReport(
        name=owned.name,
        shape=tuple(owned.param.shape),
        dtype=str(owned.param.dtype).removeprefix("torch."),
        layer=owned.path,
        layer_type=type(owned.owner).__name__,
        status=status,
        **more,
    )


# -- the whole check -------------------------------------------------------------------------------


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
    return losses[0], ""


def _check_buffers(subject: Subject) -> None:
    """What a forward leaves in buffers is released with the model, without noise."""
    samples = subject.samples
    if samples.count < 2:
        return
    left = []
    for batch in (samples.all, samples.take(range(1, samples.count))):
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
    seed: int = 0,
    **options: Any,
) -> CheckReport:
    """Compare flash clipping on one batch with per-sample gradients taken in float64.

    The oracle is a plain copy of the model in float64 that sees one sample at a time; nothing of
    this library takes part in it. Compared are the norm of every sample for every parameter, the
    clipped sums, and norms in other batches of the same samples: with one removed, of the size of
    another axis of the inputs, among many copies of one sample, beside an extreme one. The loss
    must be that of its samples, also where one has fewer labels (integers ``[B, T]``; some are set
    to -100 or -1, on a CPU). No buffer may depend on a sample. A model that is trained has to stand
    a proof before its first step, and audits of later ones: it does so here as well.

    ``model`` and ``batch`` are not changed; dropout is switched off in the copies. The oracle holds
    one sample's gradients and one sum in float64.

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
        seed: seed of every forward.
        **options: more arguments of
            :class:`~flash_clipping.GradSampleModuleFlashClipping` (``mode``, ``backend``, ...).

    Returns:
        A report; ``report.passed`` says whether everything agreed.

    Raises:
        BadBatchError: there is nothing to check: no tensors, no samples, no loss.
        ValueError: an option that is out of its range, or that the wrapper refuses.
        TypeError: ``model`` is not a plain module.
    """
    if not isinstance(model, nn.Module) or hasattr(model, "autograd_grad_sample_hooks"):
        raise InvalidType(
            f"FC923 check() takes a plain nn.Module, found {type(model).__name__}"
            f"{' that is wrapped already' if isinstance(model, nn.Module) else ''}."
        )
    if "clipping" in options:
        raise InvalidType("FC923 check() is for flat clipped sums; leave out clipping=...")
    checked_number("removals", removals, "[0, inf)", example=16, whole=True)
    if max_grad_norm is not None:
        checked_number("max_grad_norm", max_grad_norm, "(0, inf)", example=1.0)
    if tolerance is not None:
        checked_number("tolerance", tolerance, "[0, inf)", example=1e-4)
    plain = without_dropout(copy.deepcopy(model))
    if dtype is not None:
        plain, batch = plain.to(dtype), cast(batch, dtype)
    samples = Samples(batch, batch_first, plain)
    task = Task(loss or squared_outputs(batch_first), loss_reduction, seed)
    options.update(loss_reduction=loss_reduction, batch_first=batch_first)
    subject = Subject(plain, samples, task, options, notes=[*samples.notes])
    _LOGGER.info("the plain model, in batches of several sizes")
    plain_loss, refused = check_plain_model(subject)
    if refused:
        return _uncovered(subject, refused)
    _LOGGER.info("one step of flash clipping")
    try:
        with fallbacks(subject.notes):
            flash = Flash(subject)
    except InvalidValue:  # of an option
        raise
    except Exception as error:  # the model is the finding
        return _uncovered(subject, described(error))
    try:
        with fallbacks(subject.notes):
            flash.step(samples.all, max_grad_norm)
    except Exception as error:  # whatever the user's model raises is the finding
        return _uncovered(subject, described(error))
    _LOGGER.info("the oracle, one sample at a time in float64")
    try:
        exact, samples = subject.exact()
        oracle = Oracle(exact, task, samples, flash.bound)
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
    _LOGGER.info("batches with samples removed, exchanged and repeated")
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
