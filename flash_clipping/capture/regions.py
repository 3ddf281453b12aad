"""Compiled parts of a model: wires are made outside of them, and received there.

A *region* is what ``torch.compile`` was asked for: the whole model (``wrapped.compile()``, or
``torch.compile(model)`` and ``model.compile()`` before it was wrapped), or blocks of it
(``model.block.compile()``). One autograd function outside of the region makes all wires
(:mod:`flash_clipping.capture.wires`) of one call; its backward gets all gradients at once, makes
factors of them and records these. Eager and compiled models differ in who does that, and in nothing
else: rehearsals run uncompiled, and only layers that they have proven get wires.

The shapes of wires must be known before the region runs. They are learned from an uncompiled run of
the region that keeps nothing for backward, for the first shapes of its inputs and for every other
that does not follow from those that were seen: two batch sizes tell all.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from flash_clipping._compat import (
    as_if_compiling,
    call_of,
    checkpoints_replaced,
    compiles,
    is_compiled,
    is_compilers_error,
    pytree,
)
from flash_clipping.capture.forward_call import ForwardCall, in_backward
from flash_clipping.capture.inputs import map_tensors, tensors_in
from flash_clipping.capture.no_trace import (
    PlainCheckpoint,
    random_state,
    untouched,
    without_activations,
)
from flash_clipping.capture.same_for_all import note_escaped, noting_misuse
from flash_clipping.capture.session import ClippingSession
from flash_clipping.capture.wires import (
    ACTIVE,
    Calls,
    Kind,
    Meta,
    OwnWiring,
    Seen,
    WiredCall,
    Wiring,
    begin_trace,
    kind_of,
    traces,
)
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Factor, Outer
from flash_clipping.finish.session import Readers

if TYPE_CHECKING:
    from flash_clipping.capture.no_samples import EmptyBatchForward
    from flash_clipping.capture.tap import Tap

#: Layouts of wires, and shapes, that one region remembers.
REMEMBERED = 256


# -- the shapes of wires ---------------------------------------------------------------------------


class _Affine:
    """Shapes that follow from those of inputs, as far as these are combinations of known ones.

    Sizes grow evenly with the sizes that they depend on: with the batch, with the length of texts.
    So any combination of two that were seen can be told (``s = s_0 + r (s_1 - s_0)``), and what
    cannot be told so is learned.
    """

    def __init__(self) -> None:
        self._first: tuple[Sequence[int], Calls] | None = None
        #: Differences to the first, of inputs and of what was learned, in echelon form: the place
        #: of the leading 1, and both vectors.
        self._rows: list[tuple[int, list[Fraction], list[Fraction]]] = []
        self._even = True

    def refute(self) -> None:
        """What was told turned out wrong: nothing is told any more."""
        self._even = False

    def add(self, sizes: Sequence[int], calls: Calls) -> None:
        if self._first is None:
            self._first = sizes, calls
            return
        if not self._even or _form(calls) != _form(self._first[1]):
            self._even = False
            return
        of_inputs, learned = self._difference(sizes), self._from_first(calls)
        rest, known = self._reduced(of_inputs)
        learned = [a - b for a, b in zip(learned, known, strict=True)]
        lead = next((i for i, size in enumerate(rest) if size), None)
        if lead is None:
            self._even = not any(learned)
            return
        factor = rest[lead]
        row = lead, [size / factor for size in rest], [size / factor for size in learned]
        self._rows.append(row)

    def find(self, sizes: Sequence[int]) -> Calls | None:
        """What follows for these sizes of the inputs, if anything."""
        if self._first is None or not self._even:
            return None
        rest, learned = self._reduced(self._difference(sizes))
        if any(rest):
            return None
        first = _sizes(self._first[1])
        found = [size + more for size, more in zip(first, learned, strict=True)]
        if any(size < 0 or size.denominator != 1 for size in found):
            return None
        return _with_sizes(self._first[1], iter([int(size) for size in found]))

    def _difference(self, sizes: Sequence[int]) -> list[Fraction]:
        assert self._first is not None
        return [Fraction(a - b) for a, b in zip(sizes, self._first[0], strict=True)]

    def _from_first(self, calls: Calls) -> list[Fraction]:
        assert self._first is not None
        pairs = zip(_sizes(calls), _sizes(self._first[1]), strict=True)
        return [Fraction(a - b) for a, b in pairs]

    def _reduced(self, of_inputs: list[Fraction]) -> tuple[list[Fraction], list[Fraction]]:
        """What is left when known rows are taken away, and what these say was learned."""
        rest, learned = (
            of_inputs,
            [Fraction(0)] * len(_sizes(self._first[1] if self._first else [])),
        )
        for lead, row, of_row in self._rows:
            if times := rest[lead]:
                rest = [a - times * b for a, b in zip(rest, row, strict=True)]
                learned = [a + times * b for a, b in zip(learned, of_row, strict=True)]
        return rest, learned


def _sizes(calls: Calls) -> list[int]:
    of_calls = [seen for of_tap in calls for seen in of_tap if seen is not None]
    return [size for seen in of_calls for size in (*seen.x_shape, *seen.y_shape)]


def _form(calls: Calls) -> Hashable:
    """All about these calls but sizes."""
    return tuple(
        tuple(
            None if s is None else (len(s.x_shape), len(s.y_shape), s.x_dtype, s.y_dtype, *s[4:])
            for s in of_tap
        )
        for of_tap in calls
    )


def _with_sizes(calls: Calls, sizes: Iterator[int]) -> Calls:
    def changed(seen: Seen | None) -> Seen | None:
        if seen is None:
            return None
        x_shape = tuple(next(sizes) for _ in seen.x_shape)
        return seen._replace(x_shape=x_shape, y_shape=tuple(next(sizes) for _ in seen.y_shape))

    return [[changed(seen) for seen in of_tap] for of_tap in calls]


def _kind_and_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, list[int]]:
    """What a region was called with, apart from the sizes of tensors, and these."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kind: list[Hashable] = [repr(spec)]
    sizes: list[int] = []
    devices = set()
    for leaf in leaves:
        if leaf is None or isinstance(leaf, bool | int | float | str):
            kind.append(leaf)
            continue
        kind.append(repr(type(leaf)))
        for x in tensors_in(leaf):
            kind += (x.dtype, x.device, x.dim())
            sizes += x.shape
            devices.add(x.device.type)
    for device in sorted(devices):
        if torch.is_autocast_enabled(device):
            kind.append(torch.get_autocast_dtype(device))
    return tuple(kind), sizes


