"""Compiled models: what clipping needs leaves a compiled region as gradients of wires.

Inside a compiled region nothing can be recorded on the side. So every tapped layer takes, besides
its input, *wires*: tensors of one element, expanded to the shapes of what clipping needs. The
layer's backward returns the input, the output gradient or per-sample vectors as the gradients of
these. Forward and backward are then pure functions, which Dynamo and AOTAutograd trace whole. One
autograd function outside of the region makes all wires of one call; its backward gets all gradients
at once, makes factors of them and hands these to the tape. Eager and compiled models differ in who
does that, and in nothing else.

A *region* is what ``torch.compile`` was asked for: the whole model (``wrapped.compile()``, or
``torch.compile(model)`` and ``model.compile()`` before it was wrapped), or blocks of it
(``model.block.compile()``).

What is wired: ``nn.Linear`` and ``transformers``' ``Conv1D``, ``nn.Embedding``, ``nn.LayerNorm``,
``nn.RMSNorm``, ``nn.GroupNorm``, ``nn.InstanceNorm1d/2d/3d`` and ``nn.Conv1d/2d/3d``, called with
one tensor, once or several times in a region, where a rehearsal has shown that they read samples.
Any other layer with trainable parameters (bare parameters, the generic rule, ``nn.EmbeddingBag``,
``nn.MultiheadAttention``, recurrent layers, rules of users) runs by itself, between two graphs; with
``fullgraph=True`` it is an error that names it.

The shapes of wires must be known before the region runs. They are learned from an eager run of the
region without backward, for the first shapes of its inputs and for every other that does not follow
from those that were seen: a batch size needs one only while fewer than two are known. While a layer
is traced, its wires are compared with what it reads and returns, so that a wrong shape is a guard
that fails, not a wrong norm.

Shape suffixes: ``B`` samples, ``T`` positions, ``d`` and ``p`` features, ``n`` elements of a vector.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from flash_clipping.errors import FlashClippingError
from flash_clipping.factors import (
    Convolution,
    Dense,
    Factor,
    Lookup,
    Outer,
    RowSum,
    accumulation_dtype,
)
from flash_clipping.inputs import map_tensors, tensors_in
from flash_clipping.recorder import Forward, Readers, Recorder, in_backward
from flash_clipping.rows import (
    _random_state,
    _untouched,
    _without_activations,
    _without_checkpoints,
)
from flash_clipping.rules.convolution import ConvolutionRule
from flash_clipping.rules.embedding import EmbeddingRule
from flash_clipping.rules.linear import LinearRule, TransposedLinearRule
from flash_clipping.rules.normalization import (
    GroupNormRule,
    InstanceNormRule,
    LayerNormRule,
    RMSNormRule,
)
from flash_clipping.rules.registry import Rule, as_BTd

if TYPE_CHECKING:
    from flash_clipping.no_samples import EmptyBatchForward
    from flash_clipping.tap import Tap

#: Shape and dtype of a wire.
Meta: TypeAlias = tuple[tuple[int, ...], torch.dtype]

#: The wires of one call of a layer, in the order of its wiring; None for what nobody needs.
Wires: TypeAlias = Sequence[Tensor | None]

#: The wires of regions that run now, by the key of their model's recorder: for each tap of the
#: region, by its number, those of every call. An empty tuple: the layer has nothing to train. None:
#: it has no wires. Global, as Dynamo takes tensors that are reached through a module of PyTorch's to
#: be of one shape for good.
_ACTIVE: dict[int, list[tuple[Wires, ...] | None]] = {}

#: Layouts of wires that one region remembers.
REMEMBERED = 256


# -- how layers are wired --------------------------------------------------------------------------


class Seen(NamedTuple):
    """Input and output of one call of a layer, with the batch in front."""

    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    y_shape: tuple[int, ...]
    y_dtype: torch.dtype


class Wiring(ABC):
    """What one type of layer leaves through its wires."""

    def serves(self, layer: Any) -> bool:
        """Whether layers with these settings are wired."""
        return True

    @abstractmethod
    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        """All wires that such a layer may have; also traced, with sizes that are symbols."""

    @abstractmethod
    def wanted(self, names: Sequence[str]) -> tuple[bool, ...]:
        """Which of them are needed where these parameters are trainable."""

    @abstractmethod
    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        """The layer's output. Traced: PyTorch's operators only, which Inductor fuses."""

    @abstractmethod
    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        """A factor for every parameter that is trainable, from the gradients of the wires."""


class _LinearFunction(torch.autograd.Function):
    """``y = x Wᵀ + b``, whose wires get ``x``, ``G`` and ``Σ_t G``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of_x: Tensor | None,
        of_G: Tensor | None,
        of_bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wired = of_x is not None, of_bias is not None
        return F.linear(x, weight, bias).detach()  # no view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        product, vector = ctx.wired
        return (
            G @ weight,
            None,
            None,
            x if product else None,
            G if product else None,
            _sum_rows(G) if vector else None,
        )


class LinearWiring(Wiring):
    transposed = False

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        y_shape, dtype = seen.y_shape, seen.y_dtype  # that of both operands
        vector = ((y_shape[0], y_shape[-1]), accumulation_dtype(dtype))
        return (seen.x_shape, dtype), (y_shape, dtype), vector

    def wanted(self, names: Sequence[str]) -> tuple[bool, ...]:
        product = "weight" in names  # which a bias needs no more than
        return product, product, not product

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        x, weight, bias = _operands(x, layer.weight, layer.bias)
        return _LinearFunction.apply(x, weight.mT if self.transposed else weight, bias, *wires)

    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        x, G, vector_Bp = grads
        if x is None:
            return {"bias": Dense(vector_Bp)}
        A_BTd, G_BTp = as_BTd(x), as_BTd(G)
        outer = Outer(G_BTp, A_BTd) if self.transposed else Outer(A_BTd, G_BTp)
        return {"weight": outer, "bias": RowSum(G_BTp)}


