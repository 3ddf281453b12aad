"""Layers inside compiled regions: what clipping needs leaves them as gradients of wires.

Inside a compiled region nothing can be recorded on the side. So every tapped layer takes, besides
its input, *wires*: tensors of one element, expanded to the shapes of what clipping needs. The
layer's backward returns the input, the output gradient or per-sample vectors as the gradients of
these. Forward and backward are then pure functions, which Dynamo and AOTAutograd trace whole; the
wires are made and received outside (:mod:`flash_clipping.capture.regions`).

What is wired: ``nn.Linear`` and ``transformers``' ``Conv1D``, ``nn.Embedding``, ``nn.LayerNorm``,
``nn.RMSNorm``, ``nn.GroupNorm``, ``nn.InstanceNorm1d/2d/3d`` and ``nn.Conv1d/2d/3d``, called with
one tensor, once or several times in a region, where a rehearsal has shown that they read samples;
what is the same for all samples, and parameters that modules use themselves, as
:mod:`flash_clipping.capture.same_for_all` has it. Any other layer with trainable parameters (the
generic rule, ``nn.EmbeddingBag``, ``nn.MultiheadAttention``, recurrent layers, rules of users) runs
by itself, between two graphs; with ``fullgraph=True`` it is an error that names it.

While a layer is traced, its wires are compared with what it reads and returns, so that a wrong
shape is a guard that fails, not a wrong norm.

Shape suffixes: ``B`` samples, ``T`` positions, ``C`` channels, ``d`` and ``p`` features, ``n``
elements of a vector.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping._compat import (
    constant_in_traces,
    is_traced_once,
    never_compiled,
    padding_of,
    tracing_context,
    transforms_are_active,
)
from flash_clipping.capture.same_for_all import (
    SameForAll,
    SameRows,
    is_checkpointed,
    memory_of,
    note_use,
    rows_of,
    same_for_all,
    was_used,
    without_same,
)
from flash_clipping.capture.session import ClippingSession
from flash_clipping.factors import (
    Convolution,
    Dense,
    Factor,
    Lookup,
    Outer,
    RowSum,
    accumulation_dtype,
)
from flash_clipping.rules.convolution import ConvolutionRule
from flash_clipping.rules.embedding import EmbeddingRule
from flash_clipping.rules.linear import LinearRule, TransposedLinearRule
from flash_clipping.rules.normalization import (
    DEFAULT_EPS,
    GroupNormRule,
    InstanceNormRule,
    LayerNormRule,
    RMSNormRule,
)
from flash_clipping.rules.registry import Rule, as_BTd

#: Shape and dtype of a wire.
Meta: TypeAlias = tuple[tuple[int, ...], torch.dtype]

#: The wires of one call of a layer, in the order of its wiring; None for what nobody needs.
Wires: TypeAlias = Sequence[Tensor | None]

#: What a layer's call reads, or computes with: rows that are samples; what is the same for all
#: samples; its own parameters, in a forward of its own; or nothing of it is trained.
Kind: TypeAlias = Literal["samples", "same for all", "own", "unused"]


class WiredCall(NamedTuple):
    """One call of a layer in a region."""

    kind: Kind
    wires: Wires


#: The wires of regions that run now, by the key of their model's session: for each tap of the
#: region, by its number, those of every call. An empty tuple: the layer has nothing to train. None:
#: it has no wires. Global, as Dynamo takes tensors that are reached through a module of PyTorch's
#: to be of one shape for good.
ACTIVE: dict[int, list[tuple[WiredCall, ...] | None]] = {}


class WiredTap(Protocol):
    """What is asked of a tap (:class:`~flash_clipping.capture.tap.Tap`)."""

    layer: Any
    path: str
    session: ClippingSession
    rule: Rule | None
    wiring: Wiring | None
    owners: list[torch.nn.Module]
    folded: bool
    generic: bool
    #: Its number in the region that runs, or -1.
    number: int

    @property
    def computed(self) -> bool: ...

    def trainable(self) -> tuple[list[str], list[torch.nn.Parameter]]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def original(self, *args: Any, **kwargs: Any) -> Any: ...


class Seen(NamedTuple):
    """Input and output of one call of a layer, with the batch in front.

    What is the same for all samples has the batch in front of its own axes. Of a layer with a
    forward of its own, there is the batch alone.
    """

    x_shape: tuple[int, ...]
    x_dtype: torch.dtype
    y_shape: tuple[int, ...]
    y_dtype: torch.dtype
    kind: Kind = "samples"
    #: Why this call can have no wires.
    why: str = ""


class Wiring(ABC):
    """What one type of layer leaves through its wires."""

    #: Whether it computes along the last axes only, and so takes any number of axes before.
    any_axes = False

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
    any_axes = True
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
    any_axes = True

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
    any_axes = True
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
        eps = DEFAULT_EPS[x.dtype] if layer.eps is None else layer.eps
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
        pads = tuple(padding_of(layer))
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


class _ParameterFunction(torch.autograd.Function):
    """A parameter for each sample, ``[B, *parameter]``, whose wire gets the gradients."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, wire: Tensor) -> Tensor:
        return param.detach().expand(wire.shape)

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        return None, G