# -- one call of a region --------------------------------------------------------------------------


class _Slot(NamedTuple):
    """One call of a wired layer: which of all wires are its own."""

    tap: Tap
    wiring: Wiring | OwnWiring
    names: list[str]
    params: list[nn.Parameter]
    places: tuple[int | None, ...]


@dataclass
class _Layout:
    """The wires of a region for one combination of shapes and trainable parameters."""

    #: What wires are like: one element for all of a dtype, which nothing ever reads.
    wires: list[Tensor]
    slots: list[_Slot]
    #: By number of a tap: of its calls, what they are and the places of their wires, or as in
    #: :data:`ACTIVE`.
    by_tap: list[tuple[tuple[Kind, tuple[int | None, ...]], ...] | None]
    params: list[nn.Parameter]
    #: Layers that have no wires, and why.
    refused: list[tuple[str, str]]
    #: Those of them that may get wires, once it is proven that they read samples.
    unproven: set[str] = field(default_factory=set)
    #: Why the region does not run as compiled, but for ``fullgraph``.
    uncompiled: str = ""
    #: Whether something in the region is the same for all samples.
    has_same_for_all: bool = False
    elements: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)
    #: What identifies this layout by ``id`` is kept, so that no other object gets that.
    kept: list[Any] = field(default_factory=list)

    def add_wire(self, meta: Meta, device: torch.device) -> int:
        """Returns: its place."""
        shape, dtype = meta
        element = self.elements.get((dtype, device))
        if element is None:
            element = self.elements[dtype, device] = torch.empty((), dtype=dtype, device=device)
        self.wires.append(element.expand(shape))
        return len(self.wires) - 1


