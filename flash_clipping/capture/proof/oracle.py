"""Is what is clipped each sample's own gradient?

*The gradient of a sample, through the taps, in its batch, equals plain autograd's for that sample
among other companions.* A round compares two runs of the model. Half of the samples, S, stand in
both; the others, R, are an extreme sample in one of them, and shorter in the other: where rows lie
may depend on lengths, which a batch may happen not to show.

=========  =====================  =================================================================
run        backward passes        what must hold
=========  =====================  =================================================================
taps       S                      norms of the other samples are 0 (STRAY)
autograd   S                      outputs of S (VALUE) and their gradient (GRADIENT) are the same
others     one of S               its norm is the one that is clipped by (NORM)
the batch, the model's own loss   norms of all samples are autograd's, of the same loss of each of
single                            them alone: of its mean over the batch, or its sum (LOSS)
samples
=========  =====================  =================================================================

Both batches have as many samples. Parameters are moved meanwhile (PERTURB).

A call is checked in a few of its samples. A round before the first step, and more as audits of
later ones, with other samples, S and the rest swapped, and other random numbers. Nothing of the
user's is changed. What only the number of samples changes, and hooks that are not linear in the
batch, are left to ``flash-clipping check``.

Shape suffixes: ``B`` samples, ``P`` parameters, ``K`` projections.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from flash_clipping.capture.inputs import map_tensors
from flash_clipping.capture.no_trace import ModelsOwnError
from flash_clipping.capture.proof.batches import LEFT
from flash_clipping.capture.proof.repeatable import computed_in, moved, perturbed, scaled
from flash_clipping.capture.proof.runs import MASKED, Forward, Gradient, Runs, Subject
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.ops.runtime.backend import compiled_side_by_side, compiles_kernels

#: Relative difference that is a mistake, by the lowest dtype of a run: a hundred times what
#: rounding gives in a deep model where kernels or the order of rows differ.
TOLERANCE = {torch.bfloat16: 0.2, torch.float16: 0.02}
TOLERANCE_WIDE = 1e-3

#: Rounding may give, besides, so many times what one unit of rounding in the parameters changes. It
#: was seen to give three times as much, in a T5 of random numbers in bf16.
ROUNDING = 4

#: A gradient that is a smaller part of the whole has this part of it as its scale.
FLOOR = 1e-2

#: Gradients below this part of the outputs that they come from are rounding.
NOTHING = 1e-4

#: No gradient of losses whose weights are about 1 has a smaller scale: it is rounding.
LEAST = 1e-9

#: The part of another sample's norm that may be rounding: rows without a gradient give 0.
STRAY = 1e-6

#: Seeds by which a finding is repeated.
SEEDS = 3

#: Parameters that an error names.
NAMED = 10

#: The finding of each part of the oracle, in words.
WORDS = {
    "VALUE": "the outputs of a sample change with the others in its batch",
    "GRADIENT": "the clipped sum is not autograd's gradient of the same samples among others",
    "NORM": "the norm that a sample is clipped by is not that of its gradient",
    "STRAY": "the gradient of some samples reaches rows that are booked to others",
}

#: The last lines where an output is at fault.
LEAVE_OUT = f"\nOr leave this output out of the loss:\n    output = output.detach(){ONE_BY_ONE}"

ADVICE = (
    "The model mixes samples (a mean or a scale over the batch, shuffled or sorted rows, in-batch "
    "negatives, a hook that looks at the whole batch), a layer has its rows in another order than "
    "the samples, or a rule is wrong. Compute each sample by itself, or mix outside of the model."
)

#: The findings for outputs that are one number for the batch.
_SHARED = (
    "FC444 output {number}: what the model's own loss asks of a sample changes with the others in "
    "its batch. Found a gradient with {ratio:.3g} times the norm that it has for the loss of this "
    'sample alone, expected once, with loss_reduction="{reduction}". '
)
_NOT_ALONE = (
    "FC444 output {number}: the model's own loss is one number for the batch, and whether that is "
    "the {reduction} of the losses of its samples was not seen: for one of them alone, the model "
    "raises {error}. "
)
_OWN_LOSS = (
    "The loss may divide by what is counted in the whole batch (labels, tokens, a mask), or "
    'compare samples; or it is a sum, which needs loss_reduction="sum". Compute the loss of each '
    "sample from the model's other outputs:\n"
    "    loss = flash_clipping.per_sample_loss(output.logits, labels).{reduction}()"
    f"{LEAVE_OUT}"
)

#: How outputs are named, by their numbers.
OUTPUT = "output "


def _finding(part: str, names: Sequence[str], gap: float) -> str:
    """What this part of the oracle has found, of these parameters or outputs."""
    shown = [*names[:NAMED]]
    if len(names) > NAMED:
        shown.append(f"and {len(names) - NAMED} more")
    return (
        f"FC210 {', '.join(shown)}: {WORDS[part]}. Found a relative difference of {gap:.2g}, "
        f"expected rounding alone. {ADVICE}"
        f"{LEAVE_OUT if names[0].startswith(OUTPUT) else ONE_BY_ONE}"
    )


@dataclass
class Table:
    """The result of a round, for one kind of call.

    Attributes:
        unfit: outputs from which no gradient may come back, by number, and why.
        outputs: the numbers of the outputs that were shown to be each sample's own; empty where
            nothing could be compared.
        returned: how many tensors the model returned.
        losses: outputs that are one number for the batch, and neither the mean nor the sum of what
            they are for its samples, by number, and why.
        fit_losses: those that are such a mean, or sum.
        dtypes: that the model computed in.
        failed: whether the forward through the taps has.
        doubts: findings that were not found again.
        by_chance: whether two runs differed only where chance was not made alike.
    """

    unfit: dict[int, str] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    returned: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    fit_losses: tuple[int, ...] = ()
    dtypes: set[torch.dtype] = field(default_factory=set)
    failed: bool = False
    doubts: list[str] = field(default_factory=list)
    by_chance: bool = False

    @property
    def findings(self) -> set[tuple[str, int]]:
        """The attribute that holds each finding, and the number of the output."""
        return {(kind, n) for kind in ("unfit", "losses") for n in getattr(self, kind)}


class _NotFinite(Exception):
    """Some samples' gradients are not finite, which shows nothing; the others, by number."""

    def __init__(self, finite: list[int]) -> None:
        self.finite = finite


