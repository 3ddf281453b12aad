"""The tap, which stands in for the ``forward`` of a layer that owns parameters.

A layer with a rule runs inside one ``torch.autograd.Function``
(:mod:`flash_clipping.capture.tapped_layer`), any other module on stand-ins for its parameters
(:mod:`flash_clipping.capture.proxies`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any, NoReturn, TypeAlias

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import transforms_are_active
from flash_clipping.capture.borrowed import refuse_until_lent
from flash_clipping.capture.compiled.tracing import ACTIVE, by_itself, noted_call, traced_call
from flash_clipping.capture.declared_rows import DeclaredRows, LostRows, declared_rows
from flash_clipping.capture.factor_source import FactorSource, Trainable, owners
from flash_clipping.capture.forward_call import ForwardCall, in_backward
from flash_clipping.capture.layer_inputs import (
    ReadsNoSamples,
    positional,
    refuse_input,
    rows_by_sample,
    samples_in,
)
from flash_clipping.capture.positions import (
    Positions,
    apply_layer_by_position,
    by_position,
    refuse_layer,
    unrecorded,
)
from flash_clipping.capture.proxies import (
    ParameterProxy,
    UnsupportedUse,
    parameter_proxies,
    refuse_bypassed,
)
from flash_clipping.capture.proxies.parameter_proxy import is_plain
from flash_clipping.capture.row_layouts import Layout
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.tapped_layer import Proven, apply_proven_layer, apply_tapped_layer
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError, InvalidValue, module_at
from flash_clipping.rules.registry import GradRequest, Rule, UnsupportedLayer

#: Grad mode, transforms of torch.func, Dynamo and declared rows, as the short way has them.
_ORDINARY = (True, False, False, None)

#: One call of a layer with a rule: its parameters, the call of the root that it belongs to, if any,
#: and whether it runs in backward itself (activation checkpointing).
Use: TypeAlias = tuple[Trainable, ForwardCall | None, bool]


def _overrides(method: Any, default: Any) -> bool:
    """Whether a rule, or its type, has a method of its own."""
    return getattr(method, "__func__", None) is not default


def _each(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """An output, or several, changed."""
    return change(output) if isinstance(output, Tensor) else tuple([*map(change, output)])


def _moved(output: Any, axis: int) -> Any:
    """An output, or several, with samples along this axis in place of the first; one in the memory
    layout that the layer itself gives it."""
    moved = _each(output, lambda part: part.transpose(0, axis))
    return moved.contiguous() if isinstance(output, Tensor) else moved


class RefusedByRule(FlashClippingError, ValueError):
    """A rule's error about a layer that it cannot serve, with the layer's path, which rules do not
    know. Its last line is the rule's, or names the mode that supports every layer."""

    def __init__(self, path: str, error: UnsupportedLayer):
        line = error.line.format(layer=module_at(path))
        code = "" if error.code else "FC119 "  # of a rule of the user's
        super().__init__(f"{code}{path}: {error}" + (f"\n    {line}" if line else ONE_BY_ONE))


