"""The truth that flash clipping is compared with, and the error between the two."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flash_clipping.diagnostics.batch import Samples, Task, cast
from flash_clipping.diagnostics.sections import section_axis
from flash_clipping.finish.clipping import NORM_EPSILON

#: Relative error allowed, by the narrowest dtype that takes part. The oracle computes everything in
#: float64, so the rounding of the model's own forward and backward is part of the error.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}

#: A parameter's error is relative to its own norm, but never to less than this part of the norm
#: over all parameters: some gradients are zero but for rounding (a key bias before a softmax).
FLOOR = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}

_TINY = 1e-300


class Oracle:
    """Per-sample gradients by plain autograd, one sample at a time, in float64.

    With ``dtype=None`` the model keeps its own dtype; norms and sums are float64 all the same.
    """

    def __init__(
        self,
        plain: nn.Module,
        task: Task,
        samples: Samples,
        max_grad_norm: float,
        sections: Mapping[str, Sequence[str]],
        dtype: torch.dtype | None = torch.float64,
    ):
        model = copy.deepcopy(plain)
        if dtype is not None:
            model = model.to(dtype)
        params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        norms: list[float] = []
        param_norms: dict[str, list[float]] = {name: [] for name in params}
        self.sums = {
            n: torch.zeros_like(p, dtype=torch.float64, requires_grad=False)
            for n, p in params.items()
        }
        self.reached = dict.fromkeys(params, False)
        section_norms: dict[str, list[list[float]]] = {
            n: [[] for _ in s] for n, s in sections.items()
        }
        losses = []
        for b in range(samples.size):
            model.zero_grad(set_to_none=True)
            sample = samples.take([b])
            loss = task(model, sample if dtype is None else cast(sample, dtype))
            losses.append(float(loss.detach()))
            if loss.requires_grad:
                loss.backward()
            grads = {name: param.grad for name, param in params.items() if param.grad is not None}
            for name, param in params.items():
                grad = grads.get(name)
                self.reached[name] |= grad is not None
                grad = torch.zeros_like(param) if grad is None else grad
                grad = grad.to_dense() if grad.layout != torch.strided else grad
                grads[name] = grad.double()
                param_norms[name].append(float(torch.linalg.vector_norm(grads[name])))
            norms.append(math.hypot(*(param_norms[name][b] for name in params)))
            for name in sections.keys() & params.keys():
                axis = section_axis(model, name)
                chunks = grads[name].chunk(len(sections[name]), axis)
                for collected, chunk in zip(section_norms[name], chunks, strict=True):
                    collected.append(float(torch.linalg.vector_norm(chunk)))
            if math.isfinite(norms[b]):
                coef = min(1.0, max_grad_norm / (norms[b] + NORM_EPSILON))
                for name, grad in grads.items():
                    self.sums[name] += coef * grad
        self.norms = tuple(norms)
        self.param_norms = {name: tuple(values) for name, values in param_norms.items()}
        self.section_norms = {
            name: [tuple(values) for values in parts] for name, parts in section_norms.items()
        }
        self.loss = math.fsum(losses) / (samples.size if task.reduction == "mean" else 1)
        self.largest_sum = max(
            (float(total.abs().max()) for total in self.sums.values() if total.numel()), default=0.0
        )


def largest_norm_error(
    found: Sequence[float], expected: Sequence[float], whole: Sequence[float], floor: float
) -> float:
    """Largest ``|found - expected| / max(expected, floor * whole)`` over the samples."""
    worst = 0.0
    for f, e, w in zip(found, expected, whole, strict=True):
        if not math.isfinite(e):
            error = 0.0 if not math.isfinite(f) else math.inf
        else:
            scale = max(e, floor * w if math.isfinite(w) else 0.0, _TINY)
            error = abs(f - e) / scale if f != e else 0.0
        if not error <= worst:  # also NaN
            worst = error if not math.isnan(error) else math.inf
    return worst


def largest_sum_error(found: Tensor, expected: Tensor, floor: float) -> float:
    """``max |found - expected| / max(max |expected|, floor)``."""
    if not expected.numel():
        return 0.0
    difference = float((found.to(expected.device).double() - expected).abs().max())
    error = difference / max(float(expected.abs().max()), floor, _TINY) if difference else 0.0
    return error if not math.isnan(error) else math.inf


def close(found: float, expected: float, tolerance: float) -> bool:
    if not (math.isfinite(found) and math.isfinite(expected)):
        return math.isfinite(found) == math.isfinite(expected)
    return abs(found - expected) <= 10 * tolerance * max(abs(expected), _TINY)
