"""Runs of one model, by plain autograd and through its taps, with the gradients of some samples.

Shape suffixes: ``B`` samples, ``P`` parameters, ``K`` projections.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flash_clipping._compat import compiled_module
from flash_clipping.capture.declared_rows import parts_of_samples
from flash_clipping.capture.inputs import batched_inputs, map_tensors, tensors_in
from flash_clipping.capture.no_trace import Holdings, ModelsOwnError, own_errors
from flash_clipping.capture.proof.batches import Samples, Window
from flash_clipping.capture.proof.kinds import Kind
from flash_clipping.capture.proof.reads import Reads, layout_of
from flash_clipping.capture.proof.repeatable import repeatable
from flash_clipping.capture.proxies import ParameterProxy
from flash_clipping.capture.refused_forwards import collectives_refused
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.units import Units
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import PerSampleGrad
from flash_clipping.finish.backward_pass import BackwardPass, Readers, Session
from flash_clipping.finish.clipping import Doubts
from flash_clipping.finish.plan import Plans
from flash_clipping.ops.error_bounds import squared_norms

T = TypeVar("T")

#: Random projections of each gradient: a difference ``d`` is a random number of size ``|d|`` in
#: each, so that a difference a thousand times the tolerance is missed once in a billion times.
PROJECTIONS = 4

#: Gradients of at most so many elements are measured together: they are copied for it.
SMALL = 1 << 14

#: Masked scores (the least number of a dtype) are no values.
MASKED = 1e4


@dataclass
class Gradient:
    """The result of one backward pass, on the CPU in float64.

    Attributes:
        projections: of the sum over samples, ``[P, K]``.
        norms: of the sum, ``[P]``.
        each: norms of single samples, ``[P, B]``; of taps only.
        bounds: at least these norms, whatever rounding hides, ``[P, B]``.
    """

    projections: Tensor
    norms: Tensor
    each: Tensor | None = None
    bounds: Tensor | None = None


@dataclass(frozen=True)
class Subject:
    """A call of a model that is to be proven.

    Attributes:
        root: the model; ``forward`` runs it, and ``session`` is what its taps share.
        args, kwargs: of the call.
        offsets: where samples begin that lie end to end, and how many there are.
        bags: offsets of bags beside other inputs, and the ids that they point into.
        chosen: the samples that are checked, if not all.
        narrow, window: of :class:`Samples`.
    """

    root: nn.Module
    forward: Callable[..., Any]
    session: ClippingSession
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    offsets: tuple[Tensor, int] | None = None
    bags: Sequence[tuple[Tensor, Tensor]] = ()
    chosen: Sequence[int] | None = None
    narrow: int = 0
    window: Window | None = None

    @property
    def kind(self) -> Kind:
        """The kind of the call."""
        return self.session.proof.kinds.of(self.root, self.args, self.kwargs)

    def of_bags(self, reads: Reads) -> Subject:
        """The same with what was seen of bags."""
        offsets = None if reads.offsets is None else (reads.offsets, reads.size)
        return replace(self, offsets=offsets, bags=reads.bags)

    def samples(self) -> Samples:
        """The samples of the call, also those that are not checked."""
        parts = parts_of_samples(self.root, self.kwargs)
        model = compiled_module(self.root)
        forward = getattr(type(model), "forward", None)  # none of what is scripted
        names = [*inspect.signature(forward).parameters][1:] if forward is not None else ()
        given = self.args, self.kwargs, self.session.options.batch_axis, self.narrow, self.offsets
        return Samples(*given, parts, names, self.bags, self.window)

    def chosen_samples(self) -> list[int]:
        """The numbers of the samples that are checked."""
        return [*range(self.samples().count)] if self.chosen is None else [*self.chosen]

    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the samples that are checked."""
        if self.chosen is None:
            return self.args, self.kwargs
        return self.samples().batch(self.chosen)

    def smaller(self, seed: int = 0) -> Iterator[Subject]:
        """A few samples of the call, and these shorter, in ways that the model may run on; the call
        as it is at last. Another ``seed`` chooses other samples."""
        samples = self.samples()
        may_fail = self.session.proof.has_oracle  # where it is sharded, other processes would wait
        is_chosen = self.chosen is not None or any(x.is_meta for x in samples.leaves)
        if samples.count and not is_chosen and (may_fail or not samples.is_ambiguous):
            chosen = samples.few(seed)
            window = samples.window_of(len(chosen)) if may_fail else None
            if len(chosen) < samples.count or window is not None:
                for part in (window, None) if window is not None else (None,):
                    for narrow in range(3) if samples.is_ambiguous else (0,):
                        yield replace(self, chosen=chosen, narrow=narrow, window=part)
        yield self


