"""Tapped layers while Dynamo traces them, and while a region learns what they see.

While a layer is traced, its wires are compared with what it reads and returns, so that a wrong
shape is a guard that fails, not a wrong norm.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flash_clipping._compat import (
    constant_in_traces,
    is_traced_once,
    never_compiled,
    tracing_context,
    transforms_are_active,
)
from flash_clipping.capture.compiled.unbatched import (
    SameRows,
    Unbatched,
    is_checkpointed,
    memory_of,
    note_use,
    rows_of,
    same_for_all,
    was_used,
    without_same,
)
from flash_clipping.capture.compiled.wirings import Kind, PerSampleParameters, Seen
from flash_clipping.errors import FlashClippingError

#: Of regions that run now, by the key of their model's session: the calls of each tap, by its
#: number, and all wires, as a layout has them. Global, as Dynamo takes tensors that are reached
#: through a module of PyTorch's to be of one shape for good.
ACTIVE: dict[int, tuple[Sequence[Any], Sequence[Tensor]]] = {}


# -- what runs while Dynamo traces -----------------------------------------------------------------

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
    return (
        context is not None
        and context in _claims
        and not transforms_are_active()
        and is_traced_once()
    )


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
    """A layer is traced there that has no wires: it cannot run by itself."""
    traces.inside.append(path)
    return True


@constant_in_traces
def _note_misfit() -> bool:
    """The wires of a layer that is traced do not have the shapes that it needs."""
    traces.misfits = True
    return True


def traced_call(tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tapped layer while Dynamo traces it: on its wires, or between two graphs."""
    if not torch.is_grad_enabled():
        return tap.original(*args, **kwargs)
    active = ACTIVE.get(tap.session.options.key)
    # A tap's own number is asked for last: code that depends on it serves one tap.
    if active is not None and _may_claim() and tap.number >= 0:
        calls = active[0][tap.number]
        if calls is not None:
            if len(calls) == 0:
                return tap.original(*args, **kwargs)
            if calls[0].kind in ("own", "unused") or _only_tensor(args, kwargs) is not None:
                number = _claim(tap.number)
                if number < len(calls):
                    on_wires = _on_wires if tap.boundary is None else _inside_of_boundary
                    fits, output = on_wires(tap, calls[number], active[1], args, kwargs)
                    if fits:
                        return output
                    _note_misfit()
    if _is_in_an_operator():  # its path is a guard, which elsewhere would be one of every layer
        _note_operator(tap.path)
    return by_itself(tap, args, kwargs)


def _only_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a layer is called with, if that is one tensor."""
    x = args[0] if len(args) == 1 and not kwargs else kwargs.get("input")
    return x if len(args) + len(kwargs) == 1 and isinstance(x, Tensor) else None


def _on_wires(
    tap: Any, call: Any, of_all: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    """Whether the wires of a call fit it, and the layer's output on them."""
    wires = [None if place is None else of_all[place] for place in call.places]
    if call.kind == "unused":
        return True, tap.original(*args, **kwargs)
    if call.kind == "own":
        params = [param for _, _, param in _own_parameters(tap)]
        if len(params) != len(wires):
            return False, None
        for param, wire in zip(params, wires, strict=True):
            if wire is None or not isinstance(param, torch.nn.Parameter):
                return False, None  # functional_call has put something else there
            if tuple(wire.shape[1:]) != tuple(param.shape) or wire.dtype != param.dtype:
                return False, None
        rows = PerSampleParameters.apply(*params, *wires)
        return True, _on_own_parameters(tap, rows, args, kwargs)
    x, wiring, axis = _only_tensor(args, kwargs), tap.wiring, tap.session.options.batch_axis
    assert x is not None and wiring is not None
    for name in ("weight", "bias") if tap.boundary is None else ():
        param = getattr(tap.layer, name, None)
        if param is not None and not isinstance(param, torch.nn.Parameter):
            return False, None  # computed elsewhere (functional_call): no wire leads there
    same = call.kind == "same for all"
    if same:
        sizes = [wire.shape[0] for wire in wires if wire is not None]
        x = rows_of(x) if isinstance(x, Unbatched) else x.expand(sizes[0], *x.shape)
    elif isinstance(x, Unbatched):
        if not isinstance(x, SameRows):
            return False, None
        x = memory_of(x)
    if axis:
        x = x.transpose(0, axis)
    y = wiring.forward(tap.layer, x, wires)
    for wire, (shape, dtype) in zip(wires, wiring.metas(tap.layer, _seen(x, y)), strict=True):
        # Autograd would add up, or round, a gradient that is not like its tensor.
        if wire is not None and (tuple(wire.shape) != shape or wire.dtype != dtype):
            return False, None
    if same:
        return True, same_for_all(y, tap.path)
    return True, y.transpose(0, axis) if axis else y