class TransposedLinearWiring(LinearWiring):
    transposed = True


class _EmbeddingFunction(torch.autograd.Function):
    """Rows of a table, whose wires get the ids and ``G``."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, of_ids: Tensor, of_G: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight).detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        return None, None, ids.to(torch.float64), G  # a gradient holds no integers


class EmbeddingWiring(Wiring):
    def serves(self, layer: Any) -> bool:
        return not layer.scale_grad_by_freq and layer.max_norm is None

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        return (seen.x_shape, torch.float64), (seen.y_shape, seen.y_dtype)

    def wanted(self, names: Sequence[str]) -> tuple[bool, ...]:
        return True, True

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        return _EmbeddingFunction.apply(x, layer.weight.detach(), *wires)

    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        ids, G = grads
        ids_BT = ids.to(torch.int64).reshape(ids.shape[0], ids.shape[1:].numel())
        lookup = Lookup(ids_BT, as_BTd(G), layer.num_embeddings, layer.padding_idx)
        return {"weight": lookup}


def _input_gradient(
    x_hat: Tensor, G: Tensor, rstd: Tensor, axes: list[int], centred: bool
) -> Tensor:
    """``rstd · (g - ⟨g⟩ - x̂ ⟨g·x̂⟩)``, with ``g`` the output gradient times the weight and ``⟨·⟩``
    the mean over ``axes``; without ``⟨g⟩`` where no mean was subtracted."""
    dx = G - x_hat * (G * x_hat).mean(axes, keepdim=True)
    if centred:
        dx = dx - G.mean(axes, keepdim=True)
    return rstd * dx


class _RowNormFunction(torch.autograd.Function):
    """LayerNorm, or RMSNorm where ``centred`` is false; wires get ``Σ_t G·x̂`` and ``Σ_t G``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        centred: bool,
        of_weight: Tensor | None,
        of_bias: Tensor | None,
    ) -> Tensor:
        ctx.axes, ctx.eps, ctx.centred = len(shape), eps, centred
        ctx.wired = of_weight is not None, of_bias is not None
        ctx.weighted = weight is not None
        if centred:
            y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
            saved = [x, mean, rstd]
        else:
            y = F.rms_norm(x, shape, weight, eps)
            saved = [x]  # what it keeps of its own may be rounded to the input's dtype
        if weight is not None:
            saved.append(weight)
        ctx.save_for_backward(*saved)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors
        x, dtype = saved[0], accumulation_dtype(saved[0].dtype)
        axes = list(range(-ctx.axes, 0))
        x_hat = x.to(dtype)
        if ctx.centred:
            mean, rstd = saved[1].to(dtype), saved[2].to(dtype)
            x_hat = (x_hat - mean) * rstd
        else:
            rstd = (x_hat.square().mean(axes, keepdim=True) + ctx.eps).rsqrt()
            x_hat = x_hat * rstd
        G = G.to(dtype)
        of_weight, of_bias = ctx.wired
        g = G * saved[-1].to(dtype) if ctx.weighted else G
        dx = _input_gradient(x_hat, g, rstd, axes, ctx.centred).to(x.dtype)
        return (
            dx,
            *(None,) * 5,
            _sum_rows((G * x_hat).flatten(-ctx.axes)) if of_weight else None,
            _sum_rows(G.flatten(-ctx.axes)) if of_bias else None,
        )


class _VectorsWiring(Wiring):
    """A layer whose weight and bias have vectors as per-sample gradients."""

    def wanted(self, names: Sequence[str]) -> tuple[bool, ...]:
        return "weight" in names, "bias" in names

    def shape(self, layer: Any) -> tuple[int, ...]:
        raise NotImplementedError

    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        shape = self.shape(layer)
        axes = None if len(shape) == 1 else shape
        named = zip(("weight", "bias"), grads, strict=True)
        # As sums over one position: one launch takes the norms of all of a model's.
        return {
            name: RowSum(vector_Bn.unsqueeze(1), axes)
            for name, vector_Bn in named
            if vector_Bn is not None
        }


class LayerNormWiring(_VectorsWiring):
    centred = True

    def shape(self, layer: Any) -> tuple[int, ...]:
        return tuple(layer.normalized_shape)

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        n = 1
        for size in layer.normalized_shape:
            n *= size
        meta = (seen.x_shape[0], n), accumulation_dtype(seen.x_dtype)
        return meta, meta

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        x = _normalization_input(x)
        weight, bias = _detached(layer.weight), None
        if self.centred:
            bias = _detached(layer.bias)
        eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
        shape = tuple(layer.normalized_shape)
        return _RowNormFunction.apply(x, weight, bias, shape, eps, self.centred, *wires)


class RMSNormWiring(LayerNormWiring):
    centred = False


