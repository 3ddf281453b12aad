"""Experts of a mixture as ``transformers`` has them: all matrices of a kind in one parameter.

B samples, T positions, M = B·T tokens, k choices of each, N = M·k rows, E experts, d features;
u features after the first projection and f before the second.

A token's row is sent to each expert that was chosen for it. Rows of one expert and one sample are a
segment (:mod:`flash_clipping.ops.segments`), and the gradients of both projections are products
over the rows of a segment. Between the projections stands a gate without parameters, which autograd
differentiates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from flash_clipping._compat import gate_of_experts
from flash_clipping.factors import DenseGrad, PerSampleGrad, SegmentedLinearGrad
from flash_clipping.layers.exchange import Samples, are_parts
from flash_clipping.layers.routed_rows import (
    Gradients,
    LowRank,
    Projection,
    RoutedRows,
    compute,
    gradients,
)
from flash_clipping.ops.segments import segment_sums
from flash_clipping.rules.registry import (
    GradRequest,
    Rule,
    UnsupportedLayer,
    register_family,
)

#: Relative difference between what a block computes and what its rule does at which it is refused,
#: by the dtype in which it was multiplied.
_DIFFERENT = {torch.float64: 1e-9, torch.float32: 1e-3}
_DIFFERENT_LOW = 5e-2


def difference(own: Tensor, ruled: Tensor, dtype: torch.dtype) -> str:
    """How much two results differ; empty where it is rounding in this dtype."""
    own, ruled = own.double(), ruled.double()
    error = float(torch.dist(own, ruled) / own.norm().clamp(min=1e-300))
    within = error <= _DIFFERENT.get(dtype, _DIFFERENT_LOW)
    return "" if within else f"relative difference {error:.1e}"


MARKS = ("has_gate", "has_bias", "is_transposed", "num_experts", "down_proj")


def are_experts(layer: nn.Module) -> bool:
    """Whether ``transformers`` may run this layer by any of its implementations of experts."""
    if not all(hasattr(layer, mark) for mark in MARKS):
        return False
    if layer.has_gate and gate_of_experts(layer) is None:
        return False
    # All of its parameters: those of a gate would be trained on rows that nothing has put in order.
    return {name for name, _ in layer.named_parameters()} == set(names_of(layer))


def names_of(layer: Any) -> tuple[str, ...]:
    """Parameters of the first projection, then of the second: matrices, and biases if any."""
    return _NAMES[bool(layer.has_gate), bool(layer.has_bias)]


_NAMES = {
    (has_gate, has_bias): tuple(
        name + kind
        for name in ("gate_up_proj" if has_gate else "up_proj", "down_proj")
        for kind in (("", "_bias") if has_bias else ("",))
    )
    for has_gate in (False, True)
    for has_bias in (False, True)
}


def arithmetic_of(
    layer: Any,
    params: Sequence[Tensor],
    prefix: str = "",
    low_ranks: Mapping[str, Sequence[LowRank]] | None = None,
) -> RoutedRows:
    """What experts compute with these tensors for their parameters.

    ``prefix``: stands before their names. ``low_ranks``: what is added to a parameter's matrices.
    """
    names, transposed, half = names_of(layer), layer.is_transposed, len(params) // 2

    def projection(i: int) -> Projection:
        name, bias, of_bias = names[i], None, ""
        if layer.has_bias:
            bias, of_bias = params[i + 1], prefix + names[i + 1]
        matrices = params[i].mT if transposed else params[i]
        added = () if low_ranks is None else low_ranks.get(name, ())
        return Projection(matrices, prefix + name, bias, of_bias, transposed, added)

    between = gate_of_experts(layer) if layer.has_gate else layer.act_fn
    return RoutedRows(projection(0), projection(half), between)


class OfSeveralProcesses(PerSampleGrad):
    """A gradient of this process's experts, of the samples of all processes that sent it rows.

    No process knows a sample's gradient by itself: the backward pass of a sharded model adds norms
    up over processes, and takes ``whole`` in the place of this.

    Attributes:
        whole: for the samples of all processes, one process after the other.
        samples: which of them are this process's.
    """

    def __init__(self, whole: PerSampleGrad, samples: Samples):
        self.whole, self.samples = whole, samples

    @property
    def batch_size(self) -> int:
        return self.samples.own

    def sqnorms(self, backend: str) -> Tensor:
        raise NotImplementedError

    def clipped_sum(self, coef_B: Tensor | None, backend: str) -> Tensor:
        """Of all samples, with recording off: a ``DTensor``, as the parameter is one."""
        if coef_B is not None:
            raise NotImplementedError
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh = self.samples.mesh
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        return DTensor.from_local(
            self.whole.clipped_sum(None, backend), mesh, placements, run_check=False
        )

    def dense(self) -> Tensor:
        raise NotImplementedError


def factors_of(found: Gradients) -> dict[str, PerSampleGrad]:
    """Factors of matrices ``[E, p, d]`` and of biases ``[E, p]``; of the samples of several
    processes, if experts lie in several."""
    segments = found.segments
    factors: dict[str, PerSampleGrad] = {
        name: SegmentedLinearGrad(A, G, segments) for name, (A, G) in found.operands.items()
    }
    for name, G_Np in found.rows.items():
        sums_BEp = segment_sums(G_Np, segments).unflatten(0, (segments.groups, segments.samples))
        factors[name] = DenseGrad(sums_BEp.transpose(0, 1))
    if (exchange := found.exchange) is not None:
        samples = exchange.samples
        return {name: OfSeveralProcesses(whole, samples) for name, whole in factors.items()}
    return factors


@register_family(are_experts)
class ExpertsRule(Rule):
    """Serves every implementation alike, as its own forward takes the place of all of them.

    What such a block computes is checked when it runs for the first time.
    """

    allows_children = True  # an activation function
    folds = True

    def __init__(self) -> None:
        #: Layers that compute what the rule does.
        self.checked: WeakSet[nn.Module] = WeakSet()

    def experts(self, layer: Any) -> Any:
        """The module of ``transformers``."""
        return layer

    def beside(self, layer: Any) -> Any:
        """What its forward computes with now, besides parameters; the next three are given it."""
        return None

    def tensors(self, layer: Any, beside: Any) -> list[Tensor]:
        """All that its forward multiplies with, or adds."""
        return [getattr(layer, name) for name in names_of(layer)]

    def arithmetic(self, layer: Any, params: Sequence[Tensor], beside: Any) -> RoutedRows:
        """What it computes with these for :meth:`tensors`."""
        return arithmetic_of(layer, params)

    def factors(self, found: Gradients, beside: Any) -> dict[str, PerSampleGrad]:
        """By the names of parameters."""
        return factors_of(found)

    def routed(self, layer: Any, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ``[B, T, d]``, the experts chosen for each and their weights ``[B, T, k]``."""
        hidden_BTd, chosen_BTk, weight_BTk = inputs
        return hidden_BTd, chosen_BTk, weight_BTk

    def own_output(self, layer: Any, *inputs: Tensor) -> Tensor:
        """What the layer's own forward returns for the same inputs, ``[M, d]``."""
        output: Tensor = type(layer).forward(layer, *(x.flatten(0, 1) for x in inputs))
        return output

    def works_by_position(self, layer: Any) -> bool:
        return True

    def forward(self, layer: Any, *inputs: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        hidden_BTd, chosen_BTk, weight_BTk = self.routed(layer, *inputs)
        beside = self.beside(layer)
        tensors = self.tensors(layer, beside)
        try:
            in_parts = are_parts(tensors)
        except ValueError as error:
            raise UnsupportedLayer(str(error)) from error
        output_BTd, saved = compute(
            lambda params: self.arithmetic(layer, params, beside),
            tensors,
            hidden_BTd,
            chosen_BTk,
            weight_BTk,
            self.experts(layer).num_experts,
        )
        if layer not in self.checked and not in_parts:
            with torch.no_grad():
                own_Md = self.own_output(layer, *inputs)
            if torch.isfinite(own_Md).all():  # else the next batch may tell
                # Under autocast, that of the tokens that were multiplied. Weights of a router are
                # often in fp32, and so is the sum of tokens times these then.
                dtypes = (saved[0].dtype, weight_BTk.dtype)
                narrowest = min(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
                found = difference(own_Md, output_BTd.flatten(0, 1), narrowest)
                if found:
                    raise UnsupportedLayer(
                        "its attributes are those of experts that transformers can run by any of "
                        f"its implementations, but they compute something else ({found}). Give it "
                        "a rule of its own (flash_clipping.register_rule), or freeze its "
                        "parameters."
                    )
                self.checked.add(layer)
        return output_BTd, (*saved, beside)

    def backward(
        self, layer: Any, saved: tuple[Any, ...], grad_output: Tensor, needs: GradRequest
    ) -> tuple[tuple[Tensor | None, ...], Mapping[str, PerSampleGrad]]:
        *saved_rows, beside = saved
        hidden_wanted, *others_wanted = needs.inputs
        grad, grad_weight, found = gradients(
            lambda params: self.arithmetic(layer, params, beside),
            tuple(saved_rows),
            grad_output,
            needs.params,
            hidden_wanted,
            any(others_wanted),
        )
        return (grad, None, grad_weight)[: len(needs.inputs)], self.factors(found, beside)
