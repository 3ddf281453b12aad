"""Tapped layers while Dynamo traces them, and while a region learns what they see.

While a layer is traced, its wires are compared with what it reads and returns, so that a wrong
shape is a guard that fails, not a wrong norm.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import Any, NamedTuple, Protocol, TypeAlias

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
from flash_clipping.capture.compiled.wirings import (
    Kind,
    PerSampleParameter,
    Seen,
    Wires,
    Wiring,
)
from flash_clipping.capture.session import ClippingSession
from flash_clipping.rules.registry import Rule


class WiredCall(NamedTuple):
    """One call of a layer in a region."""

    kind: Kind
    wires: Wires


#: The wires of regions that run now, by the key of their model's session: for each tap of the
#: region, by its number, those of every call. An empty tuple: the layer has nothing to train. None:
#: it has no wires. Global, as Dynamo takes tensors that are reached through a module of PyTorch's
#: to be of one shape for good.
ACTIVE: dict[int, list[tuple[WiredCall, ...] | None]] = {}


class WiredTap(Protocol):
    """What is asked of a tap (:class:`~flash_clipping.capture.tap.Tap`)."""

    layer: Any
    path: str
    session: ClippingSession
    rule: Rule | None
    wiring: Wiring | None
    owners: list[torch.nn.Module]
    generic: bool
    borrows: bool
    #: Its number in the region that runs, or -1.
    number: int

    @property
    def computed(self) -> bool: ...

    @property
    def folded(self) -> bool: ...

    def trainable(self) -> tuple[list[str], list[torch.nn.Parameter]]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def original(self, *args: Any, **kwargs: Any) -> Any: ...


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
def _claim(number: int, calls: int) -> int:
    """Which of its calls this one of a tap is, in the trace that runs now; -1 where that is not
    known, or there are not so many."""
    context = tracing_context()
    claims = None if context is None else _claims.get(context)
    if claims is None:
        return -1
    call = claims[number]
    claims[number] += 1
    return call if call < calls else -1


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


def traced_call(tap: WiredTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tapped layer while Dynamo traces it: on its wires, or between two graphs."""
    if not torch.is_grad_enabled():
        return tap.original(*args, **kwargs)
    wires = ACTIVE.get(tap.session.key)
    # A tap's own number is asked for last: code that depends on it serves one tap.
    if wires is not None and _may_claim() and tap.number >= 0:
        calls = wires[tap.number]
        if calls is not None:
            if len(calls) == 0:
                return tap.original(*args, **kwargs)
            x = _only_tensor(args, kwargs)
            if x is not None or calls[0].kind in ("own", "unused"):
                number = _claim(tap.number, len(calls))
                if number >= 0:
                    call = calls[number]
                    if call.kind == "own":
                        if _parameters_fit(tap, call.wires):
                            return _on_own_parameters(tap, call.wires, args, kwargs)
                    elif call.kind == "unused":
                        return tap.original(*args, **kwargs)
                    else:
                        output = _wired_call(tap, x, call)
                        if output is not None:
                            return output
                    _note_misfit()
    if _is_in_an_operator():  # its path is a guard, which elsewhere would be one of every layer
        _note_operator(tap.path)
    return by_itself(tap, args, kwargs)


def _only_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a layer is called with, if that is one tensor."""
    x = args[0] if len(args) == 1 and not kwargs else kwargs.get("input")
    return x if len(args) + len(kwargs) == 1 and isinstance(x, Tensor) else None


def _wired_call(tap: WiredTap, x: Any, call: WiredCall) -> Tensor | None:
    """The layer on its wires; None where they do not fit."""
    wiring, axis, wires = tap.wiring, tap.session.batch_axis, call.wires
    assert wiring is not None
    for name in ("weight", "bias"):
        param = getattr(tap.layer, name, None)
        if param is not None and not isinstance(param, torch.nn.Parameter):
            return None  # computed elsewhere (functional_call): no wire leads there
    same = call.kind == "same for all"
    if same:
        sizes = [wire.shape[0] for wire in wires if wire is not None]
        x = rows_of(x) if isinstance(x, Unbatched) else x.expand(sizes[0], *x.shape)
    elif isinstance(x, Unbatched):
        if not isinstance(x, SameRows):
            return None
        x = memory_of(x)
    if axis:
        x = x.transpose(0, axis)
    y = wiring.forward(tap.layer, x, wires)
    seen = Seen(tuple(x.shape), x.dtype, tuple(y.shape), y.dtype)
    for wire, (shape, dtype) in zip(wires, wiring.metas(tap.layer, seen), strict=True):
        # Autograd would add up, or round, a gradient that is not like its tensor.
        if wire is not None and (tuple(wire.shape) != shape or wire.dtype != dtype):
            return None
    if same:
        return same_for_all(y, tap.path)
    return y.transpose(0, axis) if axis else y


def _own_parameters(tap: WiredTap) -> list[tuple[Any, str, Any]]:
    """Those that a module computes with itself and that are trainable, and where they are."""
    return [
        (owner, name, param)
        for owner in tap.owners
        for name, param in owner._parameters.items()
        if param is not None and param.requires_grad
    ]


def _parameters_fit(tap: WiredTap, wires: Wires) -> bool:
    found = _own_parameters(tap)
    if len(found) != len(wires):
        return False
    for (_, _, param), wire in zip(found, wires, strict=True):
        if wire is None or not isinstance(param, torch.nn.Parameter):
            return False  # functional_call has put something else there
        if tuple(wire.shape[1:]) != tuple(param.shape) or wire.dtype != param.dtype:
            return False
    return True


def _on_own_parameters(
    tap: WiredTap, wires: Wires, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The module's own forward, with its parameters as what is the same for all samples."""
    found = _own_parameters(tap)
    try:
        for (owner, name, param), wire in zip(found, wires, strict=True):
            param_B = PerSampleParameter.apply(param, wire)
            owner._parameters[name] = same_for_all(param_B, tap.path)
        return tap.original(*args, **kwargs)
    finally:
        for owner, name, param in found:
            owner._parameters[name] = param