class OwnWiring:
    """One parameter that a module uses in a forward of its own: its gradients, sample by sample."""

    def __init__(self, name: str):
        self.name = name

    @staticmethod
    def meta(param: Tensor, seen: Seen) -> Meta:
        return (seen.x_shape[0], *param.shape), param.dtype

    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        return {self.name: Dense(grads[0])}


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
    handed out. Parameters are cut off: their gradients are left at the end of the pass."""
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


def wiring_of(rule: Rule | None) -> Wiring | None:
    """How layers with this rule are wired, if they are."""
    return _WIRINGS.get(type(rule)) if rule is not None else None


# -- what runs while Dynamo traces -----------------------------------------------------------------

#: How often each tap was traced, by its number, in traces that began where a region does.
_claims: weakref.WeakKeyDictionary[Any, Counter[int]] = weakref.WeakKeyDictionary()


class _Traces(threading.local):
    """Whether a layer was traced, in this thread, with wires that do not fit it."""

    misfits = False
    #: Layers that were traced in the body of an operator that runs any number of times.
    inside: list[str] = []  # noqa: RUF012 (every region begins one of its own)


traces = _Traces()


@constant_in_traces
def begin_trace() -> bool:
    """The trace that runs now begins where a region does: a run of the region goes through its
    graph once, so that it may have the region's wires. What follows a break in the graph does not
    come by here, and may be run any number of times."""
    context = tracing_context()
    if context is not None:
        _claims.setdefault(context, Counter())
    return True


@constant_in_traces
def _may_claim() -> bool:
    """Whether the trace that runs now begins where a region does, and what it traces here will run
    once: no transform of torch.func, whose derivatives pass wires by, and no subgraph that is
    stamped out several times (``nested_compile_region``, scan, branches)."""
    context = tracing_context()
    return (
        context is not None
        and context in _claims
        and not transforms_are_active()
        and is_traced_once()
    )


@constant_in_traces
def _claim(number: int, calls: int) -> int:
    """Which of its calls this one of a tap is, in the trace that runs now; -1 where that is not
    known, or there are not so many."""
    context = tracing_context()
    claims = None if context is None else _claims.get(context)
    if claims is None:
        return -1
    call = claims[number]
    claims[number] += 1
    return call if call < calls else -1


@constant_in_traces
def _note_operator(path: str) -> bool:
    """A layer is traced that has no wires: in the body of an operator it cannot run by itself."""
    if not is_traced_once():
        traces.inside.append(path)
    return True


@constant_in_traces
def _note_misfit() -> bool:
    """The wires of a layer that is traced do not have the shapes that it needs."""
    traces.misfits = True
    return True


def traced_call(tap: WiredTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tapped layer while Dynamo traces it: on its wires, or between two graphs."""
    if not torch.is_grad_enabled():
        return tap.original(*args, **kwargs)
    wires = ACTIVE.get(tap.session.key)
    # A tap's own number is asked for last: code that depends on it serves one tap.
    if wires is not None and _may_claim() and tap.number >= 0:
        calls = wires[tap.number]
        if calls is not None:
            if len(calls) == 0:
                return tap.original(*args, **kwargs)
            x = _only_tensor(args, kwargs)
            if x is not None or calls[0].kind in ("own", "unused"):
                number = _claim(tap.number, len(calls))
                if number >= 0:
                    call = calls[number]
                    if call.kind == "own":
                        if _parameters_fit(tap, call.wires):
                            return _on_own_parameters(tap, call.wires, args, kwargs)
                    elif call.kind == "unused":
                        return tap.original(*args, **kwargs)
                    else:
                        output = _wired_call(tap, x, call)
                        if output is not None:
                            return output
                    _note_misfit()
    _note_operator(tap.path)
    return by_itself(tap, args, kwargs)