class Runs:
    """Runs of one model on batches of the samples of one call.

    Args:
        subject: the call.
        units: its units, where these are parts of rows.
    """

    def __init__(self, subject: Subject, units: Units | None = None) -> None:
        self.root, self.forward, self.session = subject.root, subject.forward, subject.session
        self.params, self._units = self.session.options.trainable(), units
        #: Where samples lie in what such calls return, as far as looks have shown it.
        self._layouts = subject.kind.outputs
        tensors = batched_inputs(subject.args, subject.kwargs)
        devices = {x.device for x in (*tensors, *self.session.options.state()) if x.is_cuda}
        self._devices = list(devices)
        self._held = Holdings(self.root)
        self._signs: dict[Hashable, Tensor] = {}
        #: Dtypes of inputs, of parameters, and that floats are cast to.
        self.dtypes = {x.dtype for x in (*tensors, *self.params)}
        #: How many tensors the model returned.
        self.returned = 0
        #: While it is asked which calls of layers get a gradient: their paths and parameters.
        self.recorded: list[tuple[str, list[int]]] | None = None
        #: The outputs of the last run that were one number for the batch, without their signs.
        self.numbers: dict[int, float] = {}

    def look(self, given: tuple[tuple[Any, ...], dict[str, Any]], seed: int = 0) -> Reads:
        """What layers read in the forward alone, through the taps. Without a ``seed`` nothing is
        dropped. Errors as of :meth:`run`; what taps raise is noted."""
        reads = Reads()
        self.run(given, [], bool, taps=True, seed=seed, varies=seed > 0, reads=reads)
        return reads

    def run(
        self,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        places: Sequence[int],
        take: Callable[[Forward], T],
        **options: Any,
    ) -> T:
        """What is taken from a forward on a batch; arguments as of :meth:`_run`.

        Raises:
            ModelsOwnError: the model raises.
            FlashClippingError: taps raise where the model itself does not.
        """
        try:
            return self._run(given, places, take, **options)
        except ModelsOwnError as error:
            if not options.get("taps"):
                raise
            self._run(given, places, take, **{**options, "taps": False, "reads": None})
            raise _of_taps(error) from error.__cause__

    def _run(
        self,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        places: Sequence[int],
        take: Callable[[Forward], T],
        *,
        taps: bool = False,
        seed: int = 0,
        watched: bool = True,
        orders: bool = False,
        varies: bool = False,
        reads: Reads | None = None,
    ) -> T:
        """What is taken from a forward on a batch.

        Args:
            given: its arguments.
            places: the number of the sample in each place of the batch, which says what goes
                backward from its outputs.
            take: asks the forward for outputs and gradients.
            taps: whether gradients are taken as they will be clipped.
            seed, watched, orders, varies: what is drawn at random, as of :func:`repeatable`.
            reads: gets what layers read, and what taps raise.

        Raises:
            ModelsOwnError: the model raises, or its taps do.
        """
        originals: dict[int, Tensor] = {}

        def own(x: Tensor) -> Tensor:  # models may write into their inputs
            copy = x.clone()
            originals[id(copy)] = x
            return copy

        args, kwargs = map_tensors(own, given, packed=True)
        session = self.session
        left = [param.grad for param in self.params]
        around = session.mode.enabled, session.mode.comparing
        call = None
        session.mode.enabled = taps
        try:
            with (
                session.apart(),
                repeatable(self._held, self._devices, seed, watched, orders, varies) as random,
                torch.enable_grad(),
            ):
                if taps:
                    inputs = batched_inputs(args, kwargs)
                    call = session.begin_forward(inputs, reads, self._units)
                session.mode.comparing = reads is None
                for param in self.params:
                    param.grad = None
                try:
                    with own_errors(), nullcontext() if reads is None else collectives_refused():
                        tensors = tensors_in(self.forward(*args, **kwargs))
                except FlashClippingError as error:
                    if reads is None:
                        raise
                    reads.refused, tensors = error, []
                if reads is not None and call is not None:
                    reads.note_end(tensors, call.batch_size or 0, originals)
                    return take(Forward(self, [], {}, places, taps))
                self.returned = len(tensors)
                numbers = {n: x for n, x in enumerate(tensors) if x.numel() == 1}
                numbers = {n: x for n, x in numbers.items() if _may_be_of_samples(x)}
                self.numbers = {n: abs(float(x.detach())) for n, x in numbers.items()}
                if call is not None:
                    call.end()
                    for x in [x for x in tensors if x.requires_grad]:  # before what recomputes
                        x.register_hook(lambda _: session.begin_backward() and None)
                random.end_forward()
                self.dtypes |= random.casts
                forward = Forward(self, tensors, numbers, places, taps)
                forward.drawn = random.drawn
                forward.uses = Counter() if call is None else call.uses
                return take(forward)
        finally:
            for param, grad in zip(self.params, left, strict=True):
                param.grad = grad
            if call is not None:
                call.spent, call.reads = True, None  # who holds the call keeps nothing of it
                call.end()
            session.mode.enabled, session.mode.comparing = around

    def by_sample(self, number: int, x: Tensor, count: int) -> Tensor | None:
        """An output as ``[B, entries]``, if it has a row for each sample."""
        if not _may_be_of_samples(x):
            return None
        first = self.session.options.batch_axis
        layout = layout_of([x.shape], [count], first, has_parts=False)
        if len(self._layouts) == self.returned:
            layout = self._layouts[number]
        if layout is None or layout.parts(x, count) != 1:
            return None
        return layout.front(x, count).flatten(1)

    def gradient_of(
        self,
        roots: Sequence[Tensor],
        weights: Sequence[Tensor | None],
        taps: bool,
        sums: bool,
        last: bool = False,
    ) -> Gradient:
        """The result of a backward pass; arguments as of :meth:`Forward.backward`."""
        options = {"retain_graph": not last, "allow_unused": True}
        grad: Any = partial(torch.autograd.grad, roots, self.params, weights, **options)
        if not taps:
            with own_errors():
                own = grad()
            # Backwards inside of functions (reversible layers) leave theirs in ``p.grad``.
            left = [param.grad for param in self.params]
            for param in self.params:
                param.grad = None
            found = [a if b is None else b for a, b in zip(own, left, strict=True)]
            return self._measured(dict(enumerate(found)), sums)
        session = self.session
        before, plans = session.calls.backward_pass_class, session.calls.plans
        taken: list[Gradient] = []
        tell: Any = partial(_Collects, runs=self, tell=taken.append, sums=sums)
        session.calls.backward_pass_class, session.calls.plans = tell, Plans()
        try:
            with own_errors():
                grad()
        finally:
            session.calls.backward_pass_class, session.calls.plans = before, plans
        return taken[0] if taken else self._measured({})

    def _measured(self, grads: Mapping[int, Tensor | None], sums: bool = True) -> Gradient:
        """Projections and norms of gradients, by the number of their parameter."""
        device = self.params[0].device
        rows = [torch.zeros(PROJECTIONS + 1, dtype=torch.float64, device=device)] * len(self.params)
        # Small ones of one shape together: each operator costs the host as much as a large one.
        groups: dict[Any, dict[int, Tensor]] = {}
        for n, g in grads.items():
            if g is None or not g.numel():
                continue
            g = g.detach() if g.layout == torch.strided else g.detach().to_dense()
            g = g.reshape(-1, g.shape[-1]) if g.dim() else g.view(1, 1)
            alone = n if g.numel() > SMALL else None
            groups.setdefault((alone, g.shape, g.dtype, g.device), {})[n] = g
        for group in groups.values():
            x, *others = group.values()
            g = torch.stack([x, *others]) if others else x[None]
            measured = self._projected(g, [*group], sums).to(device)
            for n, row in zip(group, measured.unbind(), strict=True):
                rows[n] = row
        of_all = torch.stack(rows).cpu()
        return Gradient(of_all[:, :-1], of_all[:, -1])

    def _projected(self, g: Tensor, numbers: list[int], sums: bool) -> Tensor:
        """``[G, K + 1]`` of matrices ``[G, rows, columns]``: projections on products of two vectors
        of signs, others for each of these numbers, and the norm."""
        g = g if g.dtype == torch.float64 else g.float()
        norms = squared_norms(g).sqrt()[:, None]
        if not sums:
            return torch.cat([norms.new_zeros(len(norms), PROJECTIONS), norms], 1).double()
        which = [[n % 7 + k for k in range(PROJECTIONS)] for n in numbers]
        which_GK = torch.tensor(which, device=g.device)
        down, along = (self._signs_of(n, g)[which_GK] for n in g.shape[1:])
        return torch.cat([((down @ g) * along).sum(2), norms], 1).double()

    def _signs_of(self, n: int, like: Tensor) -> Tensor:
        key = n, like.device, like.dtype
        if key not in self._signs:
            generator = torch.Generator().manual_seed(n)
            signs = torch.randint(0, 2, (PROJECTIONS + 6, n), generator=generator, dtype=torch.int8)
            self._signs[key] = (2 * signs - 1).to(like)
        return self._signs[key]

    def of_taps(self, backward: _Collects, sums: Mapping[int, Tensor]) -> Gradient:
        """The result of a backward pass through the taps."""
        # With the loss reduction "mean" both are as many times as large as there are samples.
        factor = backward.scale
        numbers = {id(param): n for n, param in enumerate(self.params)}
        found = self._measured({numbers[key]: grad for key, grad in sums.items()})
        each, bounds = (x.cpu().double() / factor for x in (backward.each, backward.bounds))
        return Gradient(found.projections / factor, found.norms / factor, each, bounds)