@dataclass(frozen=True)
class Examination:
    """How a call is examined.

    Attributes:
        audit: 0 before the first step, then the number of the audit: another one swaps halves, and
            draws otherwise.
        brief: two runs with a backward pass each are compared, and of the model's own losses one
            sample's: what chance decides, or what has begun since, is looked for once more. What it
            finds decides nothing: rounds that are not brief follow.
        watched: whether chance is made alike for all samples at once; otherwise only where
            something was found.
        unfit: outputs that are not compared as the model's own losses: they are known to be unfit.
        dtypes: what calls of the model were seen to cast floats to; unless it is watched, a round
            does not see it.
        seed: another one draws other numbers, and moves parameters otherwise.
        left: the part of R that stands in the first run.
        varies: whether each draw is another one.
        only: outputs that go backward, if not all.
    """

    audit: int = 0
    brief: bool = False
    watched: bool = True
    unfit: frozenset[int] = frozenset()
    dtypes: frozenset[torch.dtype] = frozenset()
    seed: int = 0
    left: float = LEFT[-1]
    varies: bool = True
    only: frozenset[int] | None = None


def examine(subject: Subject, how: Examination) -> Table:
    """A round of the oracle on one batch, and more where it finds something.

    A finding may be rounding. It holds if the model, computed in a wider dtype, shows it too, with
    one of :data:`SEEDS` at least; or if it is found with all of them as the model is: some of what
    a model does it may do in a narrow dtype only.

    Args:
        subject: a call of a model.
        how: before the first step, or in an audit.

    Raises:
        FlashClippingError: the forward through the taps does.
        torch.OutOfMemoryError: two samples do not fit.
        ModelsOwnError: the model raises on this batch.
    """
    found = _round_of(subject, how)
    if how.brief and found.findings and not found.failed:
        for seed in range(SEEDS):
            how = replace(how, brief=False, watched=True, seed=seed)
            found = _round_of(subject, how)
            if found.findings or found.failed:
                break
        found.by_chance = not (found.findings or found.failed)
    floats = {kind for kind in found.dtypes if kind.is_floating_point}
    if found.failed or not found.findings or floats <= {torch.float64}:
        return found
    wide = torch.float32 if floats & TOLERANCE.keys() else torch.float64
    in_wide = replace(how, watched=True, dtypes=frozenset())
    hold = set[tuple[str, int]]()
    # It may not run in another dtype, nor fit.
    with suppress(ModelsOwnError, FlashClippingError, torch.OutOfMemoryError):
        for seed in range(SEEDS):
            table = _in_dtype(subject, replace(in_wide, seed=seed), wide)
            hold |= set() if table.failed else table.findings
            if found.findings <= hold:
                return found
    rest = found.findings - hold
    for seed in range(how.watched, SEEDS):
        again = replace(how, watched=True, seed=seed)
        rest &= _round_of(subject, again).findings if rest else rest
    for kind, number in found.findings - hold - rest:
        found.doubts.append(getattr(found, kind).pop(number))
        if kind == "unfit":
            found.outputs = (*found.outputs, number)
    return found


