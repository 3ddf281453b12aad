"""Compare flash clipping with the oracle, parameter by parameter.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from flash_clipping.diagnostics.oracle import (
    FLOOR,
    TOLERANCE,
    Oracle,
    close,
    largest_norm_error,
    largest_sum_error,
)
from flash_clipping.diagnostics.report import (
    FAIL,
    FROZEN,
    PASS,
    REFUSED,
    UNCHECKED,
    UNUSED,
    CheckReport,
    ParameterReport,
    RemovalReport,
    SectionReport,
)
from flash_clipping.diagnostics.sections import owned_parameters, section_axis, sections_of
from flash_clipping.diagnostics.watch import Flash, fallbacks, floats


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
    buffer may depend on a sample.

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
    samples = Samples(batch if dtype is None else cast(batch, dtype), batch_first)
    task = Task(loss or squared_outputs(batch_first), loss_reduction, samples.size, seed)
    run = _Check(
        plain, samples, task, max_grad_norm, tolerance, removals, dict(sections or {}), options
    )
    run.options.update(loss_reduction=loss_reduction, batch_first=batch_first)
    return run.report()


#: Batches that are made to have the size of another axis have at most so many samples.
LARGEST_SIZE = 64


@dataclass
class _Check:
    """One call of :func:`check`."""

    plain: nn.Module
    samples: Samples
    task: Task
    max_grad_norm: float | None
    tolerance: float | None
    removals: int
    sections: dict[str, Sequence[str]]
    options: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def report(self) -> CheckReport:
        self.notes += self.samples.notes
        self.find_sections()
        refused = self._refused_before_start()
        if refused:
            return self._uncovered(refused)
        try:
            with fallbacks(self.notes):
                flash = Flash(self.plain, self.task, self.options, self.sections)
                flash.step(self.samples.all, self.max_grad_norm)
        except Exception as error:  # whatever the user's model raises is the finding
            return self._uncovered(_described(error))
        oracle, reason = self._oracle(flash.bound)
        if oracle is None:
            return self._uncovered(
                f"The plain model fails on one sample at a time, so there is no oracle: {reason}"
            )
        return self._compared(flash, oracle)

    def _oracle(self, bound: float) -> tuple[Oracle | None, str]:
        """In float64, or in the model's own dtype where code insists on that; else why not."""
        reason = ""
        for dtype in (torch.float64, None):
            try:
                oracle = Oracle(self.plain, self.task, self.samples, bound, self.sections, dtype)
            except Exception as error:
                reason = reason or _described(error)
                continue
            if dtype is None:
                self.notes.append(
                    f"The model or the loss does not run in float64 ({reason}); the oracle ran in "
                    "the model's own dtype, so rounding is on both sides."
                )
            return oracle, ""
        return None, reason

    def _refused_before_start(self) -> str:
        """Why no comparison would mean anything, found with the plain model alone."""
        try:
            losses = [self.task.value(self.plain, self.samples.all, seed) for seed in (0, 0, 1)]
        except BadBatchError:
            raise
        except Exception as error:
            return f"The plain model fails on this batch: {_described(error)}"
        if losses[0] == losses[1] != losses[2]:
            return (
                "The loss changes with the random seed although nn.Dropout layers are switched "
                "off, so per-sample gradients cannot be compared. Check the model in eval mode "
                "(model.eval()), or set its remaining dropout rates to 0."
            )
        self.plain_loss = losses[0]
        counted = self.task.counted
        if counted is not None and counted != self.samples.size:
            axis = 0 if self.options["batch_first"] else 1
            return (
                f"The loss gives {counted} losses, but the batch has {self.samples.size} samples "
                f"(the size of axis {axis} of its first tensor). One of the two does not count "
                "samples: if the batch is the other axis of the inputs, check and wrap the model "
                f"with batch_first={not self.options['batch_first']}."
            )
        self._check_buffers()
        return ""

    def _check_buffers(self) -> None:
        """What a forward leaves in buffers is released with the model, without noise."""
        if self.samples.size < 2:
            return
        state = [
            self._buffers_after(batch) for batch in (self.samples.all, self.samples.without(0))
        ]
        changed = [name for name, value in state[0].items() if not _same(value, state[1].get(name))]
        if changed:
            self.failures.append(
                f"The forward writes what it sees of the samples into buffers: "
                f"{', '.join(changed)}. They are part of the state dict and get no noise. Use a "
                "layer without running statistics, or do not train or release in this mode."
            )

    def _buffers_after(self, batch: Any) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(self.plain)
        self.task.value(model, batch)
        parameters = dict(model.named_parameters())
        return {name: v for name, v in model.state_dict().items() if name not in parameters}

    # -- parts of the report ------------------------------------------------------------------

    def find_sections(self) -> None:
        names = dict(self.plain.named_parameters())
        for name in self.sections:
            if name not in names:
                raise BadBatchError(
                    f"sections names the parameter {name!r}, which the model does not have."
                )
        for name, param in names.items():
            if name not in self.sections:
                found = sections_of(self.plain, name, param)
                if found:
                    self.sections[name] = found
        for name, parts in self.sections.items():
            axis = section_axis(self.plain, name)
            if names[name].shape[axis] % len(parts):
                raise BadBatchError(
                    f"sections gives {name} {len(parts)} equal parts, but its axis {axis} has "
                    f"{names[name].shape[axis]} entries."
                )

    def _uncovered(self, error: str) -> CheckReport:
        """Nothing could be compared: say which parameters that leaves uncovered, and why."""
        culprits = set()
        lines = error.splitlines()  # an error may name several layers, one a line
        for path, module in self.plain.named_modules():
            kind = type(module).__name__
            # As this library names a module, and as Opacus does.
            named = f"{path or 'the model'} ({kind})"
            if any(line.startswith(named) for line in lines) or f"({path}:{kind}(" in error:
                culprits.add(path)
        parameters = []
        for name, param, path, owner in owned_parameters(self.plain):
            if not param.requires_grad:
                status, reason = FROZEN, "requires_grad is False"
            elif path in culprits:
                status, reason = REFUSED, error
            else:
                status, reason = UNCHECKED, "the check stopped before this parameter"
            parameters.append(_parameter(name, param, path, owner, status, reason=reason))
        return CheckReport(
            failures=(error, *self.failures),
            notes=tuple(self.notes),
            batch_size=self.samples.size,
            parameters=tuple(parameters),
        )

    def _compared(self, flash: Flash, oracle: Oracle) -> CheckReport:
        tolerance = TOLERANCE[flash.dtype] if self.tolerance is None else self.tolerance
        floor = FLOOR[flash.dtype]
        norms = floats(flash.norms)
        typical = (statistics.median(oracle.norms),) * len(norms)
        norm_error = largest_norm_error(norms, oracle.norms, typical, floor)
        parameters = tuple(
            self._compared_parameter(*owned, flash, oracle, tolerance, floor)
            for owned in owned_parameters(self.plain)
        )
        bad = [parameter.name for parameter in parameters if parameter.status == FAIL]
        if bad:
            self.failures.append(
                f"{len(bad)} of {len(parameters)} parameters differ from the oracle: "
                f"{', '.join(bad[:5])}{', ...' if len(bad) > 5 else ''}."
            )
        if not norm_error <= tolerance:
            self.failures.append(
                f"The norms of whole samples differ from the oracle by {norm_error:.1e}, more than "
                f"{tolerance:.0e}.{self._hint(norms, oracle.norms)}"
            )
        self._check_losses(flash, oracle, tolerance)
        # From here on, flash holds the last removal's step, not the whole batch's.
        removals = tuple(self._removed(flash, norms, sample, tolerance) for sample in self._chosen)
        self._judge_removals(removals)
        self._check_sizes(flash, norms, tolerance)
        if not any(parameter.status in (PASS, FAIL) for parameter in parameters):
            self.failures.append("No parameter takes part: all are frozen or unused.")
        if any(parameter.status == UNUSED for parameter in parameters):
            self.notes.append(
                "Unused parameters have norm 0 here and still receive noise in a private step; "
                "freeze them if no batch uses them."
            )
        return CheckReport(
            failures=tuple(self.failures),
            notes=tuple(self.notes),
            batch_size=self.samples.size,
            dtype=str(flash.dtype).removeprefix("torch."),
            tolerance=tolerance,
            max_grad_norm=flash.bound,
            norms=norms,
            oracle_norms=oracle.norms,
            norm_error=norm_error,
            parameters=parameters,
            removals=removals,
        )

    def _compared_parameter(
        self,
        name: str,
        param: nn.Parameter,
        path: str,
        owner: nn.Module,
        flash: Flash,
        oracle: Oracle,
        tolerance: float,
        floor: float,
    ) -> ParameterReport:
        if not param.requires_grad:
            return _parameter(name, param, path, owner, FROZEN, reason="requires_grad is False")
        seen = flash.seen.get(name)
        if seen is None and not oracle.reached[name]:
            reason = "the loss does not depend on it with this batch"
            return _parameter(name, param, path, owner, UNUSED, reason=reason)
        norms = floats(flash.norms_of(name))
        grad = flash.grad(name)
        scale = oracle.largest_sum * floor
        norm_error = largest_norm_error(norms, oracle.param_norms[name], oracle.norms, floor)
        sum_error = largest_sum_error(grad, oracle.sums[name], scale)
        parts = []
        if name in self.sections:
            axis = section_axis(self.plain, name)
            names = self.sections[name]
            chunks = zip(
                names,
                grad.chunk(len(names), axis),
                oracle.sums[name].chunk(len(names), axis),
                oracle.section_norms[name],
                flash.section_norms(name),
                strict=True,
            )
            for part, found, expected, expected_norms, found_norms in chunks:
                errors = (
                    largest_norm_error(found_norms, expected_norms, oracle.norms, floor),
                    largest_sum_error(found, expected, scale),
                )
                passed = all(error <= tolerance for error in errors)
                parts.append(SectionReport(part, *errors, passed))
        passed = (
            norm_error <= tolerance
            and sum_error <= tolerance
            and all(section.passed for section in parts)
        )
        reason = "" if passed or seen is not None else "its gradient never reached a rule"
        return _parameter(
            name,
            param,
            path,
            owner,
            PASS if passed else FAIL,
            reason=reason,
            rule=seen.rule if seen else "",
            algorithm=" + ".join(seen.algorithms) if seen else "",
            backend=" + ".join(seen.backends) if seen else "",
            norms=norms,
            oracle_norms=oracle.param_norms[name],
            norm_error=norm_error,
            sum_error=sum_error,
            sections=tuple(parts),
        )

    # -- one sample less ----------------------------------------------------------------------

    @property
    def _chosen(self) -> list[int]:
        """Samples to remove: all, or as many as asked for, evenly spaced."""
        B = self.samples.size
        if B < 2:
            return []
        count = min(B, self.removals)
        return [index * B // count for index in range(count)]

    def _removed(
        self, flash: Flash, norms: tuple[float, ...], sample: int, tolerance: float
    ) -> RemovalReport:
        expected = norms[:sample] + norms[sample + 1 :]
        try:
            flash.step(self.samples.without(sample), flash.bound)
            found = floats(flash.norms)
        except Exception as failure:
            return RemovalReport(sample, math.nan, _described(failure), False)
        if len(found) != len(expected):
            reason = f"found {len(found)} norms for {len(expected)} samples"
            return RemovalReport(sample, math.nan, reason, False)
        typical = (statistics.median(expected),) * len(expected)
        error = largest_norm_error(found, expected, typical, FLOOR[flash.dtype])
        return RemovalReport(sample, error, "", error <= tolerance)

    def _check_sizes(self, flash: Flash, norms: tuple[float, ...], tolerance: float) -> None:
        """As many samples as some other axis of the inputs has: no size may decide what they are.

        Samples are taken in turn, again and again if there are too few; by the copy that has seen
        the whole batch, and by a new one that sees nothing else.
        """
        sizes = [size for size in self.samples.other_sizes() if size <= LARGEST_SIZE]
        if not sizes:
            self.notes.append(
                "No other axis of the inputs has a size that a batch could have, so the batch was "
                "not tried with the size of another axis (as many samples as positions)."
            )
        for size in sizes:
            chosen = [b % self.samples.size for b in range(size)]
            expected = tuple(norms[b] for b in chosen)
            typical = (statistics.median(expected),) * size
            for copied in (flash, Flash(self.plain, self.task, self.options, self.sections)):
                try:
                    with fallbacks([]):  # noted already
                        copied.step(self.samples.take(chosen), flash.bound)
                    found = floats(copied.norms)
                except Exception as failure:
                    reason = _described(failure)
                else:
                    if len(found) == size:
                        error = largest_norm_error(found, expected, typical, FLOOR[flash.dtype])
                        if error <= tolerance:
                            continue
                        reason = f"norms change by {error:.1e}"
                    else:
                        reason = f"found {len(found)} norms"
                self.failures.append(
                    f"With {size} samples, as many as another axis of the inputs has, the step is "
                    f"wrong: {reason}"
                )
                return

    def _judge_removals(self, removals: tuple[RemovalReport, ...]) -> None:
        failed = [removal for removal in removals if not removal.passed]
        if not removals and self.removals:
            self.notes.append(
                "One sample only: whether samples are independent of each other was not checked. "
                "Use a batch of at least two."
            )
        if not failed:
            return
        errors = [removal for removal in failed if removal.reason]
        if errors:
            self.failures.append(
                f"With sample {errors[0].sample} removed the step fails: {errors[0].reason} "
                "(A constant input whose leading axis merely has the size of the batch, such as "
                "positions torch.arange(T) with T == B, looks like this: expand it over the batch.)"
            )
            return
        worst = max(failed, key=lambda removal: removal.error)
        self.failures.append(
            f"Removing sample {worst.sample} changes the norms of other samples by "
            f"{worst.error:.1e}: samples are not independent. A layer or the loss mixes them "
            "(batch statistics, a mean over all tokens of the batch, a lookup of the batch's own "
            "order)."
        )

    # -- what may be behind it ----------------------------------------------------------------

    def _hint(self, found: Sequence[float], expected: Sequence[float]) -> str:
        """Name the usual reason of a wrong factor that is the same for all samples."""
        B = self.samples.size
        ratios = [f / e for f, e in zip(found, expected, strict=True) if e > 0 and math.isfinite(f)]
        if B < 2 or not ratios or max(ratios) - min(ratios) > 0.01 * max(ratios):
            return ""
        ratio = statistics.fmean(ratios)
        for factor, actual in ((B, "sum"), (1 / B, "mean")):
            if abs(ratio / factor - 1) < 0.01 and actual != self.task.reduction:
                return (
                    f" All are off by a factor of {ratio:.4g}: the loss seems to be reduced by "
                    f"{actual!r}, but loss_reduction is {self.task.reduction!r}."
                )
        return f" All are off by the same factor, {ratio:.4g}."

    def _check_losses(self, flash: Flash, oracle: Oracle, tolerance: float) -> None:
        if not close(flash.loss, self.plain_loss, tolerance):
            self.failures.append(
                f"The wrapped model's loss is {flash.loss:.6g}, the plain model's "
                f"{self.plain_loss:.6g}: a module without a rule runs one sample at a time, which "
                "changes what it computes if it mixes samples."
            )
        elif not close(self.plain_loss, oracle.loss, tolerance):
            self.failures.append(
                f"The loss of the batch is {self.plain_loss:.6g}, but the {self.task.reduction} "
                f"of its samples' own losses is {oracle.loss:.6g}: a sample's loss depends on the "
                "other samples (or on how many tokens they have), or loss_reduction is wrong."
            )


def _parameter(
    name: str, param: nn.Parameter, path: str, owner: nn.Module, status: str, **more: Any
) -> ParameterReport:
    return ParameterReport(
        name=name,
        shape=tuple(param.shape),
        dtype=str(param.dtype).removeprefix("torch."),
        layer=path,
        layer_type=type(owner).__name__,
        status=status,
        **more,
    )


def _same(one: torch.Tensor, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True  # extra state, which need not be comparable
    return torch.equal(one, other)


def _described(error: BaseException) -> str:
    text = str(error).strip() or repr(error)
    kind = type(error).__name__
    return text if kind == "FlashClippingError" else f"{text} ({kind})"
