"""One operation between stand-ins and tensors that carry samples, and its gradients.

A module may call ``F.linear`` on its weight, or write ``x @ self.weight.T``, in a forward of its
own: what it computes is known from the operation, and so is a factor of its gradient, as rules
have it. Nothing is assumed of the module. Of any other
operation gradients are formed sample by sample: those of one sample are those with the output
gradients of all others at 0.

Samples may lie along another axis than the first: XLNet's ``einsum("ibh,hnd->ibnd", h, self.q)``
has positions first. Where they lie in ``h`` and in the result, the look before a first step shows
(:mod:`flash_clipping.capture.proof.observe`).

Shape suffixes: ``B`` samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flash_clipping._compat import vmap_without_warnings
from flash_clipping.capture.factor_source import FactorSource
from flash_clipping.capture.proxies.parameter_proxy import (
    AffineView,
    ParameterProxy,
    TableRows,
    UnsupportedUse,
    unflattened,
)
from flash_clipping.capture.row_layouts import TOGETHER, Layout
from flash_clipping.errors import NotServed
from flash_clipping.factors import DenseGrad, PerSampleGrad, accumulation_dtype
from flash_clipping.finish.backward_pass import Readers
from flash_clipping.rules.convolution import convolution_backward
from flash_clipping.rules.embedding import embedding_factor
from flash_clipping.rules.linear import linear_backward, transposed_backward
from flash_clipping.rules.normalization import row_norm_backward
from flash_clipping.rules.registry import GradRequest, Grads

#: They may draw dropout, and an operand that is the same for all samples is broadcast over these.
ATTENTION = {"scaled_dot_product_attention"}
#: Linear maps: layers that read one input are measured together.
READS_ROWS = {"linear", "matmul"}
#: What they make of a sample is the same without the others, or an error: its axis is not theirs.
_SAME_ALONE = READS_ROWS | {"einsum", "bmm", "baddbmm", "add", "mul"}


@dataclass
class ProxyOp:
    """One operation between bare parameters and tensors that carry samples."""

    func: Callable[..., Tensor]
    name: str
    leaves: list[Any]
    spec: Any
    bares: list[ParameterProxy]
    batched: list[bool]
    autocast: tuple[str, bool, torch.dtype]
    recomputed: bool
    #: What each of ``bares`` is of a parameter, where it is little more than that.
    origins: list[AffineView | None]
    #: Where samples lie in what carries them, and in the output, if not along the first axis; and
    #: how many there are.
    before: Layout | None = None
    after: Layout | None = None
    count: int = 0
    #: It is yet to be seen where samples lie.
    is_searched: bool = False
    #: Which layers read the same rows, where that is of use.
    readers: Readers | None = None
    #: Samples in the call of the root that it belongs to, if there is one.
    samples: int | None = None

    @property
    def tap(self) -> FactorSource:
        return self.bares[0].tap

    def call(self, plain: list[Tensor], bare: list[Tensor]) -> Tensor:
        """The operation with these tensors in the place of its own."""
        plain_, bare_ = iter(plain), iter(bare)
        leaves = [
            next(bare_)
            if isinstance(leaf, ParameterProxy)
            else (next(plain_) if isinstance(leaf, Tensor) else leaf)
            for leaf in self.leaves
        ]
        args, kwargs = unflattened(leaves, self.spec)
        device_type, enabled, dtype = self.autocast
        if not enabled and not torch.is_autocast_enabled(device_type):
            return self.func(*args, **kwargs)
        with torch.autocast(device_type, dtype=dtype, enabled=enabled):
            return self.func(*args, **kwargs)

    @property
    def params(self) -> list[nn.Parameter]:
        found = [param for bare in self.bares for param in bare.params]
        return found if len(found) == 1 else list(dict.fromkeys(found))


Factors: TypeAlias = list[tuple[nn.Parameter, PerSampleGrad]]


def gradients(
    operation: ProxyOp,
    plain: list[Tensor],
    values: list[Tensor],
    needs: tuple[bool, ...],
    G: Tensor,
) -> tuple[list[Tensor | None], Iterable[tuple[nn.Parameter, PerSampleGrad]]]:
    """Gradients of the tensors that carry samples, and factors of parameters.

    Args:
        plain: the operation's ordinary tensors.
        values: those of its stand-ins.
        needs: which of ``plain`` need a gradient.
        G: the output gradient.
    """
    if not operation.tap.by_function:
        found = _by_rule(operation, plain, values, needs, G)
        if found is not None:
            return found
    return _input_grads(operation, plain, needs, G), _per_sample_factors(operation, plain, G)


def _input_grads(
    operation: ProxyOp, plain: list[Tensor], needs: tuple[bool, ...], G: Tensor
) -> list[Tensor | None]:
    """Gradients of the tensors that carry samples: the operation's own backward."""
    if not any(needs):
        return [None] * len(plain)
    inputs = [tensor.detach().requires_grad_(n) for tensor, n in zip(plain, needs, strict=True)]
    with torch.enable_grad():
        output = operation.call(inputs, [bare.value.detach() for bare in operation.bares])
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, G))
    return [next(found) if need else None for need in needs]


