"""Do the methods compute the same thing? Asked before anything is timed.

All methods that clip by the norm over all parameters take one step on the same weights and the
same batch. Two figures are compared with a reference method's:

* norms: largest relative difference of a sample's gradient norm;
* gradients: ``|g - r| / |r|`` of the clipped sums over all parameters.

Where a method tells its coefficients, one more is told: by how much at most it clips a sample
further than its norm asks for, as rounding may hide a part of it.

The reference is none of them: the plain model on one sample at a time, by ordinary autograd, in
the next wider dtype with the weights that the methods have (:func:`one_at_a_time`): fp32 for 16
bits, fp64 for fp32. Where one of ours is off by more than :data:`TOLERANCE`, the same is done once
more in the methods' own dtype. What that is off by is the model's rounding, which no method can be
blamed for: a method may be off by :data:`MARGIN` times as much. Only a method of ours that is
further off is an error; a peer's row says it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.methods import Method, Setting
from benchmarks.workload import loss
from flash_clipping.diagnostics.oracle import Oracle, Samples, Task, cast

MARGIN = 3.0
"""A method may be off by so many times the rounding of the plain model in the same dtype."""

TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}


@dataclass
class Fingerprint:
    """What a method computed for one batch."""

    norms_B: Tensor | None
    coefficients_B: Tensor | None
    gradients: list[Tensor] | None


@dataclass(frozen=True)
class Errors:
    """Relative errors of a method, or what is allowed of them; None where there is nothing."""

    norms: float | None
    gradients: float | None

    def exceed(self, allowed: Errors) -> bool:
        pairs = (self.norms, allowed.norms), (self.gradients, allowed.gradients)
        return any(e is not None and (limit is None or not e <= limit) for e, limit in pairs)

    @property
    def largest(self) -> float:
        return max(e for e in (self.norms, self.gradients, 0.0) if e is not None)


def allowed(
    dtype: torch.dtype, rounding: Errors | None, reference: torch.dtype | None = None
) -> Errors:
    """What a method may be off by, given the plain model's own rounding in its dtype. Of a
    ``reference`` in the same dtype both are rounded, by errors of one size that do not depend on
    each other."""
    tolerance = TOLERANCE[dtype] * (2**0.5 if reference == dtype != torch.float64 else 1)
    if rounding is None:
        return Errors(tolerance, tolerance)
    both = rounding.norms or 0.0, rounding.gradients or 0.0
    return Errors(*(max(tolerance, MARGIN * error) for error in both))


def reference_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of the reference for methods in ``dtype``."""
    return torch.float32 if dtype.itemsize < 4 else torch.float64


def one_at_a_time(
    setting: Setting,
    inputs: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    checkpointing: bool = False,
) -> Fingerprint:
    """Norms and clipped sum of the plain model's gradients, one sample after the other.

    ``dtype`` is that of forward and backward; norms and sums are taken in fp64. ``checkpointing``
    takes less memory, of models of ``transformers``.
    """
    model = setting.build().to(dtype)
    if checkpointing:
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing_enable"):
                module.gradient_checkpointing_enable({"use_reentrant": False})
                break
    samples = Samples(cast((inputs, targets), dtype), True, model)
    task = Task(model, samples, _loss, "mean", batch_first=True, seed=setting.seed)
    oracle = Oracle(task, setting.max_grad_norm)
    return Fingerprint(oracle.norms_B, None, [*map(_kept, oracle.sums.values())])


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss(model(batch[0]), batch[1])


def _kept(total: Tensor) -> Tensor:
    """Where it is, while half of a GPU's memory is free; else on the CPU, which takes seconds."""
    if total.device.type == "cuda":
        free, all_of_it = torch.cuda.mem_get_info(total.device)
        free += torch.cuda.memory_reserved(total.device) - torch.cuda.memory_allocated(total.device)
        return total if free > 0.5 * all_of_it else total.cpu()
    return total


def fingerprint(method: Method, inputs: Tensor, targets: Tensor) -> Fingerprint:
    method.zero_grad()
    if method.graph:  # what is compared is what will be timed: a replay
        for _ in range(method.settling + 1):
            method.backward(inputs, targets)
            method.zero_grad()
    method.backward(inputs, targets)
    norms_B, coefs_B, gradients = method.norms(), method.coefficients(), method.gradients()
    taken = Fingerprint(
        None if norms_B is None else norms_B.detach().double().cpu(),
        None if coefs_B is None else coefs_B.detach().double().cpu(),
        None if gradients is None else [_kept(g.detach().clone()) for g in gradients],
    )
    method.zero_grad()
    return taken


def shortened(taken: Fingerprint, max_grad_norm: float) -> Tensor | None:
    """By how much each clipped sample is shorter than ``max_grad_norm``, relative to it; None where
    the method tells no coefficients."""
    if taken.coefficients_B is None or taken.norms_B is None:
        return None
    clipped_B = taken.coefficients_B < 1
    return 1 - (taken.coefficients_B * taken.norms_B / max_grad_norm)[clipped_B]


def errors(ours: Fingerprint, reference: Fingerprint) -> Errors:
    """Infinite where a number is not finite."""
    norms = gradients = None
    if ours.norms_B is not None and reference.norms_B is not None:
        difference_B = (ours.norms_B - reference.norms_B).abs()
        norms = (difference_B / reference.norms_B.clamp_min(1e-30)).max().item()
    if ours.gradients is not None and reference.gradients is not None:
        difference = total = 0.0
        fast = "cuda" if torch.cuda.is_available() else "cpu"  # of billions of elements
        for mine, theirs in zip(ours.gradients, reference.gradients, strict=True):
            expected = theirs.to(fast).float()
            difference += torch.linalg.vector_norm(mine.to(fast).float() - expected).item() ** 2
            total += torch.linalg.vector_norm(expected).item() ** 2
        gradients = (difference / max(total, 1e-60)) ** 0.5
    return Errors(*(math.inf if e is not None and math.isnan(e) else e for e in (norms, gradients)))
