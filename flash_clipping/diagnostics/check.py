"""Compare flash clipping with the oracle, parameter by parameter, and in other batches of the same
samples.

Capacities that are full, and experts that choose their tokens, leave every layer's rows in their
places, so that no layer can be refused for them: mixing that no clipping bounds.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.inputs import map_tensors, tensors_in
from flash_clipping.capture.proof.gate import FIRST_AUDIT
from flash_clipping.capture.root_forward import RootForward
from flash_clipping.diagnostics.oracle import (
    FLOOR,
    TOLERANCE,
    Loss,
    Oracle,
    Samples,
    Task,
    cast,
    largest,
    largest_error,
    squared_outputs,
    typical,
    without_dropout,
)
from flash_clipping.diagnostics.report import CheckReport, ParameterReport, described, listed
from flash_clipping.engine.grad_sample_module import GradSampleModuleFlashClipping
from flash_clipping.errors import InvalidType, InvalidValue, checked_number

_LOGGER = logging.getLogger(__name__)

#: What ``cross_entropy`` ignores by default, and what others are often told to ignore.
IGNORED = (-100, -1)

#: Relative difference of losses in float64 (where they are, as in transformers, taken in float32).
LOSS_TOLERANCE = 1e-5

#: Batches that are larger than the user's have at most so many samples.
LARGEST_SIZE = 64

#: How many audits of later steps a model has to stand, besides the proof before a first step.
AUDITS = 2

_NOT_INDEPENDENT = (
    "samples are not independent. Let a sample's loss depend on that sample alone: no capacity "
    "that tokens of all samples share, no experts that choose their tokens, no order by values, no "
    "statistics of the batch, no mean over all of its tokens."
)


class NoComparison(Exception):
    """There is nothing to compare; the message is the finding."""


@contextmanager
def _compares(words: str = "") -> Iterator[None]:
    """Whatever the user's model raises in here is a finding, but for values that no check takes."""
    try:
        yield
    except (InvalidValue, NoComparison):
        raise
    except Exception as error:
        raise NoComparison(f"{words}{described(error)}") from error


class Flash:
    """The wrapped copy of a model and what its last step left.

    Args:
        options: of :class:`~flash_clipping.GradSampleModuleFlashClipping`.
        proven: whether steps are those of training, and begin with its proof; otherwise they leave
            whatever their gradients are.

    Attributes:
        norms_B: of the last step, in float64, on the CPU.
    """

    def __init__(self, task: Task, options: dict[str, Any], proven: bool = False):
        self.task = task
        self.module = GradSampleModuleFlashClipping(copy.deepcopy(task.model), **options)
        self.has_taps = self.module.mode != "one_by_one"
        calls: Any = self.module._session.calls
        if not proven and self.has_taps:  # passes of other classes are for whoever watches them
            calls.backward_pass_class = type("Compared", (calls.backward_pass_class,), {})
        self.params = dict(self.module._module.named_parameters())

    def step(self, batch: Any, max_grad_norm: float = 1.0) -> None:
        """Forward and backward with this bound."""
        self.module.max_grad_norm = max_grad_norm
        self.module.zero_grad(set_to_none=True)
        self.task.total(batch, self.module).backward()
        self.norms_B = self.module.get_norm_sample().detach().double().cpu()

    def norms_of(self, name: str) -> Tensor:
        """Norms ``[B]`` of one parameter in the last step."""
        norms_PB = self.module.running_step.norms_of([self.params[name]]).norms_PB
        return norms_PB.squeeze(0).detach().double().cpu()

    def rules(self) -> dict[str, str]:
        """The rules of the layers that use each parameter, by its name, or what takes it without:
        ``"bare"`` use by its module, or, without taps, ``"sample by sample"``."""
        names = {param: name for name, param in self.params.items()}
        found: dict[str, list[str]] = {name: [] for name in self.params}
        for tap in self.module._taps.all if self.has_taps else ():
            rule = "bare" if tap.rule is None else type(tap.rule).__name__
            for owner in () if isinstance(tap, RootForward) else tap.owners:
                for param in owner.parameters(recurse=False):
                    found[names[param]].append(rule)
        return {name: " + ".join(rules) or "sample by sample" for name, rules in found.items()}


#: In words, who takes the step, the samples, and what stands for them if others than these do: with
#: another one in the first place.
Step = tuple[str, Flash, Sequence[int], Any]