class Forward:
    """A forward that has run, while its graph is there.

    Args:
        runs: of the model.
        tensors, numbers: what it returned; those of it that are one number for the batch.
        places: the number of the sample in each place.
        taps: whether gradients are taken as they will be clipped.

    Attributes:
        outputs: ``[B, entries]`` of every output with a row for each sample and a gradient.
        drawn: how many operators drew at random.
        uses: of each parameter, by ``id``, in the forward.
    """

    drawn = 0
    uses: Counter[int]

    def __init__(
        self,
        runs: Runs,
        tensors: Sequence[Tensor],
        numbers: Mapping[int, Tensor],
        places: Sequence[int],
        taps: bool,
    ) -> None:
        self._runs, self._places, self._taps, self._numbers = runs, places, taps, numbers
        self.outputs = {
            n: rows
            for n, x in enumerate(tensors)
            if (rows := runs.by_sample(n, x, len(places))) is not None
        }

    def backward(
        self,
        scale: Mapping[int, float],
        only: AbstractSet[int] | None = None,
        *,
        sums: bool = True,
        last: bool = False,
    ) -> Gradient:
        """The gradient of the losses of some samples.

        Args:
            scale: places that take part, and by how much their losses are multiplied.
            only: outputs that go backward, if not all.
            sums: whether sums over samples are wanted beside norms.
            last: whether the graph is not needed afterwards.
        """
        roots = [x for n, x in self.outputs.items() if only is None or n in only]
        weights = [_weights(x, self._places, scale) for x in roots]
        if not roots:
            return self._runs._measured({})
        return self._runs.gradient_of(roots, weights, self._taps, sums, last)

    def reached(self, numbers: AbstractSet[int]) -> list[tuple[str, list[int]]]:
        """The calls of layers that these outputs give a gradient: their paths, and the ``id`` of
        each of their parameters."""
        rows = [x for n, x in self.outputs.items() if n in numbers]
        losses = [x for n, x in self._numbers.items() if n in numbers and n not in self.outputs]
        scale = dict.fromkeys(range(len(self._places)), 1.0)
        weights = [*(_weights(x, self._places, scale) for x in rows), *[None] * len(losses)]
        self._runs.recorded = found = list[tuple[str, list[int]]]()
        try:
            self._runs.gradient_of([*rows, *losses], weights, True, sums=False)
        finally:
            self._runs.recorded = None
        return found

    def of_losses(self) -> dict[int, Gradient | FlashClippingError]:
        """The gradients of single numbers that the model returned; or why one has none."""
        found: dict[int, Gradient | FlashClippingError] = {}
        for n, x in self._numbers.items():
            try:
                found[n] = self._runs.gradient_of([x], [None], self._taps, sums=False)
            except FlashClippingError as error:
                found[n] = error
        return found


