"""The truth for any model: one sample at a time through the plain model, by ``autograd.grad``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping

#: (model, rows of the batch) -> the sum of their losses, as a training loop takes it.
Loop = Callable[[Any, Sequence[int]], Tensor]


def one_at_a_time(
    fresh: Callable[[], nn.Module], loop: Loop, groups: Sequence[Sequence[int]], bound: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms ``[B]`` and clipped sums of samples, or of groups of rows, each by a model of its own,
    ``fresh()``, in float64."""
    norms, sums = [], {}
    for rows in groups:
        model = fresh()
        loop(model, rows).backward()
        grads = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        norms.append(torch.cat([grad.flatten() for grad in grads.values()]).norm())
        coef = (bound / (norms[-1] + 1e-6)).clamp(max=1)
        for name, grad in grads.items():
            sums[name] = sums.get(name, 0) + coef * grad
    return torch.stack(norms), sums


def assert_clipped(wrapped: Any, norms: Tensor, sums: dict[str, Tensor], rtol: float) -> None:
    """What backward left with a wrapped model is this."""
    torch.testing.assert_close(wrapped.get_norm_sample(), norms, rtol=rtol, atol=rtol)
    found = {name.removeprefix("_module."): p for name, p in wrapped.named_parameters()}
    for name, expected in sums.items():
        torch.testing.assert_close(found[name].grad, expected, rtol=rtol, atol=rtol, msg=name)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model in float64 that is the same each time."""

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return make().double()

    return fresh


def wrap(model: nn.Module, **options: Any) -> Any:
    """The model in ``mode="one_by_one"``, with losses that are added up."""
    given = {"loss_reduction": "sum", "mode": "one_by_one"} | options
    return GradSampleModuleFlashClipping(model, **given)


def check_clipped(
    fresh: Callable[[], nn.Module],
    loop: Loop,
    bound: float = 1.0,
    steps: int = 1,
    of: Callable[[Any], Any] = lambda wrapped: wrapped,
) -> Tensor:
    """Steps of a batch of 5 leave what its samples do one at a time. Returns their norms."""
    norms, sums = one_at_a_time(fresh, loop, [[b] for b in range(5)], bound)
    wrapped = of(wrap(fresh(), max_grad_norm=bound))
    for _ in range(steps):
        wrapped.zero_grad(set_to_none=True)
        loop(wrapped, range(5)).backward()
        assert_clipped(wrapped, norms, sums, 1e-9)
    for module in wrapped.modules():
        assert all(isinstance(p, nn.Parameter) for p in module.parameters(recurse=False))
    return norms