def _per_sample_factors(
    operation: ProxyOp, plain: list[Tensor], G: Tensor
) -> Iterator[tuple[nn.Parameter, PerSampleGrad]]:
    """For every parameter that took part, its gradient per sample ``[B, *parameter]``."""
    parts = operation.tap.parts(operation.count or len(G), operation.samples)
    try:
        if operation.after is not None and operation.name not in _SAME_ALONE:
            raise NotServed("it may compute something else of a sample without the others")
        operand_grads = _operand_grads(operation, plain, G)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        # An operation that vmap does not have, or that does not take a sample alone.
        operand_grads = _operand_grads_in_turn(operation, plain, G)
    for bare, grads_B in zip(operation.bares, operand_grads, strict=True):
        if not bare.value.requires_grad:
            continue  # computed with gradients off
        yield from factors_of(bare, in_samples(grads_B, parts))


def in_samples(grads_N: Tensor, parts: int) -> Tensor:
    """Gradients of rows, added up where as many consecutive ones are of one sample: what goes back
    through functions of parameters is then no more than samples, however many windows or heads."""
    if parts == 1:
        return grads_N
    grads_Bp = torch.unflatten(grads_N, 0, (-1, parts))
    return grads_Bp.sum(1, dtype=accumulation_dtype(grads_N.dtype))


def factors_of(
    bare: ParameterProxy, grads_B: Tensor
) -> Iterator[tuple[nn.Parameter, PerSampleGrad]]:
    """Per-sample gradients ``[B, *value]`` of a stand-in, as factors of its parameters."""
    for leaf, grads in through(bare.value, bare.leaves, grads_B):
        of = bare.leaves[leaf]
        yield (of.table, of.factor(grads)) if isinstance(of, TableRows) else (of, DenseGrad(grads))


