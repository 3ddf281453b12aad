"""Tokens that are sent to experts and come back: the arithmetic of every mixture, both ways.

M tokens, k choices of each, N = M·k rows sorted by expert and sample, E experts, d input features,
p output features of a projection, r rank; u features after the first projection and f before the
second.

Each projection is one grouped product over :class:`~flash_clipping.ops.segments.Segments`, so that
nothing loops over experts. The gradient of a matrix is ``Σ g_n a_nᵀ`` over its rows: a factor of
every sample, which an ordinary backward asks for the sum over all of them.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from flash_clipping.factors import DenseGrad, PerSampleGrad
from flash_clipping.layers.exchange import Exchange, are_parts
from flash_clipping.layers.factors import OfSeveralProcesses, SegmentedLinearGrad
from flash_clipping.ops.runtime.backend import autocast_operands
from flash_clipping.ops.segments import (
    Rows,
    Segments,
    grouped_linear,
    segment_sums,
    sums_of_tokens,
)
from flash_clipping.rules.registry import GradRequest, Grads, Rule


@dataclass
class Gradients:
    """Gradients that one backward finds.

    Attributes:
        segments: which sample and which expert the rows are of.
        wanted: the parameters whose gradients are asked for.
        arranged: how the gradients of some lie in the parameter, by name.
        factors: of these, by name: of matrices ``[E, p, d]`` and biases ``[E, p]``.
    """

    segments: Segments
    wanted: Set[str]
    arranged: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    factors: dict[str, PerSampleGrad] = field(default_factory=dict)

    def add(self, name: str, A: Rows, G: Rows) -> None:
        """Note a matrix's gradient ``Σ g_n a_nᵀ``, if it is asked for."""
        if name in self.wanted:
            arrange = self.arranged.get(name)
            self.factors[name] = SegmentedLinearGrad(A, G, self.segments, arrange)

    def add_bias(self, name: str, G_Np: Tensor) -> None:
        """Note a bias's gradient, the sum of these sorted rows."""
        sums_Sp, segments = segment_sums(G_Np, self.segments), self.segments
        sums_EBp = sums_Sp.unflatten(0, (segments.groups, segments.samples))
        self.factors[name] = DenseGrad(sums_EBp.transpose(0, 1))


@dataclass(frozen=True)
class LowRank:
    """``s B_e A_e``, or several with one A between them: they give outputs side by side, and each
    reads its share of what A gives.

    Attributes:
        A_ERd: ``[E, R, d]``, R being the ranks of all of ``Bs`` together.
        Bs_Epr: ``[E, p, r]`` each.
        scale: s.
        A_name, B_names: of the parameters.
    """

    A_ERd: Tensor
    Bs_Epr: Sequence[Tensor]
    scale: float
    A_name: str
    B_names: Sequence[str]

    def _shares(self, x_Nd: Tensor, segments: Segments) -> tuple[Tensor, ...]:
        """``s A_e x_n``, cut for Bs."""
        read_NR = grouped_linear(x_Nd, self.A_ERd, segments) * self.scale
        return torch.split(read_NR, [B.shape[2] for B in self.Bs_Epr], dim=1)

    def forward(self, x_Nd: Tensor, segments: Segments) -> Tensor:
        shares = zip(self._shares(x_Nd, segments), self.Bs_Epr, strict=True)
        return _side_by_side([grouped_linear(share, B, segments) for share, B in shares])

    def backward(
        self, x: Rows, g_Np: Tensor, found: Gradients, input_wanted: bool
    ) -> Tensor | None:
        """Gradient of the input, if wanted, and those of parameters into ``found``."""
        segments, wanted = found.segments, found.wanted
        parts = g_Np.split([B.shape[1] for B in self.Bs_Epr], dim=1)
        if not wanted.isdisjoint(self.B_names):
            shares = self._shares(x.sorted(), segments)
            for name, share, part in zip(self.B_names, shares, parts, strict=True):
                found.add(name, Rows(share), Rows(part))
        if not input_wanted and self.A_name not in wanted:
            return None
        pairs = zip(parts, self.Bs_Epr, strict=True)
        through = torch.cat([grouped_linear(g, B.mT, segments) for g, B in pairs], dim=1)
        through_NR = through * self.scale
        found.add(self.A_name, x, Rows(through_NR))
        return grouped_linear(through_NR, self.A_ERd.mT, segments) if input_wanted else None


