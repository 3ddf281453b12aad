"""What one call of a region leaves: which wires its layers have. They are made outside of the
region, and what comes back for them is recorded there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flash_clipping._compat import pytree
from flash_clipping.capture.compiled.wires import Slot
from flash_clipping.capture.factor_source import ordinary_gradients
from flash_clipping.capture.forward_call import ForwardCall
from flash_clipping.capture.inputs import tensors_in
from flash_clipping.capture.session import ClippingSession
from flash_clipping.errors import ONE_BY_ONE, FlashClippingError
from flash_clipping.factors import LinearGrad
from flash_clipping.finish.backward_pass import Readers

UNPROVEN = "it was not shown that it reads the samples, one row for each"


@dataclass
class Layout:
    """What a region leaves in one kind of call, as a run that was not compiled has shown.

    Attributes:
        batch_size: samples in that run.
        calls: by number of a tap, its calls; none if it has nothing to train, None if it has no
            wires.
        refused: layers that were called and have no wires, by their paths, and why.
        unproven: those of them that may get wires, once it is proven that they read samples.
        uncompiled: why the region does not run as compiled, but for ``fullgraph``.
        misuse: why there are no wires for what is the same for all samples, if there are none.
        outside: what a checkpoint changes, as it was outside of any.
        kept: what identifies it by ``id``.
    """

    batch_size: int
    calls: list[list[Slot] | None]
    refused: dict[str, str] = field(default_factory=dict)
    unproven: set[str] = field(default_factory=set)
    uncompiled: str = ""
    misuse: str = ""
    outside: Any = None
    kept: Any = None
    #: Shape, dtype and device of all wires.
    like: list[tuple[tuple[int, ...], torch.dtype, torch.device]] = field(default_factory=list)

    def add(self, slot: Slot) -> None:
        """Note a call of a layer."""
        if (calls := self.calls[slot.tap.number]) is not None:
            calls.append(slot)
            self.like += [(*like, slot.params[0].device) for like in slot.like]

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
        kinds = {(dtype, device) for _, dtype, device in self.like}
        ones = {(d, at): torch.empty((), dtype=d, device=at) for d, at in kinds}
        return [ones[dtype, device].expand(shape) for shape, dtype, device in self.like]

    @cached_property
    def has_same_for_all(self) -> bool:
        """Whether something in the region is the same for all samples."""
        return any(slot.kind != "samples" for slot in self.slots)

    def for_batch(self, batch_size: int) -> Layout | None:
        """The same for another number of samples: the rows of each wire are theirs. ``None`` where
        these rows are no multiple of the samples."""
        known = self.batch_size
        if any(shape[0] % known for shape, *_ in self.like):
            return None
        like = [((n[0] // known * batch_size, *n[1:]), dtype, at) for n, dtype, at in self.like]
        return replace(self, batch_size=batch_size, like=like)


def kind_of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch_size: int, axis: int
) -> tuple[tuple[Hashable, ...], bool]:
    """What a region was called with, and whether something in it has a row for each sample: how
    many these are is then left out."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kind: list[Hashable] = [repr(spec)]
    has_rows = False
    for leaf in leaves:
        plain = leaf is None or isinstance(leaf, bool | int | float | str)
        kind.append(leaf if plain else repr(type(leaf)))
        for x in tensors_in(leaf):
            shape: list[Any] = [*x.shape]
            if batch_size > 1 and shape[axis : axis + 1] == [batch_size]:
                has_rows, shape[axis] = True, "samples"
            kind.append((x.dtype, x.device, *shape))
    for device in sorted({x.device.type for x in tensors_in((args, kwargs))}):
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
        of_slots = [(slot.tap, *slot.recorded(grads)) for slot in layout.slots]
        found = [(tap, params, factors) for tap, params, factors in of_slots if params]
        if not session.mode.enabled:  # since forward
            pairs = [pair for _, *of_one in found for pair in zip(*of_one, strict=True)]
            return None, None, *ordinary_gradients(session, layout.params, pairs)
        if found:
            backward_pass = found[0][0].running_backward_pass(recomputed)
            readers = _readers(call, [factors[0] for _, _, factors in found])
            for (tap, params, factors), of_tap in zip(found, readers, strict=True):
                tap.record_on(backward_pass, params, factors, of_tap)
        return None, None, *[None] * len(layout.params)


class Handed(NamedTuple):
    """What the backward of one call of a region has to know."""

    region: str
    layout: Layout
    session: ClippingSession
    call: ForwardCall | None
    recomputed: bool


def _readers(call: ForwardCall | None, of_layers: Sequence[Any]) -> list[Readers | None]:
    """For every layer, where it is looked up how many layers read its input."""
    places: dict[Hashable, int] = {}
    found: list[Readers | None] = []
    for number, factor in enumerate(of_layers if call is not None else ()):
        assert call is not None
        shared = factor.shares_input_with() if isinstance(factor, LinearGrad) else number
        place = places.setdefault(shared, len(call.readers))
        if place == len(call.readers):
            call.readers.append(0)
        call.readers[place] += 1
        found.append((call, place))
    return found if call is not None else [None] * len(of_layers)
