"""One operation between stand-ins and tensors that carry samples, as an autograd function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_clipping._compat import apply_of, memory_id
from flash_clipping.capture.factor_source import FactorSource, ordinary_gradients
from flash_clipping.capture.forward_call import in_backward
from flash_clipping.capture.proxies.operation import (
    ATTENTION,
    READS_ROWS,
    ProxyOp,
    gradients,
    through,
)
from flash_clipping.capture.proxies.parameter_proxy import (
    AffineView,
    ParameterProxy,
    TableRows,
    UnsupportedUse,
    circumstances,
    flattened,
    is_plain,
    name_of,
    recomputable,
    unflattened,
)
from flash_clipping.capture.row_layouts import Layout
from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import DenseGrad, PerSampleGrad, accumulation_dtype, merge
from flash_clipping.finish.backward_pass import Readers
from flash_clipping.rules.registry import own

#: In the place of the ordinary tensors of an operation.
_TENSOR = torch.empty(0)


def mixed(
    func: Callable[..., Any],
    leaves: list[Any],
    spec: Any,
    batched: list[bool],
    before: Layout | None = None,
    count: int = 0,
    use: str = "",
) -> Tensor:
    """Run an operation between stand-ins and tensors, of which some carry samples (``batched``)."""
    bares = [leaf for leaf in leaves if isinstance(leaf, ParameterProxy)]
    tap = bares[0].tap
    plain = [leaf for leaf in leaves if is_plain(leaf)]
    if (name := name_of(func)) in ATTENTION and before is None:
        return _attention(func, leaves, spec, plain[batched.index(True)])
    device_type = plain[0].device.type
    operation = ProxyOp(
        func=func,
        name=name,
        leaves=[_TENSOR if is_plain(leaf) else leaf for leaf in leaves],
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
        before=before,
        count=count,
    )
    if before is not None:
        operation.after = tap.session.known.layouts_after.get(use, before if count == 1 else None)
        if operation.after is None:
            raise UnsupportedUse(tap, f"{name} moves the batch axis")
    elif (call := tap.session.current_forward) is not None and call.reads is not None:
        operation.is_searched = plain[0].shape[:1] != (call.batch_size,)
    note_recomputation(tap, operation.recomputed)
    params = operation.params
    tap.session.count_use(params)
    if (call := tap.session.current_forward) is not None:
        operation.samples = call.batch_size
        if name in READS_ROWS:
            operation.readers = call, call.note_reader(plain[0])
    # The parameters are inputs, so that the output requires grad.
    return _apply(operation, len(plain), *plain, *params)


def note_recomputation(tap: FactorSource, recomputed: bool) -> None:
    """A checkpoint inside the module's forward will run this operation again."""
    if tap.entered not in (None, circumstances()) and not recomputed:
        tap.session.calls.recomputed[tap.path] = functools.partial(recomputable, tap)


def of_samples(
    bare: ParameterProxy, shape: Sequence[int], axis: int = 0, samples: int = 0
) -> Tensor:
    """What stands in for parameters, broadcast to this shape, whose ``axis`` holds the samples: an
    ordinary tensor from here on.

    Layers that all add one table of biases to their scores share it, and autograd adds up what
    comes back from them.

    Args:
        samples: how many there are; 0: by the module's rows.
    """
    session, recomputed = bare.tap.session, in_backward()
    call = session.current_forward
    key = bare.value, tuple(shape), axis, bare.value._version
    may_share = not recomputed and bare.tap.entered in (None, circumstances())
    shared = {} if call is None or call.ended or not may_share else call.expansions
    if (found := shared.get(key)) is not None:
        return found
    if not samples:
        size = shape[axis]
        samples = size // bare.tap.parts(size, None if call is None else call.batch_size)
    shared[key] = expanded(bare, bare.value.detach().expand(shape), axis, samples)
    return shared[key]