class _GroupNormFunction(torch.autograd.Function):
    """GroupNorm, whose wires get ``Σ_s G·x̂`` and ``Σ_s G``, ``[B, C]``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: int,
        eps: float,
        of_weight: Tensor | None,
        of_bias: Tensor | None,
    ) -> Tensor:
        B, C = x.shape[0], x.shape[1]
        y, mean, rstd = torch.native_group_norm(
            x, weight, bias, B, C, x.shape[2:].numel(), groups, eps
        )
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups, ctx.wired = groups, (of_weight is not None, of_bias is not None)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        x, weight, mean, rstd = ctx.saved_tensors
        dtype = accumulation_dtype(x.dtype)
        groups, (of_weight, of_bias) = ctx.groups, ctx.wired
        B, C = x.shape[0], x.shape[1]
        grouped = (B, groups, C // groups, -1)
        mean, rstd = (s.to(dtype).view(B, groups, 1, 1) for s in (mean, rstd))
        x_hat = (x.to(dtype).reshape(grouped) - mean) * rstd
        G = G.to(dtype).reshape(grouped)
        g = G * weight.to(dtype).view(1, groups, C // groups, 1)
        dx = _input_gradient(x_hat, g, rstd, [2, 3], centred=True)
        return (
            dx.reshape(x.shape).to(x.dtype),
            *(None,) * 4,
            (G * x_hat).sum(3).reshape(B, C) if of_weight else None,
            G.sum(3).reshape(B, C) if of_bias else None,
        )


class GroupNormWiring(_VectorsWiring):
    def shape(self, layer: Any) -> tuple[int, ...]:
        return tuple(layer.weight.shape)

    def groups(self, layer: Any) -> int:
        return int(layer.num_groups)

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        meta = (seen.x_shape[0], seen.x_shape[1]), accumulation_dtype(seen.x_dtype)
        return meta, meta

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        x = _normalization_input(x).contiguous()
        weight, bias = layer.weight.detach(), _detached(layer.bias)
        return _GroupNormFunction.apply(x, weight, bias, self.groups(layer), layer.eps, *wires)


class InstanceNormWiring(GroupNormWiring):
    def serves(self, layer: Any) -> bool:
        return not layer.track_running_stats

    def groups(self, layer: Any) -> int:
        return int(layer.num_features)


class _ConvolutionFunction(torch.autograd.Function):
    """A convolution of a padded input; wires get that input, ``G`` and ``Σ_t G``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        of_x: Tensor | None,
        of_G: Tensor | None,
        of_bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = stride, padding, dilation, groups
        ctx.wired = of_x is not None, of_bias is not None
        y = torch.convolution(
            x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups
        )
        return y.detach()

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        product, vector = ctx.wired
        dx = torch.ops.aten.convolution_backward(
            G,
            x,
            weight,
            None,
            stride,
            padding,
            dilation,
            False,
            [0] * len(stride),
            groups,
            [True, False, False],
        )[0]
        return (
            dx,
            *(None,) * 6,
            x if product else None,
            G if product else None,
            G.flatten(2).sum(2, dtype=accumulation_dtype(G.dtype)) if vector else None,
        )


class ConvolutionWiring(Wiring):
    """Padding that the convolution does not do itself is done before it, under autograd."""

    @staticmethod
    def _own_padding(layer: Any) -> tuple[int, ...]:
        """What is added by an operator of its own, as ``F.pad`` takes it."""
        by_kernel = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        pads = tuple(layer._reversed_padding_repeated_twice)
        return pads if any(pads) and not by_kernel else ()

    def _zero_padding(self, layer: Any) -> list[int]:
        if self._own_padding(layer) or isinstance(layer.padding, str):
            return [0] * len(layer.stride)
        return list(layer.padding)

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        shape, pads = list(seen.x_shape), self._own_padding(layer)
        for place in range(len(pads) // 2):  # from the last axis on
            shape[len(shape) - 1 - place] += pads[2 * place] + pads[2 * place + 1]
        dtype = seen.y_dtype
        vector = ((seen.y_shape[0], seen.y_shape[1]), accumulation_dtype(dtype))
        return (tuple(shape), dtype), (seen.y_shape, dtype), vector

    def wanted(self, names: Sequence[str]) -> tuple[bool, ...]:
        return "weight" in names, "weight" in names, "bias" in names

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        x, weight, bias = _operands(x, layer.weight, layer.bias)
        if pads := self._own_padding(layer):
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            x = F.pad(x, pads, mode=mode)
        return _ConvolutionFunction.apply(
            x,
            weight,
            bias,
            list(layer.stride),
            self._zero_padding(layer),
            list(layer.dilation),
            layer.groups,
            *wires,
        )

    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        x, G, vector_Bp = grads
        found: dict[str, Factor] = {}
        if x is not None:
            found["weight"] = Convolution(
                x,
                G,
                layer.weight,
                layer.stride,
                self._zero_padding(layer),
                layer.dilation,
                layer.groups,
            )
        if vector_Bp is not None:
            found["bias"] = Dense(vector_Bp)
        return found


#: Of exactly these: another rule knows better what its layers' gradients are made of.
_WIRINGS: dict[type[Rule], Wiring] = {
    LinearRule: LinearWiring(),
    TransposedLinearRule: TransposedLinearWiring(),
    EmbeddingRule: EmbeddingWiring(),
    LayerNormRule: LayerNormWiring(),
    RMSNormRule: RMSNormWiring(),
    GroupNormRule: GroupNormWiring(),
    InstanceNormRule: InstanceNormWiring(),
    ConvolutionRule: ConvolutionWiring(),
}


def _sum_rows(x: Tensor) -> Tensor:
    """``[B, ..., n]`` added up over all axes between, ``[B, n]``."""
    dtype = accumulation_dtype(x.dtype)
    return x.flatten(1, -2).sum(1, dtype=dtype) if x.dim() > 2 else x.to(dtype)


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, Any, Any]:
    """Operands as autocast would cast them, so that those that are multiplied are those that are
    handed out. Parameters are cut off: their gradients are the tape's to leave."""
    weight, bias, kind = weight.detach(), _detached(bias), x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return x, weight, bias


