"""One backward pass: factors -> norms -> coefficients -> clipped gradients.

A :class:`BackwardPass` lives as long as autograd's own: the engine owns it through the callback
that will finish it, so a pass that fails takes its records with it.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain, repeat
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from flash_clipping._compat import will_run
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.factors import PerSampleGrad, SumGrad, UnitMap, accumulation_dtype, merge
from flash_clipping.finish.clipping import ClipOptions, Coefficients, Doubts
from flash_clipping.finish.grouped_factors import Blocks, GroupedFactors
from flash_clipping.finish.plan import Plan, Plans, layout_of_step, plan_of
from flash_clipping.ops.runtime.backend import full_precision
from flash_clipping.ops.runtime.shapes import accumulator
from flash_clipping.ops.runtime.tables import to_device

_GRAD, _SHAPE = operator.attrgetter("grad"), operator.attrgetter("shape")


class Call(Protocol):
    """One call of the root module, which knows which layers read the same input."""

    @property
    def batch_size(self) -> int | None: ...

    def count_readers(self, place: int, params: Sequence[nn.Parameter]) -> int: ...


#: A call of the root, and the place among its readers of a tapped layer's input.
Readers: TypeAlias = tuple[Call, int]


class Units(Protocol):
    """Which privacy unit each row belongs to, that layers record."""

    count: int
    map: UnitMap

    def scale_of_mean(self) -> float: ...

    def without_lost(self, norms_PB: Tensor) -> Tensor: ...

    def of_units(self, path: str, factor: PerSampleGrad, device: torch.device) -> PerSampleGrad: ...


class Running(Protocol):
    """What runs, and what outlives it."""

    recomputed: dict[str, Callable[[], AbstractContextManager[None]]]
    plans: Plans


class Session(Protocol):
    """What a backward pass asks of its session
    (:class:`~flash_clipping.capture.session.ClippingSession`), and of taps and modules nothing
    else: how to clip, what forward did, and who is told what is left."""

    @property
    def options(self) -> ClipOptions: ...

    @property
    def calls(self) -> Running: ...

    def units(self) -> Units | None: ...

    def expected_batch_sizes(self) -> set[int]: ...

    def end_backward(self, norms_taken: bool = True) -> None: ...


class BackwardPass:
    """What one backward pass has recorded, and how it ends.

    Parameters go by their ``id`` (``key``): hashing one costs more than the rest of recording it.
    """

    def __init__(self, session: Session):
        self.session = session
        self.backend = session.options.backend
        #: Which privacy unit each row belongs to that layers record.
        self.units: Units | None = session.units()
        #: Layer calls whose factors are held to the end, by path and by parameters, and these
        #: factors, one per parameter. Flat: what a step keeps alive brings the garbage collector.
        self.call_paths: list[str] = []
        self.used: list[Sequence[nn.Parameter]] = []
        self.factors: list[PerSampleGrad] = []
        #: Parameters whose factors are held elsewhere.
        self.elsewhere: list[nn.Parameter] = []
        #: Of the layers that recorded parameters; complete where a new plan is made.
        self.paths: dict[int, str] = {}
        #: Once norms are asked for: the trainable parameters, and the factors by how they are
        #: handled together.
        self.params: dict[int, nn.Parameter] = {}
        self.groups: GroupedFactors
        self.plan: Plan | None = None
        self.batch_size: int | None = None
        self.first_path = ""
        self.coef: Coefficients | None = None
        self.thread: int | None = None
        #: Whether this backward was asked for the gradients of all parameters that it recorded; if
        #: not, these were asked for, by ``id``.
        self.is_for_all = True
        self.asked: set[int] = set()
        #: Whether a layer that was run again in backward recorded something. Autograd allows
        #: re-entrant checkpoints only in a backward for all parameters, so it is taken for one.
        self.is_checkpointed = False

        self._stand_ins = ExitStack()
        if session.calls.recomputed:
            self.stand_in()

    # -- recording ----------------------------------------------------------------------------

    def stand_in(self) -> None:
        """Let checkpoints recompute with stand-ins, as they computed."""
        for make in self.session.calls.recomputed.values():
            self._stand_ins.enter_context(make())

    def put_back(self) -> None:
        """The parameters themselves again."""
        self._stand_ins.close()

    def record(
        self,
        path: str,
        params: Sequence[nn.Parameter],
        factors: Sequence[PerSampleGrad],
        readers: Readers | None = None,
    ) -> None:
        """Take the factors of one layer call, one for each of these parameters.

        ``readers`` tells which layers read the same input. None is worth storing without,
        or if the call's parameters have other uses in the same call of the root, or may have.
        """
        # This runs for every layer of every backward: whatever can wait is done for all at once.
        if self.units is not None:
            factors = self._of_units(self.units, path, params, factors)
        if readers is not None:
            call, place = readers
            count = partial(call.count_readers, place, params)
            factors = stored_where_cheaper(factors, count, self.backend)
        self.call_paths.append(path)
        self.used.append(params)
        self.factors += factors

    @staticmethod
    def _of_units(
        units: Units, path: str, params: Sequence[nn.Parameter], factors: Sequence[PerSampleGrad]
    ) -> Sequence[PerSampleGrad]:
        """Factors of units in the place of those of rows."""
        return [
            units.of_units(path, factor, param.device)
            for param, factor in zip(params, factors, strict=True)
        ]

    def _check_batch_size(self, path: str, found: int) -> None:
        # Rows of units were counted where they became units.
        expected = set() if self.units is not None else self.session.expected_batch_sizes()
        axis = "first" if self.session.options.batch_first else "second"
        advice = (
            f"The batch must be the {axis} axis of the input of every layer that has parameters: "
            "keep other axes (windows, positions) behind it, declare modules whose rows are parts "
            "of samples (folded_modules=[...]), or give this part a rule of its own "
            f"(flash_clipping.register_rule).{ONE_BY_ONE}"
        )
        if expected and found not in expected:
            sizes = " or ".join(map(str, sorted(expected)))
            raise FlashClippingError(
                f"FC201 {path}: found {found} samples along the batch axis, but the model was "
                f"called with a batch of {sizes}. {advice}"
            )
        if self.batch_size is not None:
            raise FlashClippingError(
                f"FC201 {path}: found {found} samples along the batch axis, but {self.first_path} "
                f"recorded {self.batch_size} in the same backward. {advice}"
            )
        self.batch_size, self.first_path = found, path

    # -- finishing ----------------------------------------------------------------------------

    def finish(self) -> None:
        """Norms, coefficients, clipped sums into ``p.grad``; never waits for the device."""
        norms_taken = done = False
        with torch.no_grad():
            try:
                self._stand_ins.close()
                if self._is_for_parameters():
                    norms_taken = True
                    first = self.used[0] if self.used else self.elsewhere
                    with full_precision(first[0].device, ends_step=True):
                        self.take_norms()
                        self.add_clipped_sums()
                done = True
            finally:
                if not done:  # its frames may be kept
                    self.forget()
                self.session.end_backward(norms_taken)

    def _is_for_parameters(self) -> bool:
        """Whether the gradient of any parameter that was recorded was asked for.

        ``torch.autograd.grad(loss, x)`` passes by layers, and must leave nothing in ``p.grad``.

        Raises:
            FlashClippingError: it was asked for by ``torch.autograd.grad``.
        """
        if self.is_checkpointed or will_run(get_gradient_edge(self.session.options.anchor).node):
            return bool(self.used or self.elsewhere)
        recorded = [*chain(*self.used, self.elsewhere)]
        self.asked = {id(param) for param in recorded if self._will_get(param)}
        self.is_for_all = len(self.asked) == len(set(map(id, recorded)))
        return bool(self.asked)

    def _will_get(self, param: nn.Parameter) -> bool:
        """Whether the running backward is to leave a gradient with this parameter."""
        try:
            return bool(will_run(get_gradient_edge(param).node))
        except RuntimeError as error:
            if "autograd.grad" not in str(error):
                raise
            raise FlashClippingError(
                "FC411 torch.autograd.grad was asked for gradients of a wrapped model's "
                "parameters; clipped sums are only left by loss.backward(), in p.grad. Call that; "
                "or, for ordinary gradients, call the model and torch.autograd.grad between "
                "module.disable_hooks() and module.enable_hooks()."
            ) from None

    def forget(self) -> None:
        """Let go of all factors."""
        self.call_paths.clear()
        self.used.clear()
        self.factors.clear()
        if self.plan is not None:
            self.groups.forget()

    def take_norms(self) -> None:
        """Complete the norms of all parameters and turn them into coefficients."""
        if self.units is not None:
            self.batch_size = self.units.count
        params = self.session.options.trainable()
        self.params = dict(zip(map(id, params), params, strict=True))
        keys = [*map(id, chain.from_iterable(self.used))]
        layout = layout_of_step(keys, self.factors, params, self.backend, tuple(self.paths))
        plans = self.session.calls.plans
        plan = plans.find(layout)
        if plan is None:
            self._check_uses()
        elif self.factors:
            found = self.factors[0].batch_size  # it speaks for all
            if self.batch_size is None and found in self.session.expected_batch_sizes():
                self.batch_size, self.first_path = found, self.call_paths[0]
            elif found != self.batch_size:
                self._check_batch_size(self.call_paths[0], found)
        factors = self.merged(keys)
        if plan is None:
            plan = plan_of(factors, params, self.paths)
            plans.keep(layout, plan)
        del layout  # it holds factors' operands
        self.groups = GroupedFactors(self.backend, factors, plan)
        self.plan = plan
        del factors
        blocks, hidden = self._sqnorms(plan)
        # Loss reduction "mean": what arrived is 1/B of every sample's own gradient.
        scale = 1.0
        if self.session.options.loss_reduction == "mean":
            # Over rows, whoever they belong to.
            units = self.units
            scale = float(self.batch_size or 0) if units is None else units.scale_of_mean()
        norms_PB = self._norms(params, blocks, plan, scale)
        if self.units is not None:
            norms_PB = self.units.without_lost(norms_PB)
        norms_PB, doubts = self._of_whole_gradients(params, norms_PB, Doubts(hidden, scale))
        coef = self._clip(params, norms_PB, doubts)
        self.coef = Coefficients(coef * scale, params, plan)

    def _sqnorms(self, plan: Plan) -> tuple[Blocks, Blocks]:
        """Squared norms ``[n, B]`` of several parameters at a time, and whose they are; and what
        rounding may hide of those that are released by another product."""
        return self.groups.sqnorms(plan)

    def _clip(self, params: list[nn.Parameter], norms_PB: Tensor, doubts: Doubts) -> Tensor:
        """Coefficients by these norms."""
        return self.session.options.clip(params, norms_PB, doubts)

    def _check_uses(self) -> None:
        """Look at the batch size of every use of a parameter."""
        factors = iter(self.factors)
        for path, params in zip(self.call_paths, self.used, strict=True):
            for param in params:
                size = next(factors).batch_size
                if size != self.batch_size:
                    self._check_batch_size(path, size)
                self.paths[id(param)] = path

    def merged(self, keys: Sequence[int]) -> dict[int, PerSampleGrad]:
        """One factor per parameter: all of its uses are in."""
        uses, self.factors = self.factors, []
        factors = dict(zip(keys, uses, strict=True))
        if len(factors) == len(keys):
            return factors
        # Only parameters that were used several times have anything to merge.
        several = {key for key, count in Counter(keys).items() if count > 1}
        by_key: dict[int, list[PerSampleGrad]] = {key: [] for key in factors if key in several}
        for key, factor in zip(keys, uses, strict=True):
            if key in several:
                by_key[key].append(factor)
        uses.clear()
        for key in by_key:  # letting go of what has been merged
            factors[key] = merge(by_key[key])
            by_key[key] = []
        return factors

    def _of_whole_gradients(
        self, params: Sequence[nn.Parameter], norms_PB: Tensor, doubts: Doubts
    ) -> tuple[Tensor, Doubts]:
        """Norms and doubts of all of the gradients, where this process has parts of them only."""
        return norms_PB, doubts

    def _norms(
        self, params: Sequence[nn.Parameter], blocks: Blocks, plan: Plan, scale: float
    ) -> Tensor:
        """Norms ``[P, B]`` of every sample's own gradient, which is what arrived times ``scale``; 0
        for what backward did not reach."""
        device = blocks[0][1].device if blocks else params[0].device
        rows_of: list[int] = []
        found: list[Tensor] = []
        for keys, sq in blocks:
            rows_of += keys
            found.append(sq)
        dtype = accumulator(*found)
        if plan.order is None or plan.rows_of != rows_of:  # blocks are cut as whoever ran cuts them
            row_of = {key: row for row, key in enumerate(rows_of)}
            plan.order = None  # until the rest is there: an interrupt may come at any line
            plan.rows_of = rows_of
            plan.unreached = [key for key in plan.trainable if key not in row_of]
            rows = [row_of.get(key, len(row_of)) for key in plan.trainable]
            plan.order = to_device(rows, device, torch.int64)
        for i, sq in enumerate(found):  # they are few, and none waits
            found[i] = sq.to(device, dtype, non_blocking=True)
        if plan.unreached:
            found.append(torch.zeros((1, self.batch_size or 0), dtype=dtype, device=device))
        sq_PB = torch.cat(found).index_select(0, plan.order)
        # A sum that cancels may come out below zero. An overflow is no such sum, and must not be 0.
        sq_PB = sq_PB.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.nan).clamp_(min=0)
        return sq_PB.sqrt_().mul_(scale)

    def add_clipped_sums(self) -> None:
        """Add every parameter's clipped sum into ``p.grad``, letting go of factors on the way."""
        assert self.coef is not None and self.plan is not None
        self.groups.add_clipped_sums(self.plan, self.coef, self._add)
        # A parameter that this batch did not reach still takes part in the step: it gets noise.
        for key in self.plan.unreached if self.is_for_all else ():
            param = self.params[key]
            if param.grad is None:
                self._put(param, torch.zeros_like(param, dtype=accumulation_dtype(param.dtype)))
        params = self.params
        self.session.options.note_sums(
            params.values()
            if self.is_for_all
            else [param for key, param in params.items() if key in self.asked]
        )

    def _add(self, keys: Sequence[int], grads: Sequence[Tensor]) -> None:
        params = [*map(self.params.__getitem__, keys)]
        is_new = all(map(operator.is_, map(_GRAD, params), repeat(None)))
        if self.is_for_all and is_new and [*map(_SHAPE, grads)] == [*map(_SHAPE, params)]:
            for param, grad in zip(params, grads, strict=True):  # nearly all
                param.grad = grad
            return
        for key, param, grad in zip(keys, params, grads, strict=True):
            if self.is_for_all or key in self.asked:
                self._put(param, grad)

    def _put(self, param: nn.Parameter, grad: Tensor) -> None:
        """Where gradients go: add to ``p.grad`` as autograd would, but in the sum's own dtype.

        Rounding a sum to 16 bits depends on all samples of the batch, so it waits until noise has
        been added (:class:`~flash_clipping.FlashDPOptimizer`).
        """
        if grad.shape != param.shape:
            grad = grad.view_as(param)
        if param.grad is None:
            param.grad = grad
        elif param.grad.dtype == grad.dtype:
            param.grad.add_(grad)
        else:  # of a backward with recording off, say
            param.grad = param.grad + grad


def stored_where_cheaper(
    factors: Sequence[PerSampleGrad], readers: Callable[[], int], backend: str
) -> Sequence[PerSampleGrad]:
    """Form per-sample gradients now where that is cheapest and takes no more memory."""
    worth = [factor.is_worth_storing(readers) for factor in factors]
    if not any(worth):
        return factors
    # A bias alone would keep its rows to the end.
    return [
        factor.stored(backend) if is_worth or isinstance(factor, SumGrad) else factor
        for factor, is_worth in zip(factors, worth, strict=True)
    ]
