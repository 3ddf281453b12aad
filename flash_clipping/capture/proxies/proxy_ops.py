"""One operation between stand-ins and tensors that carry samples, as an autograd function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_clipping._compat import apply_of
from flash_clipping.capture.forward_call import in_backward
from flash_clipping.capture.proxies.arguments import flattened, unflattened
from flash_clipping.capture.proxies.factored import factored_gradients
from flash_clipping.capture.proxies.gradients import input_grads, per_sample_grads, table_factor
from flash_clipping.capture.proxies.laid_out import layout_after
from flash_clipping.capture.proxies.operation import (
    ATTENTION,
    IN_PLACE,
    READS_ROWS,
    ProxyOp,
    name_of,
)
from flash_clipping.capture.proxies.parameter_proxy import (
    ParameterProxy,
    UnsupportedUse,
    circumstances,
    is_plain,
    recomputable,
)
from flash_clipping.capture.row_layouts import Layout
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import Dense, Factor, merge
from flash_clipping.rules.registry import own


def mixed(
    func: Callable[..., Any],
    leaves: list[Any],
    spec: Any,
    batched: list[bool],
    axis: int,
    before: Layout | None = None,
    count: int = 0,
    use: str = "",
) -> Tensor:
    bares = [leaf for leaf in leaves if isinstance(leaf, ParameterProxy)]
    tap = bares[0].tap
    plain = [leaf for leaf in leaves if is_plain(leaf)]
    if name_of(func) in ATTENTION and before is None and axis == 0:
        return _attention(func, leaves, spec, plain[batched.index(True)])
    device_type = plain[0].device.type
    operation = ProxyOp(
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
        origins=[bare.kept_origin if bare.value.requires_grad else None for bare in bares],
        axis=axis,
        before=before,
        count=count,
    )
    if before is not None:
        operation.after = layout_after(operation, plain, use)
    elif use and (call := tap.session.current_forward) is not None and call.witness is not None:
        operation.is_searched = plain[0].shape[:1] != (call.batch_size,)
    if tap.entered not in (None, circumstances()) and not operation.recomputed:
        tap.session.recomputed[tap.path] = functools.partial(recomputable, tap)
    return run_mixed(operation, plain)


def _attention(func: Callable[..., Any], leaves: list[Any], spec: Any, samples: Tensor) -> Tensor:
    """Attention of which a mask, or another operand, comes from parameters: every sample gets such
    an operand for itself, and the rest is autograd's.

    Run again in backward, as other operations are, it would draw another dropout.
    """

    def of_samples(bare: ParameterProxy) -> Tensor:
        zeros = samples.new_zeros((), dtype=bare.dtype).expand(
            len(samples), *[1] * (samples.dim() - 1)
        )
        sum_leaves, sum_spec = flattened((zeros, bare), {})
        return mixed(torch.add, sum_leaves, sum_spec, [True], 0)

    own = [of_samples(leaf) if isinstance(leaf, ParameterProxy) else leaf for leaf in leaves]
    args, kwargs = unflattened(own, spec)
    # Fused kernels of CUDA keep what their backward needs only where a query, a key or a value
    # requires a gradient: that of a mask alone would be made of memory that nobody wrote.
    named = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
    others = [named[name] for name in ("query", "key", "value")]
    mask_alone = samples.is_cuda and not any(x.requires_grad for x in others)
    with sdpa_kernel(SDPBackend.MATH) if mask_alone else nullcontext():
        output: Tensor = func(*args, **kwargs)
    return output


class _MixedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: ProxyOp, n_plain: int, *tensors: Tensor) -> Tensor:
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
        if operation.after is not None and operation.after.parts(output, operation.count) is None:
            raise UnsupportedUse(operation.tap, f"{name_of(operation.func)} moves the batch axis")
        if operation.axis and output.shape != tensors[0].shape:
            raise UnsupportedUse(operation.tap, f"{name_of(operation.func)} adds axes to the batch")
        sizes = {x.shape[0] for x in batches if x.dim() == output.dim()}
        sizes = sizes or {x.shape[0] for x in batches}
        moved = output.dim() == 0 or output.shape[0] not in sizes
        if operation.after is None and moved and not operation.is_searched:
            raise UnsupportedUse(operation.tap, f"{name_of(operation.func)} moves the batch axis")
        ctx.operation = operation
        if name_of(operation.func) in IN_PLACE:
            ctx.mark_dirty(tensors[0])
            ctx.shape = tensors[0].shape
        elif None in operation.origins:
            ctx.save_for_backward(*tensors[:n_plain])
        else:  # through autograd, so that a parameter that changes before backward is noticed
            ctx.save_for_backward(*tensors[:n_plain], *values)
        if name_of(operation.func) in READS_ROWS:
            return own(output)
        # A view of what the operation itself made (einsum's): whoever changes it in place may.
        memory = output.untyped_storage().data_ptr() if output._is_view() else None
        shared = any(x.untyped_storage().data_ptr() == memory for x in (*tensors, *values))
        return output if memory is None or shared else own(output)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:
        operation: ProxyOp = ctx.operation
        if torch.is_grad_enabled():
            raise UnsupportedUse(
                operation.tap,
                "backward(create_graph=True) asks for the derivative of its gradient",
            )
        n_plain = len(operation.batched)
        saved = list(ctx.saved_tensors)
        plain, values = saved[:n_plain], saved[n_plain:]
        if name_of(operation.func) in IN_PLACE:  # an addition needs no more than shapes
            plain = [G.new_empty(()).expand(ctx.shape)]
            values = [bare.value.detach() for bare in operation.bares]
        needs = ctx.needs_input_grad[2 : 2 + n_plain]
        grads, factors = _gradients(operation, plain, values, needs, G)
        session = operation.tap.session
        by_param: dict[nn.Parameter, Factor] = {}
        for param, factor in factors:
            by_param[param] = merge([by_param[param], factor]) if param in by_param else factor
        if session.enabled:
            operation.tap.record(
                [*by_param],
                [*by_param.values()],
                operation.recomputed,
                operation.readers,
                samples=operation.samples,
            )
            return None, None, *grads, *[None] * len(operation.params)
        # An ordinary backward: ordinary gradients.
        ordinary = [
            by_param[param].clipped_sum(None, session.backend).view_as(param).to(param.dtype)
            if param in by_param
            else None
            for param in operation.params
        ]
        return None, None, *grads, *ordinary


def _gradients(
    operation: ProxyOp,
    plain: list[Tensor],
    values: list[Tensor],
    needs: tuple[bool, ...],
    G: Tensor,
) -> tuple[list[Tensor | None], Iterable[tuple[nn.Parameter, Factor]]]:
    """Gradients of the tensors that carry samples, and factors of parameters."""
    found = factored_gradients(operation, plain, values, needs, G)
    if found is not None:
        return found
    grads = input_grads(operation, plain, needs, G)
    rows = None if operation.after is not None else table_factor(operation, plain, G)
    if rows is not None:
        return grads, [rows]
    return grads, (
        (param, Dense(grads_B)) for param, grads_B in per_sample_grads(operation, plain, G)
    )


_apply = apply_of(_MixedFunction)  # transforms of torch.func were refused before


def run_mixed(operation: ProxyOp, plain: list[Tensor]) -> Tensor:
    """Run the operation; the parameters are inputs, so that its output requires grad."""
    params = operation.params
    session = operation.tap.session
    session.count_use(params)
    call = session.current_forward
    if call is not None:
        operation.samples = call.batch_size
        if name_of(operation.func) in READS_ROWS:
            operation.readers = call, call.note_reader(plain[0])
    output: Tensor = _apply(operation, len(plain), *plain, *params)
    return output
