"""Is what is clipped each sample's own gradient?

*The gradient of a sample, through the taps, in its batch, equals plain autograd's for that sample
among other companions.* A round compares two runs of the model. Half of the samples, S, stand in
both; the rest of the batch is replaced in one of them, by other samples and an extreme one, and
shorter in the other: where rows lie may depend on lengths, which a batch may happen not to show.

=========  =====================  =================================================================
run        backward passes        what must hold
=========  =====================  =================================================================
taps       S                      norms of the other samples are 0 (STRAY)
the batch  all, losses x1 .. 1000 norms of S grow as their losses do (TOGETHER)
autograd   S                      outputs of S (VALUE) and their gradient (GRADIENT) are the same
others     one of S               its norm is the one that is clipped by (NORM)
the batch, the model's own loss   norms of some samples are autograd's, of the same loss of each of
single                            them alone: of its mean over the batch, or its sum (LOSS)
samples
=========  =====================  =================================================================

The second batch is smaller than the first where nothing is drawn at random. Parameters are moved
meanwhile (PERTURB).

A round before the first step, and more as audits of later ones, with S and the rest swapped, other
random numbers, and soon for one sample only. Nothing of the user's is changed by a round.

Shape suffixes: ``B`` samples, ``P`` parameters, ``K`` projections.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence, Set as AbstractSet
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_clipping.capture.inputs import map_tensors
from flash_clipping.capture.no_trace import ModelsOwnError
from flash_clipping.capture.proof.batches import EXTREMES, LEFT, Samples
from flash_clipping.capture.proof.repeatable import computed_in, perturbed, rounded_otherwise
from flash_clipping.capture.proof.runs import AT_ONCE, MASKED, Gradient, Run, Runs, Subject
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError

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

#: The largest factor of losses; less where gradients could overflow.
LOUD, LOUD_FP16 = 1000.0, 16.0

#: Samples of a batch for which the model's own loss is computed alone.
ALONE = 3

#: Outputs that are looked at one by one where something is wrong with one of them.
OUTPUTS = 16

#: Parameters that an error names.
NAMED = 10

#: The finding of each part of the oracle, in words.
WORDS = {
    "VALUE": "the outputs of a sample change with the others in its batch, or their number",
    "GRADIENT": "the clipped sum is not autograd's gradient of the same samples among others",
    "NORM": "the norm that a sample is clipped by is not that of its gradient",
    "STRAY": "the gradient of some samples reaches rows that are booked to others",
    "TOGETHER": "a sample's gradient changes with the losses of others, or has another's rows",
}

ADVICE = (
    "The model mixes samples (a mean or a scale over the batch, shuffled or sorted rows, in-batch "
    "negatives, a hook that looks at the whole batch), a layer has its rows in another order than "
    "the samples, or a rule is wrong. Compute each sample by itself, mix samples outside of the "
    "model, or"
)

#: The findings for outputs that are one number for the batch.
_SHARED = (
    "output {number}: what the model's own loss asks of a sample changes with the others in its "
    "batch. Found a gradient with {ratio:.3g} times the norm that it has for the loss of this "
    'sample alone, expected once, with loss_reduction="{reduction}". '
)
_NOT_ALONE = (
    "output {number}: the model's own loss is one number for the batch, and whether that is the "
    "{reduction} of the losses of its samples was not seen: for one of them alone, the model "
    "raises {error}. "
)
_OWN_LOSS = (
    "The loss may divide by what is counted in the whole batch (labels, tokens, a mask), or "
    'compare samples; or it is a sum, which needs loss_reduction="sum". Compute the loss of each '
    "sample from the model's other outputs:\n"
    "    loss = flash_clipping.per_sample_loss(output.logits, labels).{reduction}()\n"
    "or leave this output out of the loss:\n"
    f"    output = output.detach(){ONE_BY_ONE}"
)

#: How outputs are named, by their numbers.
OUTPUT = "output "


@dataclass
class Complaint:
    """A finding: the part that found it, and the parameters, or outputs, that it is about."""

    part: str
    names: list[str]
    gap: float

    def text(self) -> str:
        names = [*self.names[:NAMED]]
        if len(self.names) > NAMED:
            names.append(f"and {len(self.names) - NAMED} more")
        found = (
            f"{', '.join(names)}: {WORDS[self.part]}. Found a relative difference of "
            f"{self.gap:.2g}, expected rounding alone. {ADVICE}"
        )
        if self.names[0].startswith(OUTPUT):
            line = "leave this output out of the loss:\n    output = output.detach()"
            return f"{found} {line}{ONE_BY_ONE}"
        freeze = self.names[0]
        line = f'model.get_parameter("{freeze}").requires_grad_(False)'
        return f"{found} freeze the parameters:\n    {line}{ONE_BY_ONE}"


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
        dtypes: that the model computed in.
        failed: whether the forward through the taps has.
        doubts: findings that were not found again.
    """

    unfit: dict[int, str] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    returned: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)
    failed: bool = False
    doubts: list[str] = field(default_factory=list)

    @property
    def findings(self) -> set[tuple[str, int]]:
        """The attribute that holds each finding, and the number of the output."""
        return {(kind, n) for kind in ("unfit", "losses") for n in getattr(self, kind)}