def _normalization_input(x: Tensor) -> Tensor:
    """As the rules have it: autocast computes normalizations in float32 on CUDA."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64:
        return x.float()
    return x


# -- what runs while Dynamo traces -----------------------------------------------------------------

#: How often each tap was traced, by its number, in traces that began where a region does.
_claims: weakref.WeakKeyDictionary[Any, Counter[int]] = weakref.WeakKeyDictionary()

#: Regions that run now, the innermost last. Only traces look at it.
_running: list[Region] = []


@torch.compiler.assume_constant_result
def _begin_trace() -> bool:
    """The trace that runs now begins where a region does: a run of the region goes through its
    graph once, so that it may have the region's wires. What follows a break in the graph does not
    come by here, and may be run any number of times."""
    context = TracingContext.try_get()
    if context is not None:
        _claims.setdefault(context, Counter())
    return True


@torch.compiler.assume_constant_result
def _may_claim() -> bool:
    """Whether the trace that runs now begins where a region does."""
    context = TracingContext.try_get()
    return context is not None and context in _claims


@torch.compiler.assume_constant_result
def _claim(number: int, calls: int) -> int:
    """Which of its calls this one of a tap is, in the trace that runs now; -1 where that is not
    known, or there are not so many."""
    context = TracingContext.try_get()
    claims = None if context is None else _claims.get(context)
    if claims is None:
        return -1
    call = claims[number]
    claims[number] += 1
    return call if call < calls else -1


@torch.compiler.assume_constant_result
def _note_misfit() -> bool:
    """The wires of a layer that is traced do not have the shapes that it needs."""
    if _running:
        _running[-1].misfits = True
    return True


def traced_call(tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tapped layer while Dynamo traces it: on its wires, or between two graphs."""
    if not torch.is_grad_enabled():
        return tap.original(*args, **kwargs)
    wires = _ACTIVE.get(tap.recorder.key)
    # A tap's own number is asked for last: code that depends on it serves one tap.
    if wires is not None and _may_claim() and tap.number >= 0:
        calls = wires[tap.number]
        if calls is not None:
            if len(calls) == 0:
                return tap.original(*args, **kwargs)
            x = args[0] if len(args) == 1 and not kwargs else kwargs.get("input")
            if len(args) + len(kwargs) == 1 and isinstance(x, Tensor):
                call = _claim(tap.number, len(calls))
                if call >= 0:
                    output = _wired_call(tap, x, calls[call])
                    if output is not None:
                        return output
                    _note_misfit()
    return _by_itself(tap, args, kwargs)


def _wired_call(tap: Tap, x: Tensor, wires: Wires) -> Tensor | None:
    """The layer on its wires; None where they do not fit."""
    wiring, axis = tap.wiring, tap.recorder.batch_axis
    assert wiring is not None
    if axis:
        x = x.transpose(0, axis)
    y = wiring.forward(tap.layer, x, wires)
    seen = Seen(tuple(x.shape), x.dtype, tuple(y.shape), y.dtype)
    for wire, (shape, dtype) in zip(wires, wiring.metas(tap.layer, seen), strict=True):
        # Autograd would add up, or round, a gradient that is not like its tensor.
        if wire is not None and (tuple(wire.shape) != shape or wire.dtype != dtype):
            return None
    return y.transpose(0, axis) if axis else y


