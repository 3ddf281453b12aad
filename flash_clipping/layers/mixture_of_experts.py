"""A mixture of SwiGLU experts with LoRA, its matrices stacked.

B samples, T positions, k choices, E experts, d features, f features between, r rank;
N = B·T·k rows, one for each choice of each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flash_clipping.errors import InvalidValue, checked_number
from flash_clipping.layers.by_rule import by_rule
from flash_clipping.layers.routed_rows import (
    Described,
    LowRank,
    Projection,
    RoutedRows,
    RoutedRule,
    gated,
)
from flash_clipping.rules.registry import UnsupportedLayer, register_rule


class MixtureOfExperts(nn.Module):
    """``y = Σ_j w_j · down(silu(gate x) · up x)`` over the experts that a router chose for x.

    Every projection of an expert is ``x Wᵀ + s · x Aᵀ Bᵀ`` with ``s = lora_alpha / rank``; without
    LoRA only the first term. Matrices of one product are one parameter: ``gate_up`` has gate's
    matrices first, then up's. :attr:`gate`, :attr:`up`, :attr:`gate_A` and :attr:`up_A` are views.

    Without LoRA ``gate_up`` and ``down`` are trained. With it they are frozen, and
    ``gate_up_A``, ``gate_B``, ``up_B``, ``down_A`` and ``down_B`` are trained.

    Unwrapped it is trained by autograd, in the same arithmetic. Experts may lie in several
    processes (:func:`~flash_clipping.hugging_face.experts_in_parallel.distribute_experts`). A token
    may be sent to one expert twice. Backward is of first order, and no transform of ``torch.func``
    goes through it.

    Args:
        dim: features of a token, d.
        hidden: features between the projections, f.
        experts: how many there are, E.
        rank: r of LoRA; 0 for none.
        lora_alpha: α of LoRA; ``rank`` if not given.
        device, dtype: of the parameters.

    Attributes:
        gate_up: ``[E, 2f, d]``.
        down: ``[E, d, f]``.
        gate_up_A: ``[E, 2r, d]``: gate's, then up's.
        gate_B, up_B: ``[E, f, r]`` each.
        down_A: ``[E, r, f]``.
        down_B: ``[E, d, r]``.

    Guarantees:
        The output of a token depends on that token and its routing alone, and no sample's gradient
        on another's. No atomics are used. Nothing waits for the device, but for experts in several
        processes: once in forward.
    """

    gate_up_A: nn.Parameter
    gate_B: nn.Parameter
    up_B: nn.Parameter
    down_A: nn.Parameter
    down_B: nn.Parameter

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        *,
        rank: int = 0,
        lora_alpha: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, value in (("dim", dim), ("hidden", hidden), ("experts", experts)):
            checked_number(name, value, "[1, inf)", 64, whole=True)
        checked_number("rank", rank, "[0, inf)", 8, whole=True)
        if lora_alpha is not None and not rank:
            raise InvalidValue(
                f"FC302 MixtureOfExperts: found lora_alpha={lora_alpha} with rank=0, where there "
                "is no LoRA to scale. Give a rank, or leave lora_alpha out."
            )
        self.dim, self.hidden, self.experts, self.rank = dim, hidden, experts, rank
        self.lora_alpha = float(rank if lora_alpha is None else lora_alpha)

        def stacked(rows: int, columns: int, trained: bool = True) -> nn.Parameter:
            empty = torch.empty(experts, rows, columns, device=device, dtype=dtype)
            return nn.Parameter(empty, requires_grad=trained)

        self.gate_up: nn.Parameter = stacked(2 * hidden, dim, not rank)
        self.down: nn.Parameter = stacked(dim, hidden, not rank)
        self._names: tuple[str, ...] = ("gate_up", "down")
        if rank:
            self.gate_up_A = stacked(2 * rank, dim)
            self.gate_B, self.up_B = stacked(hidden, rank), stacked(hidden, rank)
            self.down_A, self.down_B = stacked(rank, hidden), stacked(dim, rank)
            self._names += ("gate_up_A", "gate_B", "up_B", "down_A", "down_B")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As ``nn.Linear``; LoRA's B are 0."""
        with torch.no_grad():
            for name, param in zip(self._names, self.tensors(), strict=True):
                if name.endswith("_B"):
                    param.zero_()
                else:
                    bound = 1 / math.sqrt(param.shape[2])
                    param.uniform_(-bound, bound)

    @property
    def gate(self) -> Tensor:
        """``[E, f, d]``, a view of ``gate_up``."""
        return self.gate_up[:, : self.hidden]

    @property
    def up(self) -> Tensor:
        """``[E, f, d]``, a view of ``gate_up``."""
        return self.gate_up[:, self.hidden :]

    @property
    def gate_A(self) -> Tensor:
        """``[E, r, d]``, a view of ``gate_up_A``."""
        return self.gate_up_A[:, : self.rank]

    @property
    def up_A(self) -> Tensor:
        """``[E, r, d]``, a view of ``gate_up_A``."""
        return self.gate_up_A[:, self.rank :]

    def extra_repr(self) -> str:
        lora = f", rank={self.rank}, lora_alpha={self.lora_alpha:g}" if self.rank else ""
        return f"dim={self.dim}, hidden={self.hidden}, experts={self.experts}{lora}"

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Send every token to its experts.

        Args:
            x: ``[B, ..., d]``: tokens, samples first.
            expert_ids: ``[B, ..., k]``, integers: 0 to E - 1, or -1 for none, which adds nothing.
            weights: ``[B, ..., k]``, floating point; of -1 it may be anything.

        Returns:
            ``[B, ..., d]`` in the dtype of ``x``.

        Raises:
            ValueError: shapes that do not fit together, or ids that are no integers.
        """
        params = dict(zip(self._names, self.tensors(), strict=True))
        y: Tensor = by_rule(MixtureOfExpertsRule(), self, (x, expert_ids, weights), params)
        return y

    def check(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """Raise ``UnsupportedLayer`` for arguments of :meth:`forward` that do not fit."""
        fits = x.dim() >= 2 and x.shape[-1] == self.dim and expert_ids.shape == weights.shape
        fits = fits and expert_ids.shape[:-1] == x.shape[:-1] and expert_ids.dim() == x.dim()
        if not fits or expert_ids.is_floating_point() or not weights.is_floating_point():
            raise UnsupportedLayer(
                f"FC303 MixtureOfExperts: found x {tuple(x.shape)}, expert_ids "
                f"{tuple(expert_ids.shape)} of {expert_ids.dtype} and weights "
                f"{tuple(weights.shape)} of {weights.dtype}; expected [B, ..., {self.dim}], "
                "integers [B, ..., k] and floating-point numbers [B, ..., k] for the same tokens."
            )

    def tensors(self) -> list[Tensor]:
        """Its parameters, or what :mod:`torch.nn.utils.parametrize` computes in their place."""
        return [getattr(self, name) for name in self._names]

    def arithmetic(self, params: Sequence[Tensor]) -> RoutedRows:
        """The layer's arithmetic with these tensors for its parameters."""
        of = dict(zip(self._names, params, strict=True))
        first: list[LowRank] = []
        second: list[LowRank] = []
        if self.rank:
            s = self.lora_alpha / self.rank
            Bs = of["gate_B"], of["up_B"]
            first.append(LowRank(of["gate_up_A"], Bs, s, "gate_up_A", ("gate_B", "up_B")))
            second.append(LowRank(of["down_A"], (of["down_B"],), s, "down_A", ("down_B",)))
        return RoutedRows(
            Projection((of["gate_up"],), ("gate_up",), low_ranks=first),
            Projection((of["down"],), ("down",), low_ranks=second),
            gated(torch.nn.functional.silu),
        )