class _NotFinite(Exception):
    """Some samples' gradients are not finite, which shows nothing; the others, by number."""

    def __init__(self, finite: list[int]) -> None:
        self.finite = finite


def examine(subject: Subject, *, audit: int = 0) -> Table:
    """A round of the oracle on one batch, and more where it finds something.

    A finding may be rounding. It holds if the model, computed in a wider dtype, shows it too, with
    one of :data:`SEEDS` at least; or if it is found with all of them as the model is: some of what
    a model does it may do in a narrow dtype only.

    Args:
        subject: a call of a model.
        audit: 0 before the first step, then the number of the audit: another one swaps halves,
            draws otherwise, and from the third on looks at one sample.

    Raises:
        FlashClippingError: the forward through the taps does.
        torch.OutOfMemoryError: two samples do not fit.
        ModelsOwnError: the model raises on this batch.
    """
    found = _round_of(subject, audit, 0)
    floats = {kind for kind in found.dtypes if kind.is_floating_point}
    if found.failed or not found.findings or floats <= {torch.float64}:
        return found
    wide = torch.float32 if floats & TOLERANCE.keys() else torch.float64
    hold = set[tuple[str, int]]()
    # It may not run in another dtype, nor fit.
    with suppress(ModelsOwnError, FlashClippingError, torch.OutOfMemoryError):
        for seed in range(SEEDS):
            table = _in_dtype(subject, audit, seed, wide)
            hold |= set() if table.failed else table.findings
            if found.findings <= hold:
                return found
    rest = found.findings - hold
    for seed in range(1, SEEDS):
        rest &= _round_of(subject, audit, seed).findings if rest else rest
    for kind, number in found.findings - hold - rest:
        found.doubts.append(getattr(found, kind).pop(number))
        if kind == "unfit":
            found.outputs = (*found.outputs, number)
    return found


