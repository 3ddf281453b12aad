"""Experts of one hidden unit each, and the router that chooses k of them for every token, by two
projections to the logits of an axis each (product keys; PEER, arXiv 2407.04153).

d features, E = s² experts, s entries of an axis, h heads, k choices of each head, L = h·k;
B samples, T positions, N = B·T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat import BATCH_NORMS, never_compiled, transforms_are_active
from flash_clipping.errors import InvalidValue, check_one_of, checked_number
from flash_clipping.factors import PerSampleGrad
from flash_clipping.layers.by_rule import by_rule
from flash_clipping.layers.factors import BUFFER, ScaledEmbeddingGrad
from flash_clipping.layers.ops.product_key import (
    product_key_backward,
    product_key_scores,
    reference,
)
from flash_clipping.rules.registry import GradRequest, Grads, Rule, as_BTd, register_rule

MakeNorm = Callable[[int], nn.Module]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class ProductKeyExperts(nn.Module):
    """A feed-forward layer of many small experts: ``y = shared(x) + Σ_j w_j v_j act(⟨u_j, x⟩)``.

    The sum is over the experts that a :class:`~flash_clipping.layers.ProductKeyRouter` chooses for
    the token, ``w_j = exp(score_j)``, and ``u``, ``v`` are rows of two tables ``[E, d]``.

    Args:
        width: features of a token, d.
        experts: how many experts there are: a square.
        k: how many each head chooses.
        shared: features of the SwiGLU that every token takes besides, or 0 for none.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``.
        router: options of the router: ``heads``, ``norm``, ``groups``, ``bias``, ``backend``.

    Raises:
        ValueError: as the router, or an unknown activation.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        k: int,
        *,
        shared: int = 0,
        activation: str = "gelu",
        **router: Any,
    ):
        super().__init__()
        self.router = ProductKeyRouter(width, experts, k, **router)
        self.tables = ExpertTables(width, experts, activation)
        self.shared = SwiGLU(width, shared) if shared else None

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """``[..., d]`` to ``[..., d]``, in the dtype of x.

        Args:
            x: the samples first, tokens behind them.
            valid: ``[...]``, bool: tokens where it is false have no experts. The shared expert
                reads them.
        """
        scores, indices = self.router(x, valid)
        y: Tensor = self.tables(x, indices, scores.exp())
        return y if self.shared is None else y + self.shared(x)