@dataclass(frozen=True)
class Projection:
    """``y_n = W_e x_n + b_e``, and what low ranks add to ``W_e``; of several ``W`` side by side.

    Attributes:
        Ws_Epd: ``[E, p, d]`` each.
        names: of these parameters.
        bias_Ep, bias_name: ``[E, p]``, or ``None``; likewise.
        transposed: parameters are ``[E, d, p]``, and their operands change places.
        low_ranks: what is added.
    """

    Ws_Epd: Sequence[Tensor]
    names: Sequence[str]
    bias_Ep: Tensor | None = None
    bias_name: str = ""
    transposed: bool = False
    low_ranks: Sequence[LowRank] = ()

    def forward(self, x_Nd: Tensor, segments: Segments) -> Tensor:
        y_Np = _side_by_side([grouped_linear(x_Nd, W, segments) for W in self.Ws_Epd])
        for low_rank in self.low_ranks:
            y_Np = y_Np + low_rank.forward(x_Nd, segments)
        if self.bias_Ep is not None:
            y_Np = y_Np + self.bias_Ep[segments.group_N]
        return y_Np

    def backward(self, x: Rows, g: Rows, found: Gradients, input_wanted: bool) -> Tensor | None:
        """Gradient of the input, if wanted, and those of matrices into ``found``."""
        shares, grads = [g], []
        if input_wanted or self.low_ranks or len(self.Ws_Epd) > 1:
            g_Np = g.sorted()
            parts = g_Np.split([W.shape[1] for W in self.Ws_Epd], dim=1)
            shares = [g] if len(parts) == 1 else [*map(Rows, parts)]
            grads = [low.backward(x, g_Np, found, input_wanted) for low in self.low_ranks]
        for name, share in zip(self.names, shares, strict=True):
            found.add(name, *((share, x) if self.transposed else (x, share)))
        if not input_wanted:
            return None
        pairs = zip(parts, self.Ws_Epd, strict=True)
        grads += [grouped_linear(part, W.mT, found.segments) for part, W in pairs]
        return functools.reduce(torch.add, grads)  # type: ignore[arg-type]  # none is None


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim=1)


#: What stands between the projections: rows ``[N, u]`` to rows ``[N, f]``, each separately, without
#: parameters. Autograd differentiates it.
Between: TypeAlias = Callable[[Tensor], Tensor]


def gated(activation: Between) -> Between:
    """``activation(gate) · up`` of rows ``[gate, up]``."""

    def forward(both_N2f: Tensor) -> Tensor:
        gate_Nf, up_Nf = both_N2f.chunk(2, dim=-1)
        return activation(gate_Nf) * up_Nf

    return forward