@dataclass
class Comparison:
    """What is compared, and what was found.

    Attributes:
        task: the model, a batch and the loss.
        options: of :class:`~flash_clipping.GradSampleModuleFlashClipping`.
        allowed: relative error, if not that of the dtype.
        dtype: the narrowest that the model computes with; once it has run.
        notes: for the report, in the order in which they were found.
        causes: of failures, in that order, and where each was seen.
    """

    task: Task
    options: dict[str, Any]
    allowed: float | None
    dtype: torch.dtype = torch.float32
    notes: list[str] = field(default_factory=list)
    causes: dict[str, list[str]] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype] if self.allowed is None else self.allowed

    def fail(self, cause: str, *where: str) -> None:
        self.causes.setdefault(cause, []).extend(where)

    def report(self, **found: Any) -> CheckReport:
        """All that is known, with a text for each cause, which begins with where it was seen."""
        texts = [
            f"{listed(where, most=3)}: {cause}" if where else cause
            for cause, where in self.causes.items()
        ]
        failures = tuple(text[:1].upper() + text[1:] for text in texts)
        return CheckReport(failures, tuple(self.notes), self.task.samples.count, **found)

    @cached_property
    def exact(self) -> Task:
        """In which the truth is computed: in float64, or in the model's own dtype, where code
        insists on that."""
        try:
            return self.task.in_float64()
        except Exception as error:
            self.notes.append(
                f"The model or the loss does not run in float64 ({described(error)}); the oracle "
                "ran in the model's own dtype, so rounding is on both sides."
            )
            return replace(self.task, model=copy.deepcopy(self.task.model))

    def with_oracle(self, max_grad_norm: float | None, removals: int) -> CheckReport:
        """Everything beside the oracle; then other batches of the same samples."""
        batch = self.task.samples.all
        _LOGGER.info("the plain model, in batches of several sizes")
        self._run_plain_model()
        _LOGGER.info("one step of flash clipping")
        with _compares():
            flash = Flash(self.task, self.options)
            if max_grad_norm is None:
                flash.step(batch)
                max_grad_norm = typical(flash.norms_B[flash.norms_B > 0]) or 1.0
            flash.step(batch, max_grad_norm)
        _LOGGER.info("the oracle, one sample at a time in float64")
        with _compares("The plain model fails on one sample at a time, so there is no oracle: "):
            oracle = Oracle(self.exact, max_grad_norm)
        cause = self._cause_in_loss()
        norms_B, floor = flash.norms_B, FLOOR[self.dtype]
        norm_error = largest_error(norms_B, oracle.norms_B, floor * typical(oracle.norms_B))
        parameters = tuple(self._parameters(flash, oracle, floor))
        wrong = []
        if bad := [parameter.name for parameter in parameters if parameter.status == "FAIL"]:
            of_all = f"{len(bad)} of {len(parameters)} parameters differ from the oracle"
            wrong.append(f"{of_all} ({listed(bad, most=5)})")
        if not norm_error <= self.tolerance:
            wrong.append(f"norms of whole samples are off by {norm_error:.1e}")
        if cause:
            self.fail(cause, *wrong)
        elif wrong:
            self.fail(f"{listed(wrong, most=2)}: more than {self.tolerance:.0e}.")
        _LOGGER.info("batches with samples removed, exchanged and repeated")
        changes = tuple(self._changes_in_other_batches(flash, max_grad_norm, removals))
        statuses = {parameter.status for parameter in parameters}
        if not statuses & {"PASS", "FAIL"}:
            self.fail("No parameter takes part: all are frozen or unused.")
        if "unused" in statuses:
            self.notes.append(
                "Unused parameters have norm 0 here and still receive noise in a private step; "
                "freeze them if no batch uses them."
            )
        return self.report(
            dtype=str(self.dtype).removeprefix("torch."),
            tolerance=self.tolerance,
            max_grad_norm=max_grad_norm,
            norms=tuple(norms_B.tolist()),
            oracle_norms=tuple(oracle.norms_B.tolist()),
            norm_error=norm_error,
            parameters=parameters,
            changes=changes,
        )

    def _run_plain_model(self) -> None:
        """Run it alone, and note the narrowest dtype. ``NoComparison`` if it fails, or draws random
        numbers."""
        dtypes = {param.dtype for param in self.task.model.parameters()}

        def note(module: nn.Module, args: Any, output: Any) -> None:
            dtypes.update(x.dtype for x in tensors_in(output))

        hook = nn.modules.module.register_module_forward_hook(note)
        with _compares("The plain model fails on this batch: "), hook:
            losses = [self.task.value(self.task.samples.all, seed) for seed in (0, 0, 1)]
        if losses[0] == losses[1] != losses[2]:
            raise NoComparison(
                "The loss changes with the random seed although nn.Dropout layers are switched "
                "off, so per-sample gradients cannot be compared. Check the model in eval mode "
                "(model.eval()), or set its remaining dropout rates to 0."
            )
        self.dtype = [torch.float32, *(dtype for dtype in TOLERANCE if dtype in dtypes)][-1]

    def _cause_in_loss(self) -> str:
        """Why the loss of a batch is not made of its samples' own; empty where it is.

        A batch whose samples all have as many labels cannot show whether the loss of one depends on
        how many the others have. So half of the labels of its first sample are ignored as well.
        That is a failure where some are ignored already; otherwise the batch may be of a data set
        in which all samples have the same length, for which a mean over all labels is right, and it
        is a note. ``NoComparison`` if the loss is reduced otherwise than was declared.
        """
        task, B = self.exact, self.exact.samples.count
        reduction = task.reduction
        for words, samples, fails in self._with_fewer_labels():
            try:
                loss = task.value(samples.all)
                expected = math.fsum(task.value(samples.take([b])) for b in range(B))
            except Exception:  # these are no labels, or another number is ignored
                continue
            expected /= B if reduction == "mean" else 1
            is_given = samples is task.samples
            allowed = max(LOSS_TOLERANCE, 10 * self.tolerance if is_given else 0.0)
            is_mean_of_none = not (is_given or math.isfinite(loss + expected))
            if is_mean_of_none or _is_close(loss, expected, allowed):
                continue
            other, times = ("sum", B) if reduction == "mean" else ("mean", 1 / B)
            if _is_close(loss, times * expected, allowed):
                why = f"The loss is reduced by {other!r}, but loss_reduction is {reduction!r}."
                raise NoComparison(why)
            found = (
                f"{words} is {loss:.6g}, but the {reduction} of its samples' own losses is "
                f"{expected:.6g}: a sample's loss depends on the other samples, or on how many "
                "tokens they have. Take the mean over each sample's own labels:\n    losses = "
                "flash_clipping.per_sample_loss(logits, labels)  # [B]; shift=True for input ids\n"
                f"    loss = losses.{reduction}()"
            )
            if fails:
                return found
            line = "It is harmless only if all samples have as many labels."
            self.notes.append(f"{found}\n{line}")
            break
        return ""

    def _with_fewer_labels(self) -> Iterator[tuple[str, Samples, bool]]:
        """The batch, and others in which half of the labels of one sample are ignored: in words,
        and whether losses that differ there are a failure. Where none were ignored, others are not
        tried on a GPU, which an index that is out of range would take down."""
        exact = self.exact.samples
        yield "The loss of the batch", exact, True
        if exact.count < 2 or not self.task.batch_first:
            return
        labels = [x for x in exact.leaves if exact.holds(x) and x.dim() == 2 and x.shape[1] > 1]
        for ignored, x in itertools.product(IGNORED, labels):
            some = bool((x == ignored).any())
            if x.dtype == torch.int64 and (some or x.device.type == "cpu"):
                shorter = x.clone()
                shorter[0, x.shape[1] // 2 :] = ignored
                batch = _replaced(exact.all, x, shorter)
                words = "The loss of the batch with half of one sample's labels ignored"
                yield f"{words} ({ignored})", Samples(batch, True, self.exact.model), some

    def _parameters(self, flash: Flash, oracle: Oracle, floor: float) -> Iterator[ParameterReport]:
        """The norms and the clipped sums of all parameters, beside the oracle's."""
        rules, model = flash.rules(), self.task.model
        largest_sum = max(map(largest, oracle.sums.values()), default=0.0)
        for name, param in model.named_parameters():
            layer = name.rpartition(".")[0]
            found: dict[str, Any] = {}
            if not param.requires_grad:
                found["status"] = "frozen"
            elif name not in oracle.reached and not flash.norms_of(name).any():
                found["status"] = "unused"
            else:
                norms_B, expected_B = flash.norms_of(name), oracle.param_norms[name]
                total, grad = oracle.sums[name], flash.params[name].grad
                least_B = floor * oracle.norms_B.nan_to_num(0, 0)
                norm_error = largest_error(norms_B, expected_B, least_B)
                grad = torch.zeros_like(total) if grad is None else grad
                least = max(largest(total), floor * largest_sum)
                sum_error = largest_error(grad, total, least)
                found.update(
                    status="PASS" if max(norm_error, sum_error) <= self.tolerance else "FAIL",
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
                layer_type=type(model.get_submodule(layer)).__name__,
                **found,
            )

    # -- other batches of the same samples: each one's norm must be what it is in the batch --------

    def _changes_in_other_batches(
        self, flash: Flash, max_grad_norm: float, removals: int
    ) -> Iterator[float]:
        """Largest relative change of a norm in each of them, but where a step fails. ``flash`` has
        taken a step on the whole batch; afterwards it holds another one."""
        norms_B = flash.norms_B
        for words, model, samples, batch in self._other_batches(flash, removals):
            expected_B, skipped = norms_B[list(samples)], int(batch is not None)
            try:
                batch = self.task.samples.take(samples) if batch is None else batch
                model.step(batch, max_grad_norm)
            except Exception as failure:
                if len(samples) > len(norms_B) and isinstance(failure, torch.OutOfMemoryError):
                    self.notes.append(f"{words}: this batch did not fit.")
                else:  # somebody has said that it fits
                    self.fail(described(failure), words)
                continue
            error = math.inf
            if len(model.norms_B) == len(samples):
                least = FLOOR[self.dtype] * typical(expected_B)
                error = largest_error(model.norms_B[skipped:], expected_B[skipped:], least)
            if not error <= self.tolerance:
                self.fail(_NOT_INDEPENDENT, f"{words} (norms change by {error:.1e})")
            yield error

    def _other_batches(self, flash: Flash, removals: int) -> Iterator[Step]:
        """All kinds of other batches.

        * Without single samples.
        * As many samples as another axis of the inputs has: no size may decide what they are. By
          the copy that has seen the whole batch, and by a new one that sees nothing else.
        * Many copies of one sample, which want the same experts.
        * The first sample as far from the others as the model takes it: its values may not decide
          where rows of the others lie.
        * The batch itself, with the proof before a first step of training and audits of later ones.
        """
        samples, B = self.task.samples, self.task.samples.count
        count = min(B, removals) if B > 1 else 0
        if not count and removals:
            self.notes.append(
                "One sample only: whether samples are independent of each other was not checked. "
                "Use a batch of at least two."
            )
        for sample in (index * B // count for index in range(count)):
            yield f"without sample {sample}", flash, [b for b in range(B) if b != sample], None
        sizes = {n: None for x in samples.leaves if samples.holds(x) for n in x.shape}
        for size in [n for n in sizes if 1 < n <= LARGEST_SIZE and n != B]:
            words = f"with {size} samples, as many as another axis of the inputs has"
            for model in (flash, Flash(self.task, self.options)):
                yield words, model, [b % B for b in range(size)], None
        size = min(LARGEST_SIZE, 4 * B)
        yield f"in a batch of {size} copies of sample 0", flash, [0] * size, None
        if B > 1:
            (batch,), _ = samples.batch(range(B), extreme=[0])
            try:
                self.task.value(batch)
            except Exception:  # the model takes no such sample
                pass
            else:
                yield "where the values of sample 0 are extreme", flash, range(B), batch
        flash, failed = Flash(self.task, self.options, proven=True), len(self.causes)
        yield "in the proof of a first step", flash, range(B), None
        for audit in range(AUDITS if flash.has_taps else 0):
            if len(self.causes) > failed:
                return
            gate = flash.module._watch.gate
            gate.calls, gate.next_audit = FIRST_AUDIT << audit, 0
            yield f"in audit {audit + 1} of later steps", flash, range(B), None


def _replaced(tree: Any, old: Tensor, new: Tensor) -> Any:
    return map_tensors(lambda x: new if x is old else x, tree)


def _is_close(found: float, expected: float, allowed: float) -> bool:
    pair = [torch.tensor(x, dtype=torch.float64) for x in (found, expected)]
    return largest_error(pair[0], pair[1], least=0.0) <= allowed


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
    loss = loss or squared_outputs(batch_first)
    task = Task(plain, samples, loss, loss_reduction, batch_first, seed)
    options.update(loss_reduction=loss_reduction, batch_first=batch_first)
    comparison = Comparison(task, options, tolerance, notes=[*samples.notes])
    try:
        return comparison.with_oracle(max_grad_norm, removals)
    except NoComparison as error:
        comparison.causes = {str(error): [], **comparison.causes}
        return comparison.report()