def _inside_of_boundary(
    tap: Any, call: Any, of_all: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    """The same of a layer that is cut over processes: wires are of this process's part."""
    layer, fits = tap.layer, []
    whole = dict(layer._parameters)

    def tapped(x: Tensor) -> Tensor:
        local = tap.boundary.local_parameters(layer)
        try:
            for name in whole:
                layer._parameters[name] = local[name]
            found, y = _on_wires(tap, call, of_all, (x,), {})
            fits.append(found)
            return y if found else tap.original(x)
        finally:
            for name in whole:
                layer._parameters[name] = whole[name]

    output = tap.boundary.call(layer, tapped, args, kwargs)
    return fits[0], output


def _seen(x: Tensor, y: Tensor, kind: Kind = "samples") -> Seen:
    return Seen(tuple(x.shape), x.dtype, tuple(y.shape), y.dtype, kind)


def _own_parameters(tap: Any) -> list[tuple[Any, str, Any]]:
    """Those that a module computes with itself and that are trainable, and where they are."""
    return [
        (owner, name, param)
        for owner in tap.owners
        for name, param in owner._parameters.items()
        if param is not None and param.requires_grad
    ]


def _on_own_parameters(
    tap: Any, rows: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The module's own forward, with its parameters as what is the same for all samples.

    ``rows``: each of them for every sample, ``[B, *parameter]``.
    """
    found = _own_parameters(tap)
    try:
        for (owner, name, _), param_B in zip(found, rows, strict=True):
            owner._parameters[name] = same_for_all(param_B, tap.path)  # type: ignore[assignment]
        return tap.original(*args, **kwargs)
    finally:
        for owner, name, param in found:
            owner._parameters[name] = param


@never_compiled
def by_itself(tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer as it is uncompiled, with all that it calls."""
    session = tap.session
    if session.options.layers_are_cut:
        raise FlashClippingError(
            f"{tap.path}: found a break between two compiled graphs at this layer, in a model "
            "whose layers are cut over processes. Gradients that are DTensors do not go from one "
            "graph to the next, and autograd does not say so. Compile parts that have no break, "
            "and let the compiler name one:\n    for block in model.blocks:\n"
            "        block.compile(fullgraph=True)\n"
            "Hooks that were disabled are such a break too: use the model before it is wrapped. So "
            "are inputs that lie otherwise than in the first call: lay them out alike in all calls."
        )
    before, session.mode.by_itself = session.mode.by_itself, True
    try:
        return tap(*args, **kwargs)
    finally:
        session.mode.by_itself = before


# -- what runs before ------------------------------------------------------------------------------

#: For each tap of a region, what its calls saw; None for a call that was of no use.
Calls: TypeAlias = list[list["Seen | None"]]


def kind_of(tap: Any) -> Kind | None:
    """What was shown of what a layer reads; None where it was not, or where it has
    nothing to train."""
    session, shown = tap.session, tap.session.known
    if not tap.trainable()[1]:
        return None
    if tap.rule is None:
        if tap.by_function or tap.loops or tap.borrows or tap.folded or session.options.batch_axis:
            return None
        if tap.path in shown.proven:
            return "own"
        return "unused" if shown.proven and tap.path not in shown.reads else None
    if tap.path in shown.proven:
        return "samples"
    if tap.path in shown.constants and not (tap.folded or session.options.batch_axis):
        return "same for all"
    return None


def noted_call(tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer's own forward, while a region learns what its layers see."""
    if tap.boundary is None or not tap.trainable()[1]:
        return _noted_call(tap, tap.original, args, kwargs)

    def tapped(x: Tensor) -> Any:
        local = tap.boundary.local_layer(tap.layer)
        return _noted_call(tap, MethodType(type(local).forward, local), (x,), {})

    return tap.boundary.call(tap.layer, tapped, args, kwargs)


def _noted_call(
    tap: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    session = tap.session
    assert session.mode.seen is not None
    of_tap = session.mode.seen.setdefault(id(tap), [])
    note_use(args, kwargs)
    call, axis = session.current_forward, session.options.batch_axis
    batch_size, kind = None if call is None else call.batch_size, kind_of(tap)
    if kind in ("own", "unused") and batch_size is not None:
        params = [param for _, _, param in _own_parameters(tap)]
        place = len(of_tap)  # the module may be called again inside
        of_tap.append(None)
        rows = [param.expand(batch_size, *param.shape) for param in params]
        output = _on_own_parameters(tap, rows, args, kwargs)
        kind, why = "own" if was_used(tap.path) else "unused", ""
        if is_checkpointed():  # Dynamo puts nothing in a parameter's place there
            why = "it uses its parameters itself, inside of an activation checkpoint"
        shape, dtype = (batch_size,), params[0].dtype
        of_tap[place] = Seen(shape, dtype, shape, dtype, kind, why)
        return output
    x = _only_tensor(args, kwargs)
    same = isinstance(x, Unbatched) or kind == "same for all"
    if isinstance(x, SameRows) and kind == "samples":
        args, kwargs = (memory_of(x),), {}
    elif same and x is not None and batch_size is not None and _serves_same_for_all(tap):
        x = rows_of(x) if isinstance(x, Unbatched) else x.expand(batch_size, *x.shape)
        y = original(x)
        of_tap.append(_seen(x, y, "same for all"))
        return same_for_all(y, tap.path)
    if tap.trainable()[1]:
        args, kwargs = without_same(tap.path, args, kwargs)
    output = original(*args, **kwargs)
    x, seen = args[0] if args else kwargs.get("input"), None
    if isinstance(x, Tensor) and isinstance(output, Tensor) and min(x.dim(), output.dim()) > axis:
        seen = _seen(x.transpose(0, axis), output.transpose(0, axis))
    of_tap.append(seen)
    return output


def _serves_same_for_all(tap: Any) -> bool:
    """Whether a layer may read what is the same for all samples."""
    wiring = tap.wiring
    if tap.computed or tap.folded or tap.session.options.batch_axis or wiring is None:
        return False
    return wiring.any_axes and wiring.serves(tap.layer) and bool(tap.trainable()[1])