@torch.compiler.disable
def _by_itself(tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tap(*args, **kwargs)


# -- the shapes of wires ---------------------------------------------------------------------------

#: For each tap of a region, what its calls saw; None for a call that was of no use.
Calls: TypeAlias = list[list["Seen | None"]]


def noted_call(tap: Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer's own forward, while a region learns what its layers see."""
    output = tap.original(*args, **kwargs)
    calls = tap.recorder.seen
    if calls is None:
        return output
    x, axis = args[0] if args else kwargs.get("input"), tap.recorder.batch_axis
    seen = None
    if all(isinstance(t, Tensor) and t.dim() > axis for t in (x, output)):
        before, after = x.transpose(0, axis), output.transpose(0, axis)
        seen = Seen(tuple(before.shape), x.dtype, tuple(after.shape), output.dtype)
    calls.setdefault(id(tap), []).append(seen)
    return output


class _Affine:
    """Shapes that follow from those of inputs, as far as these are combinations of known ones.

    Sizes grow evenly with the sizes that they depend on: with the batch, with the length of texts.
    So any combination of two that were seen can be told (``s = s_0 + r (s_1 - s_0)``), and what
    cannot be told so is learned.
    """

    def __init__(self) -> None:
        self._first: tuple[Sequence[int], Calls] | None = None
        #: Differences to the first, of inputs and of what was learned, in echelon form: the place of
        #: the leading 1, and both vectors.
        self._rows: list[tuple[int, list[Fraction], list[Fraction]]] = []
        self._even = True

    def refute(self) -> None:
        """What was told turned out wrong: nothing is told any more."""
        self._even = False

    def add(self, sizes: Sequence[int], calls: Calls) -> None:
        if self._first is None:
            self._first = sizes, calls
            return
        if not self._even or _form(calls) != _form(self._first[1]):
            self._even = False
            return
        of_inputs, learned = self._difference(sizes), self._from_first(calls)
        rest, known = self._reduced(of_inputs)
        learned = [a - b for a, b in zip(learned, known, strict=True)]
        lead = next((i for i, size in enumerate(rest) if size), None)
        if lead is None:
            self._even = not any(learned)
            return
        factor = rest[lead]
        row = lead, [size / factor for size in rest], [size / factor for size in learned]
        self._rows.append(row)

    def find(self, sizes: Sequence[int]) -> Calls | None:
        """What follows for these sizes of the inputs, if anything."""
        if self._first is None or not self._even:
            return None
        rest, learned = self._reduced(self._difference(sizes))
        if any(rest):
            return None
        first = _sizes(self._first[1])
        found = [size + more for size, more in zip(first, learned, strict=True)]
        if any(size < 0 or size.denominator != 1 for size in found):
            return None
        return _with_sizes(self._first[1], iter([int(size) for size in found]))

    def _difference(self, sizes: Sequence[int]) -> list[Fraction]:
        assert self._first is not None
        return [Fraction(a - b) for a, b in zip(sizes, self._first[0], strict=True)]

    def _from_first(self, calls: Calls) -> list[Fraction]:
        assert self._first is not None
        pairs = zip(_sizes(calls), _sizes(self._first[1]), strict=True)
        return [Fraction(a - b) for a, b in pairs]

    def _reduced(self, of_inputs: list[Fraction]) -> tuple[list[Fraction], list[Fraction]]:
        """What is left when known rows are taken away, and what these say was learned."""
        rest, learned = (
            of_inputs,
            [Fraction(0)] * len(_sizes(self._first[1] if self._first else [])),
        )
        for lead, row, of_row in self._rows:
            if times := rest[lead]:
                rest = [a - times * b for a, b in zip(rest, row, strict=True)]
                learned = [a + times * b for a, b in zip(learned, of_row, strict=True)]
        return rest, learned


def _sizes(calls: Calls) -> list[int]:
    of_calls = [seen for of_tap in calls for seen in of_tap if seen is not None]
    return [size for seen in of_calls for size in (*seen.x_shape, *seen.y_shape)]


def _form(calls: Calls) -> Hashable:
    """All about these calls but sizes."""
    return tuple(
        tuple(
            None if s is None else (len(s.x_shape), s.x_dtype, len(s.y_shape), s.y_dtype)
            for s in of_tap
        )
        for of_tap in calls
    )


def _with_sizes(calls: Calls, sizes: Iterator[int]) -> Calls:
    def changed(seen: Seen | None) -> Seen | None:
        if seen is None:
            return None
        x_shape = tuple(next(sizes) for _ in seen.x_shape)
        return Seen(x_shape, seen.x_dtype, tuple(next(sizes) for _ in seen.y_shape), seen.y_dtype)

    return [[changed(seen) for seen in of_tap] for of_tap in calls]


def _kind_and_sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, list[int]]:
    """What a region was called with, apart from the sizes of tensors, and these."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kind: list[Hashable] = [repr(spec)]
    sizes: list[int] = []
    devices = set()
    for leaf in leaves:
        if leaf is None or isinstance(leaf, bool | int | float | str):
            kind.append(leaf)
            continue
        kind.append(type(leaf))
        for x in tensors_in(leaf):
            kind += (x.dtype, x.device, x.dim())
            sizes += x.shape
            devices.add(x.device.type)
    for device in sorted(devices):
        if torch.is_autocast_enabled(device):
            kind.append(torch.get_autocast_dtype(device))
    return tuple(kind), sizes


# -- one call of a region --------------------------------------------------------------------------


class _Slot(NamedTuple):
    """One call of a wired layer: which of all wires are its own."""

    tap: Tap
    names: list[str]
    params: list[nn.Parameter]
    places: tuple[int | None, ...]


@dataclass
class _Layout:
    """The wires of a region for one combination of shapes and trainable parameters."""

    metas: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]]
    slots: list[_Slot]
    #: By number of a tap: the places of the wires of its calls, or as in :data:`_ACTIVE`.
    by_tap: list[tuple[tuple[int | None, ...], ...] | None]
    params: list[nn.Parameter]
    #: Layers that have no wires, and why.
    refused: list[tuple[str, str]]
    #: Those of them that may get wires, once it is proven that they read samples.
    unproven: set[str] = field(default_factory=set)
    #: What identifies this layout by ``id`` is kept, so that no other object gets that.
    kept: list[Any] = field(default_factory=list)


class _Wires(torch.autograd.Function):
    """Makes the wires of one call of a region, and receives their gradients.

    The trainable parameters are inputs, so that autograd knows for which of them a backward is.
    """

    @staticmethod
    def forward(ctx: Any, handed: _Handed, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.handed = handed
        ctx.set_materialize_grads(False)
        return tuple(
            # One element each. Nothing ever reads it.
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in handed.layout.metas
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *ctx.handed.take(grads)


@dataclass(eq=False)
class _Handed:
    """What the backward of one call of a region has to know."""

    region: str
    layout: _Layout
    recorder: Recorder
    call: Forward | None
    recomputed: bool

    def take(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Hand the factors to the tape; gradients for the parameters only where nobody records."""
        if torch.is_grad_enabled():
            raise FlashClippingError(
                f"{self.region}: backward(create_graph=True) asks for second derivatives, which "
                "flash clipping does not have. Call backward() without create_graph, or take such "
                "gradients on the unwrapped model."
            )
        found: list[tuple[_Slot, list[Factor]]] = []
        for slot in self.layout.slots:
            of_slot = [None if place is None else grads[place] for place in slot.places]
            arrived = sum(grad is not None for grad in of_slot)
            if not arrived:
                continue  # the layer was not reached
            if arrived != sum(place is not None for place in slot.places):
                raise FlashClippingError(
                    f"{slot.tap.path}: in a compiled model, only a part of what its norm needs "
                    "arrived. Call the layer with a tensor that requires grad, or compile the "
                    "model without it."
                )
            assert slot.tap.wiring is not None
            by_name = slot.tap.wiring.factors(slot.tap.layer, of_slot)
            found.append((slot, [by_name[name] for name in slot.names]))
        if not self.recorder.enabled:
            return self._ordinary(found)
        readers = self._readers(found)
        for slot, factors in found:
            first = factors[0]
            shared = readers.get(first.shares_input_with()) if isinstance(first, Outer) else None
            if shared is None and self.call is not None and first.may_be_stored():
                shared = self._place(1)
            slot.tap.record(slot.params, factors, self.recomputed, shared)
        return (None,) * len(self.layout.params)

    def _readers(self, found: Sequence[tuple[_Slot, list[Factor]]]) -> dict[Hashable, Readers]:
        """How many layers read each input, where the tape will ask."""
        if self.call is None:
            return {}
        firsts = [factors[0] for _, factors in found]
        inputs = Counter(f.shares_input_with() for f in firsts if isinstance(f, Outer))
        return {key: self._place(count) for key, count in inputs.items()}

    def _place(self, count: int) -> Readers:
        assert self.call is not None
        self.call.readers.append(count)
        return self.call, len(self.call.readers) - 1

    def _ordinary(self, found: Sequence[tuple[_Slot, list[Factor]]]) -> list[Tensor | None]:
        """Recording was switched off since forward."""
        backend = self.recorder.backend
        sums: dict[int, Tensor] = {}
        for slot, factors in found:
            for param, factor in zip(slot.params, factors, strict=True):
                grad = factor.clipped_sum(None, backend).view_as(param).to(param.dtype)
                sums[id(param)] = sums[id(param)] + grad if id(param) in sums else grad
        return [sums.get(id(param)) for param in self.layout.params]


class Region:
    """A part of the model that is compiled as one, in place of what would run it.

    Args:
        module: that part, for its type.
        path: its name in the model, for messages.
        inner: runs it uncompiled.
        recorder, taps: the model's, and those in this part.
        compiler: compiles a function, as ``torch.compile`` was told for this part.
        fullgraph: whether a break in the graph is an error.
        codes: code objects of what was compiled for parts of other types: parts of one type share
            what was compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str,
        inner: Callable[..., Any],
        recorder: Recorder,
        taps: list[Tap],
        compiler: Callable[[Callable[..., Any]], Callable[..., Any]],
        fullgraph: bool,
        codes: dict[type, Any],
    ):
        self.path = f"{path or 'the model'} ({type(module).__name__})"
        self.module, self.inner = module, inner
        self.recorder, self.taps = recorder, taps
        self.fullgraph = fullgraph
        #: Whether a trace has met wires of another shape than its layers need.
        self.misfits = False
        #: Layers that ran uncompiled once, to be proven.
        self._tried: set[str] = set()
        self.compiled: Callable[..., Any] | None = compiler(self._entry(inner, module, codes))
        self._shapes: dict[Hashable, _Affine] = {}
        self._known: OrderedDict[Hashable, Calls] = OrderedDict()
        self._layouts: OrderedDict[Hashable, _Layout] = OrderedDict()

    @staticmethod
    def _entry(
        inner: Callable[..., Any], module: nn.Module, codes: dict[type, Any]
    ) -> Callable[..., Any]:
        def region(*args: Any, **kwargs: Any) -> Any:
            _begin_trace()
            return inner(*args, **kwargs)

        # Dynamo counts recompilations by code object: other models are none of this one's.
        own = region.__code__.replace(co_name=f"region_of_{type(module).__name__}")
        region.__code__ = codes.setdefault(type(module), own)
        return region

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a compiled module is not compiled, as PyTorch has it.
        state = self.__dict__.copy()
        state.update(compiled=None, _shapes={}, _known=OrderedDict(), _layouts=OrderedDict())
        return state

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the module's own forward, which trainers choose arguments by."""
        forward: Any = self.inner
        while hasattr(forward, "instance_forward"):  # a tap
            forward = forward.instance_forward or MethodType(
                type(forward.layer).forward, forward.layer
            )
        return inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)  # a part of another region
        recorder, call = self.recorder, self.recorder.current_forward
        if (
            self.compiled is None
            or recorder.bypassed  # a run that only looks
            or (call is not None and call.witness is not None)  # a rehearsal
        ):
            return self.inner(*args, **kwargs)
        if not recorder.recording:
            if recorder.enabled and call is not None and call.recorded and not in_backward():
                # The first forward of re-entrant checkpointing, without autograd. How often a layer
                # is used is not known then: none may pass for used once.
                for tap in self.taps:
                    recorder.count_use(tap.trainable()[1] * 2)
            return self._run(None, args, kwargs)
        if (call is None or call.ended) and not in_backward():
            return self.inner(*args, **kwargs)  # where taps refuse it
        kind, sizes = _kind_and_sizes(args, kwargs)
        key = kind, tuple(sizes)
        known = self._find(key, kind, sizes)
        told = known is not None
        self.misfits = False
        if known is None:
            known = self._learn(key, kind, sizes, args, kwargs)
        try:
            layout = self._layout(key, known)
            if layout.unproven and not self._tried.issuperset(layout.unproven):
                # As eager taps do, take what they read for samples, to be proven after this call.
                self._tried |= layout.unproven
                return self.inner(*args, **kwargs)
            return self._run(layout, args, kwargs)
        except FlashClippingError:
            raise
        except Exception:
            if not (self.misfits and told):
                raise
            # What followed from other shapes was wrong; nothing has run yet.
            self.misfits = False
            known = self._learn(key, kind, sizes, args, kwargs)
            return self._run(self._layout(key, known), args, kwargs)
        finally:
            if self.misfits:  # some layers ran by themselves; the next time it is learned anew
                self._known.pop(key, None)
                self._shapes[kind].refute()

    def _run(self, layout: _Layout | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The compiled region, with wires if there is a layout of them."""
        assert self.compiled is not None
        key = self.recorder.key
        if layout is not None:
            self._check(layout)
        before = _ACTIVE.pop(key, None)
        if layout is not None:
            _ACTIVE[key] = self._make(layout)
        _running.append(self)
        try:
            return self.compiled(*args, **kwargs)
        finally:
            _running.pop()
            _ACTIVE.pop(key, None)
            if before is not None:
                _ACTIVE[key] = before

    def _make(self, layout: _Layout) -> list[tuple[Wires, ...] | None]:
        """The wires of one call, by number of the tap."""
        recorder = self.recorder
        for slot in layout.slots:
            recorder.count_use(slot.params)
        if recorder.numbered is not self.taps:
            for tap in recorder.numbered:  # this region may call what is not in it
                tap.number = -1
            for number, tap in enumerate(self.taps):
                tap.number = number
            recorder.numbered = self.taps
        if not layout.metas:
            return [None if calls is None else () for calls in layout.by_tap]
        call = recorder.current_forward
        handed = _Handed(self.path, layout, recorder, call, in_backward())
        wires = _Wires.apply(handed, *layout.params)
        return [
            None
            if calls is None
            else tuple(
                tuple(None if place is None else wires[place] for place in of_call)
                for of_call in calls
            )
            for calls in layout.by_tap
        ]

    # -- what wires are like ----------------------------------------------------------------------

    def _find(self, key: Hashable, kind: Hashable, sizes: list[int]) -> Calls | None:
        known = self._known.get(key)
        if known is None and kind in self._shapes:
            known = self._shapes[kind].find(sizes)
            if known is not None:
                _keep(self._known, key, known)
        return known

    def _learn(
        self,
        key: Hashable,
        kind: Hashable,
        sizes: list[int],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Calls:
        """Run the region once, uncompiled, to see what its layers read and return."""
        recorder = self.recorder
        args, kwargs = map_tensors(_copied, (args, kwargs))
        tensors = [*tensors_in((args, kwargs)), *recorder.state()]
        devices = {x.device for x in tensors if x.is_cuda}
        before, recorder.seen = recorder.seen, {}
        try:
            with (
                _untouched(self.module),
                _random_state(list(devices), 0),
                _without_activations(),
                _without_checkpoints(),
                recorder.bypass(),
            ):
                self.inner(*args, **kwargs)
            calls = [recorder.seen.get(id(tap), []) for tap in self.taps]
        finally:
            recorder.seen = before
        self._shapes.setdefault(kind, _Affine()).add(sizes, calls)
        _keep(self._known, key, calls)
        return calls

    def _layout(self, key: Hashable, known: Calls) -> _Layout:
        proven = self.recorder.evidence.proven
        trainables = [tap.trainable() for tap in self.taps]
        states = [
            (id(names), tap.path in proven, tap.computed, tap.generic)
            for tap, (names, _) in zip(self.taps, trainables, strict=True)
        ]
        number = key, id(known), tuple(states)
        layout = self._layouts.get(number)
        if layout is None:
            layout = self._new_layout(known, trainables)
            _keep(self._layouts, number, layout)
        return layout

    def _check(self, layout: _Layout) -> None:
        """Refuse layers without wires where they may not break the graph."""
        if layout.refused and self.fullgraph:
            lines = "\n".join(f"{path}: {why}" for path, why in layout.refused)
            raise FlashClippingError(
                f"{self.path}: it is compiled with fullgraph=True, but these layers in it cannot "
                f"be recorded inside a compiled graph:\n{lines}\nCompile without fullgraph (such a "
                "layer then runs by itself, between two graphs), compile blocks without such "
                "layers (model.block.compile(fullgraph=True)), or freeze their parameters."
            )

    def _new_layout(self, known: Calls, trainables: Sequence[Any]) -> _Layout:
        layout = _Layout([], [], [], [], [])
        unique: dict[int, nn.Parameter] = {}
        for tap, calls, (names, params) in zip(self.taps, known, trainables, strict=True):
            layout.kept += (names, known)
            if not params and not (tap.rule is not None and tap.rule.allows_children):
                layout.by_tap.append(())
                continue
            why = _without_wires(tap, calls)
            if why is not None:
                layout.by_tap.append(None)
                if calls:
                    layout.refused.append((tap.path, why))
                if calls and why == _UNPROVEN:
                    layout.unproven.add(tap.path)
                continue
            assert tap.wiring is not None
            of_tap: list[tuple[int | None, ...]] = []
            wanted = tap.wiring.wanted(names)
            for seen in calls:
                assert seen is not None
                places: list[int | None] = []
                metas = tap.wiring.metas(tap.layer, seen)
                for (shape, dtype), needed in zip(metas, wanted, strict=True):
                    places.append(len(layout.metas) if needed else None)
                    if needed:
                        strides = (0,) * len(shape)
                        layout.metas.append((shape, strides, dtype, params[0].device))
                layout.slots.append(_Slot(tap, names, params, tuple(places)))
                of_tap.append(tuple(places))
            layout.by_tap.append(tuple(of_tap) or None)
            unique.update((id(param), param) for param in params)
        layout.params = list(unique.values())
        return layout


_UNPROVEN = "no rehearsal has shown that it reads the samples, one row for each"


def _without_wires(tap: Tap, calls: Sequence[Seen | None]) -> str | None:
    """Why a layer has no wires."""
    if tap.wiring is None or tap.rule is None:
        if tap.rule is None:
            return "it uses its parameters itself, or by the generic rule"
        return f"its rule {type(tap.rule).__name__} cannot be traced"
    if tap.generic or tap.computed:
        return "it computes with tensors that are not its own parameters"
    if not tap.wiring.serves(tap.layer):
        return "its settings are not supported there"
    if tap.path not in tap.recorder.evidence.proven:
        return _UNPROVEN
    if any(seen is None for seen in calls):
        return "it was called with something else than one tensor that has a batch axis"
    return None


def _copied(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _keep(known: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    known[key] = value
    if len(known) > REMEMBERED:
        known.popitem(last=False)


# -- the regions of a model ------------------------------------------------------------------------


def wiring_of(rule: Rule | None) -> Wiring | None:
    """How layers with this rule are wired, if they are."""
    return _WIRINGS.get(type(rule)) if rule is not None else None


class Regions:
    """What is compiled in a wrapped model: found where PyTorch has it, and put back.

    Args:
        root: the model.
        recorder, taps: its own.
    """

    def __init__(self, root: nn.Module, recorder: Recorder, taps: Sequence[Tap]):
        self.root, self.recorder = root, recorder
        self.taps = list(taps)
        self._codes: dict[type, Any] = {}
        self._of_blocks: list[tuple[nn.Module, str, Any, Region]] = []
        #: The stand-in for the root's forward that runs the region, and what it ran before.
        self._of_root: tuple[EmptyBatchForward, Any] | None = None
        self._compiled_call: Any = None

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.update(_codes={}, _compiled_call=None, _of_blocks=[])
        return state

    def find(self, forward: EmptyBatchForward) -> None:
        """Take over what was compiled before, or since: the root and blocks of it.

        ``forward`` stands in for the root's forward.
        """
        root = self.root
        compiled = vars(root).get("_compiled_call_impl")
        if compiled is not None and (context := _context_of(compiled)) is not None:
            # The hooks of the root, which must not be compiled, are called by its call.
            self._compiled_call, root._compiled_call_impl = compiled, None  # type: ignore
            self._install(forward, context)
        elif isinstance(root, torch._dynamo.OptimizedModule) and self._of_root is None:
            self._install(forward, root.dynamo_ctx)
        for path, module in root.named_modules():
            if module is root:
                continue
            self._take_over(path, module)

    def _take_over(self, path: str, module: nn.Module) -> None:
        inner: Callable[..., Any]
        if isinstance(module, torch._dynamo.OptimizedModule):
            name, context = "forward", module.dynamo_ctx
            inner = module._orig_mod.__call__
        else:
            name = "_compiled_call_impl"
            inner = module._call_impl
            context = _context_of(vars(module).get(name))
        before = vars(module).get(name)
        if context is None or isinstance(before, Region):
            return
        region = self._region(module, path, inner, context)
        for tap in region.taps:
            if tap.wiring is not None:
                tap.install(as_method=True)
        setattr(module, name, region)
        self._of_blocks.append((module, name, before, region))

    def compile(self, forward: EmptyBatchForward, context: Any) -> None:
        """Compile the root's forward."""
        self._install(forward, context)

    def _install(self, forward: EmptyBatchForward, context: Any) -> None:
        if self._of_root is None:
            self._of_root = forward, forward.instance_forward
        before, root = self._of_root[1], self.root
        if isinstance(root, torch._dynamo.OptimizedModule):
            inner = root._orig_mod.__call__
        else:
            inner = before or MethodType(type(root).forward, root)
        forward.instance_forward = self._region(root, "", inner, context)

    def _region(
        self, module: nn.Module, path: str, inner: Callable[..., Any], context: Any
    ) -> Region:
        inside = set(module.modules())
        taps = [tap for tap in self.taps if tap.layer in inside]
        fullgraph = bool(getattr(context, "fullgraph", False))
        return Region(module, path, inner, self.recorder, taps, context, fullgraph, self._codes)

    def remove(self) -> None:
        """Put everything back."""
        while self._of_blocks:
            module, name, before, region = self._of_blocks.pop()
            if vars(module).get(name) is region:
                setattr(module, name, before)
        if self._of_root is not None:
            forward, before = self._of_root
            forward.instance_forward = before
            self._of_root = None
        if self._compiled_call is not None:
            self.root._compiled_call_impl = self._compiled_call  # type: ignore
            self._compiled_call = None


def _context_of(compiled: Any) -> Any:
    """What ``torch.compile`` made a function with: calling it compiles another one alike."""
    if compiled is None or isinstance(compiled, Region):
        return None
    with contextlib.suppress(TypeError):
        found = inspect.getclosurevars(compiled).nonlocals.get("self")
        if isinstance(found, torch._dynamo.eval_frame.OptimizeContext):
            return found
    return None


def compiler_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compiles functions as ``torch.compile`` does with these arguments."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function, *args, **kwargs)
        return compiled

    # Where nn.Module.compile has it: torch.compile(model, fullgraph=False, ...)
    compiler.fullgraph = kwargs.get("fullgraph", False)  # type: ignore[attr-defined]
    return compiler
