"""The wires of one call of a region: their shapes, told from those of its inputs; made outside of
it, and received there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from flash_clipping._compat import pytree
from flash_clipping.capture.compiled.tracing import Calls, kind_of
from flash_clipping.capture.compiled.wirings import Kind, Meta, Seen
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.factors import DenseGrad, LinearGrad, PerSampleGrad
from flash_clipping.finish.backward_pass import Readers

if TYPE_CHECKING:
    from flash_clipping.capture.tap import Tap


class Affine:
    """Shapes that follow from those of inputs, as far as these are combinations of known ones.

    Sizes grow evenly with the sizes that they depend on: with the batch, with the length of texts.
    So any combination of two that were seen can be told (``s = s_0 + r (s_1 - s_0)``), and what
    cannot be told so is learned.
    """

    def __init__(self) -> None:
        #: What was learned first, with 0 in the place of all sizes.
        self._form: Calls | None = None
        #: Sizes of inputs, and those that were learned for these.
        self._known: list[tuple[list[int], list[int]]] = []
        self._even = True

    def refute(self) -> None:
        """What was told turned out wrong: nothing is told any more."""
        self._even = False

    def add(self, sizes: list[int], calls: Calls) -> None:
        if not self._even:
            return
        if (told := self.find(sizes)) is not None:
            self._even = told == calls
            return
        form = pytree.tree_map_only(int, lambda _: 0, calls)
        self._form = self._form or form
        self._even = self._form == form
        self._known.append((sizes, [n for n in pytree.tree_leaves(calls) if isinstance(n, int)]))

    def find(self, sizes: list[int]) -> Calls | None:
        """What follows for these sizes of the inputs, if anything."""
        if not self._known or not self._even:
            return None
        inputs, learned = (
            torch.tensor(x, dtype=torch.float64) for x in zip(*self._known, strict=True)
        )
        wanted = torch.tensor(sizes, dtype=torch.float64) - inputs[0]
        rates = wanted @ torch.linalg.pinv(inputs[1:] - inputs[0])
        found = learned[0] + rates @ (learned[1:] - learned[0])
        missed = (rates @ (inputs[1:] - inputs[0]) - wanted).abs().sum()
        if missed + (found - found.round()).abs().sum() > 1e-3 or bool((found < -0.5).any()):
            return None
        told = iter(found.round().long().tolist())
        calls: Calls = pytree.tree_map_only(int, lambda _: next(told), self._form)
        return calls


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


Factors: TypeAlias = list[tuple[nn.Parameter, PerSampleGrad]]


class Slot(NamedTuple):
    """One call of a layer: what it reads, and which of all wires are its own."""

    tap: Tap
    kind: Kind
    names: list[str]
    params: list[nn.Parameter]
    places: tuple[int | None, ...] = ()

    def factors(self, wires: Sequence[Tensor | None]) -> Factors:
        """What the gradients of all wires tell of its parameters: nothing if it was not reached.

        Raises:
            FlashClippingError: only some of its wires were reached.
        """
        grads = [None if place is None else wires[place] for place in self.places]
        if self.kind == "own":
            pairs = zip(self.params, grads, strict=True)
            return [(param, DenseGrad(grad)) for param, grad in pairs if grad is not None]
        missing = [grad is None for grad in grads]
        if all(missing):
            return []
        if missing != [place is None for place in self.places]:
            raise FlashClippingError(
                f"{self.tap.path}: in a compiled model, only a part of what its norm needs "
                "arrived. Call the layer with a tensor that requires grad, or compile the "
                "model without it."
            )
        assert self.tap.wiring is not None
        layer, boundary = self.tap.layer, self.tap.boundary
        layer = layer if boundary is None else boundary.local_layer(layer)
        by_name = self.tap.wiring.factors(layer, self.names, grads)
        return list(zip(self.params, [by_name[name] for name in self.names], strict=True))


@dataclass
class Layout:
    """The wires of a region for one combination of shapes and trainable parameters."""

    #: By number of a tap: its calls; none if it has nothing to train, None if it has no wires.
    calls: list[list[Slot] | None] = field(default_factory=list)
    #: What wires are like: one element for all of a dtype, which nothing ever reads.
    wires: list[Tensor] = field(default_factory=list)
    params: dict[nn.Parameter, None] = field(default_factory=dict)
    #: Layers that have no wires, and why.
    refused: list[tuple[str, str]] = field(default_factory=list)
    #: Those of them that may get wires, once it is proven that they read samples.
    unproven: set[str] = field(default_factory=set)
    #: Why the region does not run as compiled, but for ``fullgraph``.
    uncompiled: str = ""
    elements: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)
    #: What identifies this layout by ``id`` is kept, so that no other object gets that.
    kept: Any = None

    @cached_property
    def slots(self) -> list[Slot]:
        """All calls that have wires."""
        return [slot for calls in self.calls if calls for slot in calls if slot.places]

    @cached_property
    def has_same_for_all(self) -> bool:
        """Whether something in the region is the same for all samples."""
        return any(slot.kind in ("own", "same for all") for slot in self.slots)

    def add_wire(self, meta: Meta, device: torch.device) -> int:
        """Returns: its place."""
        shape, dtype = meta
        element = self.elements.get((dtype, device))
        if element is None:
            element = self.elements[dtype, device] = torch.empty((), dtype=dtype, device=device)
        self.wires.append(element.expand(shape))
        return len(self.wires) - 1


class Wired(torch.autograd.Function):
    """Makes the wires of one call of a region, and receives their gradients: records the factors,
    or gives gradients for the parameters where nobody records.

    The trainable parameters are inputs, so that autograd knows for which of them a backward is.

    Raises:
        FlashClippingError: second derivatives are asked for.
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
        region, layout, session, call, recomputed = ctx.handed
        if torch.is_grad_enabled():
            raise FlashClippingError(
                f"{region}: backward(create_graph=True) asks for second derivatives, which "
                "flash clipping does not have. Call backward() without create_graph, or take such "
                f"gradients on the unwrapped model.{ONE_BY_ONE}"
            )
        of_slots = [(slot.tap, slot.factors(grads)) for slot in layout.slots]
        found = [(tap, factors) for tap, factors in of_slots if factors]
        if not session.mode.enabled:  # since forward
            sums: dict[nn.Parameter, Tensor] = {}
            for param, factor in [pair for _, factors in found for pair in factors]:
                grad = (
                    factor.clipped_sum(None, session.options.backend).view_as(param).to(param.dtype)
                )
                sums[param] = sums[param] + grad if param in sums else grad
            return None, None, *[sums.get(param) for param in layout.params]
        if found:
            backward_pass = found[0][0].running_backward_pass(recomputed)
            readers = _readers(call, [factors[0][1] for _, factors in found])
            for (tap, factors), of_tap in zip(found, readers, strict=True):
                params, of_params = zip(*factors, strict=True)
                tap.record_on(backward_pass, params, of_params, of_tap)
        return None, None, *[None] * len(layout.params)