def through(
    value: Tensor, leaves: Iterable[Tensor], grads_B: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per-sample gradients ``[B, *value]`` of what was computed from these leaves, as theirs."""
    leaves = [*leaves]
    if any(value is leaf for leaf in leaves):
        yield value, grads_B
        return
    used: list[Tensor] = []

    def of_sample(grad: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(value, leaves, grad, retain_graph=True, allow_unused=True)
        used[:] = [leaf for leaf, grad in zip(leaves, found, strict=True) if grad is not None]
        return [grad for grad in found if grad is not None]

    # Not by is_grads_batched, which takes indexing, embeddings and more one sample at a time.
    with vmap_without_warnings():
        found = torch.func.vmap(of_sample)(grads_B.to(value.dtype))
    yield from zip(used, found, strict=True)


def _operand_grads(operation: ProxyOp, plain: list[Tensor], G: Tensor) -> list[Tensor]:
    """Gradient of the operation per sample with respect to each bare operand: ``[B, *operand]``."""
    before, after, B = operation.before, operation.after, operation.count
    lies_first = before is None or after is None
    if before is not None and after is not None:
        G, plain = after.front(G, B), [before.front(x, B) for x in plain]

    def one_sample(G_1: Tensor, operands: list[Tensor], samples: list[Tensor]) -> Any:
        rows = [
            x.unsqueeze(0) if batched and lies_first else x
            for x, batched in zip(samples, operation.batched, strict=True)
        ]

        def run(*values: Tensor) -> Tensor:
            return operation.call(rows, list(values))

        vjp: Any = torch.func.vjp(run, *operands)[1]
        return vjp(G_1.unsqueeze(0) if lies_first else G_1)

    operands = [bare.value.detach() for bare in operation.bares]
    in_dims: tuple[Any, ...] = (
        0,
        [None] * len(operands),
        [0 if batched else None for batched in operation.batched],
    )
    return list(torch.func.vmap(one_sample, in_dims=in_dims)(G, operands, plain))


def _operand_grads_in_turn(operation: ProxyOp, plain: list[Tensor], G: Tensor) -> list[Tensor]:
    """Operands' gradients ``[B, *operand]`` for any operation: its own backward for each sample,
    with the output gradients of the others at 0."""
    operands = [bare.value.detach().requires_grad_() for bare in operation.bares]
    after = operation.after
    layout, B = (TOGETHER, len(G)) if after is None else (after, operation.count)
    found = [operand.new_empty(B, *operand.shape) for operand in operands]
    try:
        with torch.enable_grad():
            output = operation.call([x.detach() for x in plain], operands)
        for b in range(B):
            of_b = torch.autograd.grad(output, operands, layout.only(G, b, B), retain_graph=True)
            for grads, grad in zip(found, of_b, strict=True):
                grads[b] = grad
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        raise UnsupportedUse(
            operation.tap, f"{operation.name} failed in backward ({error})"
        ) from error
    return found


def _by_rule(
    operation: ProxyOp, plain: list[Tensor], values: list[Tensor], needs: Sequence[bool], G: Tensor
) -> tuple[list[Tensor | None], Factors] | None:
    """:func:`gradients` by what the rule of a layer that computes the same has of its weight and
    bias.

    Returns:
        ``None`` where there is none: another operation, more than one tensor that carries samples,
        or a stand-in that is more than a parameter laid out again.
    """
    if operation.after or operation.name not in _FORMULAS:
        return None
    if sum(operation.batched) != 1 or G.is_complex() or any(x.is_complex() for x in plain):
        return None
    at = operation.batched.index(True)
    if any(need and place != at for place, need in enumerate(needs)):
        return None
    values = values or [bare.value.detach() for bare in operation.bares]
    formula, takes = _FORMULAS[operation.name]
    args, kwargs = unflattened(operation.leaves, operation.spec)
    if len(args) > len(takes) or not kwargs.keys() <= takes.keys():
        return None
    leaves = dict(zip(takes, args, strict=False)) | kwargs
    tensors, stand_ins = iter(plain), iter(values)
    given = {
        name: leaf
        if not isinstance(leaf, Tensor)
        else next(stand_ins if isinstance(leaf, ParameterProxy) else tensors)
        for name, leaf in leaves.items()
    }
    trained = [takes[name] for name, leaf in leaves.items() if isinstance(leaf, ParameterProxy)]
    backend = operation.tap.session.options.backend
    request = GradRequest((needs[at],), frozenset(trained), backend)
    made = formula(G, request, **given) if given["input"] is plain[at] else None
    if made is None:
        return None
    grad_input, by_name = made
    grads: list[Tensor | None] = [None] * len(plain)
    grads[at] = None if grad_input is None else grad_input.to(plain[at].dtype)
    factors: Factors = []
    stood_in = zip(trained, operation.bares, operation.origins, values, strict=True)
    for name, bare, origin, value in stood_in:
        if not bare.value.requires_grad:
            continue  # computed with gradients off
        if origin is None:  # a standardised weight
            factors += factors_of(bare, by_name[name].stored(backend).grads)
            continue
        factor = origin.of_parameter(by_name[name], value)
        if factor is None:
            return None
        of = bare.leaves[origin.leaf]
        if isinstance(of, TableRows):
            factors.append((of.table, of.factor(factor.dense())))
        else:
            factors.append((of, factor))
    return grads, factors


# -- formulas: what rules have of a call with these arguments, or None -----------------------------


def _linear(
    G: Tensor, needs: GradRequest, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Grads | None:
    if weight.dim() != 2 or input.dim() < 2:
        return None
    # Under autocast, the operands that were multiplied.
    return linear_backward(input.to(G.dtype), weight.to(G.dtype), G, needs)


def _matmul(G: Tensor, needs: GradRequest, input: Tensor, other: Tensor) -> Grads | None:
    if other.dim() != 2 or input.dim() < 2:
        return None
    return transposed_backward(input.to(G.dtype), other.to(G.dtype), G, needs)


def _embedding(
    G: Tensor,
    needs: GradRequest,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Grads | None:
    if max_norm is not None or scale_grad_by_freq:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    return None, {"weight": embedding_factor(input, G, len(weight), padding_idx)}


def _layer_norm(
    G: Tensor,
    needs: GradRequest,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Grads | None:
    if input.dim() <= len(normalized_shape) or input.shape != G.shape:
        return None
    x = input.to(G.dtype)
    scale = None if x.is_cuda else weight  # whose dtype is that of a CPU's means
    _, mean, rstd = torch.native_layer_norm(x, normalized_shape, scale, None, eps)
    return row_norm_backward(x, mean, rstd, weight, normalized_shape, G, needs)


def _convolution(
    G: Tensor,
    needs: GradRequest,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Grads | None:
    axes = weight.dim() - 2
    if input.dim() != axes + 2 or isinstance(padding, str):
        return None

    def each(value: Any) -> tuple[int, ...]:
        """One number for every spatial axis."""
        numbers = (value,) if isinstance(value, int) else tuple(value)
        return numbers * axes if len(numbers) == 1 else numbers

    kernel = each(stride), each(padding), each(dilation), groups
    return convolution_backward(input.to(G.dtype), weight.to(G.dtype), G, needs, kernel)


def _formula(formula: Callable[..., Grads | None]) -> tuple[Callable[..., Grads | None], Any]:
    """With the names of what it takes: the rules' name for each."""
    names = [*inspect.signature(formula).parameters][2:]
    return formula, {name: "weight" if name == "other" else name for name in names}


_FORMULAS = {
    "linear": _formula(_linear),
    "matmul": _formula(_matmul),
    "embedding": _formula(_embedding),
    "layer_norm": _formula(_layer_norm),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _formula(_convolution)),
}
