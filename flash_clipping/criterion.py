"""Opacus' ghost-clipping criterion with one backward pass in the place of two."""

from __future__ import annotations

from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import (
    DPLossFastGradientAdaptiveClipping,
    DPTensorFastGradientAdaptiveClipping,
)
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)


def _counted(loss: DPTensorFastGradientClipping) -> DPTensorFastGradientClipping:
    """The same loss, with as many per-sample losses as the model has seen samples."""
    check = getattr(loss.module, "check_losses", None)
    if check is not None:
        check(loss.loss_per_sample)
    return loss


class FlashTensor(DPTensorFastGradientClipping):
    """A loss per sample that reduces itself and runs one ordinary backward."""

    def backward(self) -> None:
        """Leave norms, coefficients and clipped sums, as ``loss.backward()`` on a scalar does."""
        reduce = torch.mean if self.loss_reduction == "mean" else torch.sum
        reduce(self.loss_per_sample).backward()

    @classmethod
    def of(cls, loss: DPTensorFastGradientClipping) -> FlashTensor:
        return cls(loss.module, loss.optimizer, loss.loss_per_sample, loss.loss_reduction)


def _keeps_type(name: str) -> Any:
    # Opacus' arithmetic names its own class; the result must stay a one-pass loss.
    def operate(self: FlashTensor, *args: Any) -> FlashTensor:
        return FlashTensor.of(getattr(super(FlashTensor, self), name)(*args))

    operate.__name__ = name
    return operate


for _name in ("truediv", "mul", "rmul", "add", "radd", "sub", "rsub", "neg"):
    setattr(FlashTensor, f"__{_name}__", _keeps_type(f"__{_name}__"))


class FlashLoss(DPLossFastGradientClipping):
    """The user's criterion, called as before; ``loss.backward()`` runs one backward pass.

    Built and called like Opacus' ``DPLossFastGradientClipping``.

    Raises:
        ValueError: the reductions of criterion, module and optimizer do not agree.
    """

    def __init__(self, module: Any, optimizer: Any, criterion: Any, loss_reduction: str = "mean"):
        found = {
            "loss_reduction": loss_reduction,
            "module.loss_reduction": module.loss_reduction,
            "optimizer.loss_reduction": optimizer.loss_reduction,
            "criterion.reduction": getattr(criterion, "reduction", module.loss_reduction),
        }
        if len(set(found.values())) > 1 or loss_reduction not in ("mean", "sum"):
            listed = ", ".join(f"{name}={value!r}" for name, value in found.items())
            raise ValueError(
                f"The loss reductions do not match: {listed}. Norms would be off by the batch "
                "size. Give all of them the same reduction, 'mean' or 'sum'."
            )
        super().__init__(module, optimizer, criterion, loss_reduction)

    def __call__(self, *args: Any, **kwargs: Any) -> FlashTensor:
        return FlashTensor.of(_counted(super().__call__(*args, **kwargs)))


class FlashAdaptiveTensor(DPTensorFastGradientAdaptiveClipping):
    """A loss whose one backward moves the bound between taking the norms and clipping.

    The bound and the noise that pays for it are Opacus' (Andrew, Thakkar, McMahan and Ramaswamy
    2021, Theorem 1).
    """

    def _update_clip_and_noise(self, per_sample_norms: torch.Tensor) -> Any:
        bound_and_multiplier = list(super()._update_clip_and_noise(per_sample_norms))
        model = getattr(self.module, "_module", self.module)
        if isinstance(model, DifferentiallyPrivateDistributedDataParallel):
            # All processes must clip by the bound that process 0 adds noise for, and each would
            # move it by its own samples and its own draw: process 0's holds.
            torch.distributed.broadcast_object_list(bound_and_multiplier, src=0)
        return bound_and_multiplier

    def backward(self) -> None:
        """Leave norms, clipped sums by the new bound, and the new bound on module and optimizer."""

        def move_bound(norm_B: torch.Tensor) -> None:
            bound, multiplier = self._update_clip_and_noise(norm_B)
            self.module.max_grad_norm = bound
            self.optimizer.max_grad_norm = bound
            self.optimizer._adjusted_noise_multiplier = multiplier

        self.module.before_clipping = move_bound
        try:
            reduce = torch.mean if self.loss_reduction == "mean" else torch.sum
            reduce(self.loss_per_sample).backward()
        finally:
            self.module.before_clipping = None


class FlashAdaptiveLoss(DPLossFastGradientAdaptiveClipping):
    """Opacus' adaptive clipping criterion with one backward pass.

    Args:
        **kwargs: ``target_unclipped_quantile``, ``min_clipbound``, ``max_clipbound``,
            ``clipbound_learning_rate``, as in Opacus.
    """

    def __init__(
        self, module: Any, optimizer: Any, criterion: Any, loss_reduction: str, **kwargs: Any
    ):
        super().__init__(
            module,
            optimizer,
            criterion,
            loss_reduction,
            initial_noise_multiplier=optimizer.noise_multiplier,
            **kwargs,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> FlashAdaptiveTensor:
        loss = _counted(DPLossFastGradientClipping.__call__(self, *args, **kwargs))
        return FlashAdaptiveTensor(
            self.module,
            self.optimizer,
            loss.loss_per_sample,
            self.loss_reduction,
            self.target_unclipped_quantile,
            self.min_clipbound,
            self.max_clipbound,
            self.clipbound_learning_rate,
            self.initial_noise_multiplier,
        )
