"""From per-sample norms to clipping coefficients, and these as clipped sums take them.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from flash_clipping.errors import InvalidValue
from flash_clipping.finish.plan import Plan
from flash_clipping.ops.error_bounds import upper_bound
from flash_clipping.ops.runtime.tables import to_device

Clipping = Literal["flat", "per_layer", "automatic"]

_keys = itertools.count()

#: Added to a norm before dividing by it; Opacus uses the same figure.
NORM_EPSILON = 1e-6

#: Stability constant of automatic clipping (Bu, Wang, Zha and Karypis 2023, section 4).
AUTOMATIC_GAMMA = 0.01


def total_norm(norms_PB: Tensor) -> Tensor:
    """Norm over all parameters, ``[B]``, from per-parameter norms ``[P, B]``. Not by
    ``vector_norm``: a CPU's adds them up in turn, and loses 1.8e-4 of a norm over 6000."""
    return norms_PB.square().sum(0).sqrt_()


@dataclass(frozen=True)
class Doubts:
    """What rounding may hide of squared norms (:mod:`flash_clipping.ops.error_bounds`).

    Attributes:
        blocks: ids of parameters, and what rounding may hide of their squared norms, ``[n, B]``,
            before ``scale``. Parameters in no block are released as measured: no doubt.
        scale: from gradients as they arrived to samples' own.
    """

    blocks: Sequence[tuple[Sequence[int], Tensor]]
    scale: float

    def bound_total(self, total_B: Tensor) -> Tensor:
        """Norms over all parameters -> what is at least the norm of what is released, ``[B]``."""
        return upper_bound(total_B, self.total(total_B))

    def total(self, like_B: Tensor) -> Tensor:
        """What rounding may hide of squared norms over all parameters, ``[B]`` as ``like_B``."""
        if not self.blocks:
            return torch.zeros_like(like_B)
        rows = [error_bound.to(like_B, non_blocking=True) for _, error_bound in self.blocks]
        doubt_B = (rows[0] if len(rows) == 1 else torch.cat(rows)).sum(0)
        return doubt_B.mul_(self.scale**2)

    def bound_each(self, keys: Sequence[int], norms_PB: Tensor) -> Tensor:
        """Upper bounds of norms parameter by parameter, ``[P, B]``; ``keys`` are their ids."""
        if not self.blocks:
            return norms_PB
        return upper_bound(norms_PB, self.rows(keys, norms_PB).mul_(self.scale**2))

    def rows(self, keys: Sequence[int], like_PB: Tensor) -> Tensor:
        """Those of these parameters, ``[P, B]``, with dtype and device of ``like_PB``."""
        found = {
            key: row
            for members, error_bound in self.blocks
            for key, row in zip(members, error_bound.to(like_PB, non_blocking=True), strict=True)
        }
        none_B = torch.zeros_like(like_PB[0])
        return torch.stack([found.get(key, none_B) for key in keys])


#: Norms ``[P, B]`` of the parameters, in their order, and what rounding may hide of them ->
#: coefficients ``[B]`` or ``[P, B]``.
ClipFunction: TypeAlias = Callable[[list[nn.Parameter], Tensor, Doubts], Tensor]


def check_bounds(clipping: str, bound: Any, count: int) -> None:
    """Raise ``ValueError`` unless per-layer clipping has one bound for each of ``count`` trainable
    parameters, and any other clipping has one."""
    found = len(bound) if isinstance(bound, Sequence) else 0
    if clipping != "per_layer" and found:
        raise InvalidValue(
            f"FC320 max_grad_norm: found {found} bounds with clipping={clipping!r}; expected one. "
            'With a bound for each parameter:\n    clipping="per_layer"'
        )
    if clipping == "per_layer" and found != count:
        raise InvalidValue(
            f"FC320 max_grad_norm: found {f'{found} bounds' if found else bound} with "
            f"clipping='per_layer'; expected {count}, one for each trainable parameter. Of norm C "
            f"in all:\n    max_grad_norm=[C / {count}**0.5] * {count}"
        )