@dataclass(frozen=True)
class RoutedRows:
    """``y_m = Σ_j w_mj · second(between(first(x_m)))`` over the experts that m was sent to.

    Attributes:
        first, second: the projections, ``[E, u, d]`` and ``[E, d, f]``.
        between: what stands between them.
    """

    first: Projection
    second: Projection
    between: Between

    def forward(self, x_Md: Tensor, weight_Mk: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        """The output ``[M, d]``; and what the first projection gave, ``[N, u]``, which backward
        reads. A choice of no expert adds 0."""
        k = weight_Mk.shape[1]
        up_Nu = self.first.forward(x_Md[segments.order_N // k], segments)
        y_Nd = self.second.forward(self.between(up_Nu), segments)
        return sums_of_tokens(y_Nd, segments, k, weight_Mk), up_Nu

    def backward(
        self,
        grad_Md: Tensor,
        x_Md: Tensor,
        weight_Mk: Tensor,
        up_Nu: Tensor,
        found: Gradients,
        x_wanted: bool,
        weight_wanted: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of tokens and weights, if wanted, and those of parameters into ``found``.

        The weight's gradient in ``y = w · W h`` is ``(Wᵀ g) · h``, without a product for ``W h``.
        """
        segments, k = found.segments, weight_Mk.shape[1]
        tokens_N = segments.order_N // k
        # A row that is sent to no expert has weight 0, whatever stands there.
        weight_N = weight_Mk.reshape(-1)[segments.order_N].masked_fill(~segments.inside_N, 0)
        weight_N1 = weight_N.unsqueeze(1)
        grad = Rows(grad_Md.to(up_Nu.dtype), tokens_N)
        with torch.enable_grad():
            up = up_Nu.detach().requires_grad_()
            between = self.between(up)
        between_Nf = between.detach()
        weighted_Nf = (between_Nf * weight_N1).to(up_Nu.dtype)
        grad_Nf = self.second.backward(Rows(weighted_Nf), grad, found, True)
        assert grad_Nf is not None
        if self.second.bias_name in found.wanted:
            found.add_bias(self.second.bias_name, grad.sorted() * weight_N1)
        grad_weight_Mk = None
        if weight_wanted:
            of_weight_N = (grad_Nf * between_Nf).sum(1, dtype=weight_Mk.dtype)
            if (bias_Ep := self.second.bias_Ep) is not None:
                of_bias_Nd = grad.sorted() * bias_Ep[segments.group_N]
                of_weight_N = of_weight_N + of_bias_Nd.sum(1, dtype=weight_Mk.dtype)
            of_weight_N = of_weight_N.masked_fill(~segments.inside_N, 0)
            grad_weight_Mk = segments.unsorted(of_weight_N).view_as(weight_Mk)
        of_between_Nf = (grad_Nf * weight_N1).to(up_Nu.dtype)
        (grad_up_Nu,) = torch.autograd.grad(between, up, of_between_Nf)
        if self.first.bias_name in found.wanted:
            found.add_bias(self.first.bias_name, grad_up_Nu)
        grad_x_Nd = self.first.backward(Rows(x_Md, tokens_N), Rows(grad_up_Nu), found, x_wanted)
        if grad_x_Nd is None:
            return None, grad_weight_Mk
        return sums_of_tokens(grad_x_Nd, segments, k).to(x_Md.dtype), grad_weight_Mk


#: Makes of tensors, in the place of a layer's parameters, what it computes with them.
Arithmetic: TypeAlias = Callable[[Sequence[Tensor]], RoutedRows]


class Described(NamedTuple):
    """What experts compute with now: backward may come when other adapters are active.

    Attributes:
        tensors: all that they multiply with, or add.
        arithmetic: what they compute with these, or with others in their places.
        experts: how many there are.
        arranged: by a parameter's name, how its gradient lies in it, where that is otherwise.
    """

    tensors: list[Tensor]
    arithmetic: Arithmetic
    experts: int
    arranged: Mapping[str, Callable[[Tensor], Tensor]] = {}


class RoutedRule(Rule):
    """Tokens ``[B, ..., d]`` through the experts ``[B, ..., k]`` that were chosen for them, as
    autocast has it. Where parameters lie in parts over a mesh, rows go to the processes that have
    their experts."""

    folds = True  # tokens [B·T, d], as blocks of transformers hand them on

    @abstractmethod
    def described(self, layer: Any) -> Described:
        """What a forward of this layer computes with."""

    def routed(self, layer: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Tokens, the experts that were chosen for each, and their weights."""
        return inputs

    def works_by_position(self, layer: Any) -> bool:
        return True

    def forward(self, layer: Any, *inputs: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        """Saves of a token the input once, however many experts read it, and of every row what the
        first projection gave."""
        x, expert_ids, weights = self.routed(layer, *inputs)
        tensors, arithmetic, experts, arranged = self.described(layer)
        parts: Sequence[Any] = tensors
        exchange = None
        if are_parts(parts):
            exchange = Exchange(expert_ids, experts, parts[0].device_mesh)
            parts = [part.to_local() for part in parts]
        tokens, *params = autocast_operands(x, *parts)
        # LoRA is often kept wider than what it is added to: it is read in the dtype of tokens.
        params = [param.to(tokens.dtype) for param in params]
        x_Md, weight_Mk = tokens.reshape(-1, x.shape[-1]), weights.reshape(-1, weights.shape[-1])
        if exchange is None:
            segments = routing(expert_ids, experts)
        else:
            x_Md, weight_Mk, segments = exchange.arrive(x_Md, weight_Mk)
        y_Md, up_Nu = arithmetic(params).forward(x_Md, weight_Mk, segments)
        others = segments, exchange, weights.shape, x.dtype, arithmetic, arranged
        if exchange is not None:
            y_Md = exchange.to_tokens(y_Md.to(tokens.dtype))
        return y_Md.to(x.dtype).view(x.shape), (x_Md, weight_Mk, up_Nu, *params, *others)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x_Md, weight_Mk, up_Nu, *params = saved[:-6]
        segments, exchange, shape, dtype, arithmetic, arranged = saved[-6:]
        found = Gradients(segments, needs.params, arranged)
        grad_Md = grad_output.reshape(-1, grad_output.shape[-1])
        if exchange is not None:
            grad_Md = exchange.to_experts(grad_Md.to(up_Nu.dtype))
        x_wanted, *others_wanted = needs.inputs
        grad_x_Md, grad_weight_Mk = arithmetic(params).backward(
            grad_Md, x_Md, weight_Mk, up_Nu, found, x_wanted, any(others_wanted)
        )
        factors: dict[str, Any] = found.factors
        if exchange is not None:
            grad_x_Md = None if grad_x_Md is None else exchange.to_tokens(grad_x_Md)
            if grad_weight_Mk is not None:
                grad_weight_Mk = exchange.to_choices(grad_weight_Mk[:, 0])
            of_all = exchange.samples
            factors = {name: OfSeveralProcesses(whole, of_all) for name, whole in factors.items()}
        grad_x = None if grad_x_Md is None else grad_x_Md.to(dtype).view(grad_output.shape)
        grad_weights = None if grad_weight_Mk is None else grad_weight_Mk.view(shape)
        return (grad_x, None, grad_weights)[: len(needs.inputs)], factors


def routing(expert_ids: Tensor, experts: int) -> Segments:
    """Rows by expert and sample, of choices ``[B, ..., k]``; those outside ``0 .. experts - 1`` are
    of none."""
    samples = len(expert_ids)
    sample_B = torch.arange(samples, device=expert_ids.device)
    sample_N = sample_B.repeat_interleave(math.prod(expert_ids.shape[1:]))
    return Segments(sample_N, samples, expert_ids.reshape(-1).long(), experts)
