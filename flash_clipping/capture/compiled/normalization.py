"""Normalization layers on wires, which get vectors: one for each sample.

Shape suffixes: ``B`` samples, ``C`` channels, ``n`` elements of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.capture.compiled.wiring import (
    Meta,
    Seen,
    Wires,
    Wiring,
    detached,
    normalization_input,
    sum_rows,
)
from flash_clipping.factors import Factor, RowSum, accumulation_dtype
from flash_clipping.rules.normalization import (
    DEFAULT_EPS,
    FoundRMSNormRule,
    ShiftedRMSNormRule,
)


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
