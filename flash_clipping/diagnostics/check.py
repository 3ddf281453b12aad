"""Compare flash clipping with the oracle, parameter by parameter.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flash_clipping.capture.inputs import tensors_in
from flash_clipping.diagnostics.oracle import (
    TOLERANCE,
    Loss,
    Oracle,
    Samples,
    Task,
    cast,
    largest,
    largest_error,
    replaced,
    squared_outputs,
    typical,
    without_dropout,
)
from flash_clipping.diagnostics.other_batches import changes_in_other_batches
from flash_clipping.diagnostics.report import CheckReport, ParameterReport, listed
from flash_clipping.diagnostics.watch import Flash, Subject, described
from flash_clipping.errors import InvalidType, InvalidValue, checked_number


class NoComparison(Exception):
    """There is nothing to compare; the message is the finding."""


_LOGGER = logging.getLogger(__name__)

#: What ``cross_entropy`` ignores by default, and what others are often told to ignore.
IGNORED = (-100, -1)

#: Relative difference of losses in float64 (where they are, as in transformers, taken in float32).
LOSS_TOLERANCE = 1e-5


def cause_in_loss(subject: Subject) -> str:
    """Why the loss of a batch is not made of its samples' own; empty where it is.

    A batch whose samples all have as many labels cannot show whether the loss of one depends on how
    many the others have. So half of the labels of its first sample are ignored as well. That is a
    failure where some are ignored already; otherwise the batch may be of a data set in which all
    samples have the same length, for which a mean over all labels is right, and it is a note.

    Raises:
        NoComparison: it is reduced otherwise than was declared.
    """
    task, (model, exact) = subject.task, subject.exact
    reduction, B = task.reduction, exact.count
    instead = (
        "Take the mean over each sample's own labels:\n"
        "    losses = flash_clipping.per_sample_loss(logits, labels)  # [B]; shift=True for input "
        f"ids\n    loss = losses.{reduction}()"
    )
    for words, samples, fails in _with_fewer_labels(subject):
        try:
            loss = task.value(model, samples.all)
            expected = task.reduced([task.value(model, samples.take([b])) for b in range(B)])
        except Exception:  # these are no labels, or another number is ignored
            continue
        allowed = max(LOSS_TOLERANCE, 10 * subject.tolerance if samples is exact else 0.0)
        is_mean_of_none = samples is not exact and not math.isfinite(loss + expected)
        if is_mean_of_none or _is_close(loss, expected, allowed):
            continue
        other, times = ("sum", B) if reduction == "mean" else ("mean", 1 / B)
        if _is_close(loss, times * expected, allowed):
            why = f"The loss is reduced by {other!r}, but loss_reduction is {reduction!r}."
            raise NoComparison(why)
        found = (
            f"{words} is {loss:.6g}, but the {reduction} of its samples' own losses is "
            f"{expected:.6g}: a sample's loss depends on the other samples, or on how many tokens "
            f"they have. {instead}"
        )
        if fails:
            return found
        subject.notes.append(f"{found}\nIt is harmless only if all samples have as many labels.")
        return ""
    return ""


def _is_close(found: float, expected: float, allowed: float) -> bool:
    pair = [torch.tensor(x, dtype=torch.float64) for x in (found, expected)]
    return largest_error(pair[0], pair[1], least=0.0) <= allowed


def _with_fewer_labels(subject: Subject) -> Iterator[tuple[str, Samples, bool]]:
    """The batch, and others in which half of the labels of one sample are ignored: in words, and
    whether losses that differ there are a failure. Where none were ignored, others are not tried
    on a GPU, which an index that is out of range would take down."""
    model, exact = subject.exact
    yield "The loss of the batch", exact, True
    if exact.count < 2 or not subject.options["batch_first"]:
        return
    labels = [x for x in exact.leaves if exact.holds(x) and x.dim() == 2 and x.shape[1] > 1]
    for ignored, x in itertools.product(IGNORED, labels):
        some = bool((x == ignored).any())
        if x.dtype == torch.int64 and (some or x.device.type == "cpu"):
            shorter = x.clone()
            shorter[0, x.shape[1] // 2 :] = ignored
            words = f"The loss of the batch with half of one sample's labels ignored ({ignored})"
            yield words, Samples(replaced(exact.all, x, shorter), True, model), some


def compared_parameters(
    subject: Subject, flash: Flash, oracle: Oracle
) -> Iterator[ParameterReport]:
    """The norms and the clipped sums of all parameters, beside the oracle's."""
    rules = flash.rules()
    for name, param in subject.plain.named_parameters():
        layer = name.rpartition(".")[0]
        found: dict[str, Any] = {}
        if not param.requires_grad:
            found["status"] = "frozen"
        elif not (oracle.reached[name] or flash.norms_of(name).any()):
            found["status"] = "unused"
        else:
            norms_B, expected_B = flash.norms_of(name), oracle.param_norms[name]
            total = oracle.sums[name]
            least_B = subject.floor * oracle.norms_B.nan_to_num(0, 0)
            least = max(largest(total), subject.floor * oracle.largest_sum)
            norm_error = largest_error(norms_B, expected_B, least_B)
            grad = flash.params[name].grad
            grad = torch.zeros_like(total) if grad is None else grad
            sum_error = largest_error(grad, total, least)
            found.update(
                status="PASS" if max(norm_error, sum_error) <= subject.tolerance else "FAIL",
                rule=rules[name],
                norms=tuple(norms_B.tolist()),
                oracle_norms=tuple(expected_B.tolist()),
                norm_error=norm_error,
                sum_error=sum_error,
            )
        yield ParameterReport(
            name=name,
            shape=tuple(param.shape),
            dtype=str(param.dtype).removeprefix("torch."),
            layer=layer,
            layer_type=type(subject.plain.get_submodule(layer)).__name__,
            **found,
        )