class Tap(FactorSource):
    """Stands in for ``layer.forward`` while the model is wrapped.

    Args:
        layer: the tapped layer.
        path: its name in the model, for messages.
        rule: its rule, if it has one.
        session: what all taps of the model share.
        by_function: form the gradients of every function by its own backward (``force_functorch``).
        folded: its rows are parts of samples (``folded_modules``).

    Attributes:
        computed: whether the layer computed with other tensors than its parameters, when these were
            last looked up.
        picks_rows: whether layers inside read rows that are picked from its first argument.
    """

    picks_rows = False

    def __init__(
        self,
        layer: nn.Module,
        path: str,
        rule: Rule | None,
        session: ClippingSession,
        by_function: bool = False,
        folded: bool = False,
    ):
        name = f"{path or 'the model'} ({type(layer).__name__})"
        self._rule_folds = rule is not None and rule.folds
        parts = {} if rule is None else rule.parts(layer)
        own = owners(layer)
        super().__init__(name, session, [*own, *parts.values()], folded or self._rule_folds)
        if self._rule_folds:
            session.known.folded_by_rule.add(self.path)
        self.layer = layer
        self.rule = rule
        self._prefixes = [""] * len(own) + [f"{part}." for part in parts]  # of owners
        self.computed = False
        self._trainable: Trainable = [], []
        self._looked_up = -1  # how many attributes the layer had when its parameters were
        #: Its number in the compiled region that runs, if it is in there.
        self.number = -1
        #: A rule that stands around the layer's own.
        self.boundary: Any = None
        self.instance_forward = vars(layer).get("forward")
        tapped = getattr(self.instance_forward, "__self__", self.instance_forward)
        if isinstance(tapped, Tap) and type(self) is Tap:
            raise InvalidValue(
                f"FC172 {self.path}: this layer is tapped already, by a wrapped model that it, or "
                "what it was copied from, belongs to. Call to_standard_module() there first."
            )
        self.by_function = by_function
        self.borrows = False  # whether it uses parameters that another module owns
        self._rule_calls = rule is not None and _overrides(rule.call, Rule.call)
        self._rule_has_rows = rule is not None and _overrides(rule.rows, Rule.rows)
        self._was_declared = False  # whether it was called inside `samples(index, count)`
        #: Whether it is a part of a compiled region, whose taps Dynamo traces.
        self.compiled = False
        #: Of the short way: calls of which kind it takes, and what a backward is asked for then.
        self._short_kind: tuple[Any, ...] = ()
        self._when_proven: Proven
        #: For which shapes per-sample gradients are formed at once.
        self.worth_storing: dict[Any, bool] = {}
        self.shared = 0
        self.is_simple = False
        #: The epoch and the kind of the last call, if that was an ordinary one.
        self._ordinary: tuple[int, tuple[Any, ...]] | None = None
        self._bypass_looked_for = False

    def install(self, as_method: bool = False) -> None:
        """``as_method``: Dynamo shares what it compiled among layers with one method for their
        forward, and not among layers with an object for each."""
        self.layer.forward = self.__call__ if as_method else self

    def borrow(self, owner: nn.Module, path: str) -> None:
        """Stand in for this module's parameters as well, which the layer's forward uses."""
        self.borrows = True
        if all(owner is not known for known in self.owners):
            self._prefixes.append(f"{path}.")
            self.owners.append(owner)

    def give_back(self, owner: nn.Module) -> None:
        """Stand in for them no longer."""
        place = next(n for n, known in enumerate(self.owners) if known is owner)
        del self.owners[place], self._prefixes[place]

    def surround(self, rule: Rule) -> None:
        """Let this rule, which stands around the layer's own, serve the layer."""
        self.rule = self.boundary = rule
        self._rule_calls = True

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

    def proven(self, *args: Any, **kwargs: Any) -> Any:
        """The short way of a layer that has gone the long one (:meth:`__call__`) and met nothing
        special. Two comparisons ask what may have changed: what this thread does, and the kind of
        the call. All else ends the short way (``ClippingSession.begin_epoch``)."""
        call = self.session.calls.proven_call
        if call is None or (len(args), len(kwargs)) != (1, 0):
            return self(*args, **kwargs)
        now = is_grad_enabled(), transforms_are_active(), is_dynamo_compiling(), declared_rows()
        if now != _ORDINARY:
            return self(*args)
        (x,) = args
        if x.__class__ is not Tensor or self._kind_of(x) != self._short_kind:
            return self(x)
        proven = self._when_proven
        params = proven[1]
        call.used.append(params)
        return apply_proven_layer(self, proven, call, self.session.options.anchor, x, *params)

    def _kind_of(self, x: Tensor) -> tuple[Any, ...]:
        """What must be the same in each call that takes the short way, also in the midst of a
        forward. Where parameters are is asked once a call (``ModelParameters.watch_new``)."""
        layer, params = self.layer, self.layer._parameters.values()
        own = *map(id, params), *map(getattr, params, repeat("requires_grad"), repeat(None))
        return x.dtype, x.device, len(layer.__dict__), len(layer._buffers), *own

    def _is_ordinary(self, args: tuple[Any, ...], axis: int, rows: DeclaredRows | None) -> bool:
        """Whether a call of these arguments needed nothing but its rule."""
        return (
            self.is_simple
            and not self.compiled
            and len(args) == 1
            and args[0].__class__ is Tensor
            and not axis
            and rows is None
            and self.path in self.session.known.proven
            and not (self.folded or self.path in self.session.known.layouts)
            and not self.layer._buffers
            and not (self._rule_calls or self._rule_has_rows or self._rule_folds)
            and len(self.owners) == 1
        )

    def note_recorded(self, trainable: Trainable, shared: int) -> None:
        """A call of it was recorded; ``shared`` layers read its input, or 0 where its parameters
        have other uses. If the call was an ordinary one, the next takes the short way."""
        session, self.shared = self.session, shared
        if self._ordinary is None or self._ordinary[0] != session.proof.epoch:
            return
        layer, (_, kind) = self.layer, self._ordinary
        forward = vars(layer).get("forward")
        if getattr(forward, "__self__", forward) is not self:
            return  # something else stands around it
        names = frozenset(trainable[0])
        needs = [GradRequest((wanted,), names, session.options.backend) for wanted in (False, True)]
        self._when_proven, self._short_kind = (*trainable, needs[0], needs[1]), kind
        layer.forward = self.proven
        session.proof.on_short_way.append(self)

    def leave_short_way(self) -> None:
        """Ask everything again in the next call."""
        if getattr(vars(self.layer).get("forward"), "__func__", None) is Tap.proven:
            self.layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Layers that are not proven, or of several inputs, come here in every forward.
        session = self.session
        if not session.mode.enabled or session.mode.bypassed:
            if session.mode.learning is not None:
                return noted_call(self, args, kwargs)
            return self.original(*args, **kwargs)
        if is_dynamo_compiling():
            return traced_call(self, args, kwargs)
        if ACTIVE and not session.mode.by_itself:
            return by_itself(self, args, kwargs)  # Dynamo has given this up, not what it calls
        rule = self.rule
        trainable = self.trainable()
        params = trainable[1]
        if rule is None or self.computed or not params:
            return self._unruled_forward(params, args, kwargs)
        if _overrides(rule.serves, Rule.serves) and (kwargs or not rule.serves(self.layer, *args)):
            return self._unruled_forward(params, args, kwargs)
        call, recomputed = session.current_forward, in_backward()
        if call is not None and not recomputed:  # count_use, whose two questions are asked here
            call.used.append(params)
        if not is_grad_enabled():
            self._was_declared = self._was_declared or declared_rows() is not None
            own = self.original
            is_checkpointed = call is not None and call.recorded and not recomputed
            if rule.allows_children and not rule.folds and is_checkpointed:
                # Its own forward need not call its children, and their uses must be counted.
                own = lambda *x, **named: self._untapped_forward(rule, x, named)  # noqa: E731
            return unrecorded(session, own, args, kwargs)
        if (call is None or call.ended) and not recomputed:
            self._refuse_call()
        use = trainable, call, recomputed
        try:
            if not self._rule_calls:
                return self._apply(rule, use, args, kwargs)

            def tapped(*args: Any, **kwargs: Any) -> Any:
                return self._apply(rule, use, args, kwargs)

            return rule.call(self.layer, tapped, args, kwargs)
        except ReadsNoSamples:
            if call is not None and not recomputed:
                call.counted.subtract(map(id, params))  # used where the result meets samples
            return self._constant_forward(args, kwargs)
        except UnsupportedLayer as error:
            raise RefusedByRule(self.path, error) from error

    def _unruled_forward(
        self, params: list[nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A layer without a rule, or without a trainable parameter."""
        session, rule = self.session, None if self.computed else self.rule
        if not params:
            if session.rows.positions is not None:
                return unrecorded(session, self.original, args, kwargs)
            if rule is not None and rule.allows_children and not rule.folds:
                # Its children's parameters may be trainable, and its own forward reads them.
                return self._untapped_forward(rule, args, kwargs)
            return self.original(*args, **kwargs)
        recorded = is_grad_enabled()
        if recorded and declared_rows() is not None:
            raise FlashClippingError(
                f"FC264 {self.path}: called inside flash_clipping.samples(...), but it has "
                "parameters and no rule, so its rows cannot be told apart. Call it outside, or "
                f"write a rule for it (flash_clipping.register_rule).{ONE_BY_ONE}"
            )
        if recorded and (units := session.rows.positions) is not None:
            run = lambda rows: self._bare_forward((rows,), {})  # noqa: E731
            again = in_backward()
            return by_position(self.path, session, units, self.original, run, args, kwargs, again)
        if not recorded:
            # The first forward of re-entrant checkpointing: how often each will be used is not
            # known yet, so none may pass for used once.
            session.count_use([*params, *params])
            return unrecorded(session, self.original, args, kwargs)
        return self._bare_forward(args, kwargs)

    def _begin_call(self) -> ForwardCall | None:
        """The call of the root that this call of a layer without a rule is a part of."""
        call = self.session.current_forward
        if (call is None or call.ended) and not in_backward():
            self._refuse_call()
        if call is not None:
            call.begin_call(self.path)
        return call

    def _refuse_call(self) -> NoReturn:
        raise FlashClippingError(
            f"FC401 {self.path}: this layer is called while the wrapped model itself is not "
            "running, so it is not known how many samples there are and which rows are theirs. "
            "Call the wrapped model itself (model(x)). Where a loop calls a part, self.net(x), "
            "in a training_step, wrap that part:\n    PrivateTraining(privacy, module='net')"
        )

    def trainable(self) -> Trainable:
        """The parameters that are the layer's own and trainable now, and their names."""
        names: list[str] = []
        params: list[nn.Parameter] = []
        for owner, prefix in zip(self.owners, self._prefixes, strict=True):
            for name, param in owner._parameters.items():
                if param is not None and param.requires_grad:
                    names.append(prefix + name)
                    params.append(param)
        layer, known = self.layer, self._trainable
        changed = names != known[0] or [*map(id, params)] != [*map(id, known[1])]
        if changed or len(vars(layer)) != self._looked_up or layer._buffers:
            self._looked_up = len(vars(layer))
            if self.rule is not None:  # is there a tensor where a parameter was?
                self.computed = self._computes_weights(names, params)
        if changed:
            self._trainable = names, params
        # The same lists again where they hold: what calls keep would make Python look for garbage
        # in every step.
        return self._trainable

    def _computes_weights(self, names: list[str], params: list[nn.Parameter]) -> bool:
        """Whether the layer reads a weight that another module computes and assigns. A rule would
        not see that tensor's gradient; the layer's own forward uses it as what it is."""
        for name, param in zip(names, params, strict=True):
            if not (param.is_leaf or isinstance(param, ParameterProxy)):
                refuse_until_lent(self.session, params)
                raise FlashClippingError(
                    f"FC141 {self.path}: its {name} is a tensor that was computed from something "
                    "else (torch.func.functional_call, for example), not a parameter. Compute it "
                    "inside the forward of one module that owns what it is computed from "
                    f"(nn.utils.parametrize does).{ONE_BY_ONE}"
                )
        attributes, buffers = vars(self.layer), self.layer._buffers.values()
        return (
            any(isinstance(x, ParameterProxy) for x in (*params, *buffers))
            or any(isinstance(value, Tensor) for value in attributes.values())
            or "weight" in attributes
            or "bias" in attributes
            or any(x is not None and x.requires_grad for x in buffers)
        )

    def _bare_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward on stand-ins for its parameters
        (:mod:`flash_clipping.capture.proxies`)."""
        call, session = self._begin_call(), self.session
        with parameter_proxies(self, self.owners):
            output = self.original(*args, **kwargs)
        looks = call is not None and call.reads is not None
        if not (self._bypass_looked_for or looks or in_backward()):
            refuse_bypassed(self, (args, kwargs), output)
            # From now on backward alone will notice. Comparisons run without checkpoints.
            self._bypass_looked_for = not session.mode.comparing
        return output

    def _constant_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module on what is the same for all samples: a function of parameters alone, which
        stays one until it meets the samples."""
        rule = self.rule
        below = rule is not None and rule.allows_children  # whose parameters it may use as well
        users = list(self.layer.modules()) if below else self.owners
        outside, self.reads_constants = self.reads_constants, True
        try:
            with parameter_proxies(self, users):
                return self.original(*args, **kwargs)
        except UnsupportedUse as unsupported:
            if unsupported.tap is not self:
                raise
            raise FlashClippingError(
                f"FC220 {self.path}: what it reads does not derive from the samples (it is the "
                f"same for all of them), and {unsupported.found}, so its parameters have no "
                "per-sample gradients here. Expand it over the batch, x.expand(batch_size, "
                f"...).{ONE_BY_ONE}"
            ) from unsupported
        finally:
            self.reads_constants = outside

    def _untapped_forward(self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A rule's own way through a layer whose own parameters are frozen."""
        axis = rule.batch_axis(self.layer, self.session.options.batch_axis)

        def ordinary(*inputs: Any, **named: Any) -> Any:
            inputs = positional(self.layer, self.path, rule, inputs, named)
            rows = (x.transpose(0, axis) if isinstance(x, Tensor) else x for x in inputs)
            return _moved(rule.forward(self.layer, *rows)[0], axis)

        try:
            return rule.call(self.layer, ordinary, args, kwargs)
        except UnsupportedLayer as error:
            raise RefusedByRule(self.path, error) from error

    def _apply(self, rule: Rule, use: Use, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer under autograd, as one function."""
        if kwargs or len(args) > 1:
            args = positional(self.layer, self.path, rule, args, kwargs)
        if transforms_are_active():
            raise FlashClippingError(
                f"FC402 {self.path}: called inside a transform of torch.func (vmap, grad, vjp, "
                "...), where its per-sample gradients cannot be recorded. Call the layer outside "
                "the transform, or use torch.func.functional_call on the unwrapped model."
            )
        session, (trainable, call, recomputed) = self.session, use
        params = trainable[1]
        if session.rows.positions is not None:
            return self._apply_by_position(rule, use, args)
        laid_out, layout = 0, session.known.layouts.get(self.path)
        if layout is not None:
            args, laid_out = self._samples_first(layout, call, args)
        axis = rule.batch_axis(self.layer, session.options.batch_axis)
        x = args[0]
        if not isinstance(x, Tensor) or x.device != params[0].device:
            refuse_input(self.path, x, params[0])
        rows = declared_rows()
        if recomputed and rows is None and self._was_declared:
            # The first forward knows them; re-entrant checkpointing goes backward from here.
            rows = LostRows(self.path)
        elif rows is not None:
            rows, self._was_declared = rows.read_as(x), True
            folded = self.folded and not rule.takes_samples
            if folded or any(isinstance(other, ParameterProxy) for other in args):
                raise UnsupportedLayer(
                    "FC264 it is called inside flash_clipping.samples(...), which is for layers "
                    "that read the declared rows; it is folded, or reads parameters. Call it "
                    "outside."
                )
            rows.check(self.path, args, axis, None if call is None else call.batch_size)
        elif call is not None and (
            self.path not in session.known.proven
            or self._rule_has_rows
            or any(isinstance(read, ParameterProxy) for read in args)
        ):
            samples = samples_in(self.path, session, self.layer, rule, call, axis, args)
            if samples is None:
                raise ReadsNoSamples
            args = samples
        if args[0].dim() <= axis:
            refuse_input(self.path, args[0], params[0])
        if axis:
            args = tuple(x.transpose(0, axis) if isinstance(x, Tensor) else x for x in args)
        folds = self._rule_folds
        if folds and rule.takes_samples:
            count = session.samples() if call is None else call.batch_size
            folds = rows is None and bool(count) and args[0].shape[0] != count
        if folds:
            args = rows_by_sample(session, args, axis, call)
        place = 0 if call is None else call.note_reader(args[0])
        given = self, trainable, call, place, recomputed, rows, session.options.anchor
        output = apply_tapped_layer(*given, *args, *params)
        self._ordinary = None
        if (
            call is not None
            and call is session.calls.proven_call
            and self._is_ordinary(args, axis, rows)
        ):
            self._ordinary = session.proof.epoch, self._kind_of(args[0])
        if folds:
            output = output.flatten(0, 1)
        if layout is not None and laid_out:
            # As the layer itself would leave it: models view what they get.
            return _each(output, lambda part: layout.back(part).contiguous())
        return _moved(output, axis) if axis else output

    def _samples_first(
        self, layout: Layout, call: ForwardCall | None, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], int]:
        """What the layer reads where samples are along another axis, which no rule that knows its
        own is told of, with these first; and how many there are, 0 where that is not known."""
        B = (self.session.samples() if call is None else call.batch_size) or 0
        x = next((x for x in args if is_plain(x)), None)
        if not B or x is None:
            return args, 0
        layout.check(self.path, x, B)
        if len(args) > 1 or declared_rows() is not None:
            raise UnsupportedLayer(
                "FC208 samples do not lie along the first axis of what it reads, and it is called "
                "with other arguments beside, or inside flash_clipping.samples(...)."
            )
        return (layout.front(x, B),), B

    def _apply_by_position(self, rule: Rule, use: Use, args: tuple[Any, ...]) -> Any:
        """Apply the rule where units are parts of rows: every position is a row."""
        session, (trainable, call, recomputed) = self.session, use
        params = trainable[1]
        assert session.rows.positions is not None
        if declared_rows() is not None or any(isinstance(x, ParameterProxy) for x in args):
            refuse_layer(self.path, "it is called inside samples(...), or reads parameters")
        if not isinstance(args[0], Tensor) or args[0].device != params[0].device:
            refuse_input(self.path, args[0], params[0])
        positions = Positions(self.path, session.rows.positions)
        rows = positions.taken(rule, self.layer, session, args, recomputed)
        # Rows are made again for every layer: who shares an input is seen by what they are made of.
        place = 0 if call is None else call.note_reader(args[0])
        output = apply_layer_by_position(
            self, trainable, call, place, recomputed, None, session.options.anchor, *rows, *params
        )
        if self._rule_folds:
            output = _each(output, lambda part: part.flatten(0, 1))
        return _each(output, positions.back)
