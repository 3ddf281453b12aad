"""``mode="one_by_one"``: samples run through the model one at a time, each with a graph of its own.

Exact for every model, and B times slower. No layer is tapped and nothing is proven, as nobody else
is in the batch. The parameters of a sample's run are *aliases* of the model's: outputs of one
autograd function, :class:`_Fork`. Autograd runs its backward once, when the gradients of all uses
have arrived, which is the whole gradient of that sample, second derivatives included. Its norm is
taken, and it is added clipped to the sums: memory is one gradient more. Forks of earlier samples
come later in backward, as autograd goes by the order in which nodes were made.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flash_clipping._compat import (
    SPECTRAL_NORM,
    call_of,
    checkpoints_replaced,
    memory_id,
    parametrizations_cached_anew,
    will_run,
)
from flash_clipping.capture.batch_size_checks import check_against_loader
from flash_clipping.capture.draws import EVERY_ROW
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.inputs import map_tensors, tensors_in
from flash_clipping.capture.no_samples import DID_NOT_RUN, NoSamples, made_up
from flash_clipping.capture.no_trace import put_back, random_state, untouched
from flash_clipping.capture.one_sample import OF_NOBODY, Batch, Joined, Way, of_no_rows, way_of
from flash_clipping.capture.units import Units
from flash_clipping.engine.buffers import BufferWatch
from flash_clipping.engine.model_watch import ParameterGuards, Structure
from flash_clipping.engine.unsupported import PIPELINES, refuse_around, refuse_in_pipeline
from flash_clipping.errors import FlashClippingError, NotServed
from flash_clipping.factors import accumulation_dtype
from flash_clipping.finish.backward_pass import BackwardPass
from flash_clipping.finish.clipping import Doubts, total_norm

_PAST_THE_SAMPLES = (
    "added without being clipped. In mode='one_by_one' a sample's gradient is what its own run of "
    "the model leaves. Use the parameter in the model's forward; for a penalty on weights, the "
    "optimizer's weight_decay. Call the wrapped model itself: what compiles it, or calls its "
    "forward, goes past the samples."
)

_OF_PARAMETERS = (
    "the model: in mode='one_by_one' it returned a parameter, or what it computed from parameters "
    "alone. That is one value for all samples, and whose gradient comes back to it would not be "
    "known. Use mode='one_pass', or return a row of it for each sample:\n"
    "    parameter.expand(len(x), *parameter.shape)"
)

_OF_ANOTHER_RUN = (
    "the model: in mode='one_by_one' a sample's run read what another run had computed from "
    "parameters, and left in a cache. Gradients of several samples would come back to one. Compute "
    "it in each forward, or keep it in an attribute, a list or a dict of its module."
)

#: Attributes of every module.
_OF_MODULES = ("_parameters", "_buffers", "_modules")


def refuse_replay(what: str) -> NoReturn:
    """Refuse to compile a model in this mode, or to replay its steps."""
    raise NotServed(
        f"{what}: found mode='one_by_one', in which samples run one at a time, each as it is: "
        "nothing is compiled or replayed. Leave it out."
    )


class OneByOne:
    """Stands in for the call of a wrapped model's root, with its hooks.

    Args:
        model: the wrapped model.
        wrapper: the same, or, where it is used as it is, its root.
        handles: where hooks are added.
    """

    def __init__(self, model: Any, wrapper: nn.Module, handles: list[Any]):
        self.model, self.root, self.session = model, model._module, model._session
        self.session.backward_pass_class = self.new_pass
        self.guards = ParameterGuards(
            self.root, model._trainable, self.session, model.sum_dtype, handles, _PAST_THE_SAMPLES
        )
        self.guards.watch_new()
        self._structure = Structure(wrapper)
        self._buffers = BufferWatch(self.root, self.session) if model.strict else None
        #: Arguments that were lists of samples, and lists of inputs of all samples.
        self._are_samples: dict[str, bool] = {}
        #: The samples of calls that a backward may come to.
        self._calls: weakref.WeakSet[Samples] = weakref.WeakSet()
        #: How each tensor that the model returns grows with samples, once it was looked at.
        self._grow: list[Way | None] | None = None
        #: What the model returns for no samples, once it is known.
        self._none: tuple[Any] | None = None
        self._runs = False
        self._compiled = self.root._compiled_call_impl
        self.install()
        warnings.warn(
            'mode="one_by_one": samples run through the model one at a time, forward and backward, '
            "so that a step takes as many runs as the batch has samples.",
            stacklevel=6,
        )

    def install(self) -> None:
        """Stand where ``nn.Module.compile()`` puts what replaces a module's call."""
        self.root._compiled_call_impl = self

    def new_pass(self, session: Any) -> SamplesPass:
        """A backward pass that begins."""
        return SamplesPass(self.model, self._calls, session)

    def remove(self) -> None:
        """The root's call, and the dtypes that gradients have to have, are as they were."""
        self.guards.remove()
        self.root._compiled_call_impl = self._compiled

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_calls": None, "_runs": False, "_compiled": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._calls = weakref.WeakSet()
        self.install()  # copies of modules lose it

    # -- forward --------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, call, given = self.session, call_of(self.root), None
        if session.units_of_calls.sample_of is not None:
            given, kwargs = session.units_of_calls.argument(self.root, args, kwargs)
        if self._runs or not session.enabled:
            return call(*args, **kwargs)
        if not torch.is_grad_enabled():
            session.draw_of(tensors_in((args, kwargs)))
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
        self._look_before(kwargs)
        batch = Batch(args, kwargs, session.batch_axis, session.drawn, self._are_samples)
        forward = self._begin(batch, given)
        groups = self._groups(batch, forward)
        samples = Samples(forward, session, len(groups))
        self._calls.add(samples)
        found = _Found(self._structure.modules)
        outputs: list[Any] = []
        kept: list[dict[Any, Any]] = []
        nodes_before = {x.grad_fn for x in batch.tensors}
        for number, rows in enumerate(groups):
            if not rows:
                continue
            if outputs:  # no sample finds what another has left
                found.put_back()
            own_args, own_kwargs = batch.of(rows)
            with self._on(samples.aliases(number)), _as_samples_run():
                outputs.append(call(*own_args, **own_kwargs))
            kept.append(found.kept())
            last = number, outputs[-1], nodes_before
        if outputs:
            samples.refuse_others(*last)
        if self._buffers is not None:
            self._buffers.after_forward(self._structure.modules, args, kwargs)
        self._structure.check()
        if not outputs:
            return self._of_none(call, args, kwargs)
        groups = [rows for rows in groups if rows]
        join = Joined(groups, session.batch_axis, session.loss_reduction == "mean")
        join.ways = self._ways_to_join(call, batch, groups, outputs)
        output = join(outputs)
        if self._none is None:
            self._none = (of_no_rows(output, batch.count, session.batch_axis),)
        places = [place for place in kept[0] if all(place in of_one for of_one in kept)]
        also = [join([of_one[place] for of_one in kept]) for place in places]
        for (holder, key), value in zip(places, also, strict=True):
            found.holders[holder][0][key] = value
        self._watch_outputs(forward, (output, also))
        return output

    def _ways_to_join(
        self, call: Any, batch: Batch, groups: list[list[int]], outputs: list[Any]
    ) -> dict[int, Way]:
        """How tensors without a row for each row of a sample grow with samples, by their ``id`` in
        the first output: seen once, in a run of two samples together."""
        first = tensors_in(outputs[0])
        odd = any(x.dim() <= batch.axis or x.shape[batch.axis] != len(groups[0]) for x in first)
        if not odd and len(first) == 1:
            return {}
        if self._grow is None or len(self._grow) != len(first):
            if len(groups) < 2:
                return {}
            second, both = tensors_in(outputs[1]), self._run(call, *batch.of(groups[0] + groups[1]))
            if not len(first) == len(second) == len(both):
                return {}
            ways = [*map(way_of, first, second, both)]
            same = [
                torch.equal(x, y) and torch.equal(x, z)
                for x, y, z in zip(first, second, both, strict=True)
            ]
            # Losses may be 0 for any sample.
            open_yet = [now and not x.any() for now, x in zip(same, first, strict=True)]
            of_parameters = {memory_id(p.untyped_storage()) for p in self.session.trainable()}
            if any(same) and (other := self._run(call, *batch.with_other_values(groups[0]))):
                for n, x in enumerate(first):
                    if not same[n] or not torch.equal(x, other[n]):
                        continue
                    if not x.requires_grad:
                        ways[n] = OF_NOBODY
                    elif not open_yet[n] or memory_id(x.untyped_storage()) in of_parameters:
                        raise FlashClippingError(_OF_PARAMETERS)
            if any(open_yet):
                return _by_id(first, ways)
            self._grow = ways
        return _by_id(first, self._grow)

    def _run(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that another run of the model returns; none if it does not run."""
        devices = [*{x.device for x in self.session.state() if x.is_cuda}]
        with (
            contextlib.suppress(*DID_NOT_RUN),
            untouched(self.root),
            random_state(devices, seed=0),
            torch.no_grad(),
        ):
            return tensors_in(call(*args, **kwargs))
        return []

    def _of_none(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns for a batch without samples: as for others, without their rows.
        Its backward leaves empty norms and sums of 0."""
        session, params = self.session, self.session.trainable()
        if self._none is None:
            self._none = (self._of_made_up(call, args, kwargs),)

        def anew(x: Tensor) -> Tensor:
            if not x.requires_grad:
                return x.clone()
            return NoSamples.apply(session, params, x.detach(), [*x.shape], session.anchor, *params)

        return map_tensors(anew, self._none[0])

    def _of_made_up(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same of a sample of zeros, or of ones."""
        axis, failure = self.session.batch_axis, None
        devices = [*{x.device for x in self.session.state() if x.is_cuda}]
        for fill in (0, 1):
            own_args, own_kwargs = made_up(args, kwargs, axis, 1, fill)
            try:
                with untouched(self.root), random_state(devices, seed=0), torch.enable_grad():
                    return of_no_rows(call(*own_args, **own_kwargs), 1, axis)
            except torch.OutOfMemoryError:
                raise
            except DID_NOT_RUN as error:
                failure = failure or error
        raise FlashClippingError(
            "the model: called with a batch without samples, which Poisson sampling draws now and "
            "then, before any other. To learn what it returns it was run on a sample made of "
            "zeros, and did not run. Expected a forward that runs on it, or a first batch with "
            f"samples. The error was {type(failure).__name__}: {failure}"
        ) from failure

    def _look_before(self, kwargs: dict[str, Any]) -> None:
        """Watch new parameters, and refuse what cannot be clipped."""
        refuse_around(self.root, may_be_replica=False)
        if PIPELINES in sys.modules:
            refuse_in_pipeline(self.root)
        if self._buffers is not None:
            self._buffers.before_forward(self._structure.modules)
        self.guards.watch_new()
        if kwargs.get("num_items_in_batch") is not None:
            raise FlashClippingError(
                "the model: found num_items_in_batch in mode='one_by_one'. A number that is "
                "counted in the batch makes one sample's gradient depend on the others. Leave it "
                "out: each sample's loss is the mean over its own labels."
            )

    def _begin(self, batch: Batch, given: Any) -> ForwardCall:
        session, tensors = self.session, batch.tensors
        draw = session.draw_of(tensors)
        units: Units | None = None
        if session.units_of_calls.are_known:
            units = session.units_of(given, tensors, draw)
        forward = session.begin_forward(tensors, units=units)
        forward.draw, forward.counted_rows = draw, EVERY_ROW
        if session.padding.rows is not None:
            forward.counted_rows = session.padding.of_call(draw, captured=False)
        check_against_loader(session, forward, advice="")
        if forward.recorded:
            self.model.running_step.await_backward(tensors)
        return forward

    def _groups(self, batch: Batch, forward: ForwardCall) -> list[list[int]]:
        """The rows of each sample, or unit; rows of nobody come last."""
        if (units := forward.units) is None:
            return [[b] for b in range(batch.count)]
        if units.by_position:
            raise FlashClippingError(
                "the model: units are parts of rows, and mode='one_by_one' runs whole rows. Give "
                "each unit rows of its own, or use another mode."
            )
        groups: list[list[int]] = [[] for _ in range(units.count + 1)]
        for row, unit in enumerate(units.map.index_M.tolist()):
            groups[unit].append(row)
        return groups

    @contextmanager
    def _on(self, aliases: dict[int, Tensor]) -> Iterator[None]:
        """Let the model run on these in the place of its parameters, by ``id``."""
        held: list[tuple[Any, Any, Any]] = []
        for module in self._structure.modules:
            places: list[Any] = [(vars(module), item) for item in vars(module).items()]
            for value in vars(module).values():
                if type(value) in (list, dict):
                    items = enumerate(value) if type(value) is list else value.items()
                    places += [(value, item) for item in items]
            held += [(where, key, p) for where, (key, p) in places if id(p) in aliases]
        try:
            for where, key, param in held:
                where[key] = aliases[id(param)]
            yield
        finally:
            for where, key, param in held:
                where[key] = param

    def _watch_outputs(self, forward: ForwardCall, output: Any) -> None:
        """Begin a backward pass where one reaches an output of this call."""
        session, leaves = self.session, tensors_in(output)
        self.model.running_step.note_results(forward, leaves)

        def start_backward(grad: Tensor) -> None:
            if session.enabled:
                session.begin_backward(forward)

        for leaf in leaves:
            if leaf.requires_grad:
                leaf.register_hook(start_backward)


def _by_id(tensors: Sequence[Tensor], ways: Sequence[Way | None]) -> dict[int, Way]:
    return {id(x): way for x, way in zip(tensors, ways, strict=True) if way is not None}


class _Found:
    """A model as a batch finds it, and every sample of it."""

    def __init__(self, modules: Sequence[nn.Module]):
        self._modules = [(module, {**vars(module)}, {**module._buffers}) for module in modules]
        self._held = [
            (value, value.copy())
            for _, attributes, _ in self._modules
            for name, value in attributes.items()
            if type(value) in (dict, OrderedDict, list) and name not in _OF_MODULES
        ]
        #: Attributes of modules, dicts and lists among them, with what they held, by ``id``.
        self.holders: dict[int, tuple[Any, dict[Any, Any]]] = {
            id(holder): (holder, dict(_items(content)))
            for holder, content in (
                *((vars(module), attributes) for module, attributes, _ in self._modules),
                *self._held,
            )
        }
        # Its power iteration is of the weight alone, and one step further with every run.
        vectors = [m._buffers for m in modules if type(m) is SPECTRAL_NORM]
        self._vectors = [
            (x, x.clone()) for of_one in vectors for x in of_one.values() if x is not None
        ]

    def put_back(self) -> None:
        """Let the model be as it was."""
        for module, attributes, buffers in self._modules:
            put_back(module, attributes, buffers)
        for value, content in self._held:
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        for x, before in self._vectors:
            x.copy_(before)

    def kept(self) -> dict[tuple[int, Any], Any]:
        """What was left on modules and requires grad (losses of layers, say), by holder and key."""
        return {
            (number, key): value
            for number, (holder, before) in self.holders.items()
            for key, value in _items(holder)
            if value is not before.get(key) and any(x.requires_grad for x in tensors_in(value))
        }


def _items(holder: Any) -> list[tuple[Any, Any]]:
    return [*enumerate(holder)] if isinstance(holder, list) else [*holder.items()]


@contextmanager
def _as_samples_run() -> Iterator[None]:
    """Re-entrant checkpoints run as the others do: a backward inside of backward would bring a
    sample's gradient in parts. What is compiled runs as it is, which can be derived twice."""
    with ExitStack() as stack:
        stack.enter_context(checkpoints_replaced(_NotReentrant))
        stack.enter_context(parametrizations_cached_anew())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


class _NotReentrant:
    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        if not any(isinstance(x, Tensor) and x.requires_grad for x in args):
            with torch.no_grad():  # as there, which warns of it
                return function(*args)
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


# -- backward --------------------------------------------------------------------------------------


class Samples:
    """The samples of one call of the model; their forks hold it.

    Args:
        forward: the call.
        session: of the wrapped model.
        count: how many there are, and one for rows of nobody.
    """

    def __init__(self, forward: ForwardCall, session: Any, count: int):
        self.forward, self.session, self.count = forward, session, count
        self.params: list[nn.Parameter] = session.trainable()
        #: Autograd's node of each sample.
        self._forks: dict[int, weakref.ref[Any]] = {}
        #: Whether a backward has gone through them.
        self.are_over = False

    def aliases(self, number: int) -> dict[int, Tensor]:
        """What stands for each parameter, by its ``id``, in the run of this sample."""
        if not self.params:  # all are frozen
            return {}
        made = _Fork.apply(self, number, self.session.anchor, *self.params)
        self._forks[number] = weakref.ref(made[0].grad_fn)
        return dict(zip(map(id, self.params), made, strict=True))

    def refuse_others(self, number: int, output: Any, before: set[Any]) -> None:
        """Refuse a run of this sample, the last one, that used parameters of another run, past the
        nodes that were there before."""
        seen = before | {None}
        nodes: list[Any] = [x.grad_fn for x in tensors_in(output)]
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            is_fork = isinstance(getattr(node, "samples", None), Samples)
            if is_fork and node is not self._forks[number]():
                raise FlashClippingError(_OF_ANOTHER_RUN)
            nodes += [other for other, _ in node.next_functions]

    def will_come(self, number: int) -> bool:
        """Whether the running backward comes to this sample."""
        fork = self._forks[number]() if number in self._forks else None
        return fork is not None and will_run(fork)


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
        if not session.enabled:
            return None, None, None, *grads
        with torch.no_grad():
            session.begin_backward().take(ctx.samples, ctx.number, grads)
        return None, None, None, *[None] * len(grads)


class SamplesPass(BackwardPass):
    """One backward pass, in which samples' gradients arrive one after the other."""

    def __init__(self, model: Any, calls: weakref.WeakSet[Samples], session: Any):
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

    def take(self, samples: Samples, number: int, grads: Sequence[Tensor | None]) -> None:
        """Take the whole gradient of a sample in one call of the model; all uses in several calls
        are one gradient."""
        if id(samples) not in self.arrived:
            self._begin(samples)
        self.arrived[id(samples)][1].add(number)
        if number in self.held:
            pairs = zip(self.held.pop(number), grads, strict=True)
            grads = [
                own if also is None else also if own is None else own + also for own, also in pairs
            ]
        for other in self.others:
            _, numbers = self.arrived.get(id(other), (other, ()))
            if number not in numbers and other.will_come(number):
                self.held[number] = grads
                return
        self._add_sample(samples, number, grads)

    def _begin(self, samples: Samples) -> None:
        """A call of the model that is reached first."""
        if samples.are_over:
            raise FlashClippingError(
                "the model: backward() came a second time through a call in mode='one_by_one'. "
                "Its samples' gradients were clipped already, and would count twice. Call the "
                "model again, and backward() once over all losses of it."
            )
        first = next(iter(self.arrived.values()), (samples,))[0]
        if (first.count, [*map(id, first.params)]) != (samples.count, [*map(id, samples.params)]):
            raise FlashClippingError(
                f"the model: backward() goes through calls of {first.count} and {samples.count} "
                "samples in mode='one_by_one', and it is not known which of them are the same. "
                "Call backward() for each batch by itself."
            )
        self.arrived[id(samples)] = samples, set()
        self.used = [samples.params]
        if self.session.loss_reduction == "mean":  # what arrives is one part of B
            units = self.units
            self.scale = units.scale_of_mean() if units is not None else float(samples.count)

    def _add_sample(self, samples: Samples, number: int, grads: Sequence[Tensor | None]) -> None:
        """Take the norm of a sample's gradient, and add it clipped."""
        norms_P = self._norms_of(samples.params, grads)
        coef = self._coefficients(number, norms_P)
        self.norms_P[number] = norms_P
        for place, (param, grad) in enumerate(zip(samples.params, grads, strict=True)):
            if grad is None:
                continue
            if id(param) not in self.sums:
                dtype = accumulation_dtype(param.dtype)
                self.sums[id(param)] = torch.zeros_like(param, dtype=dtype)
            sums, own = self.sums[id(param)], coef if coef.dim() == 0 else coef[place]
            grad = grad.to_dense() if grad.layout != torch.strided else grad
            own = own.to(sums.device, sums.dtype)
            # What is not finite has coefficient 0, and 0 times it is no number.
            sums.addcmul_(torch.where(own > 0, grad.to(sums.dtype), 0), own)

    def _norms_of(self, params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> Tensor:
        """``[P]``, fp32; fp64 for parameters in float64."""
        device = params[0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        found = [
            torch.zeros((), dtype=wide, device=device)
            if grad is None
            else torch.linalg.vector_norm(_values(grad), dtype=wide).to(device)
            for grad in grads
        ]
        is_wide = any(param.dtype == torch.float64 for param in params)
        return (torch.stack(found) * self.scale).to(wide if is_wide else torch.float32)

    def _coefficients(self, number: int, norms_P: Tensor) -> Tensor:
        """By which to multiply what arrived: ``[]``, or ``[P]`` when per layer."""
        model, norms_P1 = self.model, norms_P.unsqueeze(1)
        per_layer = model.clipping == "per_layer"
        coef = model._coefficients(norms_P1 if per_layer else total_norm(norms_P1)).squeeze(-1)
        counted, _ = model._session.rows_and_draw()
        if self.units is not None and number == self.units.count:
            coef = coef * 0  # rows of nobody
        elif counted.rows is not None:
            coef = coef.masked_fill(counted.mask(coef.device)[number], 0)
        return coef * self.scale

    def finish(self) -> None:
        """Publish norms, and add the sums to ``p.grad``."""
        norms_taken = False
        with torch.no_grad():
            try:
                if self._is_for_parameters():
                    norms_taken = True
                    self._leave()
            finally:
                self.forget()
                self.session.end_backward(norms_taken)

    def _leave(self) -> None:
        reached = [samples for samples, _ in self.arrived.values()]
        params = reached[0].params if reached else [*self.without_samples]
        norms_PB = torch.zeros((len(params), 0), device=params[0].device)
        for samples in reached:
            samples.are_over = True
        if reached:
            none_P = torch.zeros_like(next(iter(self.norms_P.values())))
            count = reached[0].count if self.units is None else self.units.count
            norms_PB = torch.stack([self.norms_P.get(b, none_P) for b in range(count)], 1)
        one_device = len({param.device for param in params}) == 1
        self.session.clip(params, norms_PB, Doubts((), self.scale), one_device)
        for param in params:
            if not self.is_for_all and id(param) not in self.asked:
                continue
            if (found := self.sums.pop(id(param), None)) is not None:
                self._put(param, found)
            elif param.grad is None:
                self._put(param, torch.zeros_like(param, dtype=accumulation_dtype(param.dtype)))
        asked = [p for p in params if self.is_for_all or id(p) in self.asked]
        self.session.note_sums(asked)

    def forget(self) -> None:
        super().forget()
        for held in (self.sums, self.norms_P, self.held):
            held.clear()


def _values(grad: Tensor) -> Tensor:
    """The numbers that a gradient is made of."""
    return grad.coalesce().values() if grad.is_sparse else grad
