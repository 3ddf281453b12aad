"""Runs of one model, by plain autograd and through its taps, with the gradients of some samples.

Shape suffixes: ``B`` samples, ``P`` parameters, ``K`` projections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.image_patches import parts_of_samples
from flash_clipping.capture.inputs import batched_inputs, tensors_in
from flash_clipping.capture.proof.batches import Samples
from flash_clipping.capture.proof.draws import repeatable
from flash_clipping.capture.session import ClippingSession
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.clipping import Doubts
from flash_clipping.finish.plan import Plans
from flash_clipping.finish.session import Session

#: Random projections of each gradient: a difference ``d`` is a random number of size ``|d|`` in
#: each, so that a difference a thousand times the tolerance is missed once in a billion times.
PROJECTIONS = 4

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


@dataclass
class Run:
    """One forward, and its backward passes.

    Attributes:
        outputs: ``[B, entries]`` of every output with a row for each sample and a gradient.
        axes: of these outputs, the axes that may hold the samples, the likely one first.
        drawn: what was drawn at random.
        gradients: of the backward passes.
    """

    outputs: dict[int, Tensor]
    axes: dict[int, list[int]]
    drawn: list[Hashable]
    gradients: list[Gradient]


@dataclass(frozen=True)
class Subject:
    """A call of a model that is to be proven.

    Attributes:
        root: the model; ``forward`` runs it, and ``session`` is what its taps share.
        args, kwargs: of the call.
    """

    root: nn.Module
    forward: Callable[..., Any]
    session: ClippingSession
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def samples(self, narrow: int = 0) -> Samples:
        """The arguments as samples."""
        parts = parts_of_samples(self.root, self.kwargs)
        return Samples(self.args, self.kwargs, self.session.batch_axis, narrow, parts)


class Runs:
    """Runs of one model on batches of the samples of one call.

    Args:
        subject: the call.
        tensors: its own, for their devices.
        seeded: whether runs of one seed draw alike; tests switch it off.
    """

    def __init__(self, subject: Subject, tensors: Sequence[Tensor], seeded: bool = True) -> None:
        self.root, self.forward, self.session = subject.root, subject.forward, subject.session
        session = self.session
        self.params = session.trainable()
        devices = {x.device for x in (*tensors, *session.state()) if x.is_cuda}
        self._devices = list(devices)
        self._seeded = seeded
        self._count = 0
        self._signs: dict[Hashable, Tensor] = {}
        #: Outputs that may go backward, if not all.
        self.only: set[int] | None = None
        #: Outputs whose samples are along another axis than the likely one.
        self.chosen_axes: dict[int, int] = {}
        #: Dtypes of inputs, of parameters, and that floats are cast to.
        self.dtypes = {x.dtype for x in (*tensors, *self.params)}
        #: How many tensors the model returned.
        self.returned = 0

    def run(
        self,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        places: Sequence[int],
        scales: Sequence[Mapping[int, float]] = (),
        *,
        taps: bool = False,
        seed: int = 0,
        calm: bool = False,
        before: Callable[[], None] = lambda: None,
        sums: int = 1,
    ) -> Run:
        """The model on a batch.

        Args:
            given: its arguments.
            places: the number of the sample in each place of the batch, which says what goes
                backward from its outputs.
            scales: of each backward pass: the samples that take part, by place, and by how much
                their losses are multiplied.
            taps: whether gradients are taken as they will be clipped.
            seed, calm: what is drawn at random.
            before: called before every backward pass.
            sums: of so many backward passes, the first ones, sums over samples are wanted; of the
                others norms alone.

        Raises:
            whatever the model raises.
        """
        args, kwargs = given
        session = self.session
        self._count += 1
        seed += 0 if self._seeded else 1000 * self._count
        left = [param.grad for param in self.params]
        around = session.enabled, session.comparing, session.returned, session.current_forward
        session.enabled = taps
        call = session.begin_forward(batched_inputs(args, kwargs)) if taps else None
        session.comparing, session.returned = True, None  # no two passes
        try:
            with repeatable(self.root, self._devices, seed, calm) as random, torch.enable_grad():
                for param in self.params:
                    param.grad = None
                tensors = tensors_in(self.forward(*args, **kwargs))
                self.returned = len(tensors)
                if call is not None:
                    call.end()
                drawn = random.end_forward()
                self.dtypes |= random.casts()
                axes = {
                    n: found for n, x in enumerate(tensors) if (found := self._axes(x, len(places)))
                }
                outputs = {
                    n: x.movedim(self.chosen_axes.get(n, axes[n][0]), 0).flatten(1)
                    if (x := tensors[n]).dim() > 1
                    else x[:, None]
                    for n in axes
                }
                gradients = []
                for number, scale in enumerate(scales):
                    before()
                    gradients.append(self._backward(outputs, places, scale, taps, number < sums))
            return Run({n: x.detach() for n, x in outputs.items()}, axes, drawn, gradients)
        finally:
            for param, grad in zip(self.params, left, strict=True):
                param.grad = grad
            if call is not None:
                call.spent = True
                call.end()
            session.enabled, session.comparing, session.returned = around[:3]
            if around[3] is not None:
                session.resume_forward(around[3])

    def _axes(self, x: Tensor, count: int) -> list[int]:
        if not x.is_floating_point() or not x.requires_grad:
            return []
        first = self.session.batch_axis
        axes = [axis for axis, n in enumerate(x.shape) if n == count]
        return sorted(axes, key=lambda axis: axis != first)

    def _backward(
        self,
        outputs: Mapping[int, Tensor],
        places: Sequence[int],
        scale: Mapping[int, float],
        taps: bool,
        sums: bool,
    ) -> Gradient:
        """One backward pass of the losses of some samples."""
        chosen = [n for n in outputs if self.only is None or n in self.only]
        roots = [outputs[n] for n in chosen]
        weights = [_weights(x, places, scale) for x in roots]
        if not roots:
            nothing = torch.zeros(len(self.params), dtype=torch.float64)
            return Gradient(nothing[:, None].expand(-1, PROJECTIONS), nothing)
        grad = partial(
            torch.autograd.grad, roots, self.params, weights, retain_graph=True, allow_unused=True
        )
        if not taps:
            found = [a if b is None else b for a, b in zip(grad(), self._left(), strict=True)]
            return self._measured(dict(enumerate(found)), sums)
        session = self.session
        before, plans = session.backward_pass_class, session.plans
        taken: list[Gradient] = []
        tell: Any = partial(_Collects, runs=self, tell=taken.append, sums=sums)
        session.backward_pass_class, session.plans = tell, Plans()
        try:
            grad()
        finally:
            session.backward_pass_class, session.plans = before, plans
        return taken[0] if taken else self._measured({})

    def _left(self) -> list[Tensor | None]:
        """Gradients that backwards inside of functions (reversible layers) left in ``p.grad``."""
        left = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        return left

    def _measured(self, grads: Mapping[int, Tensor | None], sums: bool = True) -> Gradient:
        """Projections and norms of gradients, by the number of their parameter."""
        device = self.params[0].device
        nothing = torch.zeros(PROJECTIONS + 1, dtype=torch.float64, device=device)
        rows = []
        for n in range(len(self.params)):
            g = grads.get(n)
            rows.append(nothing if g is None else self._projected(g, n, sums).to(device))
        measured = torch.stack(rows).cpu()
        return Gradient(measured[:, :-1], measured[:, -1])

    def _projected(self, g: Tensor, number: int, sums: bool) -> Tensor:
        """``[K + 1]``: projections on products of two vectors of signs, and the norm."""
        g = _dense(g)
        g = g.reshape(-1, g.shape[-1]) if g.dim() else g.view(1, 1)
        g = g if g.dtype == torch.float64 else g.float()
        norm = torch.linalg.vector_norm(g)
        if not sums:
            return torch.cat([norm.new_zeros(PROJECTIONS), norm[None]]).double()
        down, along = (self._signs_of(n, g)[number % 7 :][:PROJECTIONS] for n in g.shape)
        found = ((down @ g) * along).sum(1)
        return torch.cat([found, norm[None]]).double()

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
        factor = backward._own_gradient_scale()
        numbers = {id(param): n for n, param in enumerate(self.params)}
        found = self._measured({numbers[key]: grad for key, grad in sums.items()})
        each, bounds = (x.cpu().double() / factor for x in (backward.each, backward.bounds))
        return Gradient(found.projections / factor, found.norms / factor, each, bounds)


def _dense(g: Tensor) -> Tensor:
    g = g.detach()
    return g if g.layout == torch.strided else g.to_dense()


class _Collects(BackwardPass):
    """Takes norms and sums that nothing is clipped of, and leaves nothing else."""

    each: Tensor
    bounds: Tensor

    def __init__(
        self, session: Session, *, runs: Runs, tell: Callable[[Gradient], None], sums: bool
    ) -> None:
        super().__init__(session)
        self._runs, self._tell, self._sums = runs, tell, sums
        if not runs.params[0].is_cuda:
            self.backend = "torch"

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

    def _clip(
        self, params: list[nn.Parameter], norms_PB: Tensor, doubts: Doubts, one_device: bool
    ) -> Tensor:
        self.each = norms_PB
        self.bounds = doubts.bound_each([id(param) for param in params], norms_PB)
        return torch.ones_like(norms_PB[0])


def _weights(x: Tensor, places: Sequence[int], scale: Mapping[int, float]) -> Tensor:
    """The gradient that an output ``[B, entries]`` is given: other numbers for every entry of every
    sample, 0 for samples that take no part."""
    entries = x.shape[1]
    columns = math.isqrt(entries) or 1
    numbers = torch.tensor([float(b) for b in places], device=x.device)
    amounts = torch.tensor([scale.get(place, 0.0) for place in range(len(places))])
    step = torch.arange(float(-(-entries // columns)), device=x.device)
    down = torch.cos(1.3 * step + 2.1 * numbers[:, None]) + 0.1
    along = torch.cos(0.7 * torch.arange(float(columns), device=x.device) + numbers[:, None])
    w = (down[:, :, None] * (along[:, None] + 0.3)).flatten(1)[:, :entries]
    w = (w * amounts.to(x.device)[:, None]).to(x.dtype)
    return torch.where(x.detach().abs() < MASKED, w, 0)
