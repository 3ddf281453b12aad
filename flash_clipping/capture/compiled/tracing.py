"""Tapped layers while Dynamo traces them, and while a region learns what they leave."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import (
    constant_in_traces,
    is_traced_once,
    never_compiled,
    tracing_context,
    transforms_are_active,
)
from flash_clipping.capture.compiled.layout import UNPROVEN
from flash_clipping.capture.compiled.unbatched import (
    SameRows,
    Unbatched,
    memory_of,
    refuse_constants,
    rows_of,
    same_for_all,
)
from flash_clipping.capture.compiled.wires import (
    Kind,
    PerSampleParameters,
    RuleOnWires,
    Slot,
    Trained,
    rule_of,
)
from flash_clipping.capture.proxies.parameter_proxy import circumstances
from flash_clipping.errors import FlashClippingError
from flash_clipping.rules.registry import UnsupportedLayer

#: Of regions that run now, by the key of their model's session: the calls of each tap, by its
#: number, and all wires, as a layout has them. Global, as Dynamo takes tensors that are reached
#: through a module of PyTorch's to be of one shape for good.
ACTIVE: dict[int, tuple[Sequence[Any], Sequence[Tensor]]] = {}

NOT_ONE_TENSOR = "it was called with something else than one tensor that has a batch axis"


def kind_of(tap: Any) -> tuple[Kind | None, str]:
    """What was shown of what a layer reads, or why it can have no wires."""
    shown, rule, path = tap.session.known, tap.rule, tap.path
    if rule is not None:
        if not rule_of(tap).can_be_traced(tap.layer):
            return None, f"its rule {type(rule).__name__} cannot be traced"
        if tap.computed:
            return None, "it computes with tensors that are not its own parameters"
        if path in shown.proven:
            return "samples", ""
        kind = _kind_of_constant(tap) if path in shown.constants else None
        return kind, "" if kind else UNPROVEN
    if tap.by_function:
        return None, "its per-sample gradients are formed outside of compiled code"
    if tap.borrows:
        return None, "it uses parameters that another module owns"
    if not _has_rows(tap):
        return None, "it uses its parameters itself, and rows are not samples there"
    if path in shown.proven:
        return "own", ""
    if path in shown.reads:
        return None, "its own parameters meet what has no row for each sample"
    return ("own", "") if shown.proven else (None, UNPROVEN)


def _has_rows(tap: Any) -> bool:
    """Whether what meets its parameters has a row for each sample, if it has samples."""
    return not (tap.folded or tap.session.options.batch_axis)


def _kind_of_constant(tap: Any) -> Kind | None:
    """That of a layer with a rule which reads what is the same for all samples."""
    if _has_rows(tap) and rule_of(tap).works_by_position(tap.layer):
        return "same for all"
    return None


# -- what Dynamo asks while it traces --------------------------------------------------------------

#: How often each tap was traced, by its number, in traces that began where a region does.
_claims: weakref.WeakKeyDictionary[Any, Counter[int]] = weakref.WeakKeyDictionary()


class _Traces(threading.local):
    """Whether a layer was traced, in this thread, with wires that do not fit it."""

    misfits = False
    #: Layers that were traced in the body of an operator that runs any number of times.
    inside: list[str] = []  # noqa: RUF012 (every region begins one of its own)


traces = _Traces()


@constant_in_traces
def begin_trace() -> bool:
    """The trace that runs now begins where a region does: a run of the region goes through its
    graph once, so that it may have the region's wires. What follows a break in the graph does not
    come by here, and may be run any number of times."""
    context = tracing_context()
    if context is not None:
        _claims.setdefault(context, Counter())
    return True


@constant_in_traces
def _may_claim() -> bool:
    """Whether the trace that runs now begins where a region does, and what it traces here will run
    once: no transform of torch.func, whose derivatives pass wires by, and no subgraph that is
    stamped out several times (``nested_compile_region``, scan, branches)."""
    context = tracing_context()
    begun = context is not None and context in _claims
    return begun and not transforms_are_active() and is_traced_once()


@constant_in_traces
def _claim(number: int) -> int:
    """How often a tap was called before, in a trace that may claim."""
    claims = _claims[tracing_context()]
    claims[number] += 1
    return claims[number] - 1


@constant_in_traces
def _is_in_an_operator() -> bool:
    """Whether the body of an operator is traced, which runs any number of times."""
    return not is_traced_once()


@constant_in_traces
def _note_operator(path: str) -> bool:
    """A layer is traced there that has no wires: it cannot run alone."""
    traces.inside.append(path)
    return True


@constant_in_traces
def _note_misfit() -> bool:
    """A layer is traced otherwise than when the region learned what it leaves."""
    traces.misfits = True
    return True


# -- calls of layers -------------------------------------------------------------------------------


def traced_call(tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tapped layer while Dynamo traces it: on its wires, or between two graphs."""
    if not torch.is_grad_enabled():
        return tap.original(*args, **kwargs)
    active = ACTIVE.get(tap.session.options.key)
    # A tap's own number is asked for last: code that depends on it is for one tap.
    if active is not None and _may_claim() and tap.number >= 0:
        calls = active[0][tap.number]
        if calls is not None:
            if len(calls) == 0:
                return tap.original(*args, **kwargs)
            number = _claim(tap.number)
            if number < len(calls):
                wires = [active[1][place] for place in calls[number].places]
                on_wires = _on_wires if tap.boundary is None else _on_local_wires
                fits, output = on_wires(tap, calls[number], wires, args, kwargs)
                if fits:
                    return output
            _note_misfit()
    if _is_in_an_operator():  # its path is a guard, which elsewhere would be one of every layer
        _note_operator(tap.path)
    return by_itself(tap, args, kwargs)


