"""An ordinary backward by the arithmetic of rules: layers of models that are not wrapped, and what
has no parameters."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_clipping.rules.registry import GradRequest, Rule


def by_rule(
    rule: Rule,
    layer: Any,
    inputs: tuple[Any, ...],
    params: Mapping[str, Tensor],
    backend: str = "auto",
) -> Any:
    """What a layer gives for its inputs. Backward, of first order, leaves in the place of factors
    their sums over all rows.

    Args:
        layer: as ``rule`` is given it.
        params: what the layer reads for its parameters, by their names.
    """
    names = tuple(params)
    return _ByRule.apply(rule, layer, backend, names, *params.values(), *inputs)


class _ByRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rule: Rule, layer: Any, backend: str, names: tuple[str, ...], *tensors: Any
    ) -> Any:
        params, inputs = tensors[: len(names)], tensors[len(names) :]
        output, saved = rule.forward(layer, *inputs)
        ctx.asked = rule, layer, backend, names, [param.shape for param in params]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in saved))
        ctx.others = [None if isinstance(x, Tensor) else x for x in saved]
        # No views: they may be changed in place.
        return tuple(x.detach() for x in output) if isinstance(output, tuple) else output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rule, layer, backend, names, shapes = ctx.asked
        both = zip(ctx.saved_tensors, ctx.others, strict=True)
        saved = tuple(other if x is None else x for x, other in both)
        wanted = ctx.needs_input_grad[4:]
        trained = frozenset(compress(names, wanted))
        needs = GradRequest(wanted[len(names) :], trained, backend)
        grad = grads if len(grads) > 1 else grads[0]
        of_inputs, factors = rule.backward(layer, saved, grad, needs)
        if not isinstance(of_inputs, tuple):
            of_inputs = (of_inputs,)
        sums = [
            factors[name].clipped_sum(None, backend).view(shape) if name in trained else None
            for name, shape in zip(names, shapes, strict=True)
        ]
        return None, None, None, None, *sums, *of_inputs
