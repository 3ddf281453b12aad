"""The wires of one call of a region: made outside of it, and received there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from flash_clipping.capture.compiled.own_parameters import OwnWiring
from flash_clipping.capture.compiled.tracing import Calls, kind_of
from flash_clipping.capture.compiled.wiring import Kind, Meta, Seen, Wiring
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Factor, Outer
from flash_clipping.finish.session import Readers

if TYPE_CHECKING:
    from flash_clipping.capture.tap import Tap


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


UNPROVEN = "no rehearsal has shown that it reads the samples, one row for each"


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