def expanded(bare: ParameterProxy, whole: Tensor, axis: int, samples: int) -> Tensor:
    """``whole``, which repeats a stand-in along its axes, as an ordinary tensor.

    What reaches the repetitions of one sample, which lie together along ``axis``, is its gradient.
    Rows of a table that others are computed from are expanded as well: what all of them give these
    is added up before it goes back through the lookup.
    """
    tap, recomputed = bare.tap, in_backward()
    tables: dict[Tensor, Tensor] = {}
    for leaf, of in bare.leaves.items():
        if isinstance(of, TableRows) and not (bare.whole is leaf and bare.is_kept):
            rows = ParameterProxy.wrap(leaf, {leaf: of}, tap, AffineView(leaf))
            rows.whole = leaf
            tables[leaf] = of_samples(rows, (samples, *leaf.shape), samples=samples)
    leaves = [of for leaf, of in bare.leaves.items() if leaf not in tables]
    params = [*dict.fromkeys(of.table if isinstance(of, TableRows) else of for of in leaves)]
    tap.session.count_use(params)
    note_recomputation(tap, recomputed)
    # In a tuple: a stand-in is a tensor, which autograd must not see.
    given = bare, whole.detach(), axis, samples, recomputed, params, dict.fromkeys(tables)
    output: Tensor = _apply_expansion(given, *params, *tables.values())
    return output


def _of_repetitions(G: Tensor, shape: Sequence[int], axis: int, samples: int) -> Tensor:
    """The gradient of what repeats a tensor of this shape along its axes as gradients ``[B,
    *shape]`` of the tensor."""
    shape = [1] * (G.dim() - len(shape)) + list(shape)
    sizes, repetitions, front = list[int](), list[int](), 0
    for n, (whole, size) in enumerate(zip(G.shape, shape, strict=True)):
        times = whole // max(size, 1)
        if n == axis:
            front, times = len(sizes), times // samples
            sizes.append(samples)
        if times > 1:
            repetitions.append(len(sizes))
            sizes.append(times)
        sizes.append(size)
    G = G.reshape(sizes)
    if repetitions:
        G = G.sum(repetitions, dtype=accumulation_dtype(G.dtype))
    return G.movedim(front - sum(n < front for n in repetitions), 0)


class _Expansion(torch.autograd.Function):
    """See :func:`expanded`."""

    @staticmethod
    def forward(ctx: Any, given: tuple[Any, ...], *parents: Tensor) -> Tensor:
        ctx.bare, whole, ctx.axis, ctx.samples, ctx.recomputed, ctx.params, ctx.tables = given
        ctx.origin = ctx.bare.kept_origin
        return own(whole)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:
        bare, origin = ctx.bare, ctx.origin
        refuse_second(bare.tap)
        grads_B = _of_repetitions(G, bare.shape, ctx.axis, ctx.samples)
        if origin is not None:
            grads = {origin.leaf: origin.grads(grads_B)}
        else:
            grads_B = grads_B.reshape(len(grads_B), *bare.shape)
            grads = dict(through(bare.value, bare.leaves, grads_B))
        factors: list[tuple[nn.Parameter, PerSampleGrad]] = []
        for leaf, found in grads.items():
            if isinstance(of := bare.leaves[leaf], nn.Parameter):
                factors.append((of, DenseGrad(found)))
            elif leaf not in ctx.tables:
                factors.append((of.table, of.factor(found)))
        of_tables = map(grads.get, ctx.tables)
        if not ctx.params:
            return None, *of_tables
        given = bare.tap, ctx.params, ctx.recomputed, None, ctx.samples
        return None, *_recorded(*given, factors), *of_tables


def _for_each(bare: ParameterProxy, count: int, rank: int) -> tuple[int, ...]:
    """The shape of so many of it, with as many axes as this."""
    shape = bare.shape[1:] if bare.dim() == rank else bare.shape
    return count, *[1] * (rank - 1 - len(shape)), *shape