class ExpertTables(nn.Module):
    """``y = Σ_j w_j v_j act(⟨u_j, x⟩)`` with rows of two tables, for the experts of each token.

    Attributes:
        down: ``[E, d]``, the rows u that read.
        up: ``[E, d]``, the rows v that write.
    """

    def __init__(self, width: int, experts: int, activation: str = "gelu"):
        super().__init__()
        check_one_of("activation", activation, [*ACTIVATIONS])
        self.activation = activation
        self.down = nn.Parameter(torch.randn(experts, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(experts, width) / width**0.5)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """
        Args:
            x: ``[..., d]``.
            indices: ``[..., L]``, integers. One outside of ``0 ... E - 1``, as -1 is, stands for no
                expert: it addresses nothing and adds nothing, whatever its weight is.
            weights: ``[..., L]``.
        """
        chosen, none = self.experts_of(indices)
        # Where there is no expert, a select: what is selected away may hold anything, and its
        # gradient is exactly 0.
        u = F.embedding(chosen, self.down).masked_fill(none.unsqueeze(-1), 0)
        v = F.embedding(chosen, self.up).masked_fill(none.unsqueeze(-1), 0)
        before = (u * x.unsqueeze(-2)).sum(-1).masked_fill(none, 0)
        unit = self.act(before) * weights.masked_fill(none, 0)
        return (v * unit.unsqueeze(-1)).sum(-2).to(x.dtype)

    def experts_of(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Indices that all address a row, int64, and where there is no expert."""
        none = (indices < 0) | (indices >= len(self.down))
        return indices.long().masked_fill(none, 0), none

    def act(self, x: Tensor) -> Tensor:
        """The activation function."""
        return ACTIVATIONS[self.activation](x)

    def extra_repr(self) -> str:
        experts, width = self.down.shape
        return f"{experts}, {width}, activation={self.activation!r}"


@register_rule(ExpertTables)
class ExpertTablesRule(Rule):
    """Keeps input, output gradient and L numbers of every position, never L rows of a table: rows
    are looked up for some positions at a time, and again in backward."""

    def works_by_position(self, layer: ExpertTables) -> bool:
        return True

    def forward(
        self, layer: ExpertTables, x: Tensor, indices: Tensor, weights: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        chosen, none = layer.experts_of(indices)
        down_Ed, up_Ed = layer.down, layer.up
        x_Nd, chosen_NL, none_NL, weights_NL = map(_rows, (x, chosen, none, weights))
        before_NL = _products(down_Ed, chosen_NL, none_NL, x_Nd).masked_fill(none_NL, 0)
        unit_NL = layer.act(before_NL) * weights_NL.masked_fill(none_NL, 0)
        y = _sums(up_Ed, chosen_NL, none_NL, unit_NL, x.dtype).view(x.shape)
        return y, (x, chosen, none, weights, before_NL, down_Ed, up_Ed)

    def backward(self, layer: Any, saved: Any, grad_output: Tensor, needs: GradRequest) -> Grads:
        x, chosen, none, weights, before_NL, down_Ed, up_Ed = saved
        grad_Nd, chosen_NL, none_NL, weights_NL = map(_rows, (grad_output, chosen, none, weights))
        with torch.enable_grad():
            leaf_NL = before_NL.detach().requires_grad_()
            act_NL = layer.act(leaf_NL)
        grad_unit_NL = _products(up_Ed, chosen_NL, none_NL, grad_Nd)
        of_act_NL = (grad_unit_NL * weights_NL).to(act_NL.dtype)
        (grad_before_NL,) = torch.autograd.grad(act_NL, leaf_NL, of_act_NL)
        # Of no expert: its weight may be anything. The factors do not read its scale.
        grad_before_NL = grad_before_NL.masked_fill(none_NL, 0)
        act_NL = act_NL.detach()
        grads: list[Tensor | None] = [None, None, None]
        if needs.inputs[0]:
            grad_x_Nd = _sums(down_Ed, chosen_NL, none_NL, grad_before_NL, x.dtype)
            grads[0] = grad_x_Nd.view(x.shape)
        if needs.inputs[2]:
            of_weights_NL = (grad_unit_NL * act_NL).masked_fill(none_NL, 0)
            grads[2] = of_weights_NL.to(weights.dtype).view(weights.shape)
        ids_BTL = as_BTd(chosen.masked_fill(none, -1))
        factors: dict[str, PerSampleGrad] = {}
        for name, scale_NL, rows in (
            ("down", grad_before_NL, x),
            ("up", act_NL * weights_NL, grad_output),
        ):
            if name in needs.params:
                scale_BTL = scale_NL.view(ids_BTL.shape)
                factors[name] = ScaledEmbeddingGrad(ids_BTL, scale_BTL, as_BTd(rows), len(down_Ed))
        return tuple(grads), factors


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _looked_up(
    table_Ed: Tensor, chosen_NL: Tensor, none_NL: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Rows ``[n, L, d]`` of a table for some positions at a time, by shapes alone; zeros in the
    place of no expert."""
    (N, L), d = chosen_NL.shape, table_Ed.shape[1]
    step = max(1, BUFFER // max(1, L * d))
    for start in range(0, max(1, N), step):  # at least once, for no position if there is none
        n = slice(start, start + step)
        yield n, F.embedding(chosen_NL[n], table_Ed).masked_fill(none_NL[n].unsqueeze(2), 0)


def _products(table_Ed: Tensor, chosen_NL: Tensor, none_NL: Tensor, x_Nd: Tensor) -> Tensor:
    """Products ``[N, L]`` of the rows chosen for each position and what stands there."""
    pieces = _looked_up(table_Ed, chosen_NL, none_NL)
    return torch.cat([(rows_nLd * x_Nd[n].unsqueeze(1)).sum(2) for n, rows_nLd in pieces])


def _sums(
    table_Ed: Tensor, chosen_NL: Tensor, none_NL: Tensor, scale_NL: Tensor, dtype: torch.dtype
) -> Tensor:
    """Sums ``[N, d]`` of the rows chosen for each position, times these numbers."""
    pieces = _looked_up(table_Ed, chosen_NL, none_NL)
    return torch.cat(
        [(rows_nLd * scale_NL[n].unsqueeze(2)).sum(1).to(dtype) for n, rows_nLd in pieces]
    )


class SwiGLU(nn.Module):
    """``down(silu(gate x) · up x)``, ``[..., d]`` to ``[..., d]``."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class ProductKeyRouter(nn.Module):
    """Chooses k of ``s²`` experts for every token (product keys; PEER, arXiv 2407.04153).

    Two linear maps give a token s logits each. Expert ``ix · s + iy`` has the probability
    ``softmax(logits_x)[ix] · softmax(logits_y)[iy]``, and the k experts of the highest are chosen
    without ever forming all ``s²``. The order of ties, and what becomes of NaN, is described at
    :func:`~flash_clipping.layers.ops.product_key.product_key_scores`. A token's experts depend on
    this token alone.

    Args:
        width: features of a token, d.
        experts: how many experts there are: a square, ``s²``.
        k: how many are chosen, by each head: at most 128, and at most ``experts``.
        heads: how many times a token chooses, by logits of its own for each head.
        norm: what is done to the logits of an axis: ``"rms"`` (``nn.RMSNorm`` over them),
            ``"group"`` (:class:`TokenGroupNorm`), a function that makes a module for s logits,
            or ``None``.
        groups: of ``norm="group"``.
        bias: whether the projections have one.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Raises:
        ValueError: experts that are no square; a k that is out of range; a normalization over the
            batch, as of ``nn.BatchNorm1d``: one sample would decide on the experts of the others,
            and no clipping bounds that.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        k: int,
        *,
        heads: int = 1,
        norm: str | MakeNorm | None = "rms",
        groups: int = 8,
        bias: bool = False,
        backend: str = "auto",
    ):
        super().__init__()
        side = math.isqrt(experts)
        if side < 1 or side * side != experts:
            raise InvalidValue(
                f"FC302 ProductKeyRouter: found experts={experts}; expected a square, as {side**2} "
                f"or {(side + 1) ** 2}: each is a pair of entries of two axes."
            )
        checked_number("k", k, f"[1, {min(128, experts)}]", 1, whole=True)
        self.side, self.k, self.heads, self.backend = side, k, heads, backend
        self.to_x = nn.Linear(width, heads * side, bias=bias)
        self.to_y = nn.Linear(width, heads * side, bias=bias)
        self.norm_x = _made(norm, side, groups)
        self.norm_y = _made(norm, side, groups)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores and indices of the chosen experts.

        Args:
            x: ``[..., d]``; the samples first, tokens behind them.
            valid: ``[...]``, bool: a token where it is false (padding) is not read, and gets no
                experts.

        Returns:
            Scores ``[..., h·k]`` in the logits' dtype: logarithms of probabilities, of each head
            from the highest down. Indices ``[..., h·k]``, int32. No expert is index -1 and score
            ``-inf``.
        """
        if valid is not None:
            x = x.masked_fill(~valid.unsqueeze(-1), 0)
        logits_x = self.norm_x(self.to_x(x).unflatten(-1, (self.heads, self.side)))
        logits_y = self.norm_y(self.to_y(x).unflatten(-1, (self.heads, self.side)))
        if valid is not None:
            valid = valid.unsqueeze(-1).expand(logits_x.shape[:-1])
        scores, indices = route(logits_x, logits_y, self.k, valid, backend=self.backend)
        return scores.flatten(-2), indices.flatten(-2)

    def extra_repr(self) -> str:
        return f"experts={self.side**2}, k={self.k}, heads={self.heads}"


@never_compiled  # it has a kernel: it runs alone, between two graphs
def route(
    logits_x: Tensor,
    logits_y: Tensor,
    k: int,
    valid: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Scores and indices ``[..., k]`` of logits ``[..., s]``: :func:`.product_key_scores` under
    autograd, with first derivatives only. A row where ``valid`` ``[...]`` is false gets index -1,
    score ``-inf`` and a gradient of exactly 0."""
    *axes, side = logits_x.shape
    rows = logits_x.reshape(-1, side), logits_y.reshape(-1, side)
    if valid is not None:
        none_N1 = ~valid.reshape(-1, 1)
        rows = rows[0].masked_fill(none_N1, 0), rows[1].masked_fill(none_N1, 0)
    if transforms_are_active():  # of torch.func, which look at the operations themselves
        scores_Nk, indices_Nk = reference.product_key_scores(*rows, k)
    else:
        scores_Nk, indices_Nk = by_rule(_Route(k, backend), None, rows, {})
    if valid is not None:
        scores_Nk = scores_Nk.masked_fill(none_N1, -torch.inf)
        indices_Nk = indices_Nk.masked_fill(none_N1, -1)
    return scores_Nk.view(*axes, k), indices_Nk.view(*axes, k)


@dataclass
class _Route(Rule):
    k: int
    backend: str

    def forward(self, layer: None, *rows: Tensor) -> tuple[tuple[Tensor, Tensor], Any]:
        x, y = rows
        scores, indices = product_key_scores(x, y, self.k, backend=self.backend)
        return (scores, indices), (indices, x, y)

    def backward(self, layer: None, saved: Any, grad_output: Any, needs: GradRequest) -> Grads:
        return product_key_backward(grad_output[0], *saved, backend=self.backend), {}


class TokenGroupNorm(nn.Module):
    """Group normalization of each token alone, ``[..., channels]``.

    ``nn.GroupNorm`` on ``[B, channels, T]`` normalizes over all tokens of a sample.
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5):
        super().__init__()
        if channels % groups:
            raise InvalidValue(
                f"FC302 TokenGroupNorm: found {channels} channels for {groups} groups; expected a "
                "multiple of the groups."
            )
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (self.groups, -1))
        normal = F.layer_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        return normal * self.weight + self.bias


def _made(norm: str | MakeNorm | None, side: int, groups: int) -> nn.Module:
    if norm is None:
        return nn.Identity()
    if norm == "rms":
        return nn.RMSNorm(side)
    if norm == "group":
        return TokenGroupNorm(groups, side)
    made = None if isinstance(norm, str) else norm(side)
    found = repr(norm) if made is None else type(made).__name__
    if made is None or any(isinstance(module, BATCH_NORMS) for module in made.modules()):
        raise InvalidValue(
            f"FC106 ProductKeyRouter: found norm={found}; expected 'rms', 'group', None or a "
            "function that makes a module which normalizes every token alone. Batch "
            "normalization of logits lets one sample choose the experts of the others: use 'rms' "
            "or 'group'."
        )
    return made
