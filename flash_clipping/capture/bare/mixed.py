"""One operation between stand-ins and tensors that carry samples, as an autograd function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.bare.gradients import input_grads, per_sample_grads, table_factor
from flash_clipping.capture.bare.operation import IN_PLACE, MixedOperation, name_of
from flash_clipping.capture.bare.stand_in import (
    BareParameter,
    UnsupportedUse,
    circumstances,
    is_plain,
    recomputable,
)
from flash_clipping.capture.forward_call import in_backward
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Dense, Factor, merge


def mixed(
    func: Callable[..., Any], leaves: list[Any], spec: Any, batched: list[bool], axis: int
) -> Tensor:
    bares = [leaf for leaf in leaves if isinstance(leaf, BareParameter)]
    tap = bares[0].tap
    plain = [leaf for leaf in leaves if is_plain(leaf)]
    device_type = plain[0].device.type
    operation = MixedOperation(
        func=func,
        leaves=[torch.empty(0) if is_plain(leaf) else leaf for leaf in leaves],
        spec=spec,
        bares=bares,
        batched=batched,
        autocast=(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
        ),
        recomputed=in_backward(),
        axis=axis,
    )
    if tap.entered not in (None, circumstances()) and not operation.recomputed:
        tap.session.recomputed[tap.path] = functools.partial(recomputable, tap)
    return run_mixed(operation, plain)


class _MixedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: MixedOperation, n_plain: int, *tensors: Tensor) -> Tensor:
        values = [bare.value.detach() for bare in operation.bares]
        output = operation.call(list(tensors[:n_plain]), values)
        if not isinstance(output, Tensor):
            raise UnsupportedUse(
                operation.tap, f"{name_of(operation.func)} returns several tensors"
            )
        batches = [x for x, batched in zip(tensors, operation.batched, strict=False) if batched]
        if any(x.dim() == 0 for x in batches):
            raise FlashClippingError(
                f"{operation.tap.path}: {name_of(operation.func)} puts a parameter together with "
                "one number that was computed from the whole batch, a mean or a sum over samples. "
                "It mixes samples, so no clipping can bound what one adds. Keep the batch as the "
                "first axis (x.mean(-1), not x.mean()), or detach that number."
            )
        if operation.axis and output.shape != tensors[0].shape:
            raise UnsupportedUse(operation.tap, f"{name_of(operation.func)} adds axes to the batch")
        sizes = {x.shape[0] for x in batches if x.dim() == output.dim()}
        sizes = sizes or {x.shape[0] for x in batches}
        if output.dim() == 0 or output.shape[0] not in sizes:
            raise UnsupportedUse(operation.tap, f"{name_of(operation.func)} moves the batch axis")
        ctx.operation = operation
        if name_of(operation.func) in IN_PLACE:
            ctx.mark_dirty(tensors[0])
            ctx.shape = tensors[0].shape
        else:
            ctx.save_for_backward(*tensors[:n_plain])
        return output

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:
        operation: MixedOperation = ctx.operation
        if torch.is_grad_enabled():
            raise UnsupportedUse(
                operation.tap,
                "backward(create_graph=True) asks for the derivative of its gradient",
            )
        plain = list(ctx.saved_tensors)
        if name_of(operation.func) in IN_PLACE:  # an addition needs no more than the shape
            plain = [G.new_empty(()).expand(ctx.shape)]
        needs = ctx.needs_input_grad[2 : 2 + len(plain)]
        grads = input_grads(operation, plain, needs, G)
        session = operation.tap.session
        by_param: dict[nn.Parameter, Factor] = {}
        rows = table_factor(operation, plain, G)
        if rows is not None:
            by_param.update([rows])
        else:
            for param, grads_B in per_sample_grads(operation, plain, G):
                factor = Dense(grads_B)
                by_param[param] = merge([by_param[param], factor]) if param in by_param else factor
        if session.enabled:
            operation.tap.record([*by_param], [*by_param.values()], operation.recomputed)
            return None, None, *grads, *[None] * len(operation.params)
        # An ordinary backward: ordinary gradients.
        ordinary = [
            by_param[param].clipped_sum(None, session.backend).view_as(param).to(param.dtype)
            if param in by_param
            else None
            for param in operation.params
        ]
        return None, None, *grads, *ordinary


def run_mixed(operation: MixedOperation, plain: list[Tensor]) -> Tensor:
    """Run the operation; the parameters are inputs, so that its output requires grad."""
    params = operation.params
    operation.tap.session.count_use(params)
    output: Tensor = _MixedFunction.apply(operation, len(plain), *plain, *params)
    return output
