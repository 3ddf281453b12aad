"""A plain backward for one sample at a time, and steps that are compared with it in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.oracle import Truth, assert_close
from tests.support.sums import norm_of
from tests.support.wrapping import WRAPPERS

TOLERANCE = 1e-9

#: (model, batch) -> the loss of a batch, averaged over its samples.
Loss = Callable[[Any, tuple[Tensor, ...]], Tensor]


def truth_by_autograd(model: nn.Module, batch: tuple[Tensor, ...], loss: Loss) -> Truth:
    """One sample at a time through an ordinary backward: nothing but autograd itself."""
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in trainable}
    for b in range(len(batch[0])):
        model.zero_grad(set_to_none=True)
        loss(model, tuple(x[b : b + 1] for x in batch)).backward()
        for name, param in trainable.items():
            rows[name].append(torch.zeros_like(param) if param.grad is None else param.grad)
    return Truth.of({name: torch.stack(row).double() for name, row in rows.items()})


def truth_of_one_forward(losses_B: Tensor, model: nn.Module) -> Truth:
    """Every sample of one forward by itself through an ordinary backward, as dropout fell there.

    Args:
        losses_B: loss of each sample ``[B]``, of which no gradient was taken yet.
    """
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in trainable}
    for loss in losses_B:
        grads = torch.autograd.grad(
            loss, [*trainable.values()], retain_graph=True, allow_unused=True
        )
        for (name, param), grad in zip(trainable.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(param) if grad is None else grad)
    return Truth.of({name: torch.stack(row).double() for name, row in rows.items()})


def check_with_dropout(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    losses: Loss,
    *,
    mode: str = "one_pass",
    tolerance: float = TOLERANCE,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
) -> None:
    """A second step of a model that draws dropout, with the draws of a plain forward.

    Args:
        losses: (model, batch) -> loss of each sample ``[B]``.
        prepare: what is done to the model once the truth is known (checkpointing).
    """
    torch.manual_seed(7)
    truth = truth_of_one_forward(losses(model, batch), model)
    prepare(model)
    bound = truth.norms.median().item()
    flash: Any = WRAPPERS["wrapped"](model, max_grad_norm=bound, mode=mode)
    losses(flash, batch).mean().backward()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    losses(flash, batch).mean().backward()
    check_truth(flash, model, truth, bound, tolerance)


def check_by_autograd(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    loss: Loss,
    *,
    wrapper: str = "wrapped",
    mode: str = "one_pass",
    tolerance: float = TOLERANCE,
    loss_reduction: str = "mean",
    steps: int = 2,
    **options: Any,
) -> None:
    """Norms, norms of each parameter and clipped sums, for two steps in turn."""
    truth = truth_by_autograd(copy.deepcopy(model), batch, loss)
    bound = truth.norms.median().item()
    options |= {"mode": mode, "loss_reduction": loss_reduction}
    flash = WRAPPERS[wrapper](model, max_grad_norm=bound, **options)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        loss(flash if wrapper == "wrapped" else model, batch).backward()
        check_truth(flash, model, truth, bound, tolerance)


def check_truth(flash: Any, model: nn.Module, truth: Truth, bound: float, tolerance: float) -> None:
    """Norms, norms of each parameter and clipped sums are the truth's."""
    assert_close(flash.get_norm_sample(), truth.norms, tolerance, "norms")
    for name, grad in truth.clipped(bound).items():
        param = model.get_parameter(name)
        norm = norm_of(flash, param)
        # Where a gradient cancels to nothing, at the scale of the whole gradient.
        scale = truth.norms.max() / truth.param_norms[name].max().clamp(min=1e-30)
        slack = max(1.0, 1e-5 * scale.item())
        assert_close(norm, truth.param_norms[name], tolerance * slack, f"norms of {name}")
        assert_close(param.grad, grad, 10 * tolerance * slack, f"clipped sum of {name}")
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert param.grad is None, name


def mean_squares(output: Tensor) -> Tensor:
    rows = output.flatten(1)
    return (rows.square() * torch.linspace(0.5, 1.5, rows.shape[1])).sum(1).mean() / 2


def squares(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return mean_squares(model(*batch))


def float64s(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(*shape, dtype=torch.float64),)


def id_batch(*shape: int, vocabulary: int = 9) -> tuple[Tensor, ...]:
    return (torch.randint(0, vocabulary, shape),)