def _only_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What a layer is called with, if that is one tensor."""
    x = args[0] if len(args) == 1 and not kwargs else kwargs.get("input")
    return x if len(args) + len(kwargs) == 1 and isinstance(x, Tensor) else None


def _wired_call(tap: WiredTap, x: Any, call: WiredCall) -> Tensor | None:
    """The layer on its wires; None where they do not fit."""
    wiring, axis, wires = tap.wiring, tap.session.batch_axis, call.wires
    assert wiring is not None
    for name in ("weight", "bias"):
        param = getattr(tap.layer, name, None)
        if param is not None and not isinstance(param, torch.nn.Parameter):
            return None  # computed elsewhere (functional_call): no wire leads there
    same = call.kind == "same for all"
    if same:
        sizes = [wire.shape[0] for wire in wires if wire is not None]
        x = rows_of(x) if isinstance(x, SameForAll) else x.expand(sizes[0], *x.shape)
    elif isinstance(x, SameForAll):
        if not isinstance(x, SameRows):
            return None
        x = memory_of(x)
    if axis:
        x = x.transpose(0, axis)
    y = wiring.forward(tap.layer, x, wires)
    seen = Seen(tuple(x.shape), x.dtype, tuple(y.shape), y.dtype)
    for wire, (shape, dtype) in zip(wires, wiring.metas(tap.layer, seen), strict=True):
        # Autograd would add up, or round, a gradient that is not like its tensor.
        if wire is not None and (tuple(wire.shape) != shape or wire.dtype != dtype):
            return None
    if same:
        return same_for_all(y, tap.path)
    return y.transpose(0, axis) if axis else y


def _own_parameters(tap: WiredTap) -> list[tuple[Any, str, Any]]:
    """Those that a module computes with itself and that are trainable, and where they are."""
    return [
        (owner, name, param)
        for owner in tap.owners
        for name, param in owner._parameters.items()
        if param is not None and param.requires_grad
    ]


def _parameters_fit(tap: WiredTap, wires: Wires) -> bool:
    found = _own_parameters(tap)
    if len(found) != len(wires):
        return False
    for (_, _, param), wire in zip(found, wires, strict=True):
        if wire is None or not isinstance(param, torch.nn.Parameter):
            return False  # functional_call has put something else there
        if tuple(wire.shape[1:]) != tuple(param.shape) or wire.dtype != param.dtype:
            return False
    return True


def _on_own_parameters(
    tap: WiredTap, wires: Wires, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The module's own forward, with its parameters as what is the same for all samples."""
    found = _own_parameters(tap)
    try:
        for (owner, name, param), wire in zip(found, wires, strict=True):
            param_B = _ParameterFunction.apply(param, wire)
            owner._parameters[name] = same_for_all(param_B, tap.path)
        return tap.original(*args, **kwargs)
    finally:
        for owner, name, param in found:
            owner._parameters[name] = param