class Handed(NamedTuple):
    """What the backward of one call of a region has to know."""

    region: str
    layout: Layout
    session: ClippingSession
    call: ForwardCall | None
    recomputed: bool


def _readers(call: ForwardCall | None, of_layers: Sequence[PerSampleGrad]) -> list[Readers | None]:
    """For every layer, where it is looked up how many layers read its input."""
    if call is None:
        return [None] * len(of_layers)
    places: dict[Hashable, int] = {}
    readers: list[Readers | None] = []
    for factor in of_layers:
        place = len(call.readers)
        if isinstance(factor, LinearGrad):
            place = places.setdefault(factor.shares_input_with(), place)
        if place == len(call.readers):
            call.readers.append(0)
        call.readers[place] += 1
        readers.append((call, place))
    return readers


def layout_of(taps: Sequence[Tap], known: Calls, trainables: Sequence[Any]) -> Layout:
    """The wires of a region whose taps see this, with these trainable parameters."""
    layout = Layout(kept=(known, trainables))
    for tap, calls, (names, params) in zip(taps, known, trainables, strict=True):
        if not params and not (tap.rule is not None and tap.rule.allows_children):
            layout.calls.append([])
            continue
        why = why_without_wires(tap, calls) if calls else "it was not called"
        if why is not None:
            layout.calls.append(None)
            if calls:
                layout.refused.append((tap.path, why))
            # Neither goes from one graph to the next.
            if calls and tap.session.options.layers_are_cut:
                layout.uncompiled = (
                    f"{tap.path}: {why}. Gradients that are DTensors cannot go from one graph to "
                    "the next: leave this part uncompiled, or freeze the layer's parameters."
                )
            elif any(seen is not None and seen.kind == "same for all" for seen in calls):
                layout.uncompiled = (
                    f"{tap.path}: {why}. Such values cannot go from one graph to the next: expand "
                    "what the layer reads over the batch, x.expand(batch_size, ...), or freeze its "
                    "parameters."
                )
            if why == UNPROVEN:
                layout.unproven.add(tap.path)
            continue
        slots: list[Slot] = []
        for seen in calls:
            assert seen is not None
            metas: Sequence[Meta] = ()
            wanted: Sequence[bool] = ()
            if seen.kind == "own":
                metas = [((seen.x_shape[0], *param.shape), param.dtype) for param in params]
                wanted = [True] * len(params)
            elif seen.kind != "unused":
                assert tap.wiring is not None
                metas, wanted = tap.wiring.metas(tap.layer, seen), tap.wiring.wanted(names)
            places = [
                layout.add_wire(meta, params[0].device) if needed else None
                for meta, needed in zip(metas, wanted, strict=True)
            ]
            slots.append(Slot(tap, seen.kind, names, params, tuple(places)))
            layout.params.update(dict.fromkeys(params))
        layout.calls.append(slots)
    return layout


UNPROVEN = "it was not shown that it reads the samples, one row for each"


def why_without_wires(tap: Tap, calls: Sequence[Seen | None]) -> str | None:
    """Why a layer has no wires."""
    why = next((seen.why for seen in calls if seen is not None and seen.why), None)
    if why is not None:
        return why
    kinds = {None if seen is None else seen.kind for seen in calls}
    if tap.rule is None:
        if tap.by_function or tap.loops:
            return "its per-sample gradients are formed outside of compiled code"
        if tap.borrows:
            return "it uses parameters that another module owns"
        if tap.folded or tap.session.options.batch_axis:
            return "it uses its parameters itself, and rows are not samples there"
        if kinds == {"unused"} or (kinds <= {"own", "unused"} and kind_of(tap) == "own"):
            return None
        if tap.path in tap.session.known.reads:
            return "its own parameters meet what has no row for each sample"
        return UNPROVEN
    if tap.wiring is None:
        return f"its rule {type(tap.rule).__name__} cannot be traced"
    if tap.computed:
        return "it computes with tensors that are not its own parameters"
    if not tap.wiring.serves(tap.layer):
        return "its settings are not supported there"
    if kinds == {"same for all"}:
        return None
    if tap.path not in tap.session.known.proven:
        return UNPROVEN
    if None in kinds:
        return "it was called with something else than one tensor that has a batch axis"
    return None