class _Wires(torch.autograd.Function):
    """Makes the wires of one call of a region, and receives their gradients.

    The trainable parameters are inputs, so that autograd knows for which of them a backward is.
    """

    @staticmethod
    def forward(ctx: Any, handed: _Handed, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.handed = handed
        ctx.set_materialize_grads(False)
        # Each has a history of its own. To detach one takes the host half of what a new one takes,
        # and there are two or three for every layer.
        return tuple([wire.detach() for wire in handed.layout.wires])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *ctx.handed.take(grads)


@dataclass(eq=False)
class _Handed:
    """What the backward of one call of a region has to know."""

    region: str
    layout: _Layout
    session: ClippingSession
    call: ForwardCall | None
    recomputed: bool

    def take(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Record the factors; gradients for the parameters only where nobody records."""
        if torch.is_grad_enabled():
            raise FlashClippingError(
                f"{self.region}: backward(create_graph=True) asks for second derivatives, which "
                "flash clipping does not have. Call backward() without create_graph, or take such "
                "gradients on the unwrapped model."
            )
        found: list[tuple[_Slot, list[Factor]]] = []
        for slot in self.layout.slots:
            of_slot = [None if place is None else grads[place] for place in slot.places]
            missing = [grad is None for grad in of_slot]
            if all(missing):
                continue  # the layer was not reached
            if missing != [place is None for place in slot.places]:
                raise FlashClippingError(
                    f"{slot.tap.path}: in a compiled model, only a part of what its norm needs "
                    "arrived. Call the layer with a tensor that requires grad, or compile the "
                    "model without it."
                )
            by_name = slot.wiring.factors(slot.tap.layer, of_slot)
            found.append((slot, [by_name[name] for name in slot.names]))
        if not self.session.enabled:
            return self._ordinary(found)
        if found:
            backward_pass = found[0][0].tap.running_backward_pass(self.recomputed)
            of_slots = zip(found, self._readers(found), strict=True)
            for (slot, factors), readers in of_slots:
                slot.tap.record_on(backward_pass, slot.params, factors, readers)
        return (None,) * len(self.layout.params)

    def _readers(self, found: Sequence[tuple[_Slot, list[Factor]]]) -> list[Readers | None]:
        """For every layer, where it is looked up how many layers read its input."""
        call = self.call
        if call is None:
            return [None] * len(found)
        places: dict[Hashable, int] = {}
        readers: list[Readers | None] = []
        for _, (first, *_) in found:
            place = len(call.readers)
            if isinstance(first, Outer):
                place = places.setdefault(first.shares_input_with(), place)
            if place == len(call.readers):
                call.readers.append(0)
            call.readers[place] += 1
            readers.append((call, place))
        return readers

    def _ordinary(self, found: Sequence[tuple[_Slot, list[Factor]]]) -> list[Tensor | None]:
        """Recording was switched off since forward."""
        backend = self.session.backend
        sums: dict[int, Tensor] = {}
        for slot, factors in found:
            for param, factor in zip(slot.params, factors, strict=True):
                grad = factor.clipped_sum(None, backend).view_as(param).to(param.dtype)
                sums[id(param)] = sums[id(param)] + grad if id(param) in sums else grad
        return [sums.get(id(param)) for param in self.layout.params]


class Region:
    """A part of the model that is compiled as one, in place of what would run it.

    Args:
        module: that part, for its type.
        path: its name in the model, for messages.
        inner: runs it uncompiled.
        session, taps: the model's, and those in this part.
        compiler: compiles a function, as ``torch.compile`` was told for this part.
        fullgraph: whether a break in the graph is an error.
        codes: code objects of what was compiled for parts of other types: parts of one type share
            what was compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        inner: Callable[..., Any],
        session: ClippingSession,
        taps: list[Tap],
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]],
        fullgraph: bool,
        codes: dict[type, Any],
    ):
        self.path = f"{path or 'the model'} ({type(module).__name__})"
        self.module, self.inner = module, inner
        self.session, self.taps = session, taps
        self.fullgraph = fullgraph
        #: Layers that ran uncompiled once, to be proven.
        self._tried: set[str] = set()
        self._warned = False
        self.compiled: Callable[..., Any] | None = compiler(self._entry(inner, module, codes))
        self._shapes: dict[Hashable, _Affine] = {}
        self._known: OrderedDict[Hashable, Calls] = OrderedDict()
        self._layouts: OrderedDict[Hashable, _Layout] = OrderedDict()

    @staticmethod
    def _entry(
        inner: Callable[..., Any], module: nn.Module, codes: dict[type, Any]
    ) -> Callable[..., Any]:
        def region(*args: Any, **kwargs: Any) -> Any:
            begin_trace()
            return inner(*args, **kwargs)

        # Dynamo counts recompilations by code object: other models are none of this one's.
        own = region.__code__.replace(co_name=f"region_of_{type(module).__name__}")
        region.__code__ = codes.setdefault(type(module), own)
        return region

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a compiled module is not compiled, as PyTorch has it.
        state = self.__dict__.copy()
        state.update(compiled=None, _shapes={}, _known=OrderedDict(), _layouts=OrderedDict())
        return state

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the module's own forward, which trainers choose arguments by."""
        forward: Any = self.inner
        while hasattr(forward, "instance_forward"):  # a tap
            forward = forward.instance_forward or MethodType(
                type(forward.layer).forward, forward.layer
            )
        return inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return self.inner(*args, **kwargs)  # a part of another region
        session, call = self.session, self.session.current_forward
        if (
            self.compiled is None
            or session.bypassed  # a run that only looks
            or (call is not None and call.witness is not None)  # a rehearsal
        ):
            return self.inner(*args, **kwargs)
        if not session.recording:
            if session.enabled and call is not None and call.recorded and not in_backward():
                # The first forward of re-entrant checkpointing, without autograd. How often a layer
                # is used is not known then: none may pass for used once.
                for tap in self.taps:
                    session.count_use(tap.trainable()[1] * 2)
            return self._run(None, args, kwargs)
        if (call is None or call.ended) and not in_backward():
            return self.inner(*args, **kwargs)  # where taps refuse it
        kind, sizes = _kind_and_sizes(args, kwargs)
        # What is the same for all samples gets a row for each, as many as the model has now.
        kind = kind, tuple([kind_of(tap) for tap in self.taps])
        sizes.append(0 if call is None else call.batch_size or 0)
        key = kind, tuple(sizes)
        known = self._find(key, kind, sizes)
        told = known is not None
        traces.misfits, traces.inside = False, []
        if known is None:
            known = self._learn(key, kind, sizes, args, kwargs)
        try:
            layout = self._layout(key, known)
            if layout.unproven and not self._tried.issuperset(layout.unproven):
                # As eager taps do, take what they read for samples, to be proven after this call.
                self._tried |= layout.unproven
                return self.inner(*args, **kwargs)
            if layout.uncompiled and not self.fullgraph:
                self._warn_uncompiled(layout.uncompiled)
                return self.inner(*args, **kwargs)
            return self._run(layout, args, kwargs)
        except FlashClippingError:
            raise
        except Exception as error:
            if traces.inside:
                raise FlashClippingError(
                    f"{', '.join(dict.fromkeys(traces.inside))}: called inside an operator with a "
                    "body of its own (torch.cond, while_loop, scan, a nested compile region), "
                    "which may run it any number of times: there is nothing to record it with. "
                    "Call the layer outside of the operator, leave this part uncompiled, or "
                    "freeze the layer's parameters."
                ) from error
            # With one graph for all, nothing has run while it is traced. Otherwise a part may have.
            if not (traces.misfits and told and self.fullgraph and is_compilers_error(error)):
                raise
            # What followed from other shapes was wrong.
            traces.misfits = False
            known = self._learn(key, kind, sizes, args, kwargs)
            return self._run(self._layout(key, known), args, kwargs)
        finally:
            if traces.misfits:  # some layers ran by themselves; the next time it is learned anew
                self._known.pop(key, None)
                self._shapes[kind].refute()

    def _warn_uncompiled(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.path}: it runs uncompiled, as {why}. Such values cannot go from one graph "
                "to the next: expand what the layer reads over the batch, x.expand(batch_size, "
                "...), or freeze its parameters.",
                stacklevel=2,
            )

    def _run(self, layout: _Layout | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The compiled region, with wires if there is a layout of them."""
        assert self.compiled is not None
        key = self.session.key
        if layout is not None:
            self._check(layout)
        before = ACTIVE.pop(key, None)
        try:
            if layout is not None:
                ACTIVE[key] = self._make(layout)
            output = self.compiled(*args, **kwargs)
            if layout is not None and layout.has_same_for_all:
                note_escaped(output)
            return output
        finally:
            ACTIVE.pop(key, None)
            if before is not None:
                ACTIVE[key] = before

    def _make(self, layout: _Layout) -> list[tuple[WiredCall, ...] | None]:
        """The wires of one call, by number of the tap."""
        session = self.session
        session.count_uses([slot.params for slot in layout.slots])
        if session.numbered is not self.taps:
            for tap in session.numbered:  # this region may call what is not in it
                tap.number = -1
            for number, tap in enumerate(self.taps):
                tap.number = number
            session.numbered = self.taps
        if not layout.wires:
            return [
                None if calls is None else tuple(WiredCall(kind, ()) for kind, _ in calls)
                for calls in layout.by_tap
            ]
        call = session.current_forward
        handed = _Handed(self.path, layout, session, call, in_backward())
        wires = _Wires.apply(handed, *layout.params)
        return [
            None
            if calls is None
            else tuple(
                WiredCall(kind, tuple(None if place is None else wires[place] for place in places))
                for kind, places in calls
            )
            for calls in layout.by_tap
        ]

    # -- what wires are like ----------------------------------------------------------------------

    def _find(self, key: Hashable, kind: Hashable, sizes: list[int]) -> Calls | None:
        known = self._known.get(key)
        if known is None and kind in self._shapes:
            known = self._shapes[kind].find(sizes)
            if known is not None:
                _keep(self._known, key, known)
        return known

    def _learn(
        self,
        key: Hashable,
        kind: Hashable,
        sizes: list[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Calls:
        """Run the region once, uncompiled, to see what its layers read and return."""
        session = self.session
        args, kwargs = map_tensors(_copied, (args, kwargs))
        tensors = [*tensors_in((args, kwargs)), *session.state()]
        devices = {x.device for x in tensors if x.is_cuda}
        before, session.seen = session.seen, {}
        try:
            with (
                untouched(self.module),
                random_state(list(devices), 0),
                without_activations(),
                checkpoints_replaced(PlainCheckpoint),
                session.bypass(),
                as_if_compiling(),
                noting_misuse() as misuse,
            ):
                note_escaped(self.inner(*args, **kwargs))
            calls = [session.seen.get(id(tap), []) for tap in self.taps]
            if misuse:
                calls = [[_refused(seen, misuse[0]) for seen in of_tap] for of_tap in calls]
        finally:
            session.seen = before
        self._shapes.setdefault(kind, _Affine()).add(sizes, calls)
        _keep(self._known, key, calls)
        return calls

    def _layout(self, key: Hashable, known: Calls) -> _Layout:
        proven = self.session.evidence.proven
        trainables = [tap.trainable() for tap in self.taps]
        states = [
            (
                id(names),
                tap.path in proven,
                tap.computed,
                tap.generic,
                tap.wiring is not None and tap.wiring.serves(tap.layer),
            )
            for tap, (names, _) in zip(self.taps, trainables, strict=True)
        ]
        number = key, id(known), tuple(states)
        layout = self._layouts.get(number)
        if layout is None:
            layout = self._new_layout(known, trainables)
            _keep(self._layouts, number, layout)
        return layout

    def _check(self, layout: _Layout) -> None:
        """Refuse layers without wires where they may not break the graph."""
        if layout.refused and self.fullgraph:
            lines = "\n".join(f"{path}: {why}" for path, why in layout.refused)
            raise FlashClippingError(
                f"{self.path}: it is compiled with fullgraph=True, but these layers in it cannot "
                f"be recorded inside a compiled graph:\n{lines}\nCompile without fullgraph (such a "
                "layer then runs by itself, between two graphs), compile blocks without such "
                "layers (model.block.compile(fullgraph=True)), or freeze their parameters."
            )

    def _new_layout(self, known: Calls, trainables: Sequence[Any]) -> _Layout:
        layout = _Layout([], [], [], [], [])
        unique: dict[int, nn.Parameter] = {}
        for tap, calls, (names, params) in zip(self.taps, known, trainables, strict=True):
            layout.kept += (names, known)
            if not params and not (tap.rule is not None and tap.rule.allows_children):
                layout.by_tap.append(())
                continue
            why = _without_wires(tap, calls)
            if why is not None and any(s is not None and s.kind == "same for all" for s in calls):
                layout.uncompiled = f"{tap.path}: {why}"
            if why is not None:
                layout.by_tap.append(None)
                if calls:
                    layout.refused.append((tap.path, why))
                if calls and why == _UNPROVEN:
                    layout.unproven.add(tap.path)
                continue
            of_tap: list[tuple[Kind, tuple[int | None, ...]]] = []
            for seen in calls:
                assert seen is not None
                layout.has_same_for_all |= seen.kind in ("own", "same for all")
                if seen.kind == "own":
                    for name, param in zip(names, params, strict=True):
                        place = layout.add_wire(OwnWiring.meta(param, seen), param.device)
                        layout.slots.append(_Slot(tap, OwnWiring(name), [name], [param], (place,)))
                    found = [slot.places[0] for slot in layout.slots[-len(names) :]]
                elif seen.kind == "unused":
                    found = []
                else:
                    assert tap.wiring is not None
                    metas, wanted = tap.wiring.metas(tap.layer, seen), tap.wiring.wanted(names)
                    found = [
                        layout.add_wire(meta, params[0].device) if needed else None
                        for meta, needed in zip(metas, wanted, strict=True)
                    ]
                    layout.slots.append(_Slot(tap, tap.wiring, names, params, tuple(found)))
                of_tap.append((seen.kind, tuple(found)))
            layout.by_tap.append(tuple(of_tap) or None)
            unique.update((id(param), param) for param in params)
        layout.params = list(unique.values())
        return layout


_UNPROVEN = "no rehearsal has shown that it reads the samples, one row for each"


def _without_wires(tap: Tap, calls: Sequence[Seen | None]) -> str | None:
    """Why a layer has no wires."""
    why = next((seen.why for seen in calls if seen is not None and seen.why), None)
    if why is not None:
        return why
    kinds = {None if seen is None else seen.kind for seen in calls}
    if tap.rule is None:
        if tap.generic:
            return "it runs by the generic rule"
        if tap.folded or tap.session.batch_axis:
            return "it uses its parameters itself, and rows are not samples there"
        if kinds == {"unused"} or (kinds <= {"own", "unused"} and kind_of(tap) == "own"):
            return None
        if tap.path in tap.session.evidence.reads:
            return "its own parameters meet what has no row for each sample"
        return _UNPROVEN
    if tap.wiring is None:
        return f"its rule {type(tap.rule).__name__} cannot be traced"
    if tap.generic or tap.computed:
        return "it computes with tensors that are not its own parameters"
    if not tap.wiring.serves(tap.layer):
        return "its settings are not supported there"
    if kinds == {"same for all"}:
        return None
    if tap.path not in tap.session.evidence.proven:
        return _UNPROVEN
    if None in kinds:
        return "it was called with something else than one tensor that has a batch axis"
    return None


def _refused(seen: Seen | None, why: str) -> Seen | None:
    """A call that may have no wires, as what is the same for all samples meets others."""
    if seen is None or seen.kind in ("samples", "unused"):
        return seen
    return seen._replace(why=f"it computes what is the same for all samples, and {why}")


def _copied(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _keep(known: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    known[key] = value
    if len(known) > REMEMBERED:
        known.popitem(last=False)


class Regions:
    """What is compiled in a wrapped model: found where PyTorch has it, and put back.

    Args:
        root: the model.
        session, taps: its own.
    """

    def __init__(self, root: nn.Module, session: ClippingSession, taps: Sequence[Tap]):
        self.root, self.session = root, session
        self.taps = list(taps)
        self._codes: dict[type, Any] = {}
        self._of_blocks: list[tuple[nn.Module, str, Any, Region]] = []
        #: The stand-in for the root's forward that runs the region, and what it ran before.
        self._of_root: tuple[EmptyBatchForward, Any] | None = None
        self._compiled_call: Any = None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_codes={}, _compiled_call=None, _of_blocks=[])
        return state

    def as_compiled(self) -> contextlib.AbstractContextManager[None]:
        """For rehearsals, which run uncompiled: the way through the model that compiled code takes,
        where it asks whether it is compiled."""
        compiled = self._of_root is not None or bool(self._of_blocks)
        return as_if_compiling() if compiled else contextlib.nullcontext()

    def find(self, forward: EmptyBatchForward) -> None:
        """Take over what was compiled before, or since: the root and blocks of it.

        ``forward`` stands in for the root's forward.
        """
        root = self.root
        compiled = vars(root).get("_compiled_call_impl")
        if compiled is not None and (context := _context_of(compiled)) is not None:
            # The hooks of the root, which must not be compiled, are called by its call.
            self._compiled_call, root._compiled_call_impl = compiled, None  # type: ignore
            self._install(forward, context)
        elif is_compiled(root) and self._of_root is None:
            self._install(forward, root.dynamo_ctx)
        for path, module in root.named_modules():
            if module is root:
                continue
            self._take_over(path, module)

    def _take_over(self, path: str, module: nn.Module) -> None:
        if is_compiled(module):
            name, context = "forward", module.dynamo_ctx
        else:
            name = "_compiled_call_impl"
            context = _context_of(vars(module).get(name))
        before, inner = vars(module).get(name), call_of(module)
        if context is None or inner is None or isinstance(before, Region):
            return
        region = self._region(module, path, inner, context)
        for tap in region.taps:
            if tap.wiring is not None or tap.rule is None:
                tap.install(as_method=True)
        setattr(module, name, region)
        self._of_blocks.append((module, name, before, region))

    def compile(self, forward: EmptyBatchForward, context: Any) -> None:
        """Compile the root's forward."""
        self._install(forward, context)

    def _install(self, forward: EmptyBatchForward, context: Any) -> None:
        if self._of_root is None:
            self._of_root = forward, forward.instance_forward
        before, root = self._of_root[1], self.root
        if is_compiled(root):
            inner = call_of(root)
        else:
            inner = before or MethodType(type(root).forward, root)
        forward.instance_forward = self._region(root, "", inner, context)

    def _region(
        self, module: nn.Module, path: str, inner: Callable[..., Any], context: Any
    ) -> Region:
        inside = set(module.modules())
        taps = [tap for tap in self.taps if tap.layer in inside]
        fullgraph = bool(getattr(context, "fullgraph", False))
        return Region(module, path, inner, self.session, taps, context, fullgraph, self._codes)

    def remove(self) -> None:
        """Put everything back."""
        while self._of_blocks:
            module, name, before, region = self._of_blocks.pop()
            if vars(module).get(name) is region:
                setattr(module, name, before)
        if self._of_root is not None:
            forward, before = self._of_root
            forward.instance_forward = before
            self._of_root = None
        if self._compiled_call is not None:
            self.root._compiled_call_impl = self._compiled_call  # type: ignore
            self._compiled_call = None


def _context_of(compiled: Any) -> Any:
    """What ``torch.compile`` made a function with: calling it compiles another one alike."""
    if compiled is None or isinstance(compiled, Region):
        return None
    with contextlib.suppress(TypeError):
        found = inspect.getclosurevars(compiled).nonlocals.get("self")
        if compiles(found):
            return found
    return None


def compiler_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compiles functions as ``torch.compile`` does with these arguments."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function, *args, **kwargs)
        return compiled

    # Where nn.Module.compile has it: torch.compile(model, fullgraph=False, ...)
    compiler.fullgraph = kwargs.get("fullgraph", False)  # type: ignore[attr-defined]
    return compiler