@contextmanager
def _compares(words: str = "") -> Iterator[None]:
    """Whatever the user's model raises in here is a finding, but for values that no check takes."""
    try:
        yield
    except (InvalidValue, NoComparison):
        raise
    except Exception as error:
        raise NoComparison(f"{words}{described(error)}") from error


def check_plain_model(subject: Subject) -> None:
    """Run the plain model alone, and note the narrowest dtype.

    Raises:
        NoComparison: it fails, or draws random numbers.
    """
    task, samples = subject.task, subject.samples
    dtypes = {param.dtype for param in subject.plain.parameters()}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        dtypes.update(x.dtype for x in tensors_in(output))

    hook = nn.modules.module.register_module_forward_hook(note)
    with _compares("The plain model fails on this batch: "), hook:
        losses = [task.value(subject.plain, samples.all, seed) for seed in (0, 0, 1)]
    if losses[0] == losses[1] != losses[2]:
        raise NoComparison(
            "The loss changes with the random seed although nn.Dropout layers are switched "
            "off, so per-sample gradients cannot be compared. Check the model in eval mode "
            "(model.eval()), or set its remaining dropout rates to 0."
        )
    known = [dtype for dtype in TOLERANCE if dtype in dtypes]
    subject.dtype = known[-1] if known else torch.float32


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
    to -100 or -1, on a CPU). A model that is trained has to stand a proof before its first step,
    and audits of later ones: it does so here as well.

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
            :class:`~flash_clipping.GradSampleModuleFlashClipping` (``mode``, ``kernels``, ...).

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
    try:
        plain = without_dropout(copy.deepcopy(model))
    except Exception as error:
        raise InvalidValue(f"FC923 check() cannot copy the model: {described(error)}") from error
    if dtype is not None:
        plain, batch = plain.to(dtype), cast(batch, dtype)
    samples = Samples(batch, batch_first, plain)
    task = Task(loss or squared_outputs(batch_first), loss_reduction, seed)
    options.update(loss_reduction=loss_reduction, batch_first=batch_first)
    subject = Subject(plain, samples, task, options, tolerance, notes=[*samples.notes])
    try:
        return _compared(subject, max_grad_norm, removals)
    except NoComparison as error:
        subject.causes = {str(error): [], **subject.causes}
        return CheckReport(subject.failures, tuple(subject.notes), samples.count)


def _compared(subject: Subject, max_grad_norm: float | None, removals: int) -> CheckReport:
    """Everything beside the oracle; then other batches of the same samples."""
    task, batch = subject.task, subject.samples.all
    _LOGGER.info("the plain model, in batches of several sizes")
    check_plain_model(subject)
    _LOGGER.info("one step of flash clipping")
    with _compares():
        flash = Flash(subject)
        if max_grad_norm is None:
            flash.step(batch)
            max_grad_norm = typical(flash.norms_B[flash.norms_B > 0]) or 1.0
        flash.step(batch, max_grad_norm)
    _LOGGER.info("the oracle, one sample at a time in float64")
    with _compares("The plain model fails on one sample at a time, so there is no oracle: "):
        oracle = Oracle(*subject.exact, task, max_grad_norm)
    cause = cause_in_loss(subject)
    norms, expected = (tuple(x.norms_B.tolist()) for x in (flash, oracle))
    least = subject.floor * typical(oracle.norms_B)
    norm_error = largest_error(flash.norms_B, oracle.norms_B, least)
    parameters = tuple(compared_parameters(subject, flash, oracle))
    wrong = []
    if bad := [parameter.name for parameter in parameters if parameter.status == "FAIL"]:
        of_all = f"{len(bad)} of {len(parameters)} parameters differ from the oracle"
        wrong.append(f"{of_all} ({listed(bad, most=5)})")
    if not norm_error <= subject.tolerance:
        wrong.append(f"norms of whole samples are off by {norm_error:.1e}")
    if cause:
        subject.fail(cause, *wrong)
    elif wrong:
        subject.fail(f"{listed(wrong, most=2)}: more than {subject.tolerance:.0e}.")
    _LOGGER.info("batches with samples removed, exchanged and repeated")
    changes = changes_in_other_batches(subject, flash, max_grad_norm, removals)
    statuses = {parameter.status for parameter in parameters}
    if not statuses & {"PASS", "FAIL"}:
        subject.fail("No parameter takes part: all are frozen or unused.")
    if "unused" in statuses:
        subject.notes.append(
            "Unused parameters have norm 0 here and still receive noise in a private step; "
            "freeze them if no batch uses them."
        )
    return CheckReport(
        failures=subject.failures,
        notes=tuple(subject.notes),
        batch_size=subject.samples.count,
        dtype=str(subject.dtype).removeprefix("torch."),
        tolerance=subject.tolerance,
        max_grad_norm=max_grad_norm,
        norms=norms,
        oracle_norms=expected,
        norm_error=norm_error,
        parameters=parameters,
        changes=changes,
    )
