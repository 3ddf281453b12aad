"""Gradients of one operation between stand-ins and tensors that carry samples, sample by sample.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.proxies.operation import (
    ADDITION,
    MULTIPLICATION,
    ProxyOp,
    name_of,
)
from flash_clipping.capture.proxies.parameter_proxy import ParameterProxy, UnsupportedUse
from flash_clipping.factors import Factor, accumulation_dtype


def input_grads(
    operation: ProxyOp, plain: list[Tensor], needs: tuple[bool, ...], G: Tensor
) -> list[Tensor | None]:
    """Gradients of the tensors that carry samples: the operation's own backward."""
    if not any(needs):
        return [None] * len(plain)
    if (
        name_of(operation.func) in ADDITION
        and len(plain) == 1
        and len(operation.leaves) == 2  # a third is alpha
        and plain[0].shape == G.shape
        and not G.is_complex()
    ):
        return [G.to(plain[0].dtype)]
    inputs = [tensor.detach().requires_grad_(n) for tensor, n in zip(plain, needs, strict=True)]
    with torch.enable_grad():
        output = operation.call(inputs, [bare.value.detach() for bare in operation.bares])
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, G))
    return [next(found) if tensor.requires_grad else None for tensor in inputs]


def table_factor(
    operation: ProxyOp, plain: list[Tensor], G: Tensor
) -> tuple[nn.Parameter, Factor] | None:
    """The gradient of a table of which single rows were added to something that has samples,
    without a table per sample."""
    bare, rows = operation.bares[0], operation.rows
    if rows is None or name_of(operation.func) not in ADDITION or len(operation.leaves) != 2:
        return None
    if len(operation.bares) > 1 or len(plain) != 1 or (operation.axis and rows.feature != -1):
        return None
    if -rows.feature >= G.dim() or bare.shape[rows.feature] != G.shape[rows.feature]:
        return None
    return bare.leaves[rows.table], rows.factor(G, operation.axis)


def per_sample_grads(
    operation: ProxyOp, plain: list[Tensor], G: Tensor
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """For every parameter that took part, its gradient per sample ``[B, *parameter]``."""
    own_row = [
        operation.after is None and operation.row_by_row(bare, plain, G) for bare in operation.bares
    ]
    by_row = [operation.by_row(bare, G.dim()) for bare in operation.bares]
    try:
        if operation.after is not None:
            raise NotImplementedError("formulas below are for samples along the first axis")
        operand_grads = _operand_grads(operation, plain, G, own_row)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        # An operation that vmap does not have, or that does not take one row of an operand alone.
        own_row = by_row = [False] * len(operation.bares)
        operand_grads = _operand_grads_in_turn(operation, plain, G)
    for bare, grads_B, has_own, rowwise in zip(
        operation.bares, operand_grads, own_row, by_row, strict=True
    ):
        origin = bare.row if rowwise else bare.value
        assert origin is not None
        if not origin.requires_grad:
            continue  # computed with gradients off
        if has_own:
            yield from _through_rows(bare, grads_B)
            continue
        yield from through(origin, bare.leaves, grads_B)


def through(
    value: Tensor, leaves: dict[Tensor, nn.Parameter], grads_B: Tensor
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Per-sample gradients ``[B, *value]`` of what was computed from parameters, as theirs."""
    for leaf, param in leaves.items():
        if value is leaf:
            yield param, grads_B
            continue
        (found,) = torch.autograd.grad(
            value,
            leaf,
            grads_B.to(value.dtype),
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        if found is not None:
            yield param, found


def _through_rows(bare: ParameterProxy, grads_B: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The same where sample ``b`` met row ``b`` of the operand: ``grads_B [B, 1, *row]``."""
    for leaf, param in bare.leaves.items():
        found = []
        for b in range(len(grads_B)):  # all at once would take B times the operand
            with torch.enable_grad():
                row = bare.value[b : b + 1]
            (grad,) = torch.autograd.grad(
                row, leaf, grads_B[b].to(row.dtype), retain_graph=True, allow_unused=True
            )
            found.append(torch.zeros_like(leaf) if grad is None else grad)
        yield param, torch.stack(found)


def _operand_grads(
    operation: ProxyOp, plain: list[Tensor], G: Tensor, own_row: list[bool]
) -> list[Tensor]:
    """Gradient of the operation per sample with respect to each bare operand: ``[B, *operand]``.

    Of an operand that has a row per sample, with respect to that row: ``[B, 1, *row]``.
    """
    name = name_of(operation.func)
    bares = operation.bares
    real = not G.is_complex() and all(x.is_floating_point() for x in plain)
    if len(bares) == len(plain) == 1 and len(operation.leaves) == 2 and real:
        by_row = operation.by_row(bares[0], G.dim()) or own_row[0]
        shape = torch.Size([1, *bares[0].shape[1:]]) if by_row else bares[0].shape
        if name in ADDITION:
            return [reduce_to(G, shape)]
        if name in MULTIPLICATION:
            return [reduce_to(G * plain[0], shape)]

    def one_sample(G_1: Tensor, operands: list[Tensor], samples: list[Tensor]) -> Any:
        rows = [
            x.unsqueeze(0) if batched else x
            for x, batched in zip(samples, operation.batched, strict=True)
        ]

        def run(*values: Tensor) -> Tensor:
            return operation.call(rows, list(values))

        vjp: Any = torch.func.vjp(run, *operands)[1]
        return vjp(G_1.unsqueeze(0))

    rowwise = [
        operation.by_row(bare, G.dim()) or own for bare, own in zip(bares, own_row, strict=True)
    ]
    operands = [
        bare.value.detach().unsqueeze(1) if row else bare.value.detach()
        for bare, row in zip(bares, rowwise, strict=True)
    ]
    in_dims: tuple[Any, ...] = (
        0,
        [0 if row else None for row in rowwise],
        [0 if batched else None for batched in operation.batched],
    )
    return list(torch.func.vmap(one_sample, in_dims=in_dims)(G, operands, plain))


def _operand_grads_in_turn(operation: ProxyOp, plain: list[Tensor], G: Tensor) -> list[Tensor]:
    """The same, ``[B, *operand]``, for whatever the operation is: its own backward for each sample,
    with the output gradients of the others at 0."""
    operands = [bare.value.detach().requires_grad_() for bare in operation.bares]
    try:
        with torch.enable_grad():
            output = operation.call([x.detach() for x in plain], operands)
        found = []
        for b in range(G.shape[0] if operation.after is None else operation.count):
            G_b = operation.only(G, b)
            found.append(torch.autograd.grad(output, operands, G_b, retain_graph=True))
        return (
            [torch.stack(grads) for grads in zip(*found, strict=True)]
            if found
            else [operand.new_zeros(0, *operand.shape) for operand in operands]
        )
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise UnsupportedUse(
            operation.tap, f"{name_of(operation.func)} failed in backward ({error})"
        ) from error


def reduce_to(G: Tensor, shape: torch.Size) -> Tensor:
    """Add up ``G [B, ...]`` over the axes that ``shape`` was broadcast along, sample by sample."""
    aligned = [1] * (G.dim() - len(shape)) + list(shape)
    axes = [i for i in range(1, G.dim()) if aligned[i] == 1 and G.shape[i] != 1]
    if axes:
        G = G.sum(axes, keepdim=True, dtype=accumulation_dtype(G.dtype))
    return G.reshape(G.shape[0], *shape)
