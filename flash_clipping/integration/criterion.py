"""Opacus' ghost-clipping criterion with one backward pass in the place of two."""

from __future__ import annotations

from typing import Any

import torch
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import (
    DPLossFastGradientAdaptiveClipping,
)
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)
from torch import Tensor

from flash_clipping.integration.adaptive import AdaptiveBound
from flash_clipping.integration.token_losses import logits_of


def _counted(loss: DPTensorFastGradientClipping) -> DPTensorFastGradientClipping:
    """The same loss, with as many per-sample losses as the model has seen samples."""
    check = getattr(loss.module, "check_losses", None)
    if check is not None:
        check(loss.loss_per_sample)
    return loss


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """A criterion's arguments, by position, with logits in the place of a model's output.

    Logits ``[B, T, V]`` in an output, with targets ``[B, T]``, are flattened, and ``shape`` says so
    to Opacus' criterion, which takes the mean over each sample's own targets then.
    """
    for name in ("input", "target"):  # where Opacus looks for targets, and for no others
        if name in kwargs and len(args) == (name == "target"):
            args = *args, kwargs.pop(name)
    if not args or isinstance(args[0], Tensor) or not hasattr(args[0], "logits"):
        return args
    logits, *others = logits_of(args[0]), *args[1:]
    target = others[0] if others else None
    if isinstance(target, Tensor) and logits.dim() == 3 and logits.shape[:2] == target.shape:
        kwargs["shape"] = logits.shape
        return logits.flatten(0, 1), target.flatten(), *others[1:]
    return logits, *others


class FlashTensor(DPTensorFastGradientClipping):
    """A loss per sample that reduces itself and runs one ordinary backward."""

    def backward(self) -> None:
        """Leave norms, coefficients and clipped sums, as ``loss.backward()`` on a scalar does.

        Losses are added up, not averaged: divided by the size of the batch, a 16-bit gradient would
        be rounded in a way that depends on how many other samples there are. A gradient with
        respect to the model's input is that of the sum as well.
        """
        with self.module.summed_loss() as summed:
            reduce = torch.sum if summed or self.loss_reduction == "sum" else torch.mean
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

    Built and called like Opacus' ``DPLossFastGradientClipping``. Of an output of transformers it
    takes the logits; with logits ``[B, T, V]`` and targets ``[B, T]`` a sample's loss is the mean
    over its own targets (their sum, if losses are summed), and targets are not shifted.

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
        args = _arguments(args, kwargs)
        return FlashTensor.of(_counted(super().__call__(*args, **kwargs)))


class FlashAdaptiveLoss(DPLossFastGradientAdaptiveClipping):
    """The user's criterion with adaptive clipping: called as before, one backward pass.

    The bound moves at the end of every logical step, in ``optimizer.step()``
    (:mod:`flash_clipping.integration.adaptive`). To make the criterion is enough: any loss of the
    model's outputs then counts.

    Args:
        **kwargs: ``target_unclipped_quantile``, ``min_clipbound``, ``max_clipbound``,
            ``clipbound_learning_rate``, as in Opacus.
    """

    def __init__(
        self, module: Any, optimizer: Any, criterion: Any, loss_reduction: str, **kwargs: Any
    ):
        super().__init__(module, optimizer, criterion, loss_reduction, **kwargs)
        optimizer.adaptive = AdaptiveBound(**kwargs)
        module.running_step.counts_unclipped = True

    def __call__(self, *args: Any, **kwargs: Any) -> FlashTensor:
        args = _arguments(args, kwargs)
        return FlashTensor.of(_counted(DPLossFastGradientClipping.__call__(self, *args, **kwargs)))
