"""LayerNorm, RMSNorm, GroupNorm and InstanceNorm: per-sample gradients are vectors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat import lacks_batch_axis, memory_format_of, rms_norm
from flash_clipping.factors import DenseGrad, PerSampleGrad, SumGrad, accumulation_dtype
from flash_clipping.ops.norm_layer import group_norm_grads, norm_backward
from flash_clipping.ops.norm_layer.reference import group_norm_formula, norm_formula
from flash_clipping.ops.runtime.shapes import Normalized
from flash_clipping.rules.registry import (
    GradRequest,
    Grads,
    Rule,
    UnsupportedLayer,
    as_BTd,
    register_family,
    register_rule,
    weight_and_bias,
)

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default

#: Elements of partial sums that one parameter may keep to the end of backward (2 MiB).
PARTS_KEPT = 1 << 19

#: Elements of a layer's input that the device is through with before the host has launched twice.
BOUND_BY_LAUNCHES = 1 << 20


def normalization_input(x: Tensor) -> Tensor:
    """Autocast computes normalizations in float32 on CUDA, and in the input's dtype on the CPU."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64:
        return x.float()
    return x


def row_norm_backward(
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    shape: Sequence[int],
    G: Tensor,
    needs: GradRequest,
) -> Grads:
    """Input gradient and per-sample vectors in one pass over ``x`` and the output gradient.

    Args:
        mean: along the last axes, ``None`` where none was subtracted; ``rstd``: the reciprocal
            deviation there.
        weight: what the result is multiplied with.
        shape: of the axes that are normalized.
    """
    x_flat, G_flat, of_several = x, G, None
    if (axes := len(shape)) > 1:  # the usual case needs no reshaping
        of_several = tuple(shape)
        x_flat, G_flat, rstd = (t.flatten(-axes) for t in (x, G, rstd))
        mean = None if mean is None else mean.flatten(-axes)
        weight = None if weight is None else weight.flatten()
    factors: dict[str, PerSampleGrad] = {}
    if needs.traced:
        names = [name for name in ("weight", "bias") if name in needs.params]
        x_BTd, G_BTd, rstd_BT1 = as_BTd(x_flat), as_BTd(G_flat), as_BTd(rstd)
        mean_BT1 = None if mean is None else as_BTd(mean)
        wanted = needs.inputs[0], "weight" in names, "bias" in names
        grad_input, vectors = norm_formula(x_BTd, G_BTd, mean_BT1, rstd_BT1, weight, wanted)
        for name, vector_Bd in zip(names, vectors, strict=True):
            factors[name] = SumGrad(vector_Bd.unsqueeze(1), of_several)
    elif mean is not None and 0 < x.numel() <= BOUND_BY_LAUNCHES:
        # PyTorch's own kernel for the input gradient, and vectors in one launch with those of
        # other layers: a launch through Triton takes the host several times as long as
        # PyTorch's own, and a small layer takes the device less than either.
        grad_input = None
        if needs.inputs[0]:
            # The kernel of a CPU takes the dtypes of forward, that of a GPU one for both.
            scale = weight.to(x.dtype) if weight is not None and x.is_cuda else weight
            operands = G_flat, x_flat, x_flat.shape[-1:], mean, rstd, scale, None
            grad_input = _layer_norm_backward(*operands, [True, False, False])[0]
        G_BTd = as_BTd(G_flat)
        if "weight" in needs.params:
            x_hat = Normalized(as_BTd(x_flat), mean, rstd)
            factors["weight"] = SumGrad(G_BTd, of_several, x_hat)
        if "bias" in needs.params:
            factors["bias"] = SumGrad(G_BTd, of_several)
    else:
        grad_input, weight_BnD, bias_BnD = norm_backward(
            x_flat,
            G_flat,
            mean,
            rstd,
            weight,
            input_grad=needs.inputs[0],
            weight_grad="weight" in needs.params,
            bias_grad="bias" in needs.params,
            parts_kept=PARTS_KEPT,
            backend=needs.backend,
        )
        # To be added up with those of other layers.
        if weight_BnD is not None:
            factors["weight"] = SumGrad(weight_BnD, of_several)
        if bias_BnD is not None:
            factors["bias"] = SumGrad(bias_BnD, of_several)
    if grad_input is not None and grad_input.shape != x.shape:
        grad_input = grad_input.view_as(x)
    return grad_input, factors


