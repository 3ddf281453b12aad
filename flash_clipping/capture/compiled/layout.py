"""What one call of a region leaves: which wires its layers have. They are made outside of the
region, and what comes back for them is recorded there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from flash_clipping._compat import pytree
from flash_clipping.capture.compiled.wires import Form, Meta, Source
from flash_clipping.capture.factor_source import ordinary_gradients
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.factors import LinearGrad, PerSampleGrad
from flash_clipping.finish.backward_pass import Readers
from flash_clipping.ops.runtime.tables import on_16_bytes

#: What a layer's call reads, or computes with: rows that are samples; what is the same for all
#: samples; or its own parameters, in a forward of its own.
Kind: TypeAlias = Literal["samples", "same for all", "own"]

UNPROVEN = "it was not shown that it reads the samples, one row for each"

Factors: TypeAlias = list[tuple[nn.Parameter, PerSampleGrad]]


class Slot(NamedTuple):
    """One call of a layer: what it reads, and what it leaves.

    Attributes:
        sources: what each wire gets.
        places: its wires among all of the region.
    """

    tap: Any
    kind: Kind
    names: list[str]
    params: list[nn.Parameter]
    forms: Sequence[Form] = ()
    sources: tuple[Source, ...] = ()
    places: tuple[int, ...] = ()

    def factors(self, wires: Sequence[Tensor | None]) -> Factors:
        """What the gradients of all wires tell of its parameters."""
        grads = [wires[place] for place in self.places]
        # As outside of regions, one copy is for all that read rows that lie otherwise.
        linear = [form for form in self.forms if isinstance(form.factor, LinearGrad)]
        for place in {place for form in linear for place in form.places.values()}:
            grads[place] = None if (x := grads[place]) is None else on_16_bytes(x)
        filled = [form.filled(grads, self.tap.path) for form in self.forms]
        return [(p, f) for p, f in zip(self.params, filled, strict=False) if f is not None]


@dataclass
class Layout:
    """What a region leaves in one kind of call, as a run that was not compiled has shown.

    Attributes:
        batch_size: samples in that run.
        calls: by number of a tap, its calls; none if it has nothing to train, None if it has no
            wires.
        metas: of all wires.
        refused: layers that were called and have no wires, by their paths, and why.
        unproven: those of them that may get wires, once it is proven that they read samples.
        uncompiled: why the region does not run as compiled, but for ``fullgraph``.
        misuse: why there are no wires for what is the same for all samples, if there are none.
        outside: what a checkpoint changes, as it was outside of any.
        kept: what identifies it by ``id``.
    """

    batch_size: int
    calls: list[list[Slot] | None]
    metas: list[tuple[Meta, torch.device]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unproven: set[str] = field(default_factory=set)
    uncompiled: str = ""
    misuse: str = ""
    outside: Any = None
    kept: Any = None

    def add(
        self,
        tap: Any,
        kind: Kind,
        forms: Sequence[Form] = (),
        sources: tuple[Source, ...] = (),
        metas: Sequence[Meta] = (),
    ) -> None:
        """Note a call of a layer."""
        calls, (names, params) = self.calls[tap.number], tap.trainable()
        if calls is None:
            return
        places = tuple(range(len(self.metas), len(self.metas) + len(metas)))
        self.metas += [(meta, params[0].device) for meta in metas]
        calls.append(Slot(tap, kind, names, params, forms, sources, places))

    def refuse(self, tap: Any, why: str) -> None:
        """A layer can have no wires."""
        self.calls[tap.number] = None
        self.refused.setdefault(tap.path, why)
        if why == UNPROVEN:
            self.unproven.add(tap.path)

    @cached_property
    def slots(self) -> list[Slot]:
        """All calls that have wires."""
        return [slot for calls in self.calls if calls for slot in calls if slot.places]

    @cached_property
    def params(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(param for slot in self.slots for param in slot.params))

    @cached_property
    def wires(self) -> list[Tensor]:
        """What wires are like: one element for all of a dtype, which nothing ever reads."""
        elements: dict[Any, Tensor] = {}
        return [
            elements.setdefault(
                (dtype, device), torch.empty((), dtype=dtype, device=device)
            ).expand(shape)
            for (shape, dtype), device in self.metas
        ]

    @cached_property
    def has_same_for_all(self) -> bool:
        """Whether something in the region is the same for all samples."""
        return any(slot.kind in ("own", "same for all") for slot in self.slots)

    def for_batch(self, batch_size: int) -> Layout | None:
        """The same for another number of samples: the rows of each wire are theirs. None where
        these rows are no multiple of the samples."""
        shapes = [shape for (shape, _), _ in self.metas]
        if any(shape[0] % self.batch_size for shape in shapes):
            return None
        metas: list[tuple[Meta, torch.device]] = [
            (((shape[0] // self.batch_size * batch_size, *shape[1:]), dtype), device)
            for (shape, dtype), device in self.metas
        ]
        return replace(self, batch_size=batch_size, metas=metas)


def kind_of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int, axis: int
) -> tuple[Hashable, bool]:
    """What a region was called with, and whether something in it has a row for each sample: how
    many these are is then left out."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kind: list[Hashable] = [repr(spec)]
    devices = set()
    has_rows = False
    for leaf in leaves:
        if leaf is None or isinstance(leaf, bool | int | float | str):
            kind.append(leaf)
            continue
        kind.append(repr(type(leaf)))
        for x in tensors_in(leaf):
            shape: tuple[Any, ...] = tuple(x.shape)
            if batch_size > 1 and shape[axis : axis + 1] == (batch_size,):
                has_rows, shape = True, (*shape[:axis], "samples", *shape[axis + 1 :])
            kind += (x.dtype, x.device, shape)
            devices.add(x.device.type)
    for device in sorted(devices):
        if torch.is_autocast_enabled(device):
            kind.append(torch.get_autocast_dtype(device))
    return tuple(kind), has_rows


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
                f"FC410 {region}: backward(create_graph=True) asks for second derivatives, which "
                "flash clipping does not have. Call backward() without create_graph, or take such "
                f"gradients on the unwrapped model.{ONE_BY_ONE}"
            )
        of_slots = [(slot.tap, slot.factors(grads)) for slot in layout.slots]
        found = [(tap, factors) for tap, factors in of_slots if factors]
        if not session.mode.enabled:  # since forward
            pairs = [pair for _, factors in found for pair in factors]
            return None, None, *ordinary_gradients(session, layout.params, pairs)
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