def _of_taps(error: ModelsOwnError) -> FlashClippingError:
    """Of an error that the model alone does not raise."""
    return FlashClippingError(
        f"FC211 the model: alone it runs, and raises {error} where flash clipping takes "
        "gradients of samples: a fault of flash clipping, please report it. Until it is fixed:\n"
        '    mode="one_by_one"'
    )


class _Collects(BackwardPass):
    """Takes norms and sums that nothing is clipped of, and leaves nothing else."""

    each: Tensor
    bounds: Tensor
    scale: float

    def __init__(
        self, session: Session, *, runs: Runs, tell: Callable[[Gradient], None], sums: bool
    ) -> None:
        super().__init__(session)
        self._runs, self._tell, self._sums = runs, tell, sums
        if not runs.params[0].is_cuda:
            self.backend = "torch"

    def record(
        self,
        path: str,
        params: Sequence[nn.Parameter],
        factors: Sequence[PerSampleGrad],
        readers: Readers | None = None,
    ) -> None:
        if (found := self._runs.recorded) is not None and any(
            bool((factor.sqnorms(self.backend) > 0).any()) for factor in factors
        ):
            found.append((path, [*map(id, params)]))
        super().record(path, params, factors, readers)

    def finish(self) -> None:
        sums: dict[int, Tensor] = {}

        def add(keys: Sequence[int], grads: Sequence[Tensor]) -> None:
            for key, grad in zip(keys, grads, strict=True):
                param = self.params[key]
                sums[key] = grad.view_as(param) if grad.shape != param.shape else grad

        with torch.no_grad():
            try:
                self.put_back()
                self.take_norms()
                assert self.coef is not None and self.plan is not None
                if self._sums:
                    self.groups.add_clipped_sums(self.plan, self.coef, add)
                self._tell(self._runs.of_taps(self, sums))
            finally:
                self.forget()
                self.session.end_backward(norms_taken=False)

    def _clip(self, params: list[nn.Parameter], norms_PB: Tensor, doubts: Doubts) -> Tensor:
        self.each, self.scale = norms_PB, doubts.scale
        self.bounds = doubts.bound_each([id(param) for param in params], norms_PB)
        return torch.ones_like(norms_PB[0])


