"""What a layer in a compiled region leaves: the tensors of its factors, as gradients of wires.

No rule knows of wires. Its backward runs inside the region, and every tensor that its factors hold
becomes the gradient of a wire. How many these are, and of which shapes, shows when the rule runs
once before (:meth:`Slot.of_rule`); then factors of the same form are put together again from what
arrives.

Shape suffixes: ``B`` samples."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import DenseGrad, LinearGrad, PerSampleGrad
from flash_clipping.ops.runtime.tables import on_16_bytes
from flash_clipping.rules.registry import GradRequest, UnsupportedLayer

#: What a layer's call reads, or computes with: rows that are samples; what is the same for all
#: samples; or its own parameters, in a forward of its own.
Kind: TypeAlias = Literal["samples", "same for all", "own"]

#: Names and parameters that a layer trains.
Trained: TypeAlias = tuple[Sequence[str], Sequence[nn.Parameter]]


class Slot(NamedTuple):
    """One call of a layer: what it reads, and what it leaves.

    Attributes:
        params: what it trains.
        factors: of each of these, with tensors on the meta device.
        held: for each factor, by the attribute that holds a tensor, which wire brings it.
        names, sources: of parameters; what each wire gets: of which, and which attribute.
        like: shape and dtype of each wire.
        places: the wires among all of the region.
    """

    tap: Any
    kind: Kind
    params: Sequence[nn.Parameter]
    factors: Sequence[PerSampleGrad]
    held: Sequence[dict[str, int]]
    names: Sequence[str]
    sources: tuple[tuple[str, str], ...]
    like: Sequence[tuple[tuple[int, ...], torch.dtype]]
    places: tuple[int, ...]

    @classmethod
    def of_rule(
        cls, tap: Any, layer: Any, kind: Kind, trained: Trained, x: Tensor, first: int
    ) -> Slot:
        """What a call of a layer will leave whose rule reads ``x``, on wires from ``first`` on;
        ``layer`` holds the parameters of this process.

        Raises:
            UnsupportedLayer: the rule saves what is no tensor.
        """
        (names, params), rule = trained, rule_of(tap)
        with torch.no_grad():
            output, saved = rule.forward(layer, x)
            if not all(value is None or isinstance(value, Tensor) for value in saved):
                raise UnsupportedLayer("FC715 its rule saves what is no tensor")
            needs = GradRequest((False,), frozenset(names), "torch", traced=True)
            by_name = rule.backward(layer, saved, torch.zeros_like(output), needs)[1]
        wires: dict[int, int] = {}  # by the tensor's id: several factors may hold it
        tensors: list[Tensor] = []
        sources: list[tuple[str, str]] = []
        factors: list[PerSampleGrad] = []
        held: list[dict[str, int]] = []
        for name in names:
            factors.append(factor := copy.copy(by_name[name]))
            held.append({of: id(x) for of, x in vars(factor).items() if isinstance(x, Tensor)})
            for of, key in held[-1].items():
                tensor = vars(factor)[of]
                if wires.setdefault(key, first + len(tensors)) == first + len(tensors):
                    tensors.append(tensor)
                    sources.append((name, of))
                held[-1][of] = wires[key]
                # It may be the layer's input, whose graph must not be held.
                vars(factor)[of] = tensor.detach().to("meta")
        like = [(tuple(x.shape), _as_gradient(x).dtype) for x in tensors]
        places = tuple(range(first, first + len(tensors)))
        return cls(tap, kind, params, factors, held, names, tuple(sources), like, places)

    @classmethod
    def of_parameters(cls, tap: Any, trained: Trained, batch_size: int, first: int) -> Slot:
        """What parameters leave that a module uses itself: a gradient for each sample."""
        names, params = trained
        like = [((batch_size, *param.shape), param.dtype) for param in params]
        factors = [DenseGrad(torch.empty(shape, dtype=d, device="meta")) for shape, d in like]
        places = tuple(range(first, first + len(params)))
        held = [{"grads": place} for place in places]
        return cls(tap, "own", params, factors, held, names, (), like, places)

    def recorded(
        self, wires: Sequence[Tensor | None]
    ) -> tuple[list[nn.Parameter], list[PerSampleGrad]]:
        """The parameters that were reached, and their factors, by the gradients of all wires.

        Raises:
            FlashClippingError: only some of a factor's wires were reached.
        """
        grads = {place: wires[place] for place in self.places}
        for factor, held in zip(self.factors, self.held, strict=True):
            # As outside of regions, one copy is for all that read rows that lie otherwise.
            for place in held.values() if isinstance(factor, LinearGrad) else ():
                grads[place] = None if (x := grads[place]) is None else on_16_bytes(x)
        params: list[nn.Parameter] = []
        factors: list[PerSampleGrad] = []
        for param, factor, held in zip(self.params, self.factors, self.held, strict=True):
            found = {of: x for of, place in held.items() if (x := grads[place]) is not None}
            if found and len(found) < len(held):
                raise FlashClippingError(
                    f"FC713 {self.tap.path}: in a compiled model, only a part of what its norm "
                    "needs arrived. Call the layer with a tensor that requires grad, or compile "
                    "the model without it."
                )
            if found:
                like = vars(factor)
                params.append(param)
                factors.append(filled := copy.copy(factor))
                vars(filled).update({of: x.to(like[of].dtype) for of, x in found.items()})
        return params, factors


def rule_of(tap: Any) -> Any:
    """The rule of a layer, within the one that stands around it."""
    return tap.rule if tap.boundary is None else tap.boundary.inner


def _as_gradient(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.float64)  # a gradient holds no integers


class RuleOnWires(torch.autograd.Function):
    """A layer's rule inside a compiled region: forward and backward are pure functions, which
    Dynamo and AOTAutograd trace whole.

    Raises:
        RuntimeError: a wire is not like what it is to get. Autograd would add up, or round, a
            gradient that is not like its tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tap: Any,
        names: Sequence[str],
        sources: Sequence[tuple[str, str]],
        x: Tensor,
        *wires: Tensor,
    ) -> Tensor:
        rule = rule_of(tap)
        output: Tensor
        output, saved = rule.forward(tap.layer, x)
        ctx.rule, ctx.layer, ctx.names, ctx.sources = rule, tap.layer, names, sources
        ctx.count = len(saved)
        ctx.save_for_backward(*saved, *wires)
        return output.detach()  # no view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:
        saved, wires = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        needs = GradRequest((True,), frozenset(ctx.names), "torch", traced=True)
        dx, by_name = ctx.rule.backward(ctx.layer, saved, G, needs)
        grads = [_as_gradient(getattr(by_name[name], of)) for name, of in ctx.sources]
        for grad, wire in zip(grads, wires, strict=True):
            if grad.shape != wire.shape or grad.dtype != wire.dtype:
                raise RuntimeError("a wire of a compiled layer does not fit what it is to get")
        return None, None, None, dx, *grads


class PerSampleParameters(torch.autograd.Function):
    """Parameters, each for every sample, ``[B, *parameter]``, whose wires get the gradients.

    Called with all parameters, and then with their wires.
    """

    @staticmethod
    def forward(ctx: Any, *params_and_wires: Tensor) -> tuple[Tensor, ...]:
        count = len(params_and_wires) // 2
        params, wires = params_and_wires[:count], params_and_wires[count:]
        pairs = zip(params, wires, strict=True)
        return tuple([p.detach().to(wire.dtype).expand(wire.shape) for p, wire in pairs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *[None] * len(grads), *grads
