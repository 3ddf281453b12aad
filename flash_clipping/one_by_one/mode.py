"""``mode="one_by_one"``: samples run through the model one at a time, each with a graph of its own.

Exact for every model, and B times slower. No layer is tapped and nothing is proven, as nobody else
is in the batch. The parameters of a sample's run are *aliases* of the model's: outputs of one
autograd function, :class:`_Fork`. Autograd runs its backward once, when the gradients of all uses
have arrived, which is the whole gradient of that sample, second derivatives included. Its norm is
taken, and it is added clipped to the sums: memory is one gradient more. Forks of earlier samples
come later in backward, as autograd goes by the order in which nodes were made.

Some functions of autograd run layers again in a backward of their own (adjoint ODEs, reversible
blocks). They find the sample's aliases there, as hooks and recomputations find the attributes that
its forward left (:class:`_Run`). What a backward inside of backward brings is added to that
sample's gradient.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from flash_clipping._compat import (
    call_of,
    graph_task,
    memory_id,
    parametrizations_cached_anew,
    roots_of_backward,
    will_run,
)
from flash_clipping.capture.batch_size_checks import refuse_no_rows
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.inputs import refuse_layout, tensors_in
from flash_clipping.capture.no_trace import random_state
from flash_clipping.capture.padding import NO_ROW
from flash_clipping.capture.session import ClippingSession
from flash_clipping.engine.buffers import BufferWatch
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.engine.loss_graph import walk
from flash_clipping.engine.told_rows import draw_of
from flash_clipping.engine.unsupported import PIPELINES, refuse_around, refuse_in_pipeline
from flash_clipping.errors import FlashClippingError, warn
from flash_clipping.factors import accumulation_dtype
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.clipping import Doubts, total_norm
from flash_clipping.one_by_one.arguments import Batch, Joined, Way, way_of
from flash_clipping.one_by_one.state import Content, State

_PAST_THE_SAMPLES = (
    "added without being clipped. In mode='one_by_one' a sample's gradient is what its own run of "
    "the model leaves. Use the parameter in the model's forward; for a penalty on weights, the "
    "optimizer's weight_decay. Call the wrapped model itself: what compiles it, or calls its "
    "forward, goes past the samples."
)

_OF_PARAMETERS = (
    "FC418 the model: in mode='one_by_one' it returned a parameter, or what it computed from "
    "parameters alone. That is one value for all samples, and whose gradient comes back to it "
    "would not be known. Use mode='one_pass', or return a row of it for each sample:\n"
    "    parameter.expand(len(x), *parameter.shape)"
)

_OF_ANOTHER_RUN = (
    "FC185 the model: in mode='one_by_one' a sample's run read what another run had computed from "
    "parameters, and left in a cache. Gradients of several samples would come back to one. Compute "
    "it in each forward, or keep it in an attribute, a list or a dict of its module."
)

_ANOTHER_WAY = (
    "FC185 the loss: in mode='one_by_one' it reads what forward has left elsewhere than in the "
    "model's outputs and in attributes of its modules: in a global, a closure or an object. That "
    "is of one sample alone. Return it from forward, and read it there:\n"
    "    return output, value"
)

_TOO_LATE = (
    "FC186 the model: in mode='one_by_one' a backward of its own ran layers again after the "
    "gradient of their sample was clipped. Keep activations instead, by a way that autograd "
    "follows."
)

#: In the metadata of autograd's nodes that put samples' outputs together: their runs, which must
#: live as long.
_JOINED = "flash_clipping.samples"


class OneByOne:
    """Stands in for the call of a wrapped model's root, with its hooks.

    Args:
        model: the wrapped model.
        wrapper: the same, or, where it is used as it is, its root.
        handles: where hooks are added.
    """

    def __init__(self, model: GradSampleHooksFlashClipping, wrapper: nn.Module, handles: list[Any]):
        self.model, self.root, self.session = model, model._module, model._session
        self.session.calls.backward_pass_class = self.new_pass
        self.parameters = model._trainable
        self.parameters.watch(wrapper, self.session, handles, _PAST_THE_SAMPLES)
        self._buffers = BufferWatch(self.root, self.session) if model.strict else None
        #: Arguments that were lists of samples, and lists of inputs of all samples.
        self._are_samples: dict[str, bool] = {}
        #: The samples of calls that a backward may come to.
        self._calls: weakref.WeakSet[Samples] = weakref.WeakSet()
        #: How each tensor that the model returns grows with samples, once it was checked.
        self._grow: list[Way | None] | None = None
        self._runs = False
        self._compiled = self.root._compiled_call_impl
        self.root._compiled_call_impl = self  # where nn.Module.compile() puts what replaces a call
        warn(
            'FC180 mode="one_by_one": samples run through the model one at a time, forward and '
            "backward, so that a step takes as many runs as the batch has samples.",
            stacklevel=6,
        )

    def new_pass(self, session: ClippingSession) -> SamplesPass:
        """A backward pass that begins."""
        return SamplesPass(self.model, self._calls, session)

    def remove(self) -> None:
        """The root's call, and the dtypes that gradients have to have, are as they were."""
        self.parameters.remove()
        self.root._compiled_call_impl = self._compiled

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_calls": None, "_runs": False, "_compiled": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._calls = weakref.WeakSet()
        self.root._compiled_call_impl = self  # copies of modules lose it

    # -- forward --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, call, given = self.session, call_of(self.root), None
        if session.rows.units_of_calls.sample_of is not None:
            given, kwargs = session.rows.units_of_calls.argument(self.root, args, kwargs)
        if self._runs or not session.mode.enabled:
            return call(*args, **kwargs)
        if not torch.is_grad_enabled():
            draw_of(session, tensors_in((args, kwargs)))
            return call(*args, **kwargs)
        session.enter_forward()
        self._runs = True
        try:
            return self._of_batch(call, given, args, kwargs)
        finally:
            self._runs = False
            session.leave_forward()

    def _of_batch(
        self, call: Any, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        session = self.session
        self._look_before(args, kwargs)
        batch = Batch(
            args, kwargs, session.options.batch_axis, session.rows.drawn, self._are_samples
        )
        forward = self._begin(batch, given)
        groups = self._groups(batch, forward)
        samples = Samples(forward, session, len(groups))
        self._calls.add(samples)
        state = State(self.root, [self, self.model, session, self.parameters.handles])
        numbers = [number for number, rows in enumerate(groups) if rows]
        outputs: list[Any] = []
        kept: list[dict[Any, Any]] = []
        runs: list[_Run] = []
        inputs = {None, *[x.grad_fn for x in batch.tensors]}
        for number in numbers:
            aliases = samples.aliases(number)
            own, copied = state.copied(aliases, last=number == numbers[-1])
            own_args, own_kwargs = batch.of(groups[number], copied)
            with state.holding(own), _as_samples_run():
                outputs.append(call(*own_args, **own_kwargs))
                inside = state.now()
            left, of_one = state.back(inside, {id(aliases[id(p)]): p for p in samples.params})
            kept.append(of_one | batch.left(len(state.holders)))
            results = [x for x in tensors_in((outputs[-1], kept[-1])) if x.grad_fn not in inputs]
            functions = samples.functions_in(number, results, inputs)
            runs.append(_Run(self, state, left, inside if functions else []))
            runs[-1].watch(forward, results, functions)
        if runs:
            state.swap(runs[-1].left)
        if self._buffers is not None:
            self._buffers.after_forward(self.parameters.modules)
        self.parameters.check()
        groups = [groups[number] for number in numbers]
        join = Joined(groups, session.options.batch_axis, session.options.loss_reduction == "mean")
        join.ways = self._ways_to_join(call, state, batch, groups, outputs)
        output = join.apart(outputs)
        places = [place for place in kept[0] if all(place in of_one for of_one in kept)]
        also = [join.apart([of_one[place] for of_one in kept]) for place in places]
        targets = [*state.holders, *[target for target, _, _ in batch.made]]
        for (number, key), value in zip(places, also, strict=True):
            if isinstance(holder := targets[number], list):
                holder[key : key + 1] = [value]  # at its end, too
            else:
                holder[key] = value
        leaves = tensors_in((output, also))
        self.model.running_step.note_results(forward, leaves)
        for leaf in leaves:
            if leaf.grad_fn is not None:
                leaf.grad_fn.metadata[_JOINED] = runs  # type: ignore[index]
        return output

    def _ways_to_join(
        self, call: Any, state: State, batch: Batch, groups: list[list[int]], outputs: list[Any]
    ) -> dict[int, Way]:
        """How tensors without a row for each row of a sample grow with samples, by their ``id`` in
        the first output: seen once, in a run of two samples together."""
        first, ways = tensors_in(outputs[0]), self._grow
        odd = any(x.dim() <= batch.axis or x.shape[batch.axis] != len(groups[0]) for x in first)
        if not odd and len(first) == 1:
            return {}
        if ways is None or len(ways) != len(first):
            both = self._run(call, state, batch, groups[0] + groups[1]) if groups[1:] else []
            of_all = [*zip(first, *map(tensors_in, outputs[1:]), both, strict=False)]
            if len(of_all) < len(first) or len(groups) < 2:
                return {}
            self._grow = ways = [way_of(x, y, both) for x, y, *_, both in of_all]
            params = {memory_id(p.untyped_storage()) for p in self.session.options.trainable()}
            for x, *others in of_all:
                if not x.requires_grad or not all(map(x.equal, others)):
                    continue
                if x.any() or memory_id(x.untyped_storage()) in params:
                    raise FlashClippingError(_OF_PARAMETERS)
                self._grow = None  # a loss, which may be 0 for any sample
        return {id(x): way for x, way in zip(first, ways, strict=True) if way is not None}

    def _run(self, call: Any, state: State, batch: Batch, rows: list[int]) -> list[Tensor]:
        """The tensors that another run of the model returns; none if it does not run."""
        devices = [*{x.device for x in self.session.options.state() if x.is_cuda}]
        own, copied = state.copied({id(x): x.clone() for x in state.buffers})
        args, kwargs = batch.of(rows, copied)
        with suppress(Exception), state.holding(own), random_state(devices, 0), torch.no_grad():
            return tensors_in(call(*args, **kwargs))
        return []

    def _look_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Watch new parameters, and refuse what cannot be clipped, or cut into samples."""
        refuse_around(self.root, may_be_replica=False)
        for x in tensors_in((args, kwargs)):
            if x.layout is not torch.strided or x.is_nested:
                refuse_layout(self.root, x)
        if PIPELINES in sys.modules:
            refuse_in_pipeline(self.root)
        if self._buffers is not None:
            self._buffers.before_forward(self.parameters.modules)
        self.parameters.watch_new()
        if kwargs.get("num_items_in_batch") is not None:
            raise FlashClippingError(
                "FC442 the model: found num_items_in_batch in mode='one_by_one'. A number that is "
                "counted in the batch makes one sample's gradient depend on the others. Leave it "
                "out: each sample's loss is the mean over its own labels."
            )

    def _begin(self, batch: Batch, given: Any) -> ForwardCall:
        session, tensors = self.session, batch.tensors
        if tensors and not tensors[0].numel():
            refuse_no_rows(self.root, session, tensors)
        rows = self.model.follow_rows()
        rows.given = given
        told = rows.of_call(self.root, tensors, (), {})
        forward = session.begin_forward(tensors, units=told.units)
        rows.note(told, forward)
        self.model.running_step.await_backward(tensors)
        return forward

    def _groups(self, batch: Batch, forward: ForwardCall) -> list[list[int]]:
        """The rows of each sample, or unit; rows of no unit come last."""
        if (units := forward.units) is None:
            return [[b] for b in range(batch.count)]
        if units.by_position:
            raise FlashClippingError(
                "FC187 the model: units are parts of rows, and mode='one_by_one' runs whole rows. "
                "Give each unit rows of its own, or use another mode."
            )
        groups: list[list[int]] = [[] for _ in range(units.count + 1)]
        for row, unit in enumerate(units.map.index_M.tolist()):
            groups[unit].append(row)
        return groups


class _Run:
    """What one sample's run has left on the model, for what runs in its backward; ``inside`` with
    aliases of parameters. Nodes of its graph know it weakly: it may hold the graph itself."""

    def __init__(self, owner: OneByOne, state: State, left: Content, inside: Content):
        self.owner, self.state, self.left, self.inside = owner, state, left, inside

    def watch(self, forward: ForwardCall, results: list[Tensor], functions: list[Any]) -> None:
        """Let it be there where backward comes to these results, and in these functions."""
        of_run, session = weakref.ref(self), self.owner.session

        def enter(grad: Tensor) -> None:
            if session.mode.enabled:
                cast(SamplesPass, session.begin_backward(forward)).enter(of_run())

        def applied(of_node: Any, apply: Any, *grads: Any) -> Any:
            if (run := of_run()) is None:
                raise FlashClippingError(_ANOTHER_WAY)
            owner, runs = run.owner, run.owner._runs
            try:
                owner._runs = True
                with run.state.holding(run.inside), _as_samples_run():
                    return apply(of_node(), *grads)
            finally:
                owner._runs = runs

        for x in results:
            x.register_hook(enter)
        for node in functions:
            node.apply = partial(applied, weakref.ref(node), type(node).apply)


@contextmanager
def _as_samples_run() -> Iterator[None]:
    """What is compiled runs as it is, which can be derived twice."""
    is_loaded = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()
    with parametrizations_cached_anew(), eager:
        yield


# -- backward --------------------------------------------------------------------------------------


class Samples:
    """The samples of one call of the model; their forks hold it.

    Args:
        forward: the call.
        session: of the wrapped model.
        count: how many there are, and one for rows of no unit.
    """

    def __init__(self, forward: ForwardCall, session: ClippingSession, count: int):
        self.forward, self.session, self.count = forward, session, count
        self.params: list[nn.Parameter] = session.options.trainable()
        #: Autograd's node of each sample.
        self.forks: dict[int, weakref.ref[Any]] = {}
        #: Whether a backward has gone through them; and whether it may be derived.
        self.are_over = self.are_derived = False

    def aliases(self, number: int) -> dict[int, Tensor]:
        """What stands for each parameter, by its ``id``, in the run of this sample."""
        if not self.params:  # all are frozen
            return {}
        made = _Fork.apply(self, number, self.session.options.anchor, *self.params)
        self.forks[number] = weakref.ref(made[0].grad_fn)
        return dict(zip(map(id, self.params), made, strict=True))

    def functions_in(self, number: int, results: list[Tensor], inputs: set[Any]) -> list[Any]:
        """Functions of autograd that are written in Python, in the graph of this sample's run down
        to those of its inputs.

        Raises:
            FlashClippingError: it used parameters of another run.
        """
        found = []
        for node, _ in walk([x.grad_fn for x in results], None, inputs):
            if isinstance(getattr(node, "samples", None), Samples):
                if node is not self.forks[number]():
                    raise FlashClippingError(_OF_ANOTHER_RUN)
            elif isinstance(node, BackwardCFunction):
                found.append(node)
        return found


class _Fork(torch.autograd.Function):
    """Parameters -> aliases of them, for the runs of one sample."""

    @staticmethod
    def forward(
        ctx: Any, samples: Samples, number: int, anchor: Tensor, *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.samples, ctx.number = samples, number
        ctx.set_materialize_grads(False)
        return tuple(param.detach() for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        session = ctx.samples.session
        if not session.mode.enabled:
            return None, None, None, *grads
        with torch.no_grad():
            session.begin_backward().take(ctx.samples, ctx.number, grads)
        return None, None, None, *[None] * len(grads)


class SamplesPass(BackwardPass):
    """One backward pass, in which samples' gradients arrive one after the other."""

    def __init__(
        self,
        model: GradSampleHooksFlashClipping,
        calls: weakref.WeakSet[Samples],
        session: ClippingSession,
    ):
        super().__init__(session)
        self.model = model
        self.others = [samples for samples in calls if not samples.are_over]
        #: Calls that were reached, by ``id``, and their samples whose gradients are there.
        self.arrived: dict[int, tuple[Samples, set[int]]] = {}
        #: Gradients of samples that another call adds to.
        self.held: dict[int, Sequence[Tensor | None]] = {}
        #: Norms of a sample's own gradient, parameter by parameter, ``[P]``.
        self.norms_P: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}
        self.scale = 1.0
        #: The run whose attributes modules have, and what they had.
        self._run: _Run | None = None
        self._before: Content = []
        self._task = graph_task()
        if not any(samples.are_derived for samples in self.others):
            self._refuse_other_ways()
        for samples in self.others if torch.is_grad_enabled() else ():
            samples.are_derived = True

    def _refuse_other_ways(self) -> None:
        """Refuse a loss that comes to samples' runs past the outputs of the model. Once it was
        derived, its gradients' graph reads what is inside of them."""
        threads = {samples.forward.thread for samples in self.others}
        roots = [x for thread in threads for x in roots_of_backward(thread)]
        nodes = [x.grad_fn if isinstance(x, Tensor) else x.node for x in roots]
        for node, _ in walk([node for node in nodes if node is not None], _JOINED):
            if isinstance(getattr(node, "samples", None), Samples):
                raise FlashClippingError(_ANOTHER_WAY)

    def enter(self, run: _Run | None) -> None:
        """Let modules have what this run has left on them; or what they had."""
        if run is not self._run:
            if self._run is not None:
                self._run.state.swap(self._before)
            self._run = run
            self._before = run.state.swap(run.left) if run is not None else []

    def take(self, samples: Samples, number: int, grads: Sequence[Tensor | None]) -> None:
        """Take the whole gradient of a sample in one call; several calls are one gradient."""
        if id(samples) not in self.arrived:
            self._begin(samples)
        if number in self.norms_P:
            raise FlashClippingError(_TOO_LATE)
        if number in self.held:
            pairs = zip(self.held.pop(number), grads, strict=True)
            grads = [
                own if also is None else also if own is None else own + also for own, also in pairs
            ]
        if graph_task() != self._task:  # of a backward inside of this one: more comes
            self.is_checkpointed = True
            self.held[number] = grads
            return
        self.arrived[id(samples)][1].add(number)
        for other in self.others:
            _, numbers = self.arrived.get(id(other), (other, ()))
            fork = other.forks[number]() if number in other.forks else None
            if number not in numbers and fork is not None and will_run(fork):
                self.held[number] = grads
                return
        self._add_sample(samples.params, number, grads)

    def _begin(self, samples: Samples) -> None:
        """A call of the model that is reached first."""
        if samples.are_over:
            raise FlashClippingError(
                "FC184 the model: backward() came a second time through a call in "
                "mode='one_by_one'. Its samples' gradients were clipped already, and would count "
                "twice. Call the model again, and backward() once over all losses of it."
            )
        first = next(iter(self.arrived.values()), (samples,))[0]
        if (first.count, [*map(id, first.params)]) != (samples.count, [*map(id, samples.params)]):
            raise FlashClippingError(
                f"FC183 the model: backward() goes through calls of {first.count} and "
                f"{samples.count} samples in mode='one_by_one', and it is not known which of them "
                "are the same. Call backward() for each batch separately."
            )
        self.arrived[id(samples)] = samples, set()
        self.used = [samples.params]
        if self.session.options.loss_reduction == "mean":  # what arrives is one part of B
            units = self.units
            self.scale = units.scale_of_mean() if units is not None else float(samples.count)

    def _add_sample(
        self, params: Sequence[nn.Parameter], number: int, grads: Sequence[Tensor | None]
    ) -> None:
        """Take the norm of a sample's gradient, and add it clipped."""
        found = [None if grad is None else grad.to_dense() for grad in grads]
        norms_P = self._norms_of(params, found)
        coef = self._coefficients(number, norms_P)
        self.norms_P[number] = norms_P
        for param, grad, own in zip(params, found, coef.expand(len(params)), strict=True):
            if grad is None:
                continue
            if id(param) not in self.sums:
                dtype = accumulation_dtype(param.dtype)
                self.sums[id(param)] = torch.zeros_like(param, dtype=dtype)
            sums = self.sums[id(param)]
            own = own.to(sums.device, sums.dtype)
            # What is not finite has coefficient 0, and 0 times it is no number.
            sums.addcmul_(torch.where(own.real > 0, grad.to(sums.dtype), 0), own)

    def _norms_of(self, params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> Tensor:
        """``[P]``, fp32; fp64 for parameters in float64."""
        device = params[0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        found = [torch.zeros((), dtype=wide, device=device)] * len(grads)
        for place, grad in enumerate(grads):
            if grad is not None:
                values = torch.view_as_real(grad) if grad.is_complex() else grad
                found[place] = torch.linalg.vector_norm(values, dtype=wide).to(device)
        is_wide = any(param.dtype.to_real() == torch.float64 for param in params)
        return (torch.stack(found) * self.scale).to(wide if is_wide else torch.float32)

    def _coefficients(self, number: int, norms_P: Tensor) -> Tensor:
        """By which to multiply what arrived: ``[]``, or ``[P]`` when per layer."""
        model, norms_P1 = self.model, norms_P.unsqueeze(1)
        per_layer = model.clipping == "per_layer"
        coef = model._coefficients(norms_P1 if per_layer else total_norm(norms_P1)).squeeze(-1)
        counted, _ = model._session.rows_and_draw()
        if counted is NO_ROW or (self.units is not None and number == self.units.count):
            coef = coef * 0  # of no sample
        elif counted.rows is not None:
            coef = coef.masked_fill(counted.mask(coef.device)[number], 0)
        return coef * self.scale

    def finish(self) -> None:
        """Publish norms, and add the sums to ``p.grad``."""
        self.enter(None)
        super().finish()

    def take_norms(self) -> None:
        """Clip what is left, and publish norms."""
        reached = [samples for samples, _ in self.arrived.values()]
        params = reached[0].params
        for number, grads in self.held.items():  # of backwards inside of this one alone
            self._add_sample(params, number, grads)
        for samples in reached:
            samples.are_over = True
        none_P = torch.zeros_like(next(iter(self.norms_P.values())))
        count = reached[0].count if self.units is None else self.units.count
        norms_PB = torch.stack([self.norms_P.get(b, none_P) for b in range(count)], 1)
        self.session.options.clip(params, norms_PB, Doubts((), self.scale))

    def add_clipped_sums(self) -> None:
        """Add the sums to ``p.grad``."""
        asked = [p for p in self.used[0] if self.is_for_all or id(p) in self.asked]
        for param in asked:
            if (found := self.sums.pop(id(param), None)) is not None:
                self._put(param, found)
            elif param.grad is None:
                self._put(param, torch.zeros_like(param, dtype=accumulation_dtype(param.dtype)))
        self.session.options.note_sums(asked)
