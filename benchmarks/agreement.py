"""Do the methods compute the same thing? Asked before anything is timed.

All methods that clip by the norm over all parameters take one step on the same weights and the
same batch. Two figures are compared with a reference method's:

* norms: largest relative difference of a sample's gradient norm;
* gradients: ``|g - r| / |r|`` of the clipped sums over all parameters.

Where a method tells its coefficients, two more are told: by how much at most it clips a sample
further than its norm asks for, as rounding may hide a part of it, and the share of the samples for
which that is more than :data:`DOUBTFUL`.

The reference is Opacus, hooks first (it has the per-sample gradients themselves), ghost where
hooks is not asked for or does not fit; where neither runs, the first method that tells its norms
is what the others are compared with. Tolerances are for the reference's rounding as much as for
ours: in bf16 and fp16, Opacus rounds norms to the model's dtype at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.methods import Method

REFERENCES = ("opacus-hooks", "opacus-ghost")

DOUBTFUL = 1e-3
"""A sample is doubtful if it is clipped further than its measured norm asks for by this much."""

TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}


@dataclass
class Fingerprint:
    """What a method computed for one batch, kept on the CPU."""

    norms_B: Tensor | None
    coefficients_B: Tensor | None
    gradients: list[Tensor] | None


def fingerprint(method: Method, inputs: Tensor, targets: Tensor) -> Fingerprint:
    method.zero_grad()
    if method.setting.graph:  # what is compared is what will be timed: a replay
        for _ in range(method.settling + 1):
            method.backward(inputs, targets)
            method.zero_grad()
    method.backward(inputs, targets)
    norms_B, coefs_B, gradients = method.norms(), method.coefficients(), method.gradients()
    taken = Fingerprint(
        None if norms_B is None else norms_B.detach().double().cpu(),
        None if coefs_B is None else coefs_B.detach().double().cpu(),
        None if gradients is None else [g.detach().to("cpu", copy=True) for g in gradients],
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


def norm_error(ours: Fingerprint, reference: Fingerprint) -> float | None:
    """None where one of the two does not tell its norms; infinite where one is not finite."""
    if ours.norms_B is None or reference.norms_B is None:
        return None
    difference_B = (ours.norms_B - reference.norms_B).abs()
    error = (difference_B / reference.norms_B.clamp_min(1e-30)).max().item()
    return error if error == error else float("inf")


def gradient_error(ours: Fingerprint, reference: Fingerprint) -> float | None:
    if ours.gradients is None or reference.gradients is None:
        return None
    difference = total = 0.0
    for mine, theirs in zip(ours.gradients, reference.gradients, strict=True):
        difference += torch.linalg.vector_norm(mine.float() - theirs.float()).item() ** 2
        total += torch.linalg.vector_norm(theirs.float()).item() ** 2
    error = (difference / max(total, 1e-60)) ** 0.5
    return error if error == error else float("inf")