class _RowNormRule(Rule):
    """A layer that normalizes along its last axes. It saves its input, the means (``None`` where
    none were subtracted), the reciprocal deviations, and what the result is multiplied with."""

    def can_be_traced(self, layer: Any) -> bool:
        return True

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x, mean, rstd, weight = saved
        shape = layer.normalized_shape if weight is None else weight.shape
        return row_norm_backward(x, mean, rstd, weight, shape, grad_output, needs)


@register_rule(nn.LayerNorm)
class LayerNormRule(_RowNormRule):
    """``dgamma_b = sum_t G_t * xhat_t`` and ``dbeta_b = sum_t G_t``."""

    def works_by_position(self, layer: nn.LayerNorm) -> bool:
        return len(layer.normalized_shape) == 1

    def forward(self, layer: nn.LayerNorm, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x = normalization_input(x)
        weight, bias = weight_and_bias(layer)
        output, mean, rstd = torch.native_layer_norm(
            x, layer.normalized_shape, weight, bias, layer.eps
        )
        return output, (x, mean, rstd, weight)


def _default_eps(dtype: torch.dtype) -> float:
    """What ``nn.RMSNorm(eps=None)`` adds: the step of the dtype that PyTorch computes in, or of the
    input's own; versions differ."""
    if dtype in (torch.float32, torch.float64):
        return torch.finfo(dtype).eps
    own, wide = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    x = torch.full((1,), 1e-3, dtype=dtype)  # 1 / sqrt(1 + eps / x²): nearly 1, or nearly 0
    return wide if float(F.rms_norm(x, (1,))) > 0.5 else own


#: What ``nn.RMSNorm(eps=None)`` adds to the mean square, by the input's dtype.
_DEFAULT_EPS = {
    dtype: _default_eps(dtype)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


@register_rule(nn.RMSNorm)
class RMSNormRule(_RowNormRule):
    """``dgamma_b = sum_t G_t * x_t * rstd_t``."""

    def works_by_position(self, layer: nn.RMSNorm) -> bool:
        return len(self.arguments(layer)[0]) == 1

    def arguments(self, layer: nn.RMSNorm) -> tuple[tuple[int, ...], Tensor | None, float | None]:
        """The axes that are normalized; the scale, which is the weight, or the weight and a
        constant; and what is added to the mean square, ``None`` for PyTorch's default."""
        return layer.normalized_shape, layer._parameters["weight"], layer.eps

    def input(self, x: Tensor) -> Tensor:
        """The layer's input as it is computed with."""
        return normalization_input(x)

    def forward(self, layer: nn.RMSNorm, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x = self.input(x)
        shape, scale, eps = self.arguments(layer)
        # One fused kernel where the device has one; it also returns what backward needs.
        output, rstd = rms_norm(x, shape, scale, eps)
        wide = accumulation_dtype(x.dtype)
        if rstd.dtype != wide:  # not fused: rounded
            axes = tuple(range(-len(shape), 0))
            eps = _DEFAULT_EPS[x.dtype] if eps is None else eps
            rstd = (x.to(wide).square().mean(axes, keepdim=True) + eps).rsqrt()
        return output, (x, None, rstd, scale)


def _eps_of(layer: nn.Module) -> Any:
    """What other libraries' RMS norms add to the mean square, by the names that they give it."""
    held = layer.__dict__
    for name in ("variance_epsilon", "eps", "epsilon"):
        if name in held:
            return held[name]
    return None


def _computes_rms_norm(layer: nn.Module, plus: float) -> bool:
    """Whether a module that owns one vector, ``weight``, computes ``x̂ · (weight + plus)`` only.

    It is tried, in training and in evaluation, on inputs of two to four axes of different sizes,
    which are ordinary, large, and so small that eps shows. Output and gradients must be those of
    the formula."""
    weight, eps = layer._parameters.get("weight"), _eps_of(layer)
    alone = len(layer._parameters) == 1 and not layer._buffers and not layer._modules
    if not alone or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return False
    if weight.dtype == torch.float64 or len(weight) < 2:
        return False  # in float64 such modules take their statistics in fp32 all the same
    arguments = list(inspect.signature(type(layer).forward).parameters.values())
    if len(arguments) != 2 or arguments[1].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return False
    found = _TRIED.setdefault(type(layer), {})
    key = _what_decides(layer), plus
    if key[0] is None or key not in found:
        try:
            with torch.random.fork_rng([]), torch.device("cpu"), torch.enable_grad():
                found[key] = all(
                    _is_rms_norm_of(layer, shape, training, plus, eps)
                    for training in (True, False)
                    for shape in ((3,), (5, 2), (2, 7, 3))
                )
        except Exception:  # whatever it needs, it is something else
            found[key] = False
    return found[key]


_TRIED: WeakKeyDictionary[type, dict[Hashable, bool]] = WeakKeyDictionary()
"""What :func:`_computes_rms_norm` found of classes, as a model has many alike: of 33 layers, 8,000
small operations, which take minutes on a busy host of many processors."""


def forget_trials() -> None:
    """Try RMS norms again: what a class computes may change (an attribute of it, a function that it
    calls), but not while one model is looked through."""
    _TRIED.clear()


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _what_decides(layer: nn.Module) -> Hashable:
    """All that objects of one class may differ in beside their weights' values, or None."""
    own = {name: x for name, x in vars(layer).items() if name not in _OF_EVERY_MODULE}
    if not all(type(x) in (bool, int, float, str, type(None)) for x in own.values()):
        return None
    held = frozenset((name, type(x), repr(x)) for name, x in own.items())
    return type(layer).forward, layer.get_parameter("weight").shape, held


def _is_rms_norm_of(
    layer: Any, shape: tuple[int, ...], training: bool, plus: float, eps: float
) -> bool:
    """Whether the layer is an RMS norm on inputs ``[3, *shape, n]``, forward and backward."""
    n = len(layer._parameters["weight"])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, *shape, n), generator=generator)
    x[0] *= eps**0.5
    x[1] *= 1e4
    scale = torch.randn(n, generator=generator)
    weights = torch.randn(x.shape, generator=generator)

    def results(function: Callable[[Tensor, Tensor], Any], dtype: torch.dtype) -> list[Tensor]:
        """Output and gradients; nothing where that is no tensor of this shape and dtype."""
        given = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (x, scale)]
        output = function(*given)
        if not isinstance(output, Tensor) or (output.dtype, output.shape) != (dtype, x.shape):
            return []
        return [output, *torch.autograd.grad((output * weights.to(dtype)).sum(), given)]

    def of_class(x: Tensor, scale: Tensor) -> Any:
        # Another object of its class, with another weight: nothing of the layer is touched.
        trial = copy.copy(layer)
        trial.__dict__ = {**vars(layer), "training": training, "_parameters": {"weight": scale}}
        return type(layer).forward(trial, x)

    def formula(x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, (n,), scale + plus, eps)

    found, expected = results(of_class, torch.float32), results(formula, torch.float64)
    return bool(found) and all(
        torch.allclose(a.double() / b.abs().amax(), b / b.abs().amax(), rtol=1e-4, atol=1e-5)
        for a, b in zip(found, expected, strict=True)
    )