@register_rule(MixtureOfExperts)
class MixtureOfExpertsRule(RoutedRule):
    """The layer's own arithmetic both ways, and factors in the place of sums over all rows."""

    takes_samples = True
    allows_computed = True  # a frozen base that is kept in fewer bits, beside LoRA

    def described(self, layer: MixtureOfExperts) -> Described:
        return Described(layer.tensors(), layer.arithmetic, layer.experts)

    def call(
        self, layer: Any, tapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """In an ordinary backward matrices may be computed from anything; here not."""
        computed = layer.parametrizations if parametrize.is_parametrized(layer) else {}
        for name, of in computed.items():
            if any(param.requires_grad for param in of.parameters()):
                raise UnsupportedLayer(
                    f"FC120 its {name} is computed by torch.nn.utils.parametrize from trainable "
                    "parameters, which have no per-sample gradients there; expected a frozen base, "
                    "with LoRA beside it (rank=)."
                )
        return tapped(*args, **kwargs)

    def forward(self, layer: MixtureOfExperts, *inputs: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
        layer.check(*inputs)
        return super().forward(layer, *inputs)


class TopKRouter(nn.Module):
    """Weights of the k experts with the largest of ``softmax(linear(x))``, in fp32.

    Each token is routed alone: no capacity, no statistics of the batch. A load-balancing loss
    over the batch is not offered: it mixes samples, and no clipping bounds what one of them does to
    the others' gradients. That of each sample alone is.

    Args:
        dim: features of a token, d.
        experts: how many there are, E.
        k: how many are chosen for a token.
        normalize: whether the weights of a token are divided by their sum.
        balance: ``"sample"``: also return a load-balancing loss of each sample.
        device, dtype: of the linear layer.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int,
        *,
        normalize: bool = True,
        balance: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        checked_number("k", k, f"[1, {experts}]", 1, whole=True)
        if balance not in (None, "sample"):
            raise InvalidValue(
                f"FC106 TopKRouter: found balance={balance!r}, expected None or 'sample'. "
                "Balancing over a batch mixes samples, and no clipping bounds that."
            )
        self.k, self.normalize, self.balance = k, normalize, balance
        self.linear = nn.Linear(dim, experts, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Route ``x`` ``[B, ..., d]``.

        Returns:
            ``expert_ids`` ``[B, ..., k]``, int64; ``weights`` of that shape, fp32 (float64 for
            float64); and with ``balance="sample"`` the loss ``[B]``, 1 where all experts are used
            alike (:func:`balance_of_samples`).
        """
        logits = self.linear(x)
        wide = torch.promote_types(logits.dtype, torch.float32)
        probabilities = logits.softmax(-1, dtype=wide)
        weights, expert_ids = probabilities.topk(self.k, -1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.balance is None:
            return expert_ids, weights
        return expert_ids, weights, balance_of_samples(probabilities, expert_ids)


def balance_of_samples(probabilities: Tensor, expert_ids: Tensor) -> Tensor:
    """``E Σ_e f_e P_e`` of every sample: the share of its choices that fell on e, times its mean
    probability of e (arXiv 2101.03961, equation 4, over the tokens of one sample).

    Args:
        probabilities: ``[B, ..., E]``.
        expert_ids: ``[B, ..., k]``, 0 to E - 1.

    Returns:
        ``[B]``. Its gradient is that of the probabilities.
    """
    B, E = len(probabilities), probabilities.shape[-1]
    ids = expert_ids.reshape(B, -1)
    counts_BE = torch.zeros_like(probabilities.reshape(B, -1, E)[:, 0]).detach()
    counts_BE = counts_BE.scatter_add(1, ids, torch.ones_like(ids, dtype=counts_BE.dtype))
    mean_BE = probabilities.reshape(B, -1, E).mean(1)
    return E * (counts_BE / ids.shape[1] * mean_BE).sum(1)


class RoutedExperts(nn.Module):
    """A router and its experts: ``experts(x, *router(x))``.

    Args:
        router: gives ``(expert_ids, weights)`` of ``x`` ``[B, ..., d]``, and perhaps a loss of each
            sample: :class:`TopKRouter`, or any other that routes every token alone.
        experts: a :class:`MixtureOfExperts`.
    """

    def __init__(self, router: nn.Module, experts: MixtureOfExperts):
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x: Tensor) -> Any:
        """``[B, ..., d]``; with the router's loss of each sample ``[B]`` behind it, if any."""
        expert_ids, weights, *loss_B = self.router(x)
        y = self.experts(x, expert_ids, weights)
        return (y, *loss_B) if loss_B else y