@never_compiled
def by_itself(tap: WiredTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer as it is uncompiled, with all that it calls."""
    session = tap.session
    before, session.by_itself = session.by_itself, True
    try:
        return tap(*args, **kwargs)
    finally:
        session.by_itself = before


# -- what runs before ------------------------------------------------------------------------------

#: For each tap of a region, what its calls saw; None for a call that was of no use.
Calls: TypeAlias = list[list["Seen | None"]]


def kind_of(tap: WiredTap) -> Kind | None:
    """What rehearsals have shown of what a layer reads; None where they have not, or where it has
    nothing to train."""
    session, evidence = tap.session, tap.session.evidence
    if not tap.trainable()[1]:
        return None
    if tap.rule is None:
        if tap.generic or tap.borrows or tap.folded or session.batch_axis:
            return None
        if tap.path in evidence.proven:
            return "own"
        return "unused" if evidence.proven and tap.path not in evidence.reads else None
    if tap.path in evidence.proven:
        return "samples"
    if tap.path in evidence.constants and not (tap.folded or session.batch_axis):
        return "same for all"
    return None


def noted_call(tap: WiredTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer's own forward, while a region learns what its layers see."""
    calls = tap.session.seen
    if calls is None:
        return tap.original(*args, **kwargs)
    of_tap = calls.setdefault(id(tap), [])
    note_use(args, kwargs)
    call = tap.session.current_forward
    batch_size, kind = None if call is None else call.batch_size, kind_of(tap)
    if tap.rule is None and batch_size is not None and kind in ("own", "unused"):
        return _noted_own(tap, of_tap, batch_size, args, kwargs)
    x, axis = args[0] if args else kwargs.get("input"), tap.session.batch_axis
    if isinstance(x, SameRows) and kind == "samples":
        args, kwargs = (memory_of(x),), {}
        x = args[0]
    elif isinstance(x, Unbatched) or kind == "same for all":
        only = _only_tensor(args, kwargs)
        wiring, serves = tap.wiring, not (tap.generic or tap.computed or tap.folded or axis)
        serves = serves and wiring is not None and wiring.any_axes and wiring.serves(tap.layer)
        serves = serves and bool(tap.trainable()[1])
        if serves and only is not None and batch_size is not None:
            if isinstance(only, Unbatched):
                x = rows_of(only)
            else:
                x = only.expand(batch_size, *only.shape)
            y = tap.original(x)
            shapes = tuple(x.shape), x.dtype, tuple(y.shape), y.dtype
            of_tap.append(Seen(*shapes, kind="same for all"))
            return same_for_all(y, tap.path)
    if tap.trainable()[1]:
        args, kwargs = without_same(tap.path, args, kwargs)
        x = args[0] if args else kwargs.get("input")
    output = tap.original(*args, **kwargs)
    seen = None
    if isinstance(x, Tensor) and isinstance(output, Tensor) and min(x.dim(), output.dim()) > axis:
        before, after = x.transpose(0, axis), output.transpose(0, axis)
        seen = Seen(tuple(before.shape), x.dtype, tuple(after.shape), output.dtype)
    of_tap.append(seen)
    return output


def _noted_own(
    tap: WiredTap,
    of_tap: list[Any],
    batch_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A module's own forward on what is the same for all samples."""
    found = _own_parameters(tap)
    dtype, place = found[0][2].dtype, len(of_tap)
    of_tap.append(None)
    try:
        for owner, name, param in found:
            param_B = param.expand(batch_size, *param.shape)
            owner._parameters[name] = same_for_all(param_B, tap.path)
        output = tap.original(*args, **kwargs)
    finally:
        for owner, name, param in found:
            owner._parameters[name] = param
    kind: Kind = "own" if was_used(tap.path) else "unused"
    why = ""
    if is_checkpointed():  # Dynamo puts nothing in a parameter's place there
        why = "it uses its parameters itself, inside of an activation checkpoint"
    of_tap[place] = Seen((batch_size,), dtype, (batch_size,), dtype, kind, why)
    return output
