"""The truth that everything is measured against: ``torch.func.vmap(grad)``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: (model, batch) -> losses of the samples, [B]; a sample's loss depends on that sample only.
LossPerSample = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


@dataclass
class Truth:
    norms: Tensor  # [B]
    param_norms: dict[str, Tensor]  # name -> [B]
    grads: dict[str, Tensor]  # name -> [B, *parameter]

    @classmethod
    def of(cls, grads: dict[str, Tensor]) -> Truth:
        """Of gradients ``[B, *parameter]`` by the names of parameters."""
        norms = {n: g.reshape(len(g), math.prod(g.shape[1:])).norm(dim=1) for n, g in grads.items()}
        return cls(torch.stack([*norms.values()]).norm(dim=0), norms, grads)

    def of_units(self, index: Tensor, count: int | None = None) -> Truth:
        """Of units whose gradients are the sums over their rows; -1: of none."""
        count, inside = int(index.max()) + 1 if count is None else count, index >= 0
        return Truth.of(
            {
                name: g.new_zeros(count, *g.shape[1:]).index_add(0, index[inside], g[inside])
                for name, g in self.grads.items()
            }
        )

    def coef(self, max_grad_norm: float) -> Tensor:
        return (max_grad_norm / (self.norms + 1e-6)).clamp(max=1.0)

    def clipped(self, max_grad_norm: float) -> dict[str, Tensor]:
        coef = self.coef(max_grad_norm)
        return {n: torch.einsum("b,b...->...", coef, g) for n, g in self.grads.items()}


def per_sample_truth(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    loss_per_sample: LossPerSample,
    dtype: torch.dtype | None = torch.float64,
    randomness: str = "error",
) -> Truth:
    """Per-sample gradients of a plain model by ``vmap(grad)``, in float64 unless told otherwise."""
    model = copy.deepcopy(model)
    if dtype is not None:
        model = model.to(dtype)
        batch = tuple(x.to(dtype) if x.is_floating_point() else x for x in batch)
    trainable = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def loss(params: dict[str, Tensor], sample: tuple[Tensor, ...]) -> Tensor:
        one = tuple(x.unsqueeze(0) for x in sample)

        class Functional(nn.Module):
            def forward(self, *args: Tensor) -> Tensor:
                return torch.func.functional_call(model, params, args)

        return loss_per_sample(Functional(), one)[0]

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness=randomness)(
        trainable, batch
    )
    return Truth.of({n: g.double() for n, g in grads.items()})


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """Relative error at the scale of the values: ``max|found - expected| / max|expected|``."""
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    assert torch.isfinite(found).all(), f"{what}: not finite"
    scale = expected.double().abs().max().clamp(min=1e-30)
    error = ((found.double() - expected.double()).abs().max() / scale).item()
    assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"