def _may_be_of_samples(x: Tensor) -> bool:
    """Whether an output may have samples, and a gradient of theirs: not if it is a parameter, or
    computed from parameters alone, whatever its size."""
    of_parameters = isinstance(x, nn.Parameter | ParameterProxy)
    return x.is_floating_point() and x.requires_grad and not of_parameters


def _weights(x: Tensor, places: Sequence[int], scale: Mapping[int, float]) -> Tensor:
    """The gradient that an output ``[B, entries]`` is given: other numbers for every entry of every
    sample, 0 for samples that take no part."""
    entries = x.shape[1]
    columns = math.isqrt(entries) or 1
    numbers = torch.tensor([float(b) for b in places], device=x.device)[:, None]
    amounts = torch.tensor([scale.get(place, 0.0) for place in range(len(places))])
    down = torch.cos(1.3 * torch.arange(-(-entries // columns), device=x.device) + 2.1 * numbers)
    along = torch.cos(0.7 * torch.arange(columns, device=x.device) + numbers)
    weights = (down[:, :, None] + 0.1) * (along[:, None] + 0.3)
    weights = weights.flatten(1)[:, :entries] * amounts.to(x.device)[:, None]
    return torch.where(x.detach().abs() < MASKED, weights.to(x.dtype), 0)
