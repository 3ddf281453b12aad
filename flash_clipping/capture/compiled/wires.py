"""What a layer in a compiled region leaves: the tensors of its factors, as gradients of wires.

No rule knows of wires. Its backward runs inside the region, and every tensor that its factors hold
becomes the gradient of a wire. How many these are, and of which shapes, shows when the rule runs
once before (:func:`forms_of_rule`); then factors of the same form are put together again from what
arrives.

Shape suffixes: ``B`` samples."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import DenseGrad, PerSampleGrad
from flash_clipping.rules.registry import GradRequest, UnsupportedLayer

#: Shape and dtype of a wire.
Meta: TypeAlias = tuple[tuple[int, ...], torch.dtype]

#: What a wire gets: a parameter's name, and an attribute of its factor.
Source: TypeAlias = tuple[str, str]


class Form(NamedTuple):
    """A factor whose tensors are still to come.

    Attributes:
        factor: with tensors on the meta device.
        places: of its tensors, by the attribute that holds them: which of the call's wires.
    """

    factor: PerSampleGrad
    places: dict[str, int]

    def filled(self, grads: Sequence[Tensor | None], path: str) -> PerSampleGrad | None:
        """The factor of the gradients of the call's wires; None if nothing was reached.

        Raises:
            FlashClippingError: only some of its wires were reached.
        """
        all_grads = {name: grads[place] for name, place in self.places.items()}
        found = {name: grad for name, grad in all_grads.items() if grad is not None}
        if not found:
            return None
        if len(found) < len(all_grads):
            raise FlashClippingError(
                f"FC713 {path}: in a compiled model, only a part of what its norm needs "
                "arrived. Call the layer with a tensor that requires grad, or compile the "
                "model without it."
            )
        factor, dtypes = copy.copy(self.factor), vars(self.factor)
        vars(factor).update({name: x.to(dtypes[name].dtype) for name, x in found.items()})
        return factor


def rule_of(tap: Any) -> Any:
    """The rule of a layer, within the one that stands around it."""
    return tap.rule if tap.boundary is None else tap.boundary.inner


def _as_gradient(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.float64)  # a gradient holds no integers


def forms_of_rule(
    rule: Any, layer: Any, names: Sequence[str], x: Tensor
) -> tuple[list[Form], tuple[Source, ...], list[Meta]]:
    """What a call of a layer will leave.

    Returns:
        The forms of the factors of its parameters, what each wire gets, and what wires are like.
    """
    needs = GradRequest((False,), frozenset(names), "torch", traced=True)
    with torch.no_grad():
        output, saved = rule.forward(layer, x)
        if not all(value is None or isinstance(value, Tensor) for value in saved):
            raise UnsupportedLayer("FC715 its rule saves what is no tensor")
        by_name = rule.backward(layer, saved, torch.zeros_like(output), needs)[1]
    forms = [Form(copy.copy(by_name[name]), {}) for name in names]
    tensors: list[Tensor] = []  # each once, though several factors may hold it
    sources: list[Source] = []
    for name, form in zip(names, forms, strict=True):
        for attribute, held in vars(form.factor).items():
            if isinstance(held, Tensor):
                place = next((n for n, other in enumerate(tensors) if other is held), len(tensors))
                form.places[attribute] = place
                if place == len(tensors):
                    tensors.append(held)
                    sources.append((name, attribute))
        # They may be the layer's input, whose graph must not be held.
        like = {of: tensors[place].detach().to("meta") for of, place in form.places.items()}
        vars(form.factor).update(like)
    return forms, tuple(sources), [(tuple(x.shape), _as_gradient(x).dtype) for x in tensors]


def forms_of_parameters(params: Sequence[Tensor], batch_size: int) -> tuple[list[Form], list[Meta]]:
    """What parameters leave that a module uses itself: a gradient for each sample."""
    metas = [((batch_size, *param.shape), param.dtype) for param in params]
    grads = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in metas]
    return [Form(DenseGrad(x), {"grads": n}) for n, x in enumerate(grads)], metas


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
        sources: Sequence[Source],
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
