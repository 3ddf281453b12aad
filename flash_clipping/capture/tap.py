"""The tapped layer: an ordinary forward, and a backward that hands its factors to the tape.

While a model is wrapped, the ``forward`` of every layer that owns parameters is replaced on the
instance by a tap. A layer with a rule runs inside one ``torch.autograd.Function`` whose backward
computes the input gradient only: a weight gradient that would be thrown away is never computed.
Any other module runs its own forward on stand-ins for its parameters
(:mod:`flash_clipping.capture.bare`), and where those do not serve, under ``vmap`` with one view of
its parameters per sample, so that autograd itself delivers their per-sample gradients:
:mod:`flash_clipping.capture.generic`.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import apply_of, is_alias_of, pytree, transforms_are_active
from flash_clipping.capture.bare import (
    BareParameter,
    UnsupportedUse,
    bare_parameters,
    refuse_bypassed,
    to_samples,
)
from flash_clipping.capture.factor_source import FactorSource
from flash_clipping.capture.forward_call import ForwardCall, in_backward
from flash_clipping.capture.generic import ReadsNoSamples, generic_forward
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.wires import ACTIVE, by_itself, noted_call, traced_call, wiring_of
from flash_clipping.errors import FlashClippingError
from flash_clipping.rules.registry import (
    Needs,
    Rule,
    Scope,
    UnsupportedLayer,
    own,
)

#: Names and parameters that are a layer's own and trainable.
Trainable: TypeAlias = tuple[list[str], list[nn.Parameter]]

#: Modules that hold parameters for their parent and are never called.
PARAMETER_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


def owners(module: nn.Module) -> list[nn.Module]:
    """The module and the containers below it whose parameters its forward uses."""
    found = [module]
    for child in module.children():
        if isinstance(child, PARAMETER_CONTAINERS):
            found += owners(child)
    return found


def owned_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that the module's own forward uses directly."""
    return [p for owner in owners(module) for p in owner.parameters(recurse=False)]


def _overrides(method: Any, default: Any) -> bool:
    """Whether a rule, or its type, has a method of its own."""
    return getattr(method, "__func__", None) is not default


class RefusedByRule(FlashClippingError, ValueError):
    """What a rule said of a layer that it cannot serve, with the layer's path, which rules do not
    know."""


