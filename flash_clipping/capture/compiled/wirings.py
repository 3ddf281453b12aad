"""Side outputs of layers in compiled regions: what each kind of layer leaves through its wires.

Their factors are those that the layer's rule makes of the same tensors.

Shape suffixes: ``B`` samples, ``p`` output features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_clipping.factors import (
    ConvolutionGrad,
    DenseGrad,
    PerSampleGrad,
    SumGrad,
    accumulation_dtype,
)
from flash_clipping.rules.convolution import (
    ConvolutionRule,
    Kernel,
    convolution,
    convolution_backward,
    kernel_of,
    own_padding,
    padded,
)
from flash_clipping.rules.embedding import EmbeddingRule, embedding_factor
from flash_clipping.rules.linear import LinearRule, TransposedLinearRule, linear_backward
from flash_clipping.rules.normalization import (
    DEFAULT_EPS,
    FoundRMSNormRule,
    GroupNormRule,
    InstanceNormRule,
    LayerNormRule,
    RMSNormRule,
    ShiftedRMSNormRule,
    normalization_input,
)
from flash_clipping.rules.registry import GradRequest, Rule, as_BTd, autocast_operands

#: Shape and dtype of a wire.
Meta: TypeAlias = tuple[tuple[int, ...], torch.dtype]

#: A factor for every trainable parameter of a layer, by name.
Factors: TypeAlias = Mapping[str, PerSampleGrad]

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
    """What the layers of one rule leave through their wires."""

    #: Whether it computes along the last axes only, and so takes any number of axes before.
    any_axes = True

    #: By wire: the parameter that needs it.
    needed_for: ClassVar[tuple[str, ...]] = ("weight", "weight", "bias")

    def __init__(self, rule: Any):
        self.rule = rule

    def serves(self, layer: Any) -> bool:
        """Whether layers with these settings are wired."""
        return True

    def wanted(self, names: Sequence[str]) -> list[bool]:
        """Which wires are needed where these parameters are trainable."""
        return [name in names for name in self.needed_for]

    @abstractmethod
    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        """All wires that such a layer may have; also traced, with sizes that are symbols."""

    @abstractmethod
    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        """The layer's output. Traced: PyTorch's operators only, which Inductor fuses."""

    @abstractmethod
    def factors(self, layer: Any, names: Sequence[str], grads: Sequence[Any]) -> Factors:
        """What the gradients of the wires tell of these parameters."""


def _operands_of(x: Tensor, layer: Any) -> tuple[Any, ...]:
    """Input, weight and bias as they are multiplied. Parameters are cut off: their gradients are
    left at the end of the pass."""
    bias = None if layer.bias is None else layer.bias.detach()
    return autocast_operands(x, layer.weight.detach(), bias)


class PerSampleParameters(torch.autograd.Function):
    """Parameters, each for every sample, ``[B, *parameter]``, whose wires get the gradients.

    Called with all parameters, and then with their wires.
    """

    @staticmethod
    def forward(ctx: Any, *params_and_wires: Tensor) -> tuple[Tensor, ...]:
        count = len(params_and_wires) // 2
        params, wires = params_and_wires[:count], params_and_wires[count:]
        pairs = zip(params, wires, strict=True)
        return tuple([p.detach().to(wire.dtype).expand(wire.shape) for p, wire in pairs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        return *[None] * len(grads), *grads


class _Product(torch.autograd.Function):
    """``y = x Wᵀ + b``, or a convolution with this kernel; wires get what the rule's factors are
    made of: ``x`` and ``G``, or the bias's gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kernel: Kernel | None,
        *wires: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        wired = zip(("weight", "weight", "bias"), wires, strict=True)
        ctx.kernel, ctx.params = kernel, [name for name, wire in wired if wire is not None]
        y = F.linear(x, weight, bias) if kernel is None else convolution(x, weight, bias, kernel)
        return y.detach()  # no view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, G: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs = GradRequest((True,), ctx.params, "torch")
        if ctx.kernel is None:
            # Keys get theirs transposed. One copy in the graph, which the product needs as well, is
            # in place of one for every kernel that reads it.
            G = G.contiguous()
            dx, factors = linear_backward(x, weight, G, needs, rows=as_BTd)
        else:
            dx, factors = convolution_backward(x, weight, G, needs, ctx.kernel)
        of_weight = (x, G) if "weight" in ctx.params else (None, None)
        of_bias = factors["bias"].dense() if "bias" in ctx.params else None
        return dx, None, None, None, *of_weight, of_bias


