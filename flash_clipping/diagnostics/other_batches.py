"""Other batches of the same samples: outputs and norms of each must be what they are in the batch.

Capacities that are full, experts that choose their tokens, and losses that balance the loads of a
batch leave every layer's rows in their places, so that no layer can be refused for them: mixing
that no clipping bounds.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.proof.batches import EXTREMES
from flash_clipping.capture.proof.runs import hooked
from flash_clipping.diagnostics.oracle import FLOOR, TOLERANCE, Samples, largest_norm_error
from flash_clipping.diagnostics.report import RemovalReport
from flash_clipping.diagnostics.watch import Flash, Subject, described, fallbacks, narrowest

# -- the plain model's outputs, and where tokens are sent ------------------------------------------

#: How many samples are replaced, one at a time.
REPLACED = 4

#: Relative change of another sample's output that is no rounding, in float64: parts of a model may
#: be in fp32 all the same.
CHANGED = 1e-5

ADVICE = (
    "No clipping bounds that. Let a sample's outputs depend on that sample alone: no capacity that "
    "tokens of all samples share, no experts that choose their tokens, no statistics of the batch."
)


def check_routes(subject: Subject) -> None:
    """Put another sample in the place of one, in the plain model's batch: the outputs of all others
    must stay. If they do not, and integers that modules read or return (chosen experts) change for
    them as well, these are named."""
    B = subject.samples.count
    if B < 2 or not subject.batch_first:
        return
    model, samples = subject.exact()
    tolerance = CHANGED
    if subject.oracle_dtype is None:
        tolerance = TOLERANCE[narrowest(param.dtype for param in model.parameters())]
    results, routes = _run(subject, model, samples, range(B))
    subject.has_routes = bool(routes)
    for sample in sorted({index * B // REPLACED for index in range(REPLACED)}):
        order = [(sample + 1) % B if b == sample else b for b in range(B)]
        others = [b for b in range(B) if b != sample]
        changed, sent = _run(subject, model, samples, order)
        if _changed(results, changed, others, tolerance):
            moved = _changed(routes, sent, others, tolerance)
            where = f", and where they are sent: {moved[0]}" if moved else ""
            subject.failures.append(
                f"Another sample in the place of sample {sample} changes the outputs of other "
                f"samples{where}. {ADVICE}"
            )
            return


def _run(
    subject: Subject, model: nn.Module, samples: Samples, order: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Numbers that the model returned, and integers that modules read or returned and that are not
    the batch's own: rows of samples, ``[B, ...]``, by where they were found."""
    results: dict[str, Tensor] = {}
    routes: dict[str, Tensor] = {}
    batch = samples.take(order)
    given = {x.data_ptr() for x in tensors_in(batch)}

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for kind, tree in (("input", (args, kwargs)), ("output", output)):
            for i, x in enumerate(tensors_in(tree)):
                # The first axis may be samples, or tokens of samples in turn.
                if not x.dim() or not len(x) or len(x) % len(order):
                    continue
                rows = x.detach().clone().unflatten(0, (len(order), -1))
                if x.is_floating_point():
                    if module is model and kind == "output":
                        results[f"{len(results)}"] = rows
                elif x.data_ptr() not in given and not x.is_complex():
                    routes[f"{kind} {i} of {_named(path, module)}"] = rows

    with hooked(model, note):
        subject.task.value(model, batch)
    return results, routes


def _changed(
    before: dict[str, Tensor], after: dict[str, Tensor], kept: Sequence[int], tolerance: float
) -> list[str]:
    """Where rows of samples that were kept are not what they were."""
    found = []
    for place, x in after.items():
        if place in before and before[place].shape == x.shape:
            one, other = before[place][kept].double(), x[kept].double()
            scale = one.abs().max().nan_to_num(nan=1.0, posinf=1.0)
            if bool(((one - other).abs() > tolerance * scale).any()):
                found.append(place)
    return found


def _named(path: str, module: nn.Module) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"


def check_balance(subject: Subject) -> None:
    """Whether the loss contains an ``aux_loss`` that a model returned: in ``transformers`` a
    balance of the loads of the whole batch."""
    model = copy.deepcopy(subject.plain)
    found: list[tuple[str, Tensor]] = []

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        aux_loss = getattr(output, "aux_loss", None)
        if isinstance(aux_loss, Tensor) and aux_loss.requires_grad:
            found.append((_named(path, module), aux_loss))

    with torch.enable_grad(), hooked(model, note):
        loss = subject.task(model, subject.samples.all)
    if not found or not loss.requires_grad:
        return
    weights = torch.autograd.grad(loss, [aux for _, aux in found], allow_unused=True)
    for (path, _), weight in zip(found, weights, strict=True):
        if weight is not None and weight.any():
            subject.failures.append(
                f"The loss contains the aux_loss of {path}, with weight {float(weight.sum()):.1g}: "
                "a balance of the loads of the whole batch, through which one sample changes the "
                "others' gradients. No clipping bounds that. Set config.output_router_logits=False "
                "or config.router_aux_loss_coef=0, or balance each sample by itself."
            )
            return


# -- norms -----------------------------------------------------------------------------------------

#: Batches that are made to have the size of another axis have at most so many samples.
LARGEST_SIZE = 64