def _attention(func: Callable[..., Any], leaves: list[Any], spec: Any, samples: Tensor) -> Tensor:
    """Attention of which a mask, or another operand, comes from parameters: every sample gets such
    an operand for itself, and the rest is autograd's.

    Run again in backward, as other operations are, it would draw another dropout.
    """

    def of_each(bare: ParameterProxy) -> Tensor:
        B, rank = len(samples), samples.dim()
        if bare.shape[:1] == (B,) and bare.dim() == rank:
            bare = bare.of_one_row
        if (bare.dim() < rank or len(bare) == 1) and bare.value.requires_grad:
            return of_samples(bare, _for_each(bare, B, rank))
        zeros = samples.new_zeros((), dtype=bare.dtype).expand(B, *[1] * (rank - 1))
        sum_leaves, sum_spec = flattened((zeros, bare), {})
        return mixed(torch.add, sum_leaves, sum_spec, [True])

    of_samples_only = [of_each(x) if isinstance(x, ParameterProxy) else x for x in leaves]
    args, kwargs = unflattened(of_samples_only, spec)
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
            raise UnsupportedUse(operation.tap, f"{operation.name} returns several tensors")
        batches = [x for x, batched in zip(tensors, operation.batched, strict=False) if batched]
        if any(x.dim() == 0 for x in batches):
            raise FlashClippingError(
                f"FC143 {operation.tap.path}: {operation.name} puts a parameter together with one "
                "number that was computed from the whole batch, a mean or a sum over samples. Keep "
                "the batch as the first axis (x.mean(-1), not x.mean()), or detach that number."
            )
        if operation.after is not None and operation.after.parts(output, operation.count) is None:
            raise UnsupportedUse(operation.tap, f"{operation.name} moves the batch axis")
        sizes = {x.shape[0] for x in batches if x.dim() == output.dim()}
        sizes = sizes or {x.shape[0] for x in batches}
        moved = output.dim() == 0 or output.shape[0] not in sizes
        if operation.after is None and moved and not operation.is_searched:
            raise UnsupportedUse(operation.tap, f"{operation.name} moves the batch axis")
        ctx.operation = operation
        if None in operation.origins:
            ctx.save_for_backward(*tensors[:n_plain])
        else:  # through autograd, so that a parameter that changes before backward is noticed
            ctx.save_for_backward(*tensors[:n_plain], *values)
        if operation.name in READS_ROWS:
            return own(output)
        # A view of what the operation itself made (einsum's): whoever changes it in place may.
        memory = memory_id(output.untyped_storage()) if output._is_view() else None
        shared = any(memory_id(x.untyped_storage()) == memory for x in (*tensors, *values))
        return output if memory is None or shared else own(output)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:
        operation: ProxyOp = ctx.operation
        refuse_second(operation.tap)
        n_plain = len(operation.batched)
        saved = list(ctx.saved_tensors)
        plain, values = saved[:n_plain], saved[n_plain:]
        needs = ctx.needs_input_grad[2 : 2 + n_plain]
        grads, factors = gradients(operation, plain, values, needs, G)
        given = operation.recomputed, operation.readers, operation.samples
        return None, None, *grads, *_recorded(operation.tap, operation.params, *given, factors)


def refuse_second(tap: FactorSource) -> None:
    if torch.is_grad_enabled():
        found = "backward(create_graph=True) asks for the derivative of its gradient"
        raise UnsupportedUse(tap, found)


def _recorded(
    tap: FactorSource,
    params: Sequence[nn.Parameter],
    recomputed: bool,
    readers: Readers | None,
    samples: int | None,
    factors: Iterable[tuple[nn.Parameter, PerSampleGrad]],
) -> list[Tensor | None]:
    """Record factors, of which some may be of one parameter; what backward returns for each."""
    if not tap.session.mode.enabled:
        return ordinary_gradients(tap.session, params, factors)
    by_param: dict[nn.Parameter, PerSampleGrad] = {}
    for param, factor in factors:
        by_param[param] = merge([by_param[param], factor]) if param in by_param else factor
    tap.record(list(by_param), list(by_param.values()), recomputed, readers, samples=samples)
    return [None] * len(params)


# Transforms of torch.func were refused before.
_apply: Callable[..., Tensor] = apply_of(_MixedFunction)
_apply_expansion = apply_of(_Expansion)