def _in_dtype(subject: Subject, audit: int, seed: int, dtype: torch.dtype) -> Table:
    """A round of a model that is computed in this dtype."""

    def of(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    args, kwargs = map_tensors(of, (subject.args, subject.kwargs), packed=True)
    with computed_in(subject.root, dtype):
        return _round_of(replace(subject, args=args, kwargs=kwargs), audit, seed)


def _round_of(subject: Subject, audit: int, seed: int) -> Table:
    """A round; another ``seed`` draws other numbers, and moves parameters otherwise."""
    unfit: list[Table] = []
    samples = subject.samples()
    try:
        with perturbed(subject.session.trainable(), seed=7 + seed):
            for narrow in range(4) if samples.is_ambiguous else (0,):
                found = _Oracle(subject, subject.samples(narrow), audit, seed).table()
                if not found.unfit and not found.losses:
                    return found
                unfit.append(found)
        return min(unfit, key=lambda table: (len(table.unfit), len(table.losses)))
    except _NotFinite as error:
        kept = error.finite
    except torch.OutOfMemoryError:
        if samples.count <= 2:
            raise
        kept = [*range(samples.count // 2)]
    if not kept:
        return Table()
    args, kwargs = samples.batch(kept)
    alone = replace(subject, args=args, kwargs=kwargs, offsets=None, bags=())
    return _round_of(alone, audit, seed)


@dataclass
class _Second:
    """Autograd's run of S among others.

    Attributes:
        places: the number of the sample in each place of the batch; others than S have numbers of
            their own.
        at: the places of S.
    """

    run: Run
    given: Any
    places: list[int]
    at: list[int]


class _Oracle:
    """One round, for outputs together and, where that fails, one by one."""

    def __init__(self, subject: Subject, samples: Samples, audit: int, seed: int) -> None:
        self.samples, self.B, self.audit, self.seed = samples, samples.count, audit, seed
        self.runs = Runs(subject)
        names = {id(p): name for name, p in subject.root.named_parameters()}
        self.names = [names.get(id(p), "a parameter") for p in self.runs.params]
        self.S, self.R = _halves(self.B, audit, by_turns=self.tolerance == TOLERANCE_WIDE)
        # Where modules run sample by sample, each chooses its own way by its values.
        samples.turns_signs = not any(
            getattr(vars(module).get("forward"), "loops", False)
            for module in subject.root.modules()
        )
        found = (getattr(module, "padding_idx", None) for module in subject.root.modules())
        samples.padding = next((n for n in found if isinstance(n, int)), 0)
        #: The part of R that stands in the first run; all in every other audit.
        self.left = LEFT[0] if samples.may_be_shorter and not audit % 2 else LEFT[-1]
        self.unfit: dict[int, str] = {}
        self.returned: set[int] = set()
        self.axes: dict[int, list[int]] = {}
        #: The norm of the outputs that go backward.
        self.size = 0.0
        #: By how much losses are multiplied, by sample: of S alone, and of all.
        self.alone: dict[int, float] = {}
        self.loud: dict[int, float] = {}
        self.draws: dict[str, Any] = {}

    @property
    def tolerance(self) -> float:
        """Known once the model has run: what it casts floats to counts."""
        low = [TOLERANCE[kind] for kind in self.runs.dtypes if kind in TOLERANCE]
        if self.runs.session.fp32_precision == "tf32":
            low.append(TOLERANCE[torch.float16])  # which has as many digits
        return max(low, default=TOLERANCE_WIDE)

    def _rounded(self) -> AbstractContextManager[None]:
        """Parameters moved by one unit of rounding; where a finding is repeated, of the lowest
        dtype of a run: autocast rounds more than parameters tell."""
        low = self.runs.dtypes & TOLERANCE.keys() if self.seed else ()
        unit = max((torch.finfo(kind).eps for kind in low), default=0.0)
        return perturbed(self.runs.params, partial(rounded_otherwise, unit=unit))

    @property
    def most(self) -> float:
        """The largest factor of losses."""
        return LOUD_FP16 if torch.float16 in self.runs.dtypes else LOUD

    def table(self) -> Table:
        """The result of the round.

        Raises:
            FlashClippingError: the forward through the taps does.
        """
        if not self.B or not self.runs.params:
            return Table()
        why = self._judge()
        suspects = self.unfit.keys() if why is None else self.returned
        several = len(self.returned) > 1
        for number in sorted(suspects)[:OUTPUTS]:
            # Samples may be along another axis of it that has as many entries.
            known, axes = self.unfit.get(number), self.axes[number]
            for axis in axes[1:] if known or not several else axes:
                self.runs.only = {number}
                self.runs.chosen_axes = {**(self.runs.chosen_axes or {}), number: axis}
                self.unfit.pop(number, None)
                of_one = self._judge()
                if of_one is None and number not in self.unfit:
                    why = None if not several else why
                    break
                known = known or self.unfit.get(number) or _text(of_one)
            else:
                if known:
                    self.unfit[number] = known
        if several and why is not None and self.returned - self.unfit.keys():
            self.runs.only = self.returned - self.unfit.keys()
            why = self._judge()
        if isinstance(why, FlashClippingError) and not self.returned:
            try:
                raise why
            finally:
                del why  # which holds this frame, and what failed in memory
        if why is not None:
            self.unfit = {n: self.unfit.get(n, _text(why)) for n in sorted(self.returned)}
        fit = tuple(sorted(self.returned - self.unfit.keys()))
        failed = isinstance(why, FlashClippingError)
        losses = self._losses()
        return Table(self.unfit, fit, self.runs.returned, losses, self.runs.dtypes, failed)

    def _judge(self) -> Complaint | FlashClippingError | None:
        """The finding for the outputs that may go backward; ``None`` if all is well."""
        try:
            return self._round()
        except FlashClippingError as error:
            return error

    # -- a round ------------------------------------------------------------------------------

    def _round(self, calm: bool = False) -> Complaint | None:
        S, R, B = self.S, self.R, self.B
        self.draws = {"seed": 1 + self.audit + (self.seed << 8), "calm": calm}
        order = [*R, *S]
        self.loud = {b: self.most ** (order.index(b) / B) for b in range(B)}
        if self.audit % 2:  # a hook that looks at the sign of a sum
            self.loud |= {b: -self.loud[b] for b in R}
        # In two audits, losses of the halves and of the whole: their sums must add up.
        adds_up = bool(R and self.audit in (1, 2))
        self.alone = {b: self.loud[b] if adds_up else 1.0 for b in S}
        scales = [self.alone, self.loud, *([{b: self.loud[b] for b in R}] if adds_up else [])]
        taps = self._first(scales, sums=3 if adds_up else 1, compiles=not self.audit)
        self.returned, self.axes = set(taps.outputs), taps.axes
        of_S = [_norms(taps.outputs[n], S) for n in self._fit(taps)]
        if not of_S:
            return None
        self.size = float(torch.stack(of_S).norm())
        of_samples = [g.each for g in taps.gradients if g.each is not None]
        if of_samples and not (finite := torch.stack(of_samples).isfinite().all(0).all(0)).all():
            raise _NotFinite(finite.nonzero().flatten().tolist())
        other = self._second(taps)
        if other is None:  # the model runs on this batch only
            self.returned = set()
            return None
        if self.left < 1 and not all(x.isfinite().all() for x in other.run.outputs.values()):
            self.left = LEFT[-1]  # a sample that is not finite may have been so behind its cut
            return self._round(calm)
        drawn = taps.drawn
        wrong = self._other_values(taps, other.run, S, other.at)
        if R and not calm and (other.run.drawn != drawn or (drawn and wrong)):
            # The library's layers draw in another order, or values decide how much is drawn.
            again = self.runs.run(other.given, other.places, taps=True, **self.draws)
            if again.drawn == drawn and not self._values_decide_draws(drawn):
                wrong = self._other_values(taps, again, S, other.at)
                if self._exclude("VALUE", wrong):
                    return self._again(calm)
            return self._round(calm=True)
        if self._exclude("VALUE", wrong):
            return self._again(calm)
        return self._gradients(taps, other)

    def _first(self, scales: Sequence[Mapping[int, float]], **options: Any) -> Run:
        """The batch, through the taps, with R as short as the model runs on."""
        for self.left in [left for left in LEFT if left >= self.left]:
            try:
                run = self._taps(scales, **options)
            except FlashClippingError as error:
                if self.left == LEFT[-1]:
                    raise
                where = "\nFound where some samples of the batch are made shorter, as padding does."
                raise FlashClippingError(f"{error.args[0]}{where}") from error
            except ModelsOwnError:
                if self.left == LEFT[-1]:
                    raise
                continue
            if all(g.each is None or g.each.isfinite().all() for g in run.gradients):
                break
        return run

    def _taps(self, scales: Sequence[Mapping[int, float]], **options: Any) -> Run:
        """The batch, with R as short as in the first run, through the taps."""
        places = range(self.B)
        given = self.samples.batch(places, shorter=self.R, left=self.left)
        return self.runs.run(given, places, scales, taps=True, **self.draws, **options)

    def _values_decide_draws(self, drawn: list[Hashable]) -> bool:
        """Whether other values draw other numbers, though as many were drawn before."""
        S, B = set(self.S), self.B
        for other in (self.S[0], self.R[0], self.R[-1]):
            given = self.samples.batch([b if b in S else other for b in range(B)])
            if self.runs.run(given, range(B), taps=True, **self.draws).drawn != drawn:
                return True
        return False

    def _again(self, calm: bool) -> Complaint | None:
        """Another round, without outputs that turned out to be unfit."""
        fit = self.returned - self.unfit.keys()
        self.runs.only = fit if self.runs.only is None else self.runs.only & fit
        return self._round(calm) if self.runs.only else None

    def _fit(self, run: Run) -> list[int]:
        return [n for n in run.outputs if self.runs.only is None or n in self.runs.only]

    def _second(self, taps: Run) -> _Second | None:
        """Autograd's run of S among others; ``None`` if the model runs on no such batch."""
        S, R, B = self.S, self.R, self.B
        # For each batch, the samples in order, a number for each place, and the extreme place.
        batches: list[tuple[list[int], list[int], int | None]] = []
        if not taps.drawn:
            # A smaller batch, S behind the others; a batch of 1 or 2 has a larger one.
            others = R[:1] if B > 2 else [*R, *S][:2]
            numbers = [B + n for n in range(len(others))]
            batches.append(([*others, *S], [*numbers, *S], 0))
        turned = dict(zip(R, [*R[1:], *R[:1]], strict=True))
        order = [turned.get(b, b) for b in range(B)]
        places = [B + b if b in turned else b for b in range(B)]
        batches.append((order, places, R[0] if R else None))
        for kind, (order, places, changed) in itertools.product(EXTREMES, batches):
            self.samples.stays_in_range, extreme = kind == "in range", changed if kind else None
            given = self.samples.batch(order, extreme)
            at = [places.index(b) for b in S]
            try:
                run = self._among(given, places, at)
            except ModelsOwnError:
                continue
            finite = all(run.outputs[n][at].isfinite().all() for n in run.outputs) and all(
                g.norms.isfinite().all() for g in run.gradients
            )
            if finite or extreme is None:
                return _Second(run, given, places, at)
        return None

    def _among(self, given: Any, places: Sequence[int], at: Sequence[int]) -> Run:
        """Autograd's run of a batch, with the gradients of S in it, and of the first of them."""
        of_S = dict(zip(at, self.alone.values(), strict=True))
        scales = [of_S, {at[0]: of_S[at[0]]}][: len(at)]  # of one sample both are the same
        return self.runs.run(given, places, scales, **self.draws)

    def _gradients(self, taps: Run, other: _Second) -> Complaint | None:
        S, R = self.S, self.R
        found, expected = taps.gradients[0], other.run.gradients[0]
        one, each = other.run.gradients[-1].norms, found.each
        if each is None:
            each = torch.zeros(len(self.names), self.B, dtype=torch.float64)
        if R:
            gap = each[:, R].amax(1) / found.norms.norm().clamp(min=1e-300)
            if why := self._complain("STRAY", gap, STRAY):
                return why
        if (loud := taps.gradients[1].each) is not None:
            scale = torch.tensor([self.loud[b] / self.alone[b] for b in S], dtype=torch.float64)
            gap = self._gap(loud[:, S] / scale, each[:, S], each[:, S].norm(dim=1))
            if bool((gap > self.tolerance).any()):
                gap = self._out_of_order(each)
            if why := self._complain("TOGETHER", gap):
                return why
            if len(taps.gradients) > 2:
                of_S, whole, of_R = (g.projections for g in taps.gradients)
                norms = torch.stack([g.norms for g in taps.gradients]).amax(0)
                if why := self._complain("TOGETHER", self._gap(whole, of_S + of_R, norms)):
                    return why
        error_bound = 0.0 if found.bounds is None else found.bounds[:, S[0]] - each[:, S[0]]
        error = ((each[:, S[0]] - one).abs() - error_bound).clamp(min=0)
        of_one = self._gap(error[:, None], torch.zeros_like(error[:, None]), one)
        of_all = self._gap(found.projections, expected.projections, expected.norms)
        if bool((torch.maximum(of_one, of_all) > self.tolerance).any()):
            # On the same batch: another one would be allowed what its other samples change.
            with self._rounded():
                rounded = self._among(other.given, other.places, other.at).gradients
            rounding = self._gap(rounded[-1].norms[:, None], one[:, None], one)
            of_one -= ROUNDING * rounding.nan_to_num(0, 0)  # no number is no rounding
            rounding = self._gap(rounded[0].projections, expected.projections, expected.norms)
            of_all -= ROUNDING * rounding.nan_to_num(0, 0)
        return self._complain("NORM", of_one) or self._complain("GRADIENT", of_all)

    def _losses(self) -> dict[int, str]:
        """What is wrong with outputs that are one number for the batch: the model's own loss.

        Every other sample has fewer labels, and masks that count less, if the model runs on such
        samples: a mean over what counts in the batch shows where samples are alike, too.
        """
        if not self.runs.numbers:
            return {}
        self.runs.only, order = None, [*range(self.B)] if self.B > 1 else [0, 0]
        reduction = self.runs.session.loss_reduction
        for sparse in ({*range(1, len(order), 2)}, set[int]()):
            try:
                why: dict[int, str] = {}
                if (found := self._losses_of(order, sparse)) is not None:
                    return found
            except ModelsOwnError as error:
                words = {"error": str(error), "reduction": reduction}
                for n in self.runs.numbers:
                    text = (_NOT_ALONE + _OWN_LOSS).format(number=n, **words)
                    why[n] = str(FlashClippingError(text))
        return why

    def _losses_of(self, order: Sequence[int], sparse: AbstractSet[int]) -> dict[int, str] | None:
        """The same for one batch, with ``sparse`` places; ``None`` where no gradient is finite."""
        given = self.samples.batch(order, sparse=[*sparse])
        together = self.runs.run(given, order, taps=True, calm=True, losses=True).losses
        why = {n: str(g) for n, g in together.items() if isinstance(g, FlashClippingError)}
        sizes = self.runs.numbers
        reduction, compared = self.runs.session.loss_reduction, bool(why)
        times = len(order) if reduction == "mean" else 1
        for place in {(self.audit + n) % len(order) for n in range(ALONE)}:
            given = self.samples.batch([order[place]], sparse=[0] if place in sparse else [])
            alone, rounded = self._alone(given), None
            for n, g in together.items():
                if n in why or isinstance(g, FlashClippingError) or g.each is None:
                    continue
                found, expected = times * g.each[:, place], alone[n]
                is_mean_of_none = not found.any() and not expected.isfinite().all()
                if is_mean_of_none or not found.isfinite().all():
                    continue
                compared, self.size = True, sizes[n]
                gap = self._norms_apart(found, expected)
                if bool((gap > self.tolerance).any()):
                    if rounded is None:
                        with self._rounded():
                            rounded = self._alone(given)
                    gap -= ROUNDING * self._norms_apart(rounded[n], expected)
                if not bool((gap <= self.tolerance).all()):
                    ratio = float(found.norm() / expected.norm().clamp(min=1e-300))
                    words = {"number": n, "ratio": ratio, "reduction": reduction}
                    why[n] = str(FlashClippingError((_SHARED + _OWN_LOSS).format(**words)))
        return why if compared else None

    def _norms_apart(self, a: Tensor, b: Tensor) -> Tensor:
        """Relative differences of norms ``[P]``; of those of the whole gradient in low precision,
        where a parameter whose gradient cancels (a bias before a softmax) has rounding alone."""
        if self.tolerance > TOLERANCE_WIDE:
            a, b = a.norm()[None], b.norm()[None]
        return self._gap(a[:, None], b[:, None], b)

    def _alone(self, given: Any) -> dict[int, Tensor]:
        """Autograd's norms ``[P]`` of the model's own losses on one sample."""
        losses = self.runs.run(given, [0], calm=True, losses=True).losses
        return {n: g.norms for n, g in losses.items() if isinstance(g, Gradient)}

    def _out_of_order(self, each: Tensor) -> Tensor:
        """Relative differences where gradients need not be linear in a sample's loss (a hook that
        bounds rows): S as they are beside loud others, and which rows S reach, bit by bit."""
        S, alone = self.S, self.alone
        bits = [
            {b: alone[b] for n, b in enumerate(S) if n >> bit & 1}
            for bit in range((len(S) - 1).bit_length())
        ]
        scales = [{**alone, **dict.fromkeys(self.R, self.most)}, *bits]
        together, *some = self._taps(scales, sums=len(scales)).gradients
        assert together.each is not None
        gap = self._gap(together.each[:, S], each[:, S], each[:, S].norm(dim=1))
        for on, g in zip(bits, some, strict=True):
            if g.each is not None and (off := [b for b in S if b not in on]):
                strays = g.each[:, off].amax(1) > STRAY * g.norms.norm()
                gap = torch.where(strays, 1.0, gap)
        return gap

    # -- comparisons --------------------------------------------------------------------------

    def _gap(self, a: Tensor, b: Tensor, norms: Tensor) -> Tensor:
        """``[P]``: differences of the rows of ``a`` and ``b``, as parts of these norms."""
        floor = max(FLOOR * float(norms.norm()), NOTHING * self.size, LEAST)
        scale = norms.clamp(min=floor)
        return (a - b).norm(dim=1) / scale

    def _complain(self, part: str, gap: Tensor, most: float | None = None) -> Complaint | None:
        """The finding that these differences ``[P]`` are, if some are larger than rounding."""
        wrong = ~(gap <= (self.tolerance if most is None else most))  # NaN is no rounding
        if not wrong.any():
            return None
        names = [self.names[n] for n in wrong.nonzero().flatten().tolist()]
        return Complaint(part, names, float(gap.nan_to_num(torch.inf, torch.inf).max()))

    def _other_values(
        self, a: Run, b: Run, rows_a: Sequence[int], rows_b: Sequence[int]
    ) -> dict[int, float]:
        """The outputs whose samples have other values in ``b``, and the largest difference."""
        gaps = {}
        for n in self._fit(a):
            if n not in b.outputs or a.outputs[n].shape[1] != b.outputs[n].shape[1]:
                gaps[n] = torch.inf
                continue
            x, y = a.outputs[n], b.outputs[n]
            gap = _norms(x, rows_a, y, rows_b) / (_norms(y, rows_b) + 1e-9)
            gaps[n] = float(gap.max())
        return {n: gap for n, gap in gaps.items() if gap > self.tolerance}

    def _exclude(self, part: str, wrong: Mapping[int, float]) -> bool:
        """Let nothing come back from these outputs; whether there are any."""
        for n, gap in wrong.items():
            self.unfit[n] = Complaint(part, [f"{OUTPUT}{n}"], gap).text()
        return bool(wrong)


def _halves(B: int, audit: int, by_turns: bool) -> tuple[list[int], list[int]]:
    """The samples that are looked at, and the others; of few samples, in turns."""
    order = torch.randperm(B, generator=torch.Generator().manual_seed(3)).tolist()
    if B <= 4 and by_turns:  # where R are sorted to the beginning or to the end, S move
        order = [*range(B - 1, -1, -2), *range(B - 2, -1, -2)]
    half = -(-B // 2)
    S, R = order[:half], order[half:]
    if audit % 2 and R:
        S, R = R, S
    if audit > 2:
        chosen = order[audit % B]
        S, R = [chosen], [b for b in order if b != chosen]
    return sorted(S), sorted(R)


def _norms(
    x: Tensor, rows: Sequence[int], y: Tensor | None = None, rows_y: Sequence[int] = ()
) -> Tensor:
    """Norms of these rows of outputs ``[B, F]``, or of their differences, in float64, on the CPU.

    Masked scores do not count. Logits stay where they are, and are copied some columns at a time:
    there may be no room for more, and their way to the CPU takes seconds.
    """
    squares = torch.zeros(len(rows), dtype=torch.float64, device=x.device)
    width = max(1, AT_ONCE // max(1, len(rows)))
    for begin in range(0, x.shape[1], width):
        columns = slice(begin, begin + width)
        part = _finite(x[:, columns][list(rows)])
        if y is not None:
            part -= _finite(y[:, columns][list(rows_y)])
        squares += part.square().sum(1)
    return squares.sqrt().cpu()


def _finite(x: Tensor) -> Tensor:
    return x.double().nan_to_num(0, 0, 0).clamp(-MASKED, MASKED)


def _text(why: Complaint | FlashClippingError | None) -> str:
    return why.text() if isinstance(why, Complaint) else str(why)
