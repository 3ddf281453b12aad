"""Trainers whose ``compute_loss`` is the mean of the losses of samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from flash_clipping.capture.inputs import tensors_in
from flash_clipping.distributed import has_shards
from flash_clipping.errors import InvalidValue
from flash_clipping.trainers.arguments import PrivacyArguments
from flash_clipping.trainers.sample_losses import asking, seeded, tolerance_of
from flash_clipping.trainers.transformers import PrivateTrainer

#: Samples that are collated, and the most whose gradients are compared with that of a batch.
COLLATED, COMPARED = 32, 8


class ByMeans(PrivateTrainer):
    """Trains by a ``compute_loss`` that is the mean of the losses of samples, each a function of
    that sample only; before the first step a few samples show whether it is."""

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

    def _varied(self) -> list[Any]:
        """Samples of ``train_dataset`` with the most and the least of something: positions, say, or
        the number of a class. Losses that weigh samples by it are means where it is the same."""
        dataset, collate = self._loader.dataset, self._loader.collate_fn
        some = [dataset[n] for n in range(0, len(dataset), -(-len(dataset) // COLLATED))]
        inside = [tensors_in(collate.part([sample])) for sample in some]
        rows = [[x.numel() for x in found] + [float(x.sum()) for x in found] for found in inside]
        ends = [c.index(end(c)) for c in zip(*rows, strict=False) for end in (max, min)]
        return [some[n] for n in dict.fromkeys([*ends, *range(len(some))])][:COMPARED]

    def _compare_with_own_loss(self) -> None:
        model, loader = self.accelerator.unwrap_model(self.model), self._loader
        name = type(self).__name__
        if has_shards(model):
            raise InvalidValue(
                f"FC806 {name}: found a compute_loss, and a model in shards, on which it cannot be "
                f"seen that it is the mean of samples' losses. {_INSTEAD}"
            )
        collate, params = loader.collate_fn, [p for p in model.parameters() if p.requires_grad]

        def gradients(of: list[Any]) -> list[Tensor]:
            self._samples = len(of)
            inputs = self._prepare_inputs(collate.part(of))
            with torch.enable_grad(), seeded(model), self.accelerator.autocast():
                loss = self.compute_sample_losses(model, inputs).mean()
            found = torch.autograd.grad(loss, params, materialize_grads=True)
            return [g.clone() for g in found]  # of two parameters it may be one tensor

        # Losses of a model that has learnt nothing are alike, however they are weighted.
        with asking(model):
            samples, size = self._varied(), 0.0
            # Some of them several times, as classes are: as many as a part of a step has.
            drawn = [n for n in range(len(samples)) for _ in range(1 + n % 3)] * collate.part_size
            drawn = drawn[: min(collate.most, max(COMPARED, collate.part_size))]
            model.training = True  # of the root alone, which losses ask: layers draw nothing
            apart = gradients([samples[n] for n in drawn])
            for n in {*drawn}:
                own, share = gradients([samples[n]]), drawn.count(n) / len(drawn)
                size += share * float(get_total_norm(own))
                for total, grad in zip(apart, own, strict=True):
                    total.sub_(grad, alpha=share)
            gap = float(get_total_norm(apart)) / size if size else math.inf
        with self.accelerator.autocast():
            tolerance = tolerance_of(model, apart[0])
        if not gap <= tolerance:
            raise InvalidValue(
                f"FC806 {name}: found a compute_loss whose gradient for {len(drawn)} samples of "
                f"train_dataset is not the mean of each one's own (by {gap:.2g} of it). It is no "
                "mean of samples' losses: a mean over all tokens or weights of the batch, say, or "
                f"one that compares samples. {_INSTEAD}"
            )


_INSTEAD = """Write the loss of each sample:
    class Mine(private(TheirTrainer)):
        def compute_sample_losses(self, model, inputs):  # [B], not reduced
            ..."""
