"""A user's model, batch and loss, and the truth that flash clipping is compared with: gradients of
one sample at a time, in float64.

Shape suffixes: ``B`` samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping.capture.declared_rows import parts_of_samples
from flash_clipping.capture.inputs import map_tensors, tensors_in
from flash_clipping.capture.no_trace import random_state
from flash_clipping.capture.proof import batches
from flash_clipping.engine.grad_sample_module import GradSampleModuleFlashClipping
from flash_clipping.errors import InvalidValue
from flash_clipping.finish.clipping import NORM_EPSILON

#: ``loss(model, batch)``: one loss per sample, or a scalar reduced over the samples.
Loss = Callable[[Any, Any], Tensor]


class BadBatchError(InvalidValue):
    """A batch or a loss that no check can be made with; the message says what to change."""


class Samples(batches.Samples):
    """A batch of a model, and batches of its samples."""

    def __init__(self, batch: Any, batch_first: bool, model: nn.Module):
        axis = 0 if batch_first else 1
        parts = parts_of_samples(model, batch) if isinstance(batch, Mapping) else {}
        super().__init__((batch,), {}, axis, parts=parts)
        if not any(x.dim() > axis for x in self.tensors):
            raise BadBatchError(
                f"FC922 The batch ({type(batch).__name__}) holds no tensor with a batch axis "
                f"(axis {axis}). Return tensors, or tuples, lists or dicts of tensors."
            )
        if self.count == 0:
            raise BadBatchError("FC922 The batch is empty: there is no sample to check.")
        self.all = batch
        self.notes = [
            f"A tensor of shape {tuple(x.shape)} in the batch has no axis of {self.count} "
            "samples: every sample sees all of it."
            for x in self.leaves
            if x.dim() and self._axis_of(x) is None and id(x) not in self._parts
        ]

    def take(self, samples: Sequence[int]) -> Any:
        """A batch of these samples."""
        (batch,), _ = self.batch(samples)
        return batch


@dataclass(frozen=True)
class Task:
    """A model with a batch and a loss.

    Attributes:
        model: the plain model, without dropout; copies of it run.
        samples: of the batch.
        loss, reduction: the loss, and how a scalar one is reduced over samples.
        batch_first: samples are axis 0.
        seed: of every forward.
    """

    model: nn.Module
    samples: Samples
    loss: Loss
    reduction: str
    batch_first: bool
    seed: int

    def total(self, batch: Any, model: Any = None, seed: int = 0) -> Tensor:
        """The loss of a batch as a scalar, by this model or another one; the generators are left as
        they were."""
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        devices = [torch.device("cuda", n) for n in range(count)]
        with random_state(devices, (self.seed + seed) % 2**32):  # as NumPy takes it
            losses = self.loss(self.model if model is None else model, batch)
        if not isinstance(losses, Tensor) or losses.dim() > 1:
            found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
            raise BadBatchError(
                "FC462 loss(model, batch) must return one loss per sample, [B], or a scalar "
                f"tensor; found {found[:200]}."
            )
        if isinstance(model, GradSampleModuleFlashClipping):
            model.check_losses(losses)
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def value(self, batch: Any, seed: int = 0) -> float:
        """The same as a number."""
        return float(self.total(batch, seed=seed).detach())  # models may take gradients in forward

    def in_float64(self) -> Task:
        """The same of a copy of the model in float64; an error where that does not run."""
        model, batch = copy.deepcopy(self.model), cast(self.samples.all, torch.float64)
        samples = Samples(batch, self.batch_first, model.double())
        exact = replace(self, model=model, samples=samples)
        exact.value(batch)
        return exact


def squared_outputs(batch_first: bool) -> Loss:
    """The loss when the user gives none: a weighted square, so that no gradient is constant."""

    def loss(model: Any, batch: Any) -> Tensor:
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
        parts = []
        for x in tensors_in(output):
            if x.is_floating_point() and x.dim() > 1:
                x_BF = (x if batch_first else x.transpose(0, 1)).flatten(1)
                weight_F = torch.linspace(0.5, 1.5, x_BF.shape[1], device=x.device, dtype=x.dtype)
                parts.append((x_BF.square() * weight_F).mean(1))
        if not parts:
            raise BadBatchError(
                f"FC922 The model's output ({type(output).__name__}) holds no floating-point "
                "tensor [B, ...] to make a loss of. Give a loss: return (model, batch, loss)."
            )
        return torch.stack(parts).sum(0)

    return loss


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree, packed=True)


_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            vars(module)["p"] = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            vars(module)["dropout"] = 0.0  # nn.MultiheadAttention and recurrent layers
    return model


# -- the truth -------------------------------------------------------------------------------------

#: Relative error allowed, by the narrowest dtype that takes part: the last of these. The oracle
#: computes in float64, so the rounding of the model's own forward and backward is in the error.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

#: A parameter's error is relative to its own norm, but never to less than this part of the norm
#: over all parameters: some gradients are zero but for rounding (a key bias before a softmax).
FLOOR = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}

_TINY = 1e-300


class Oracle:
    """Per-sample gradients by plain autograd, one sample at a time; norms and sums in float64.

    Attributes:
        norms_B: of every sample, over all trainable parameters; on the CPU.
        param_norms: the same of each parameter, by name.
        sums: clipped sums.
        reached: names of parameters that the loss depends on.
    """

    def __init__(self, task: Task, max_grad_norm: float):
        params = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
        zeros_B = torch.zeros(task.samples.count, dtype=torch.float64)
        self.norms_B = zeros_B.clone()
        self.param_norms = {name: zeros_B.clone() for name in params}
        self.sums = {
            name: torch.zeros_like(p, dtype=torch.float64, requires_grad=False)
            for name, p in params.items()
        }
        self.reached: set[str] = set()
        for b in range(task.samples.count):
            task.model.zero_grad(set_to_none=True)
            loss = task.total(task.samples.take([b]))
            if loss.requires_grad:
                loss.backward()
            grads = {name: p.grad for name, p in params.items() if p.grad is not None}
            self.reached |= grads.keys()
            plain = {
                name: (grad if grad.layout == torch.strided else grad.to_dense()).double()
                for name, grad in grads.items()
            }
            for name, grad in plain.items():
                self.param_norms[name][b] = torch.linalg.vector_norm(grad)
            norm = math.hypot(*(float(norms_B[b]) for norms_B in self.param_norms.values()))
            self.norms_B[b] = norm
            if math.isfinite(norm):
                coef = min(1.0, max_grad_norm / (norm + NORM_EPSILON))
                for name, grad in plain.items():
                    self.sums[name] += coef * grad


def largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def typical(norms_B: Tensor) -> float:
    """The median of those that are finite."""
    finite = norms_B[norms_B.isfinite()]
    return float(finite.quantile(0.5)) if len(finite) else 0.0


def largest_error(found: Tensor, expected: Tensor, least: Tensor | float) -> float:
    """Largest ``|found - expected| / max(|expected|, least)``; infinite where one of the two is
    finite and the other is not."""
    found = found.to(expected.device).double()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return math.inf
    scale = expected.abs().clamp(min=_TINY).maximum(torch.as_tensor(least).to(expected))
    return largest(((found - expected).abs() / scale).nan_to_num(nan=0.0))
