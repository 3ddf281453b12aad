"""The wires of one call of a region: their shapes, told from those of its inputs; made outside of
it, and received there."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from flash_clipping._compat import pytree
from flash_clipping.capture.compiled.tracing import Calls, kind_of
from flash_clipping.capture.compiled.wirings import Kind, Meta, OwnWiring, Seen, Wiring
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Factor, Outer
from flash_clipping.finish.session import Readers

if TYPE_CHECKING:
    from flash_clipping.capture.tap import Tap


class Affine:
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


def kind_and_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, list[int]]:
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


class Slot(NamedTuple):
    """One call of a wired layer: which of all wires are its own."""

    tap: Tap
    wiring: Wiring | OwnWiring
    names: list[str]
    params: list[nn.Parameter]
    places: tuple[int | None, ...]


@dataclass
class Layout:
    """The wires of a region for one combination of shapes and trainable parameters."""

    #: What wires are like: one element for all of a dtype, which nothing ever reads.
    wires: list[Tensor]
    slots: list[Slot]
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


class Wired(torch.autograd.Function):
    """Makes the wires of one call of a region, and receives their gradients.

    The trainable parameters are inputs, so that autograd knows for which of them a backward is.
    """

    @staticmethod
    def forward(ctx: Any, handed: Handed, anchor: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.handed = handed
        ctx.set_materialize_grads(False)
        # Each has a history of its own. To detach one takes the host half of what a new one takes,
        # and there are two or three for every layer.
        return tuple([wire.detach() for wire in handed.layout.wires])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *ctx.handed.take(grads)


@dataclass(eq=False)
class Handed:
    """What the backward of one call of a region has to know."""

    region: str
    layout: Layout
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
        found: list[tuple[Slot, list[Factor]]] = []
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

    def _readers(self, found: Sequence[tuple[Slot, list[Factor]]]) -> list[Readers | None]:
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

    def _ordinary(self, found: Sequence[tuple[Slot, list[Factor]]]) -> list[Tensor | None]:
        """Recording was switched off since forward."""
        backend = self.session.backend
        sums: dict[int, Tensor] = {}
        for slot, factors in found:
            for param, factor in zip(slot.params, factors, strict=True):
                grad = factor.clipped_sum(None, backend).view_as(param).to(param.dtype)
                sums[id(param)] = sums[id(param)] + grad if id(param) in sums else grad
        return [sums.get(id(param)) for param in self.layout.params]


def layout_of(taps: Sequence[Tap], known: Calls, trainables: Sequence[Any]) -> Layout:
    """The wires of a region whose taps see this, with these trainable parameters."""
    layout = Layout([], [], [], [], [])
    unique: dict[int, nn.Parameter] = {}
    for tap, calls, (names, params) in zip(taps, known, trainables, strict=True):
        layout.kept += (names, known)
        if not params and not (tap.rule is not None and tap.rule.allows_children):
            layout.by_tap.append(())
            continue
        why = why_without_wires(tap, calls)
        if why is not None and any(s is not None and s.kind == "same for all" for s in calls):
            layout.uncompiled = f"{tap.path}: {why}"
        if why is not None:
            layout.by_tap.append(None)
            if calls:
                layout.refused.append((tap.path, why))
            if calls and why == UNPROVEN:
                layout.unproven.add(tap.path)
            continue
        of_tap: list[tuple[Kind, tuple[int | None, ...]]] = []
        for seen in calls:
            assert seen is not None
            layout.has_same_for_all |= seen.kind in ("own", "same for all")
            if seen.kind == "own":
                for name, param in zip(names, params, strict=True):
                    place = layout.add_wire(OwnWiring.meta(param, seen), param.device)
                    layout.slots.append(Slot(tap, OwnWiring(name), [name], [param], (place,)))
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
                layout.slots.append(Slot(tap, tap.wiring, names, params, tuple(found)))
            of_tap.append((seen.kind, tuple(found)))
        layout.by_tap.append(tuple(of_tap) or None)
        unique.update((id(param), param) for param in params)
    layout.params = list(unique.values())
    return layout


UNPROVEN = "it was not shown that it reads the samples, one row for each"


def why_without_wires(tap: Tap, calls: Sequence[Seen | None]) -> str | None:
    """Why a layer has no wires."""
    why = next((seen.why for seen in calls if seen is not None and seen.why), None)
    if why is not None:
        return why
    kinds = {None if seen is None else seen.kind for seen in calls}
    if tap.rule is None:
        if tap.generic:
            return "it runs by the generic rule"
        if tap.borrows:
            return "it uses parameters that another module owns"
        if tap.folded or tap.session.batch_axis:
            return "it uses its parameters itself, and rows are not samples there"
        if kinds == {"unused"} or (kinds <= {"own", "unused"} and kind_of(tap) == "own"):
            return None
        if tap.path in tap.session.evidence.reads:
            return "its own parameters meet what has no row for each sample"
        return UNPROVEN
    if tap.wiring is None:
        return f"its rule {type(tap.rule).__name__} cannot be traced"
    if tap.generic or tap.computed:
        return "it computes with tensors that are not its own parameters"
    if not tap.wiring.serves(tap.layer):
        return "its settings are not supported there"
    if kinds == {"same for all"}:
        return None
    if tap.path not in tap.session.evidence.proven:
        return UNPROVEN
    if None in kinds:
        return "it was called with something else than one tensor that has a batch axis"
    return None
