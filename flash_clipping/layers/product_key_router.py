"""The product-key router: k of s² experts for every token, by two projections to s logits.

T axes of tokens, d features, h heads, s entries of an axis, k choices, N = T·h rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_clipping._compat import BATCH_NORMS, never_compiled
from flash_clipping.layers.ops.product_key import product_key_backward, product_key_scores

MakeNorm = Callable[[int], nn.Module]


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
            raise ValueError(
                f"ProductKeyRouter: found experts={experts}; expected a square, as {side**2} or "
                f"{(side + 1) ** 2}: each is a pair of entries of two axes."
            )
        if not 1 <= k <= min(128, experts):
            raise ValueError(
                f"ProductKeyRouter: found k={k} for {experts} experts; expected 1 to "
                f"{min(128, experts)}."
            )
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


@never_compiled  # it has a kernel: it runs by itself, between two graphs
def route(
    logits_x: Tensor,
    logits_y: Tensor,
    k: int,
    valid: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """:func:`.product_key_scores` under autograd, for any axes before the last.

    Args:
        logits_x, logits_y: ``[..., s]``.
        k: how many experts each row gets.
        valid: ``[...]``, bool: rows where it is false get index -1 and score ``-inf``, and a
            gradient of exactly 0.
        backend: ``"auto"``, ``"triton"`` or ``"torch"``.

    Returns:
        Scores and indices ``[..., k]``. Scores have first derivatives only.
    """
    *axes, side = logits_x.shape
    rows = (logits_x.reshape(-1, side), logits_y.reshape(-1, side))
    flat = None if valid is None else valid.reshape(-1)
    scores_Nk, indices_Nk = _Route.apply(*rows, flat, k, backend)
    return scores_Nk.view(*axes, k), indices_Nk.view(*axes, k)


class _Route(torch.autograd.Function):
    """Rows are independent of each other: under ``vmap`` there are only more of them."""

    @staticmethod
    def forward(
        logits_x: Tensor, logits_y: Tensor, valid_N: Tensor | None, k: int, backend: str
    ) -> tuple[Tensor, Tensor]:
        scores, indices = product_key_scores(logits_x, logits_y, k, backend=backend)
        if valid_N is not None:
            scores = scores.masked_fill(~valid_N.unsqueeze(1), -torch.inf)
            indices = indices.masked_fill(~valid_N.unsqueeze(1), -1)
        return scores, indices

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits_x, logits_y, _, _, ctx.backend = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], logits_x, logits_y)

    @staticmethod
    def backward(ctx: Any, grad_scores: Tensor, _: Any) -> tuple[Any, ...]:
        indices, logits_x, logits_y = ctx.saved_tensors
        grads = _RouteBackward.apply(grad_scores, indices, logits_x, logits_y, ctx.backend)
        return (*grads, None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        return _as_more_rows(_Route, info.batch_size, in_dims, args)


class _RouteBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        grad_scores: Tensor, indices: Tensor, logits_x: Tensor, logits_y: Tensor, backend: str
    ) -> tuple[Tensor, Tensor]:
        return product_key_backward(grad_scores, indices, logits_x, logits_y, backend=backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "product-key scores have first derivatives only. Call backward() without create_graph."
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        return _as_more_rows(_RouteBackward, info.batch_size, in_dims, args)


def _as_more_rows(
    function: Any, batch: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> Any:
    rows = []
    for x, axis in zip(args, in_dims, strict=True):
        if isinstance(x, Tensor):
            x = x.expand(batch, *x.shape) if axis is None else x.movedim(axis, 0)
            x = x.flatten(0, 1)
        rows.append(x)
    outputs = function.apply(*rows)
    return tuple(x.unflatten(0, (batch, -1)) for x in outputs), (0,) * len(outputs)


class TokenGroupNorm(nn.Module):
    """Group normalization of each token by itself, ``[..., channels]``.

    ``nn.GroupNorm`` on ``[B, channels, T]`` normalizes over all tokens of a sample.
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5):
        super().__init__()
        if channels % groups:
            raise ValueError(
                f"TokenGroupNorm: found {channels} channels for {groups} groups; expected a "
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
        raise ValueError(
            f"ProductKeyRouter: found norm={found}; expected 'rms', 'group', None or a function "
            "that makes a module which normalizes every token by itself. Batch normalization of "
            "logits lets one sample choose the experts of the others: use 'rms' or 'group'."
        )
    return made
