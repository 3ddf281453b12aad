"""One privacy unit at a time through an ordinary backward, and steps that are compared with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping import Documents
from tests.support.autograd import check_truth
from tests.support.models import Wrapped
from tests.support.oracle import Truth
from tests.support.wrapping import WRAPPERS

#: (model, batch) -> losses of the rows, ``[R]``.
LossOfRows = Callable[[Any, tuple[Tensor, ...]], Tensor]

#: Rows of three units, interleaved; one of none; a unit of one row.
MIXED = (1, 0, -1, 1, 2, 0, 1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return Wrapped(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()


def index_for(rows: int) -> Tensor:
    """A map of so many rows, with as much in it as fits."""
    return torch.tensor([MIXED[r % len(MIXED)] for r in range(rows)])


def truth_by_unit(
    model: nn.Module, batch: tuple[Tensor, ...], index: Tensor, loss: LossOfRows, count: int
) -> Truth:
    """The gradient of every unit's own loss, the sum over its rows, in whatever dtype it is."""
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in trainable}
    for unit in range(count):
        model.zero_grad(set_to_none=True)
        own = index == unit
        if own.any():
            loss(model, tuple(x[own] for x in batch)).sum().backward()
        for name, param in trainable.items():
            rows[name].append(torch.zeros_like(param) if param.grad is None else param.grad)
    grads_U = {n: torch.stack(r) if r else r_of_none(trainable[n]) for n, r in rows.items()}
    model.zero_grad(set_to_none=True)
    return Truth.of(grads_U)


def r_of_none(param: Tensor) -> Tensor:
    return param.new_zeros(0, *param.shape)


def check_units(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    loss: LossOfRows,
    index: Tensor | None = None,
    *,
    plain: nn.Module | None = None,
    wrapper: str = "wrapped",
    reduction: str = "mean",
    tolerance: float = 1e-9,
    steps: int = 1,
    told: int | None = None,
    prepare: Callable[[Any], None] = lambda flash: None,
    **options: Any,
) -> Any:
    """Norms, norms of each parameter and clipped sums of units are the truth's.

    ``told``: what the model is told of the number of units.
    """
    index = index_for(len(batch[0])) if index is None else index
    count = told if told is not None else int(index.max()) + 1
    truth = truth_by_unit(plain or copy.deepcopy(model), batch, index, loss, count)
    bound = truth.norms.median().item()
    flash = WRAPPERS[wrapper](
        model, max_grad_norm=bound, loss_reduction=reduction, unit=Documents("user"), **options
    )
    prepare(flash)
    called = flash if wrapper == "wrapped" else model

    def with_units(*args: Tensor) -> Any:
        return called(*args, user=index)

    flash.expect_samples(told)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        losses = loss(with_units, batch)
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
        check_truth(flash, model, truth, bound, tolerance)
    return flash