@never_compiled
def by_itself(tap: WiredTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer as it is uncompiled, with all that it calls."""
    session = tap.session
    before, session.by_itself = session.by_itself, True
    try:
        return tap(*args, **kwargs)
    finally:
        session.by_itself = before


# -- what runs before ------------------------------------------------------------------------------

#: For each tap of a region, what its calls saw; None for a call that was of no use.
Calls: TypeAlias = list[list["Seen | None"]]


def kind_of(tap: WiredTap) -> Kind | None:
    """What rehearsals have shown of what a layer reads; None where they have not, or where it has
    nothing to train."""
    session, evidence = tap.session, tap.session.evidence
    if not tap.trainable()[1]:
        return None
    if tap.rule is None:
        if tap.generic or tap.folded or session.batch_axis:
            return None
        if tap.path in evidence.proven:
            return "own"
        return "unused" if evidence.proven and tap.path not in evidence.reads else None
    if tap.path in evidence.proven:
        return "samples"
    if tap.path in evidence.constants and not (tap.folded or session.batch_axis):
        return "same for all"
    return None


def noted_call(tap: WiredTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The layer's own forward, while a region learns what its layers see."""
    calls = tap.session.seen
    if calls is None:
        return tap.original(*args, **kwargs)
    of_tap = calls.setdefault(id(tap), [])
    note_use(args, kwargs)
    call = tap.session.current_forward
    batch_size, kind = None if call is None else call.batch_size, kind_of(tap)
    if tap.rule is None and batch_size is not None and kind in ("own", "unused"):
        return _noted_own(tap, of_tap, batch_size, args, kwargs)
    x, axis = args[0] if args else kwargs.get("input"), tap.session.batch_axis
    if isinstance(x, SameRows) and kind == "samples":
        args, kwargs = (memory_of(x),), {}
        x = args[0]
    elif isinstance(x, SameForAll) or kind == "same for all":
        only = _only_tensor(args, kwargs)
        wiring, serves = tap.wiring, not (tap.generic or tap.computed or tap.folded or axis)
        serves = serves and wiring is not None and wiring.any_axes and wiring.serves(tap.layer)
        serves = serves and bool(tap.trainable()[1])
        if serves and only is not None and batch_size is not None:
            if isinstance(only, SameForAll):
                x = rows_of(only)
            else:
                x = only.expand(batch_size, *only.shape)
            y = tap.original(x)
            shapes = tuple(x.shape), x.dtype, tuple(y.shape), y.dtype
            of_tap.append(Seen(*shapes, kind="same for all"))
            return same_for_all(y, tap.path)
    if tap.trainable()[1]:
        args, kwargs = without_same(tap.path, args, kwargs)
        x = args[0] if args else kwargs.get("input")
    output = tap.original(*args, **kwargs)
    seen = None
    if isinstance(x, Tensor) and isinstance(output, Tensor) and min(x.dim(), output.dim()) > axis:
        before, after = x.transpose(0, axis), output.transpose(0, axis)
        seen = Seen(tuple(before.shape), x.dtype, tuple(after.shape), output.dtype)
    of_tap.append(seen)
    return output


def _noted_own(
    tap: WiredTap,
    of_tap: list[Any],
    batch_size: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A module's own forward on what is the same for all samples."""
    found = _own_parameters(tap)
    dtype, place = found[0][2].dtype, len(of_tap)
    of_tap.append(None)
    try:
        for owner, name, param in found:
            param_B = param.expand(batch_size, *param.shape)
            owner._parameters[name] = same_for_all(param_B, tap.path)
        output = tap.original(*args, **kwargs)
    finally:
        for owner, name, param in found:
            owner._parameters[name] = param
    kind: Kind = "own" if was_used(tap.path) else "unused"
    why = ""
    if is_checkpointed():  # Dynamo puts nothing in a parameter's place there
        why = "it uses its parameters itself, inside of an activation checkpoint"
    of_tap[place] = Seen((batch_size,), dtype, (batch_size,), dtype, kind, why)
    return output