def clipping_coefficients(
    norms_PB: Tensor,
    max_grad_norm: float | Tensor | Sequence[float],
    clipping: str = "flat",
    total_B: Tensor | None = None,
) -> Tensor:
    """Coefficient of every sample: ``[B]``, or ``[P, B]`` for per-layer clipping.

    * ``flat``: ``min(1, C / norm)`` with the norm over all parameters.
    * ``per_layer``: the same for every parameter with its own ``C``.
    * ``automatic``: ``C / (norm + gamma)``, AUTO-S of Bu et al. 2023.

    A sample whose norm is not finite gets 0. A coefficient is never NaN. ``total_B`` are the norms
    over all parameters, where they are known already. A step gives upper bounds for norms
    (:class:`Doubts`).

    Guarantees:
        ``coefficient * norm <= C`` for every sample (and parameter, when per layer), up to the
        rounding of one division.

    Raises:
        ValueError: ``max_grad_norm`` has not one entry per parameter in per-layer clipping, or is
            a list in any other.
    """
    if clipping == "per_layer" or isinstance(max_grad_norm, Sequence):
        check_bounds(clipping, max_grad_norm, len(norms_PB))
    bound: Any = max_grad_norm
    if clipping == "per_layer":
        norms = norms_PB
        bound = to_device(bound, norms_PB.device, norms_PB.dtype).unsqueeze(1)
    else:
        norms = total_norm(norms_PB) if total_B is None else total_B
    if clipping == "automatic":
        coef: Tensor = bound / (norms + AUTOMATIC_GAMMA)
    else:
        coef = (bound / (norms + NORM_EPSILON)).clamp_(max=1.0)
    # bound / inf is 0 already; what is NaN comes from a norm that is.
    return coef.nan_to_num_(nan=0.0, posinf=math.inf)


@dataclass
class ClipOptions:
    """How a model's samples are clipped, and who is told.

    Attributes:
        clip: from per-parameter norms to coefficients; also where norms are published.
        note_sums: told of the parameters whose clipped sums are in ``p.grad``.
        trainable: the trainable parameters, in order.
        state: yields the model's parameters and buffers.
        layers_are_cut: over processes, which see DTensors (tensor parallelism).
        is_sharded: processes share the parameters, and all run forward and backward alike.
        anchor: an input of every tapped layer. Users cannot name it, so autograd reaches its node
            only in a backward for all parameters.
        key: tells models apart in compiled code.
    """

    clip: ClipFunction
    note_sums: Callable[[Iterable[nn.Parameter]], None]
    trainable: Callable[[], list[nn.Parameter]]
    state: Callable[[], Iterator[Tensor]]
    loss_reduction: str
    batch_first: bool
    backend: str
    layers_are_cut: bool = False
    is_sharded: bool = False
    anchor: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True))
    key: int = field(default_factory=lambda: next(_keys))

    def __post_init__(self) -> None:
        #: Axis of every tapped layer's input that holds the samples.
        self.batch_axis = 0 if self.batch_first else 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, key=next(_keys))


class Coefficients:
    """Every parameter's coefficients, ``[B]`` on its device. Parameters go by their ``id``.

    Args:
        coef: ``[B]`` for all, or ``[P, B]``.
        params: the trainable parameters, in order.
        plan: which also knows whether they are all on one device.
    """

    def __init__(self, coef: Tensor, params: Sequence[nn.Parameter], plan: Plan):
        self._of: dict[int, Tensor] = {}
        by_param = coef.dim() == 2
        is_one = not by_param and plan.one_device and coef.get_device() == params[0].get_device()
        #: The coefficients of all parameters, where one tensor holds them.
        self.one: Tensor | None = coef if is_one else None
        if is_one:
            self._of = dict.fromkeys(plan.trainable, coef)
            return
        rows = coef.unbind(0) if by_param else [coef] * len(params)
        on_device: dict[tuple[int, int], Tensor] = {}
        for key, param, row in zip(plan.trainable, params, rows, strict=True):
            place = (id(row), param.get_device())
            if place not in on_device:
                on_device[place] = row.to(param.device, non_blocking=True)
            self._of[key] = on_device[place]

    def __getitem__(self, key: int) -> Tensor:
        return self._of[key]

    def alike(self, keys: Sequence[int]) -> list[tuple[list[int], Tensor]]:
        """Those of these parameters together that are clipped by the same coefficients, with
        these."""
        if self.one is not None:
            return [([*keys], self.one)]
        by_coef: dict[int, tuple[list[int], Tensor]] = {}  # by id of the coefficients
        for key in keys:
            coef_B = self._of[key]
            by_coef.setdefault(id(coef_B), ([], coef_B))[0].append(key)
        return [*by_coef.values()]