def noted_call(tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tapped layer while a region learns what its layers leave: on wires that lead nowhere."""
    trained = tap.trainable()
    if tap.number < 0 or not trained[1]:
        return tap.original(*args, **kwargs)

    if tap.boundary is None:
        return _noted(tap, tap.layer, trained, args, kwargs)
    local = tap.boundary.local_layer(tap.layer)  # which knows how many words are its own, say
    return _inside_of_boundary(tap, lambda x: _noted(tap, local, trained, (x,), {}), args, kwargs)


def _noted(
    tap: Any, layer: Any, trained: Trained, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    layout, axis = tap.session.mode.learning, tap.session.options.batch_axis
    kind, why = kind_of(tap)
    x = _only_tensor(args, kwargs)
    is_expanded = isinstance(x, SameRows) and kind == "samples"
    if isinstance(x, Unbatched) and tap.rule and why in ("", UNPROVEN) and not is_expanded:
        kind, why = _kind_of_constant(tap), UNPROVEN
    if kind == "samples" and x is not None and not rule_of(tap).serves(tap.layer, x):
        kind, why = None, "its rule does not serve what it reads"
        if _has_rows(tap) and tap.boundary is None:
            kind = "own"
    constant = kind == "same for all"
    if kind in ("own", "same for all") and layout.misuse:
        kind, why = None, layout.misuse
    slot, first, why = None, len(layout.like), why or NOT_ONE_TENSOR

    def of_rule(kind: Kind, x: Tensor) -> Slot:
        return Slot.of_rule(tap, layer, kind, trained, x, first)

    try:
        if kind == "own" and layout.batch_size:
            slot = Slot.of_parameters(tap, trained, layout.batch_size, first)
        elif constant and kind and x is not None and layout.batch_size:
            slot = of_rule(kind, _rows_of_each(x, layout.batch_size))
        elif kind == "samples" and x is not None and x.dim() > axis:
            slot = of_rule(kind, _rows_of_samples(x, axis))
    except UnsupportedLayer as error:
        why = str(error)
    if slot is None:
        layout.refuse(tap, why)
        if constant:
            layout.uncompiled = (
                f"{tap.path}: {why}. Such values cannot go from one graph to the next: expand what "
                "the layer reads over the batch, x.expand(batch_size, ...)."
            )
        refuse_constants(tap.path, args, kwargs)
        return tap.original(*args, **kwargs)
    layout.add(slot)
    if kind == "own" and layout.outside != circumstances():
        # Dynamo puts nothing in a parameter's place there.
        layout.refuse(tap, "it uses its parameters itself, inside of an activation checkpoint")
    at = slot.params[0].device
    ones = [torch.empty((), dtype=dtype, device=at, requires_grad=True) for _, dtype in slot.like]
    wires = [one.expand(shape) for one, (shape, _) in zip(ones, slot.like, strict=True)]
    fits, output = _on_wires(tap, slot, wires, args, kwargs)
    return output if fits else tap.original(*args, **kwargs)


def _only_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a layer is called with, if that is one tensor."""
    x = args[0] if len(args) == 1 and not kwargs else kwargs.get("input")
    return x if len(args) + len(kwargs) == 1 and isinstance(x, Tensor) else None


def _on_wires(
    tap: Any, slot: Slot, wires: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    """Whether a call is what the region has learned, and the layer's output on its wires."""
    own = _own_parameters(tap)
    params = [param for _, _, param in own]
    if tap.boundary is None and not all([isinstance(p, nn.Parameter) for p in params]):
        return False, None  # functional_call has put something else there: no wire leads there
    if slot.kind == "own":
        if len(params) != len(wires):
            return False, None
        if is_dynamo_compiling():
            rows = PerSampleParameters.apply(*params, *wires)
        else:  # varied: by numbers that are 0 nobody sees how often they are added up
            varied = [param + torch.randn_like(param) * 1e-2 for param in params]
            rows = [x.expand(wire.shape) for x, wire in zip(varied, wires, strict=True)]
        try:
            for (owner, name, _), param_B in zip(own, rows, strict=True):
                owner._parameters[name] = same_for_all(param_B, tap.path)
            return True, tap.original(*args, **kwargs)
        finally:
            for owner, name, param in own:
                owner._parameters[name] = param
    x = _only_tensor(args, kwargs)
    same, axis = slot.kind == "same for all", tap.session.options.batch_axis
    if x is None or (isinstance(x, Unbatched) and not (same or isinstance(x, SameRows))):
        return False, None
    x = _rows_of_each(x, wires[0].shape[0]) if same else _rows_of_samples(x, axis)
    y = RuleOnWires.apply(tap, slot.names, slot.sources, x, *wires)
    if same:
        return True, same_for_all(y, tap.path)
    return True, y.transpose(0, axis) if axis else y


def _rows_of_each(x: Tensor, batch_size: int) -> Tensor:
    """What a layer reads that is the same for all samples, once for each."""
    return rows_of(x) if isinstance(x, Unbatched) else x.expand(batch_size, *x.shape)


def _rows_of_samples(x: Tensor, axis: int) -> Tensor:
    """What a layer reads that has samples along this axis, with these first."""
    x = memory_of(x) if isinstance(x, Unbatched) else x
    return x.transpose(0, axis) if axis else x


def _own_parameters(tap: Any) -> list[tuple[Any, str, Any]]:
    """Those that a module computes with itself and that are trainable, and where they are."""
    return [
        (owner, name, param)
        for owner in tap.owners
        for name, param in owner._parameters.items()
        if param is not None and param.requires_grad
    ]


def _inside_of_boundary(
    tap: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A layer that is cut over processes, on this process's part of its parameters."""
    layer = tap.layer
    whole = dict(layer._parameters)

    def tapped(x: Tensor) -> Any:
        local = tap.boundary.local_parameters(layer)
        try:
            for name in whole:
                layer._parameters[name] = local[name]
            return run(x)
        finally:
            for name in whole:
                layer._parameters[name] = whole[name]

    return tap.boundary.call(layer, tapped, args, kwargs)


def _on_local_wires(
    tap: Any, slot: Slot, wires: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    """:func:`_on_wires` of a layer that is cut over processes."""
    fits: list[bool] = []

    def on_wires(x: Tensor) -> Any:
        found, y = _on_wires(tap, slot, wires, (x,), {})
        fits.append(found)
        return y if found else tap.original(x)

    output = _inside_of_boundary(tap, on_wires, args, kwargs)
    return fits[0], output


@never_compiled
def by_itself(tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer as it is uncompiled, with all that it calls."""
    session = tap.session
    if session.options.layers_are_cut:
        raise FlashClippingError(
            f"FC712 {tap.path}: found a break between two compiled graphs at this layer, in a "
            "model whose layers are cut over processes: gradients that are DTensors do not go from "
            "one graph to the next. Disabled hooks and inputs that lie otherwise are such breaks, "
            "too. Let the compiler name it:\n"
            "    for block in model.blocks:\n"
            "        block.compile(fullgraph=True)"
        )
    before, session.mode.by_itself = session.mode.by_itself, True
    try:
        return tap(*args, **kwargs)
    finally:
        session.mode.by_itself = before
