"""Side outputs of layers in compiled regions: what each kind of layer leaves through its wires.

Shape suffixes: ``B`` samples, ``T`` positions, ``d`` input features, ``p`` output features, ``n``
elements of a vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.factors import (
    Convolution,
    Dense,
    Factor,
    Lookup,
    Outer,
    RowSum,
    accumulation_dtype,
)
from flash_clipping.ops.runtime.tables import on_16_bytes
from flash_clipping.rules.convolution import kernel_padding, own_padding, padded
from flash_clipping.rules.normalization import (
    DEFAULT_EPS,
    FoundRMSNormRule,
    ShiftedRMSNormRule,
    normalization_input,
)
from flash_clipping.rules.registry import as_BTd

#: Shape and dtype of a wire.
Meta: TypeAlias = tuple[tuple[int, ...], torch.dtype]

#: The wires of one call of a layer, in the order of its wiring; None for what nobody needs.
Wires: TypeAlias = Sequence[Tensor | None]

#: What a layer's call reads, or computes with: rows that are samples; what is the same for all
#: samples; its own parameters, in a forward of its own; or nothing of it is trained.
Kind: TypeAlias = Literal["samples", "same for all", "own", "unused"]


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


def sum_rows(x: Tensor) -> Tensor:
    """``[B, ..., n]`` added up over all axes between, ``[B, n]``."""
    dtype = accumulation_dtype(x.dtype)
    return x.flatten(1, -2).sum(1, dtype=dtype) if x.dim() > 2 else x.to(dtype)


def detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def operands_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, Any, Any]:
    """Operands as autocast would cast them, so that those that are multiplied are those that are
    handed out. Parameters are cut off: their gradients are left at the end of the pass."""
    weight, bias, kind = weight.detach(), detached(bias), x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return x, weight, bias


class PerSampleParameter(torch.autograd.Function):
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
        # Keys get theirs transposed. One copy in the graph, which the product needs as well, is in
        # place of one for every kernel that reads it.
        G = G.contiguous()
        return (
            G @ weight,
            None,
            None,
            x if product else None,
            G if product else None,
            sum_rows(G) if vector else None,
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
        x, weight, bias = operands_of(x, layer.weight, layer.bias)
        return _LinearFunction.apply(x, weight.mT if self.transposed else weight, bias, *wires)

    def factors(self, layer: Any, grads: Sequence[Any]) -> Mapping[str, Factor]:
        x, G, vector_Bp = grads
        if x is None:
            return {"bias": Dense(vector_Bp)}
        A_BTd, G_BTp = as_BTd(x), on_16_bytes(as_BTd(G))
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
            sum_rows((G * x_hat).flatten(-ctx.axes)) if of_weight else None,
            sum_rows(G.flatten(-ctx.axes)) if of_bias else None,
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
        x = normalization_input(x)
        weight, bias = detached(layer.weight), None
        if self.centred:
            bias = detached(layer.bias)
        eps = DEFAULT_EPS[x.dtype] if layer.eps is None else layer.eps
        shape = tuple(layer.normalized_shape)
        return _RowNormFunction.apply(x, weight, bias, shape, eps, self.centred, *wires)


class RMSNormWiring(LayerNormWiring):
    centred = False


class FoundRMSNormWiring(RMSNormWiring):
    """RMS norms of other libraries, by the shape, scale and constant that their rule knows."""

    def __init__(self, rule: FoundRMSNormRule):
        self.rule = rule

    def shape(self, layer: Any) -> tuple[int, ...]:
        return tuple(self.rule.arguments(layer)[0])

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        meta = (seen.x_shape[0], *self.shape(layer)), accumulation_dtype(seen.x_dtype)
        return meta, meta

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        shape, scale, eps = self.rule.arguments(layer)
        assert scale is not None
        wide = x.to(torch.promote_types(x.dtype, scale.dtype))
        output: Tensor = _RowNormFunction.apply(
            normalization_input(wide), scale.detach(), None, tuple(shape), eps, False, *wires
        )
        return output.to(x.dtype) if isinstance(self.rule, ShiftedRMSNormRule) else output


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
        x = normalization_input(x).contiguous()
        weight, bias = layer.weight.detach(), detached(layer.bias)
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

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        shape, pads = list(seen.x_shape), own_padding(layer)
        for place in range(len(pads) // 2):  # from the last axis on
            shape[len(shape) - 1 - place] += pads[2 * place] + pads[2 * place + 1]
        dtype = seen.y_dtype
        vector = ((seen.y_shape[0], seen.y_shape[1]), accumulation_dtype(dtype))
        return (tuple(shape), dtype), (seen.y_shape, dtype), vector

    def wanted(self, names: Sequence[str]) -> tuple[bool, ...]:
        return "weight" in names, "weight" in names, "bias" in names

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        x, weight, bias = operands_of(x, layer.weight, layer.bias)
        return _ConvolutionFunction.apply(
            padded(layer, x)[0],
            weight,
            bias,
            list(layer.stride),
            kernel_padding(layer),
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
                kernel_padding(layer),
                layer.dilation,
                layer.groups,
            )
        if vector_Bp is not None:
            found["bias"] = Dense(vector_Bp)
        return found