@register_family(lambda layer: _computes_rms_norm(layer, 0.0))
class FoundRMSNormRule(RMSNormRule):
    """RMS norms of other libraries (``LlamaRMSNorm``, ``T5LayerNorm``), known by what they compute:
    as one operation, whose output in 16 bits is rounded once, not after each of several."""

    def arguments(self, layer: Any) -> tuple[tuple[int, ...], Tensor | None, float | None]:
        weight = layer._parameters["weight"]
        return weight.shape, weight, _eps_of(layer)

    def input(self, x: Tensor) -> Tensor:
        return x  # autocast knows PyTorch's own layers only

    def serves(self, layer: Any, *inputs: Any) -> bool:
        """Only inputs of the weight's dtype: libraries differ in what they return for others."""
        x, weight = inputs[0] if inputs else None, layer._parameters["weight"]
        return isinstance(x, Tensor) and x.dtype == weight.dtype


@register_family(lambda layer: _computes_rms_norm(layer, 1.0))
class ShiftedRMSNormRule(FoundRMSNormRule):
    """An RMS norm whose weight is added to 1 (``Gemma2RMSNorm``)."""

    def arguments(self, layer: Any) -> tuple[tuple[int, ...], Tensor | None, float | None]:
        weight = layer._parameters["weight"]
        return weight.shape, weight + 1.0, _eps_of(layer)