class OtherBatches:
    """Steps on batches of some of the samples, in any order.

    Args:
        subject: its failures and notes get what is found.
        flash: has taken a step on the whole batch; afterwards it holds the last other one.
        tolerance: relative error of norms.
    """

    def __init__(self, subject: Subject, flash: Flash, tolerance: float):
        self.subject, self.flash, self.tolerance = subject, flash, tolerance
        self.norms = flash.norms

    def check(self, removals: int) -> tuple[RemovalReport, ...]:
        """Look at all kinds of other batches.

        Args:
            removals: how many samples to remove, one at a time.
        """
        removed = self._without_single_samples(removals)
        self._of_other_sizes()
        self._crowd()
        if not self.subject.failures:
            self._first_step()
        self._beside_an_extreme_sample()
        return removed

    def _step(self, flash: Flash, samples: Sequence[int]) -> tuple[float, str]:
        """The largest error of a norm, and why it is no rounding, if it is none."""
        try:
            return self._norm_error(flash, samples)
        except Exception as failure:
            return math.nan, described(failure)

    def _norm_error(
        self, flash: Flash, samples: Sequence[int], batch: Any = None, skipped: int = 0
    ) -> tuple[float, str]:
        """As :meth:`_step`, and raises what the step does. ``batch``: what stands for these
        samples, of which the first ones may be ``skipped``."""
        expected = [self.norms[b] for b in samples[skipped:]]
        with fallbacks([]):  # noted already
            batch = self.subject.samples.take(samples) if batch is None else batch
            flash.step(batch, self.flash.bound)
        if len(flash.norms) != len(samples):
            return math.nan, f"found {len(flash.norms)} norms for {len(samples)} samples"
        typical, found = [statistics.median(expected)] * len(expected), flash.norms[skipped:]
        error = largest_norm_error(found, expected, typical, FLOOR[self.flash.dtype])
        return error, "" if error <= self.tolerance else f"norms change by {error:.1e}"

    def _without_single_samples(self, removals: int) -> tuple[RemovalReport, ...]:
        """All samples are removed, or as many as asked for, evenly spaced."""
        subject, B = self.subject, self.subject.samples.count
        count = min(B, removals) if B > 1 else 0
        if not count and removals:
            subject.notes.append(
                "One sample only: whether samples are independent of each other was not checked. "
                "Use a batch of at least two."
            )
        found = []
        for sample in (index * B // count for index in range(count)):
            error, reason = self._step(self.flash, [b for b in range(B) if b != sample])
            failure = reason if math.isnan(error) else ""
            found.append(RemovalReport(sample, error, failure, not reason))
        failed = [removal for removal in found if not removal.passed]
        if errors := [removal for removal in failed if removal.reason]:
            subject.failures.append(
                f"With sample {errors[0].sample} removed the step fails: {errors[0].reason} "
                "(A constant input whose leading axis merely has the size of the batch, such as "
                "positions torch.arange(T) with T == B, looks like this: expand it over the batch.)"
            )
        elif failed:
            worst = max(failed, key=lambda removal: removal.error)
            subject.failures.append(
                f"Removing sample {worst.sample} changes the norms of other samples by "
                f"{worst.error:.1e}: samples are not independent. A layer or the loss mixes them "
                "(batch statistics, a mean over all tokens of the batch, a lookup of the batch's "
                "own order)."
            )
        return tuple(found)

    def _of_other_sizes(self) -> None:
        """As many samples as some other axis of the inputs has: no size may decide what they are.

        Samples are taken in turn, again and again if there are too few; by the copy that has seen
        the whole batch, and by a new one that sees nothing else.
        """
        subject = self.subject
        sizes = [size for size in subject.samples.other_sizes() if size <= LARGEST_SIZE]
        if not sizes:
            subject.notes.append(
                "No other axis of the inputs has a size that a batch could have, so the batch was "
                "not tried with the size of another axis (as many samples as positions)."
            )
        for size in sizes:
            chosen = [b % subject.samples.count for b in range(size)]
            for new in (False, True):
                flash = Flash(subject) if new else self.flash
                _, reason = self._step(flash, chosen)
                if reason:
                    subject.failures.append(
                        f"With {size} samples, as many as another axis of the inputs has, the "
                        f"step is wrong: {reason}"
                    )
                    return

    def _crowd(self) -> None:
        """Many copies of one sample, which want the same experts. Only for models whose modules
        hand integers of samples to each other."""
        subject = self.subject
        if not subject.has_routes:
            return
        size = min(LARGEST_SIZE, 4 * subject.samples.count)
        try:
            _, reason = self._norm_error(self.flash, [0] * size)
        except torch.OutOfMemoryError:
            subject.notes.append(
                f"A batch of {size} copies of one sample, which fills the capacities of experts, "
                "did not fit."
            )
            return
        except Exception as failure:
            reason = described(failure)
        if reason:
            subject.failures.append(
                f"In a batch of {size} copies of sample 0: {reason}. Copies are in each other's "
                f"way. {ADVICE}"
            )

    def _beside_an_extreme_sample(self) -> None:
        """The first sample as far from the others as the model takes it: its values may not decide
        where rows of the others lie."""
        subject, order = self.subject, range(len(self.norms))
        for kind in EXTREMES[:2] if len(order) > 1 else ():
            subject.samples.stays_in_range = kind == "in range"
            (batch,), _ = subject.samples.batch(order, extreme=0)
            try:
                subject.task.value(subject.plain, batch)
            except Exception:  # the model takes no such sample
                continue
            try:
                _, reason = self._norm_error(self.flash, order, batch, skipped=1)
            except Exception as failure:
                reason = described(failure)
            if reason:
                subject.failures.append(
                    f"Where the values of sample 0 are extreme: {reason}. They decide how the rows "
                    "of other samples lie or are scaled."
                )
                return

    def _first_step(self) -> None:
        """The batch once more, by a copy that nobody watches: as before a first step of training,
        it is proven that what is clipped is each sample's own."""
        _, reason = self._step(Flash(self.subject, watched=False), range(len(self.norms)))
        if reason:
            self.subject.failures.append(reason)