def _in_dtype(subject: Subject, how: Examination, dtype: torch.dtype) -> Table:
    """A round of a model that is computed in this dtype."""

    def of(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    args, kwargs = map_tensors(of, (subject.args, subject.kwargs), packed=True)
    with computed_in(subject.root, dtype):
        return _round_of(replace(subject, args=args, kwargs=kwargs), how)


def _round_of(subject: Subject, how: Examination) -> Table:
    """The result of all rounds."""
    chosen, params = subject.chosen_samples(), subject.session.options.trainable()
    try:
        with perturbed(params, scaled if how.brief else moved, seed=7 + how.audit + how.seed):
            return _Oracle(subject, how).table()
    except _NotFinite as error:
        kept = error.finite
    except torch.OutOfMemoryError:
        if len(chosen) <= 2:
            raise
        kept = chosen[: len(chosen) // 2]
    return _round_of(replace(subject, chosen=kept), how) if kept else Table()


@dataclass
class _Outcome:
    """A run of a batch.

    Attributes:
        given: its arguments.
        places: the number of the sample in each place: 0 to B - 1, and more of those that stand in
            the place of others.
        values: outputs with a row for each sample, ``[B, entries]``.
        drawn: how many operators drew at random.
        gradients: of the backward passes.
    """

    given: Any
    places: Sequence[int]
    values: dict[int, Tensor]
    drawn: int
    gradients: list[Gradient]


class _Oracle:
    """Rounds on one batch, for outputs together and, where that fails, one by one."""

    def __init__(self, subject: Subject, how: Examination) -> None:
        self.samples, self.how = subject.samples(), how
        #: Numbers of the samples that are checked, and of some others.
        self.chosen = subject.chosen_samples()
        self.B = len(self.chosen)
        self.rest = [b for b in range(self.samples.count) if b not in self.chosen]
        self.runs = Runs(subject)
        self.runs.dtypes |= how.dtypes
        #: The samples that are checked, and the others, in turns: where R are sorted to the
        #: beginning or to the end, S move.
        halves = [*range((self.B - 1) % 2, self.B, 2)], [*range(self.B % 2, self.B, 2)]
        self.S, self.R = halves[::-1] if (how.audit + 1) // 2 % 2 and self.B > 1 else halves
        #: The sample whose norm is compared, and those that go backward.
        self.one = self.S[how.audit // 4 % len(self.S)] if self.S else 0
        self.scale = dict.fromkeys(self.S, 1.0)
        #: Of audits every other one compares norms, and the others sums.
        self.norms, self.sums = (not how.brief or how.audit % 2 == n for n in (1, 0))
        found = (getattr(module, "padding_idx", None) for module in subject.root.modules())
        self.samples.padding = next((n for n in found if isinstance(n, int)), 0)
        #: Outputs of the first run that have a row for each sample.
        self.outputs: AbstractSet[int] = frozenset()
        #: Whether the forward through the taps has failed.
        self.failed = False
        #: The norm of the outputs that go backward.
        self.size = 0.0
        #: Outputs that are the model's own loss, as far as some sample's was compared.
        self.compared: set[int] = set()
        #: Whether the second batch of the last round had an extreme sample.
        self.runs_on_extremes = False
        #: The seed of what is drawn at random.
        self.draws = 1 + how.audit + (how.seed << 8)

    @property
    def tolerance(self) -> float:
        """Known once the model has run: what it casts floats to counts."""
        low = [TOLERANCE[kind] for kind in self.runs.dtypes if kind in TOLERANCE]
        return max(low, default=TOLERANCE_WIDE)

    def _rounded(self) -> AbstractContextManager[None]:
        """Parameters moved by one unit of rounding; where a finding is repeated, of the lowest
        dtype of a run: autocast rounds more than parameters tell."""
        low = self.runs.dtypes & TOLERANCE.keys() if self.how.seed else ()
        unit = max((torch.finfo(kind).eps for kind in low), default=0.0)
        return perturbed(self.runs.params, partial(scaled, by=unit))

    def table(self) -> Table:
        """The result of all rounds.

        Raises:
            FlashClippingError: the forward through the taps does.
        """
        if not self.B or not self.runs.params:
            return Table()
        # In every other audit R stands in the first run as it is.
        shorter = self.samples.may_be_shorter and not self.how.audit % 2
        unfit = self._unfit(replace(self.how, left=LEFT[0] if shorter else LEFT[-1]))
        fit = tuple(sorted(self.outputs - unfit.keys()))
        losses = self._losses()
        fit_losses = tuple(sorted(self.compared - losses.keys()))
        returned, dtypes = self.runs.returned, self.runs.dtypes
        return Table(unfit, fit, returned, losses, fit_losses, dtypes, self.failed)

    def _unfit(self, settings: Examination) -> dict[int, str]:
        """Outputs that may not go backward, and why: of several, one by one and what is left.

        Raises:
            FlashClippingError: the forward through the taps does.
        """
        try:
            unfit, why = self._round(settings)
            self.failed = False
        except FlashClippingError as error:
            if not self.outputs:
                raise
            unfit, why, self.failed = {}, str(error), True
        asked = self.outputs if settings.only is None else self.outputs & settings.only
        if why is not None and len(asked) > 1:
            for number in sorted(asked):
                unfit |= self._unfit(replace(settings, only=frozenset({number})))
        rest = frozenset(asked).difference(unfit)
        if unfit and rest:
            return unfit | self._unfit(replace(settings, only=rest))
        return dict.fromkeys(sorted(rest), why) if why is not None else unfit

    # -- a round ------------------------------------------------------------------------------

    def _round(self, settings: Examination) -> tuple[dict[int, str], str | None]:
        """Outputs that change with others in the batch, and why; and what is wrong with the
        gradients of them all, if none does."""
        taps, settings = self._first(settings)
        fit = {n for n in taps.values if settings.only is None or n in settings.only}
        of_S = [_norms(taps.values[n], self.S) for n in fit]
        if not of_S:
            return {}, None
        self.size = float(torch.stack(of_S).norm())
        each = taps.gradients[0].each
        if each is not None and not (finite := each.isfinite().all(0)).all():
            raise _NotFinite([b for place, b in enumerate(self.chosen) if finite[place]])
        settings = replace(settings, only=frozenset(fit))
        other = self._second(settings)
        if other is None:  # the model runs on this batch only
            self.outputs = frozenset()
            return {}, None
        if settings.left < 1 and not all(x.isfinite().all() for x in other.values.values()):
            # A sample that is not finite may have been so behind its cut.
            return self._round(replace(settings, left=LEFT[-1]))
        wrong = self._other_values(taps, other, fit, self.S)
        if wrong and taps.drawn and settings.varies:
            # Layers may run sample by sample, or draw in another order through the taps, or values
            # may decide how much is drawn.
            again = self._run(other.given, other.places, settings, taps=True)
            wrong = self._other_values(taps, again, fit, self.S)
            if not wrong or not other.drawn == again.drawn == taps.drawn:
                return self._round(replace(settings, varies=False))
        of_R = self._of_R(settings) if self.R and not (wrong or self.how.brief) else None
        if of_R is not None:
            wrong = self._other_values(taps, of_R, fit, self.R)
            if wrong and taps.drawn and settings.varies:
                return self._round(replace(settings, varies=False))
        if not wrong:
            return {}, self._gradients(taps.gradients[0], other, settings)
        return {n: _finding("VALUE", [f"{OUTPUT}{n}"], gap) for n, gap in wrong.items()}, None

    def _run(
        self,
        given: Any,
        places: Sequence[int],
        settings: Examination,
        scales: Sequence[Mapping[int, float]] = (),
        taps: bool = False,
    ) -> _Outcome:
        """A run of a batch, and a backward pass for each of these ``scales``, the first of which
        gives sums; places whose samples take part, and by how much their losses are multiplied."""

        def take(forward: Forward) -> _Outcome:
            gradients = [
                forward.backward(
                    scale, settings.only, sums=self.sums and not n, last=scale is scales[-1]
                )
                for n, scale in enumerate(scales)
            ]
            values = {n: x.detach() for n, x in forward.outputs.items()}
            return _Outcome(given, places, values, forward.drawn, gradients)

        draws: dict[str, Any] = {"seed": self.draws, "orders": True}
        draws |= {"watched": self.how.watched, "varies": settings.varies}
        if taps and scales and not self.how.audit and compiles_kernels():
            # In a run of its own, as what is recomputed in backward may draw.
            backward = methodcaller("backward", scales[0], settings.only)
            with compiled_side_by_side():
                self.runs.run(given, places, backward, taps=taps, **draws)
        return self.runs.run(given, places, take, taps=taps, **draws)

    def _first(self, settings: Examination) -> tuple[_Outcome, Examination]:
        """The batch, through the taps, with R as short as the model runs on."""
        for left in [left for left in LEFT if left >= settings.left]:
            given = self.samples.batch(self.chosen, shorter=self.R, left=left)
            settings = replace(settings, left=left)
            try:
                run = self._run(given, range(self.B), settings, [self.scale], taps=True)
            except ModelsOwnError:
                if left == LEFT[-1]:
                    raise
                continue
            if run.gradients[0].each is None or run.gradients[0].each.isfinite().all():
                break
        self.outputs = run.values.keys()
        return run, settings

    def _second(self, settings: Examination) -> _Outcome | None:
        """Autograd's run of S among others, with the gradients of S in it, and of the first of
        them; ``None`` if the model runs on no such batch."""
        last = None
        # It may run on no mixture of its samples.
        for extreme, other in itertools.product((True, False), self._instead(self.R, self.S)):
            try:
                run = self._among(*self._beside(self.S, other, extreme, settings), settings)
            except ModelsOwnError:
                continue
            if all(x[self.S].isfinite().all() for x in run.values.values()) and all(
                g.norms.isfinite().all() for g in run.gradients
            ):
                self.runs_on_extremes = extreme
                return run
            last = last if extreme else run
        return last

    def _instead(self, changed: Sequence[int], kept: Sequence[int]) -> list[int]:
        """Samples that may stand in the place of each of those that are ``changed``: what some
        have parts of, as images, is in every batch."""
        own = [self.chosen[b] for b in (*kept, *changed)]
        if len(changed) > 1:
            own = own[::-1]
        parts = self.samples.with_parts
        rest = [b for b in self.rest if b in parts] if parts else self.rest
        return [*rest[:1], next((b for b in own if b in parts), own[0])]

    def _of_R(self, settings: Examination) -> _Outcome | None:
        """The outputs of R, as they stand in the first run, among others than S; ``None`` if there
        is no such batch that the model runs on."""
        other = self._instead(self.S, self.R)[0]
        with suppress(ModelsOwnError):
            batch = self._beside(self.R, other, self.runs_on_extremes, settings)
            return self._run(*batch, settings)
        return None

    def _beside(
        self, kept: Sequence[int], other: int, extreme: bool, settings: Examination
    ) -> tuple[Any, list[int]]:
        """The arguments of a batch in which these samples are as in the first run, and the
        ``other`` one, made extreme or not, in the places of all others; and numbers for its
        places."""
        places = [b if b in kept else self.B + b for b in range(self.B)]
        changed = [place for place, b in enumerate(places) if b != place]
        order = [other if place in changed else self.chosen[place] for place in range(self.B)]
        shorter = [b for b in kept if b in self.R]
        far = changed if extreme else []
        return self.samples.batch(order, far, shorter=shorter, left=settings.left), places

    def _among(self, given: Any, places: Sequence[int], settings: Examination) -> _Outcome:
        scales = [self.scale] * self.sums + [{self.one: 1.0}] * self.norms
        return self._run(given, places, settings, scales[: len(self.scale)])

    def _gradients(self, found: Gradient, other: _Outcome, settings: Examination) -> str | None:
        """What is wrong with the gradients of the samples that went backward."""
        others = [b for b in range(self.B) if b not in self.scale]
        expected, one, each = other.gradients[0], other.gradients[-1].norms, found.each
        if each is None:
            each = torch.zeros(len(self.runs.params), self.B, dtype=torch.float64)
        if others:
            whole = torch.maximum(found.norms.norm(), each.norm()).clamp(min=1e-300)
            gap = each[:, others].amax(1) / whole
            if why := self._complain("STRAY", gap, STRAY):
                return why
        of_each = each[:, self.one]
        error_bound = 0.0 if found.bounds is None else found.bounds[:, self.one] - of_each
        error = ((of_each - one).abs() - error_bound).clamp(min=0)
        of_one = self._gap(error[:, None], torch.zeros_like(error[:, None]), one) * self.norms
        of_all = self._gap(found.projections, expected.projections, expected.norms) * self.sums
        if bool((torch.maximum(of_one, of_all) > self.tolerance).any()):
            # On the same batch: another one would be allowed what its other samples change.
            with self._rounded():
                rounded = self._among(other.given, other.places, settings).gradients
            rounding = self._gap(rounded[-1].norms[:, None], one[:, None], one)
            of_one -= ROUNDING * rounding.nan_to_num(0, 0)  # no number is no rounding
            rounding = self._gap(rounded[0].projections, expected.projections, expected.norms)
            of_all -= ROUNDING * rounding.nan_to_num(0, 0)
        return self._complain("NORM", of_one) or self._complain("GRADIENT", of_all)

    # -- the model's own loss -----------------------------------------------------------------

    def _losses(self) -> dict[int, str]:
        """What is wrong with outputs that are one number for the batch: the model's own loss.

        Every other sample has fewer labels, and masks that count less, if the model runs on such
        samples: a mean over what counts in the batch shows where samples are alike, too.
        """
        if not self.runs.numbers.keys() - self.how.unfit:
            return {}
        first = self.chosen[self.one]  # never sparse
        order = [first, *[b for b in self.chosen if b != first]]
        order = order if self.B > 1 else order * 2
        reduction = self.runs.session.options.loss_reduction
        why: dict[int, str] = {}
        for sparse in ({*range(1, len(order), 2)}, set[int]()):
            try:
                if (found := self._losses_of(order, sparse)) is not None:
                    return found
                why = {}
            except ModelsOwnError as error:
                words = {"error": error, "reduction": reduction}
                text = _NOT_ALONE + _OWN_LOSS
                why = {n: text.format(number=n, **words) for n in self.runs.numbers}
        return why

    def _losses_of(self, order: Sequence[int], sparse: AbstractSet[int]) -> dict[int, str] | None:
        """The same for one batch, with ``sparse`` places; ``None`` where no gradient is finite."""
        together = self._of_losses(order, sparse, taps=True)
        why = {n: str(g) for n, g in together.items() if isinstance(g, FlashClippingError)}
        reduction, compared = self.runs.session.options.loss_reduction, bool(why)
        times = len(order) if reduction == "mean" else 1
        for place in range(1 if self.how.brief else len(order)):
            alone, rounded = self._alone(order[place], place in sparse), None
            for n, g in together.items():
                is_done = n in why or n in self.how.unfit
                if is_done or isinstance(g, FlashClippingError) or g.each is None:
                    continue
                found, expected = times * g.each[:, place], alone[n]
                is_mean_of_none = not found.any() and not expected.isfinite().all()
                if is_mean_of_none or not found.isfinite().all():
                    continue
                compared, self.size = True, self.runs.numbers[n]
                self.compared.add(n)
                gap = self._norms_apart(found, expected)
                if bool((gap > self.tolerance).any()):
                    if rounded is None:
                        with self._rounded():
                            rounded = self._alone(order[place], place in sparse)
                    gap -= ROUNDING * self._norms_apart(rounded[n], expected)
                if not bool((gap <= self.tolerance).all()):
                    ratio = float(found.norm() / expected.norm().clamp(min=1e-300))
                    words = {"number": n, "ratio": ratio, "reduction": reduction}
                    why[n] = (_SHARED + _OWN_LOSS).format(**words)
        return why if compared else None

    def _of_losses(
        self, order: Sequence[int], sparse: AbstractSet[int], taps: bool = False
    ) -> dict[int, Gradient | FlashClippingError]:
        given = self.samples.batch(order, shorter=[*sparse], left=0.25, masks=True)
        places = range(len(order))
        return self.runs.run(given, places, Forward.of_losses, taps=taps, seed=self.draws)

    def _alone(self, sample: int, is_sparse: bool) -> dict[int, Tensor]:
        """Autograd's norms ``[P]`` of the model's own losses on one sample."""
        losses = self._of_losses([sample], {0} if is_sparse else set())
        return {n: g.norms for n, g in losses.items() if isinstance(g, Gradient)}

    def _norms_apart(self, a: Tensor, b: Tensor) -> Tensor:
        """Relative differences of norms ``[P]``; of those of the whole gradient in low precision,
        where a parameter whose gradient cancels (a bias before a softmax) has rounding alone."""
        if self.tolerance > TOLERANCE_WIDE:
            a, b = a.norm()[None], b.norm()[None]
        return self._gap(a[:, None], b[:, None], b)

    # -- comparisons --------------------------------------------------------------------------

    def _gap(self, a: Tensor, b: Tensor, norms: Tensor) -> Tensor:
        """``[P]``: differences of the rows of ``a`` and ``b``, as parts of these norms."""
        floor = max(FLOOR * float(norms.norm()), NOTHING * self.size, LEAST)
        gaps: Tensor = (a - b).norm(dim=1)
        return gaps / norms.clamp(min=floor)

    def _complain(self, part: str, gap: Tensor, most: float | None = None) -> str | None:
        """The finding that these differences ``[P]`` are, if some are larger than rounding."""
        wrong = ~(gap <= (self.tolerance if most is None else most))  # NaN is no rounding
        if not wrong.any():
            return None
        known = {id(p): name for name, p in self.runs.root.named_parameters()}
        params = [self.runs.params[n] for n in wrong.nonzero().flatten().tolist()]
        names = [known.get(id(p), "a parameter") for p in params]
        return _finding(part, names, float(gap.nan_to_num(torch.inf, torch.inf).max()))

    def _other_values(
        self, a: _Outcome, b: _Outcome, numbers: AbstractSet[int], rows: Sequence[int]
    ) -> dict[int, float]:
        """Outputs in which these rows have other values in ``b``, and the largest difference."""
        gaps = {}
        for n in sorted(numbers):
            x, y = a.values[n], b.values.get(n)
            if y is None or x.shape[1] != y.shape[1]:
                gaps[n] = torch.inf
                continue
            gap = _norms(x, rows, y) / (_norms(y, rows) + 1e-9)
            gaps[n] = float(gap.max())
        return {n: gap for n, gap in gaps.items() if gap > self.tolerance}


def _norms(x: Tensor, rows: Sequence[int], y: Tensor | None = None) -> Tensor:
    """Norms of these rows of outputs ``[B, F]``, or of their differences, in float64, on the CPU.

    Masked scores do not count.
    """
    part = _finite(x[list(rows)])
    if y is not None:
        part -= _finite(y[list(rows)])
    return part.square().sum(1).sqrt().cpu()


def _finite(x: Tensor) -> Tensor:
    return x.double().nan_to_num(0, 0, 0).clamp(-MASKED, MASKED)