@register_rule(nn.GroupNorm)
class GroupNormRule(Rule):
    """As LayerNorm, with statistics per sample and group of channels."""

    def can_be_traced(self, layer: nn.GroupNorm) -> bool:
        return True

    def groups(self, layer: nn.GroupNorm) -> int:
        return int(layer.num_groups)

    def laid_out(self, x: Tensor) -> Tensor:
        """The input in the memory layout that PyTorch gives the output."""
        return x.contiguous(memory_format=memory_format_of(x)) if x.is_cpu else x.contiguous()

    def forward(self, layer: nn.GroupNorm, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x = self.laid_out(normalization_input(x))
        weight, bias = weight_and_bias(layer)
        B, C = x.shape[:2]
        output, mean, rstd = torch.native_group_norm(
            x, weight, bias, B, C, x.shape[2:].numel(), self.groups(layer), layer.eps
        )
        return output, (x.contiguous(), mean, rstd, weight)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x, mean, rstd, weight = saved
        B, C = x.shape[:2]
        S = x.shape[2:].numel()
        grad_output = grad_output.contiguous()
        grad_input = None
        if needs.input:
            grad_input = torch.ops.aten.native_group_norm_backward(
                *(grad_output, x, mean, rstd, weight, B, C, S, self.groups(layer)),
                [True, False, False],
            )[0]
        if needs.traced:
            G_BCS = grad_output.reshape(B, C, S)
            weight_BC, bias_BC = group_norm_formula(x.reshape(B, C, S), G_BCS, mean, rstd)
        else:
            weight_BC, bias_BC = group_norm_grads(x, grad_output, mean, rstd, backend=needs.backend)
        factors = {"weight": DenseGrad(weight_BC), "bias": DenseGrad(bias_BC)}
        return grad_input, {name: factors[name] for name in needs.params}


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormRule(GroupNormRule):
    """GroupNorm with one group per channel.

    Raises:
        ValueError: ``track_running_stats`` keeps statistics over samples that are not private.
    """

    def groups(self, layer: Any) -> int:
        return int(layer.num_features)

    def laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def forward(self, layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if layer.track_running_stats:
            raise UnsupportedLayer(
                f"FC104 {type(layer).__name__}(track_running_stats=True) keeps statistics of the "
                "samples that are not private. Set track_running_stats=False.",
                "{layer}.track_running_stats, {layer}.running_mean, {layer}.running_var = "
                "False, None, None",
            )
        if lacks_batch_axis(layer, x):
            raise UnsupportedLayer(
                f"FC203 {type(layer).__name__} without a batch axis has no samples: found shape "
                f"{tuple(x.shape)}. Add the batch axis, x.unsqueeze(0).",
                "x = x.unsqueeze(0)",
            )
        return super().forward(layer, x)
