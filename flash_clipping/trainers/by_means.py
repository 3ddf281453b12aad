"""Trainers whose ``compute_loss`` is the mean of the losses of samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.distributed import has_shards
from flash_clipping.errors import InvalidValue
from flash_clipping.trainers.arguments import PrivacyArguments
from flash_clipping.trainers.sample_losses import asking, seeded, tolerance_of
from flash_clipping.trainers.transformers import PrivateTrainer

#: Samples whose gradients are compared with that of a batch of them.
COMPARED = 4


class ByMeans(PrivateTrainer):
    """Trains by a ``compute_loss`` that is the mean of the losses of samples, each a function of
    that sample only; before the first step it is seen on a few samples whether it is."""

    def __init__(self, *arguments: Any, privacy: PrivacyArguments, **kwargs: Any):
        # Rows that fill batches up would count in the mean.
        super().__init__(*arguments, privacy=replace(privacy, few_shapes=False), **kwargs)

    def compute_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The mean of the samples' losses, once for each: ``[B]``. Their sum has the gradient of
        the sum of the samples' own losses."""
        inputs = dict(inputs)
        if self._units is not None and self.run.hooks is None:  # which would take it off
            inputs.pop(str(self._units.name), None)
        loss = self.compute_loss(model, inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InvalidValue(
                f"FC804 {type(self).__name__}: found a compute_loss that returned "
                f"{getattr(loss, 'shape', type(loss).__name__)}; expected one number. {_INSTEAD}"
            )
        return loss.reshape(1).expand(max(1, self._samples))

    def _compare_with_own_loss(self) -> None:
        model, loader = self.accelerator.unwrap_model(self.model), self._loader
        name = type(self).__name__
        if has_shards(model):
            raise InvalidValue(
                f"FC806 {name}: found a compute_loss, and a model in shards, on which it cannot be "
                f"seen that it is the mean of samples' losses. {_INSTEAD}"
            )
        samples = [loader.dataset[n] for n in range(min(COMPARED, len(loader.dataset)))]
        params = [p for p in model.parameters() if p.requires_grad]

        def gradients(of: list[Any]) -> list[Tensor]:
            self._samples = len(of)
            inputs = self._prepare_inputs(loader.collate_fn.part(of))
            with torch.enable_grad(), seeded(model), self.accelerator.autocast():
                loss = self.compute_sample_losses(model, inputs).mean()
            found = torch.autograd.grad(loss, params, allow_unused=True)
            return [
                torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)
            ]

        # Losses of a model that has learnt nothing are alike, however they are weighted.
        with asking(model):
            apart, size = gradients(samples), 0.0
            for sample in samples:
                own = gradients([sample])
                size += float(_norm(own)) / len(samples)
                for total, grad in zip(apart, own, strict=True):
                    total.sub_(grad, alpha=1 / len(samples))
            gap = float(_norm(apart)) / max(size, 1e-30)
            tolerance = tolerance_of(model, apart[0])
        if not gap <= tolerance:
            raise InvalidValue(
                f"FC806 {name}: found a compute_loss whose gradient for {len(samples)} samples of "
                f"train_dataset is not the mean of each one's own (by {gap:.2g} of it). It is no "
                "mean of samples' losses: a mean over all tokens or weights of the batch, say, or "
                f"one that compares samples. {_INSTEAD}"
            )


def _norm(grads: list[Tensor]) -> Tensor:
    return torch.stack([g.float().norm() for g in grads]).norm()


_INSTEAD = """Write the loss of each sample:
    class Mine(private(TheirTrainer)):
        def compute_sample_losses(self, model, inputs):  # [B], not reduced
            ..."""