class Tap(FactorSource):
    """Stands in for ``layer.forward`` while the model is wrapped.

    Args:
        layer: the tapped layer.
        path: its name in the model, for messages.
        rule: its rule, or ``None`` for the generic one.
        generic: serve the module by the generic rule from the start
            (:func:`~flash_clipping.capture.generic.generic_forward`).
        folded: its rows are parts of samples (``folded_modules``).
        session: what all taps of the model share.
    """

    def __init__(
        self,
        layer: nn.Module,
        path: str,
        rule: Rule | None,
        session: ClippingSession,
        generic: bool = False,
        folded: bool = False,
    ):
        name = f"{path or 'the model'} ({type(layer).__name__})"
        super().__init__(name, session, owners(layer), folded)
        self.layer = layer
        self.rule = rule
        #: How it is recorded inside a compiled region, and its number in the region that runs.
        self.wiring = wiring_of(rule)
        self.number = -1
        self.instance_forward = vars(layer).get("forward")
        tapped = getattr(self.instance_forward, "__self__", self.instance_forward)
        if isinstance(tapped, Tap) and type(self) is Tap:
            raise ValueError(
                f"{self.path}: this layer is tapped already, by a wrapped model that it, or what "
                "it was copied from, belongs to. Call to_standard_module() there first."
            )
        # The generic rule serves the whole subtree; everything else the layer's own parameters.
        self.generic = generic
        self._rule_calls = rule is not None and _overrides(rule.call, Rule.call)
        self._rule_has_axis = rule is not None and _overrides(rule.batch_axis, Rule.batch_axis)
        self._rule_has_rows = rule is not None and _overrides(rule.rows, Rule.rows)
        self._needs: tuple[list[str], Needs] | None = None  # of the last backward
        self._trainable: Trainable = [], []
        self.loops = False  # whether vmap was tried on this module and failed
        self._signature: inspect.Signature | None = None
        self._taken: inspect.Signature | None = None  # arguments that the rule takes
        self._attributes = -1  # how many the layer had when its parameters were last looked up
        self._computed = False  # whether the layer then computed with other tensors than parameters
        self._bypass_looked_for = False

    def install(self, as_method: bool = False) -> None:
        """``as_method``: Dynamo shares what it compiled among layers with one method for their
        forward, and not among layers with an object for each."""
        self.layer.forward = self.__call__ if as_method else self

    def remove(self) -> None:
        forward = vars(self.layer).get("forward")
        if getattr(forward, "__self__", forward) is self:
            if self.instance_forward is None:
                del self.layer.forward
            else:
                self.layer.forward = self.instance_forward

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward."""
        if self.instance_forward is not None:
            return self.instance_forward(*args, **kwargs)
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # This runs for every layer of every forward, and small models wait for the host: what a
        # plain layer does not need is looked at only where it is needed.
        session = self.session
        if not session.enabled or session.bypassed:
            if session.seen is not None:
                return noted_call(self, args, kwargs)
            return self.original(*args, **kwargs)
        if is_dynamo_compiling():
            return traced_call(self, args, kwargs)
        if ACTIVE and not session.by_itself:
            return by_itself(self, args, kwargs)  # Dynamo has given this up, not what it calls
        trainable, rule = self.trainable(), self.rule
        params = trainable[1]
        if rule is None or self._computed or not params:
            return self._unruled_forward(params, args, kwargs)
        call, recomputed = session.current_forward, in_backward()
        if call is not None and not recomputed:  # count_use, whose two questions are asked here
            call.used.append(params)
        if not is_grad_enabled():
            if rule.allows_children and self._is_checkpointed():
                # Its own forward need not call its children, and their uses must be counted.
                return self._untapped_forward(rule, args, kwargs)
            return self.original(*args, **kwargs)
        if (call is None or call.ended) and not recomputed:
            self._refuse_call()
        try:
            if not self._rule_calls:
                return self._apply(rule, trainable, call, recomputed, args, kwargs)

            def tapped(*args: Any, **kwargs: Any) -> Any:
                return self._apply(rule, trainable, call, recomputed, args, kwargs)

            return rule.call(self.layer, tapped, args, kwargs)
        except ReadsNoSamples:
            return self._constant_forward(args, kwargs)
        except UnsupportedLayer as error:
            raise RefusedByRule(f"{self.path}: {error}") from error

    def _unruled_forward(
        self, params: list[nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A layer without a rule, or without a trainable parameter."""
        session, rule = self.session, None if self._computed else self.rule
        if not params:
            if rule is not None and rule.allows_children:
                # Its children's parameters may be trainable, and its own forward reads them.
                return self._untapped_forward(rule, args, kwargs)
            return self.original(*args, **kwargs)
        if not self.generic:
            if is_grad_enabled():
                return self._bare_forward(args, kwargs)
            # The first forward of re-entrant checkpointing: how often each will be used is not
            # known yet, so none may pass for used once.
            session.count_use([*params, *params])
        else:
            session.count_use([p for p in self.layer.parameters() if p.requires_grad])
            if is_grad_enabled():
                return self._generic_forward(args, kwargs)
        return self.original(*args, **kwargs)

    def _generic_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self.session.current_forward
        if (call is None or call.ended) and not in_backward():
            self._refuse_call()
        if call is not None:
            call.begin_call(self.path)
        try:
            return generic_forward(self, args, kwargs)
        except ReadsNoSamples:
            return self._constant_forward(args, kwargs)

    def _refuse_call(self) -> NoReturn:
        raise FlashClippingError(
            f"{self.path}: this layer is called while the wrapped model itself is not running, so "
            "it is not known how many samples there are and which rows are theirs. Call the "
            "wrapped model itself (model(x)), with all that is to be trained inside its forward; "
            "where a training loop calls parts of it (self.net(x) in a training_step), wrap that "
            "part. Under torch.no_grad() any part may be called."
        )

    def _is_checkpointed(self) -> bool:
        """Whether this is the first forward of re-entrant checkpointing, without autograd."""
        call = self.session.current_forward
        return call is not None and call.recorded and not in_backward()

    @property
    def computed(self) -> bool:
        """Whether the layer computed with other tensors than its parameters, when these were last
        looked up."""
        return self._computed

    def trainable(self) -> Trainable:
        """The parameters that are the layer's own and trainable now, and their names."""
        # The same lists again where they hold: what calls keep would make Python look for garbage
        # in every step.
        (names, params), count = self._trainable, 0
        if len(vars(self.layer)) != self._attributes or self.layer._buffers:
            return self._look_up_trainable()  # is there a tensor where a parameter was?
        for owner in self.owners:
            for name, param in owner._parameters.items():
                if param is not None and param.requires_grad:
                    if count == len(params) or params[count] is not param or names[count] != name:
                        return self._look_up_trainable()
                    count += 1
        return self._trainable if count == len(params) else self._look_up_trainable()

    def needs(self, wanted: tuple[bool, ...], names: list[str]) -> Needs:
        """What a backward is asked for: mostly the same as the last."""
        last = self._needs
        if last is None or last[0] is not names or last[1].inputs != wanted:
            last = self._needs = names, Needs(wanted, frozenset(names), self.session.backend)
        return last[1]

    def _look_up_trainable(self) -> Trainable:
        found = [
            (name, param)
            for owner in self.owners
            for name, param in owner._parameters.items()
            if param is not None and param.requires_grad
        ]
        if self.rule is not None:
            self._attributes = len(vars(self.layer))
            self._computed = self._computes_weights(found)
        names, params = self._trainable
        if [name for name, _ in found] != names or any(
            new is not old for (_, new), old in zip(found, params, strict=True)
        ):
            self._trainable = [name for name, _ in found], [param for _, param in found]
        return self._trainable

    def _computes_weights(self, found: list[tuple[str, nn.Parameter]]) -> bool:
        """Whether the layer reads tensors that are none of its own parameters: a weight that
        another module computes and assigns. A rule would not see that tensor's gradient; the
        layer's own forward uses it as what it is."""
        for name, param in found:
            if not (param.is_leaf or isinstance(param, BareParameter)):
                raise FlashClippingError(
                    f"{self.path}: its {name} is a tensor that was computed from something else "
                    "(torch.func.functional_call, for example), not a parameter, so it has no "
                    "per-sample gradient here. Compute it inside the forward of one module that "
                    "owns what it is computed from (nn.utils.parametrize does), or freeze that."
                )
        attributes, buffers = vars(self.layer), self.layer._buffers
        return (
            any(isinstance(param, BareParameter) for _, param in found)
            or any(isinstance(value, Tensor) for value in attributes.values())
            or "weight" in attributes
            or "bias" in attributes
            or any(x is not None and x.requires_grad for x in buffers.values())
            or any(isinstance(x, BareParameter) for x in buffers.values())
        )

    def _bare_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward on stand-ins for its parameters
        (:mod:`flash_clipping.capture.bare`)."""
        call = self.session.current_forward
        if (call is None or call.ended) and not in_backward():
            self._refuse_call()
        if call is not None:
            call.begin_call(self.path)
        try:
            with bare_parameters(self, self.owners):
                output = self.original(*args, **kwargs)
            rehearsing = call is not None and call.witness is not None  # without checkpoints
            if not (self._bypass_looked_for or rehearsing or in_backward()):
                refuse_bypassed(self, (args, kwargs), output)
                self._bypass_looked_for = True  # from now on backward alone will notice
            return output
        except UnsupportedUse as unsupported:
            place = unsupported.tap
            below = isinstance(place, Tap) and any(m is place.layer for m in self.layer.modules())
            if not below:
                raise
        self.generic = True  # from now on
        self.session.forget(self.path)  # what the stand-ins noted is void
        return self(*args, **kwargs)

    def _constant_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module on what is the same for all samples: a function of parameters alone, which
        stays one until it meets the samples."""
        rule = self.rule
        below = rule is not None and rule.allows_children  # whose parameters it may use as well
        users = list(self.layer.modules()) if below else self.owners
        outside, self.reads_constants = self.reads_constants, True
        try:
            with bare_parameters(self, users):
                return self.original(*args, **kwargs)
        except UnsupportedUse as unsupported:
            if unsupported.tap is not self:
                raise
            raise FlashClippingError(
                f"{self.path}: what it reads does not derive from the samples (it is the same for "
                f"all of them), and {unsupported.found}, so its parameters have no per-sample "
                "gradients here. Expand what it reads over the batch, x.expand(batch_size, ...), "
                "or freeze its parameters."
            ) from unsupported
        finally:
            self.reads_constants = outside

    def _untapped_forward(self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A rule's own way through a layer whose own parameters are frozen."""
        axis = rule.batch_axis(self.layer, self.session.batch_axis)

        def ordinary(*inputs: Any, **named: Any) -> Any:
            inputs = self._positional(rule, inputs, named)
            rows = (x.transpose(0, axis) if isinstance(x, Tensor) else x for x in inputs)
            output, _ = rule.forward(self.layer, *rows)
            if isinstance(output, Tensor):
                return output.transpose(0, axis)
            return tuple(part.transpose(0, axis) for part in output)

        try:
            return rule.call(self.layer, ordinary, args, kwargs)
        except UnsupportedLayer as error:
            raise RefusedByRule(f"{self.path}: {error}") from error

    def _apply(
        self,
        rule: Rule,
        trainable: Trainable,
        call: ForwardCall | None,
        recomputed: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The layer under autograd, as one function."""
        if kwargs or len(args) > 1:
            args = self._positional(rule, args, kwargs)
        if transforms_are_active():
            raise FlashClippingError(
                f"{self.path}: called inside a transform of torch.func (vmap, grad, vjp, ...), "
                "where its per-sample gradients cannot be recorded. Call the layer outside the "
                "transform, or use torch.func.functional_call on the unwrapped model."
            )
        session, params = self.session, trainable[1]
        axis = session.batch_axis
        if self._rule_has_axis:
            axis = rule.batch_axis(self.layer, axis)
        x = args[0]
        if (
            self.path not in session.evidence.proven
            or self._rule_has_rows
            or isinstance(x, BareParameter)
            or (len(args) > 1 and any(isinstance(other, BareParameter) for other in args))
        ):
            if not isinstance(x, Tensor) or x.device != params[0].device:
                self._refuse_input(x, params[0])
            if call is not None:
                samples = self._samples_in(rule, call, axis, args)
                if samples is None:
                    raise ReadsNoSamples
                args = samples
                x = args[0]
        if not isinstance(x, Tensor) or x.device != params[0].device or x.dim() <= axis:
            self._refuse_input(x, params[0])
        if axis:
            args = tuple(x.transpose(0, axis) if isinstance(x, Tensor) else x for x in args)
        place = 0 if call is None else call.note_reader(args[0])
        output = _apply_tapped_layer(self, trainable, call, place, recomputed, *args, *params)
        if not axis:
            return output
        if isinstance(output, Tensor):
            return output.transpose(0, axis)
        return tuple(part.transpose(0, axis) for part in output)

    def _positional(
        self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """All that the layer was called with, in the order in which its rule takes it.

        Raises:
            FlashClippingError: the rule does not take some of it, or could not give its gradient.
        """
        if kwargs:
            if self._signature is None:
                self._signature = inspect.signature(type(self.layer).forward)
            bound = self._signature.bind(self.layer, *args, **kwargs)
            given = set(bound.arguments)
            bound.apply_defaults()
            ordered: list[Any] = []
            count = 0  # without the defaults at the end, which a rule need not take
            for name, parameter in [*self._signature.parameters.items()][1:]:
                value = bound.arguments[name]
                if parameter.kind is parameter.VAR_POSITIONAL:
                    ordered += value
                elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
                    if name in given and value is not parameter.default:
                        names = value if parameter.kind is parameter.VAR_KEYWORD else [name]
                        self._refuse_argument(rule, ", ".join(map(repr, names)))
                    continue
                else:
                    ordered.append(value)
                if name in given:
                    count = len(ordered)
            args = tuple(ordered[:count])
        if len(args) > 1:
            if self._taken is None:
                self._taken = inspect.signature(rule.forward)
            try:
                self._taken.bind(self.layer, *args)
            except TypeError as error:
                self._refuse_argument(rule, f"{len(args)} arguments ({error})")
            for x in args:
                held = () if isinstance(x, Tensor) else pytree.tree_leaves(x)
                if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in held):
                    self._refuse_argument(rule, f"a {type(x).__name__} of tensors that need grad")
        return args

    def _refuse_argument(self, rule: Rule, found: str) -> NoReturn:
        raise FlashClippingError(
            f"{self.path}: it was called with {found}, which its rule {type(rule).__name__} does "
            "not take; it would be lost. Call the layer without, write a rule whose forward takes "
            "it (flash_clipping.register_rule), or freeze the layer's parameters."
        )

    def _refuse_input(self, x: Any, param: nn.Parameter) -> NoReturn:
        if not isinstance(x, Tensor):
            raise FlashClippingError(
                f"{self.path}: expected a tensor as first input, found {type(x).__name__}."
            )
        if x.device != param.device:
            raise FlashClippingError(
                f"{self.path}: its parameters are on {param.device}, but its input is on "
                f"{x.device}. Move the model or the batch: module.to({str(x.device)!r})."
            )
        raise FlashClippingError(
            f"{self.path}: found an input of shape {tuple(x.shape)}, which has no batch axis; "
            "expected [batch, ...]. Add the axis with unsqueeze(0)."
        )

    def _samples_in(
        self, rule: Rule, call: ForwardCall, axis: int, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """The same inputs with a row for each sample; ``None`` where they are all constants."""
        session, path = self.session, self.path
        call.begin_call(path)
        rows = rule.rows(self.layer, *args)
        if rows is not None:  # the rule knows which rows belong together
            found, standing_for, sets_batch = rows
            if sets_batch and standing_for.untyped_storage().data_ptr() in call.input_storages:
                self._set_batch(call, found, standing_for, args[0])
            tensors = [x for x in args if isinstance(x, Tensor)]
            samples = session.reads_samples(
                path,
                standing_for,
                0,
                sure=call.batch_size is None
                or any(x.requires_grad and not isinstance(x, BareParameter) for x in tensors),
                rows=found,
                also=tensors,
            )
            return args if samples else None
        inputs = [x for x in args if isinstance(x, Tensor) and x.dim() > axis]
        kinds: dict[int, bool] = {}
        for x in inputs:
            if id(x) in kinds:
                continue
            if isinstance(x, BareParameter):
                kinds[id(x)] = x.row is not None and session.reads_samples(
                    path, x.value.detach(), axis, sure=False
                )
            else:
                sure = x.requires_grad or call.batch_size is None
                kinds[id(x)] = session.reads_samples(path, x, axis, sure=sure)
        if inputs and not any(kinds.values()):
            return None
        if not all(kinds.values()):
            constant = next(x for x in inputs if not kinds[id(x)])
            raise FlashClippingError(
                f"{path}: one of its inputs, of shape {tuple(constant.shape)}, is the same for all "
                "samples, and another one is not. Expand it over the batch, "
                "x.expand(batch_size, ...)."
            )
        if not any(isinstance(x, BareParameter) for x in args):
            return args
        return tuple(
            to_samples(x, call.batch_size or 1, path) if isinstance(x, BareParameter) else x
            for x in args
        )

    def _set_batch(self, call: ForwardCall, found: int, offsets: Tensor, ids: Tensor) -> None:
        """The model was called with the ids of all bags end to end: its bags are the samples."""
        if ids.dim() == 1 and call.batch_sizes[:1] == (len(ids),) != (found,):
            call.batch_sizes = (found,)
            if call.witness is not None:
                call.witness.offsets = offsets


class ScopedForward(Tap):
    """Stands in for the ``forward`` of a module with a registered scope; taps nothing itself."""

    def __init__(self, module: nn.Module, path: str, scope: Scope, session: ClippingSession):
        super().__init__(module, path, None, session)
        self.scope = scope

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.scope(self.layer, *args, **kwargs):
            return self.original(*args, **kwargs)


class TappedLayer(torch.autograd.Function):
    """A layer with a rule. Its trainable parameters are inputs: its output requires grad, and any
    backward that autograd can be asked for records the layers that it should reach.

    What its backward has to know is kept on the context itself, as an object for it would be one
    more for every layer that Python's garbage collector counts: the tap, its trainable parameters
    and their names as of forward, the call of the root that it belongs to (``call``, if any) and
    the place of its input among that call's readers, whether this is checkpointing's second forward
    (``recomputed``), and saved values that are no tensors, in their places (``others``).
    """

    @staticmethod
    def forward(
        ctx: Any,
        tap: Tap,
        trainable: Trainable,
        call: ForwardCall | None,
        place: int,
        recomputed: bool,
        *inputs_and_params: Any,
    ) -> Any:
        assert tap.rule is not None
        inputs = inputs_and_params[: -len(trainable[1])]
        output, saved = tap.rule.forward(tap.layer, *inputs)
        if not isinstance(output, Tensor):
            output = tuple(_fresh(part, inputs) if part._is_view() else part for part in output)
        elif output._is_view():
            output = _fresh(output, inputs)
        # Tensors go through autograd's own saving (checkpointing, version checks); the rest not.
        ctx.others = None
        for value in saved:
            if not isinstance(value, Tensor):
                ctx.others = [None if isinstance(value, Tensor) else value for value in saved]
                saved = tuple(value if isinstance(value, Tensor) else None for value in saved)
                break
        ctx.save_for_backward(*saved)
        ctx.tap, ctx.trainable, ctx.recomputed = tap, trainable, recomputed
        ctx.call, ctx.place = call, place
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        tap: Tap = ctx.tap
        names, params = ctx.trainable
        rule = tap.rule
        assert rule is not None
        if is_grad_enabled():
            raise FlashClippingError(
                f"{tap.path}: backward(create_graph=True) asks for second derivatives, which "
                "flash clipping does not have. Call backward() without create_graph, or take "
                "such gradients on the unwrapped model."
            )
        grad_output = grad_outputs[0] if len(grad_outputs) == 1 else grad_outputs
        saved = ctx.saved_tensors
        if ctx.others is not None:
            saved = tuple(
                other if tensor is None else tensor
                for tensor, other in zip(saved, ctx.others, strict=True)
            )
        session = tap.session
        needs = tap.needs(ctx.needs_input_grad[len(_NONE) : -len(params)], names)
        grads, by_name = rule.backward(tap.layer, saved, grad_output, needs)
        try:
            factors = [by_name[name] for name in names]
        except KeyError as missing:
            raise FlashClippingError(
                f"{tap.path}: its rule {type(rule).__name__} returned no factor for "
                f"{missing.args[0]}; return one for every name in needs.params."
            ) from None
        if not isinstance(grads, tuple):
            grads = (grads,)
        for i, wanted in enumerate(needs.inputs):
            if wanted and (i >= len(grads) or grads[i] is None):
                raise FlashClippingError(
                    f"{tap.path}: its rule {type(rule).__name__} returned no gradient for input "
                    f"{i}, which requires one; whatever computes that input would learn nothing. "
                    "Return a tuple with a gradient for every input that needs.inputs asks for."
                )
        rest = len(needs.inputs) - len(grads)
        if session.enabled:
            readers = None if ctx.call is None else (ctx.call, ctx.place)
            tap.record(params, factors, ctx.recomputed, readers)
            return (*_NONE, *grads, *(None,) * (rest + len(params)))
        # An ordinary backward: ordinary gradients.
        ordinary = [
            factor.clipped_sum(None, session.backend).view_as(param)
            for param, factor in zip(params, factors, strict=True)
        ]
        return (*_NONE, *grads, *(None,) * rest, *ordinary)


#: Gradients of what a tapped layer is told besides its inputs and parameters.
_NONE = (None,) * 5


# torch.autograd.Function.apply without its look at functorch's transforms, which are refused above
# (under those of the generic rule, taps are bypassed). It is a tenth of a tap's time.
_apply_tapped_layer = apply_of(TappedLayer)


def _fresh(output: Tensor, inputs: tuple[Any, ...]) -> Tensor:
    """An output that is a view, so that it may be changed in place, as an in-place ReLU does."""
    for x in inputs:
        if isinstance(x, Tensor) and is_alias_of(x, output):
            return output.clone()
    return own(output)