class LinearWiring(Wiring):
    """``x``, ``G`` for a weight; ``Σ_t G`` for a bias alone."""

    def wanted(self, names: Sequence[str]) -> list[bool]:
        product = "weight" in names  # which a bias needs no more than
        return [product, product, not product]

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        y_shape, dtype = seen.y_shape, seen.y_dtype  # that of both operands
        vector = (y_shape[0], y_shape[-1]), accumulation_dtype(dtype)
        return (seen.x_shape, dtype), (y_shape, dtype), vector

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        x, weight, bias = _operands_of(x, layer)
        if isinstance(self.rule, TransposedLinearRule):
            weight = weight.mT
        return _Product.apply(x, weight, bias, None, *wires)

    def factors(self, layer: Any, names: Sequence[str], grads: Sequence[Any]) -> Factors:
        x, G, vector_Bp = grads
        if x is None:
            return {"bias": DenseGrad(vector_Bp)}
        needs = GradRequest((False,), frozenset(names), "auto")
        found: Factors = self.rule.backward(layer, (x, x), G, needs)[1]
        return found


class ConvolutionWiring(Wiring):
    """The input as it is padded and ``G`` for a weight, ``Σ_t G`` for a bias. Padding that the
    kernel does not do itself is done before it, under autograd."""

    any_axes = False

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        shape, pads = list(seen.x_shape), own_padding(layer)
        for place in range(len(pads) // 2):  # from the last axis on
            shape[len(shape) - 1 - place] += pads[2 * place] + pads[2 * place + 1]
        dtype = seen.y_dtype
        vector = (seen.y_shape[0], seen.y_shape[1]), accumulation_dtype(dtype)
        return (tuple(shape), dtype), (seen.y_shape, dtype), vector

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        x, weight, bias = _operands_of(x, layer)
        read, kernel = padded(layer, x)
        return _Product.apply(read, weight, bias, kernel, *wires)

    def factors(self, layer: Any, names: Sequence[str], grads: Sequence[Any]) -> Factors:
        x, G, vector_Bp = grads
        found: dict[str, PerSampleGrad] = (
            {} if vector_Bp is None else {"bias": DenseGrad(vector_Bp)}
        )
        if x is not None:
            found["weight"] = ConvolutionGrad(x, G, layer.weight, *kernel_of(layer))
        return found


class _Lookup(torch.autograd.Function):
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
    needed_for = ("weight", "weight")

    def serves(self, layer: Any) -> bool:
        return not layer.scale_grad_by_freq and layer.max_norm is None

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        return (seen.x_shape, torch.float64), (seen.y_shape, seen.y_dtype)

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        return _Lookup.apply(x, layer.weight.detach(), *wires)

    def factors(self, layer: Any, names: Sequence[str], grads: Sequence[Any]) -> Factors:
        ids, G = grads
        rows, padding_idx = layer.num_embeddings, layer.padding_idx
        return {"weight": embedding_factor(ids.to(torch.int64), G, rows, padding_idx)}


class LayerNormWiring(Wiring):
    """Per-sample gradients of weight and bias: these are vectors, one for each sample."""

    needed_for = ("weight", "bias")

    def parameters(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """What ``x̂`` is multiplied by, and what is added."""
        return layer.weight, layer.bias

    def normalized(self, layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x̂``; ``dtype``: of ``x`` before it was cast to what is computed in."""
        return F.layer_norm(x, tuple(layer.normalized_shape), eps=layer.eps)

    def broadcast(self, vectors: Tensor, axes: int) -> Tensor:
        """``[B, *parameter]``, or one for all samples, as it meets ``x̂`` of so many axes."""
        shape = vectors.shape
        return vectors.reshape(shape[0], *[1] * (axes - len(shape)), *shape[1:])

    def metas(self, layer: Any, seen: Seen) -> tuple[Meta, ...]:
        B, dtype = seen.x_shape[0], accumulation_dtype(seen.x_dtype)
        return tuple(
            ((B,) if param is None else (B, *param.shape), dtype)
            for param in self.parameters(layer)
        )

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        x = normalization_input(x)
        y = self.normalized(layer, x.to(accumulation_dtype(x.dtype)), x.dtype)
        params = [None if param is None else param.detach() for param in self.parameters(layer)]
        wired = [place for place, wire in enumerate(wires) if wire is not None]
        of_samples = PerSampleParameters.apply(
            *[params[place] for place in wired], *[wires[place] for place in wired]
        )
        for place, param in enumerate(params):
            if param is not None:
                rows = of_samples[wired.index(place)] if place in wired else param.unsqueeze(0)
                rows = self.broadcast(rows, y.dim())
                y = y + rows if place else y * rows
        return y.to(x.dtype)

    def factors(self, layer: Any, names: Sequence[str], grads: Sequence[Any]) -> Factors:
        found: dict[str, PerSampleGrad] = {}
        for name, grad in zip(("weight", "bias"), grads, strict=True):
            if grad is not None:
                axes = None if grad.dim() == 2 else grad.shape[1:]
                # As sums over one position: one launch takes the norms of all of a model's.
                found[name] = SumGrad(grad.flatten(1).unsqueeze(1), axes)
        return found


class RMSNormWiring(LayerNormWiring):
    def parameters(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        return self.rule.arguments(layer)[1], None

    def normalized(self, layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        shape, _, eps = self.rule.arguments(layer)
        axes = list(range(-len(shape), 0))
        mean_square = x.square().mean(axes, keepdim=True)
        return x * (mean_square + (DEFAULT_EPS[dtype] if eps is None else eps)).rsqrt()


class FoundRMSNormWiring(RMSNormWiring):
    """RMS norms of other libraries, which differ in the dtype of what they return."""

    def forward(self, layer: Any, x: Tensor, wires: Wires) -> Tensor:
        y = super().forward(layer, x.to(torch.promote_types(x.dtype, layer.weight.dtype)), wires)
        return y.to(x.dtype) if isinstance(self.rule, ShiftedRMSNormRule) else y


class GroupNormWiring(LayerNormWiring):
    any_axes = False

    def serves(self, layer: Any) -> bool:
        return not getattr(layer, "track_running_stats", False)

    def normalized(self, layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return F.group_norm(x, self.rule.groups(layer), eps=layer.eps)

    def broadcast(self, vectors: Tensor, axes: int) -> Tensor:
        return vectors.reshape(*vectors.shape, *[1] * (axes - vectors.dim()))


#: Of exactly these: another rule knows better what its layers' gradients are made of.
_WIRINGS: dict[type[Rule], type[Wiring]] = {
    LinearRule: LinearWiring,
    TransposedLinearRule: LinearWiring,
    EmbeddingRule: EmbeddingWiring,
    LayerNormRule: LayerNormWiring,
    RMSNormRule: RMSNormWiring,
    FoundRMSNormRule: FoundRMSNormWiring,
    ShiftedRMSNormRule: FoundRMSNormWiring,
    GroupNormRule: GroupNormWiring,
    InstanceNormRule: GroupNormWiring,
    ConvolutionRule: ConvolutionWiring,
}


def wiring_of(rule: Rule | None) -> Wiring | None:
    """How layers with this rule are wired, if they are."""
    wiring = _WIRINGS.get(type(rule)) if rule is not None else None
    return None if wiring is None else wiring(rule)
