"""What a wrapped model leaves when its backward passes are captured, and when they are replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flash_clipping.capture.draws import DrawnBatch
from flash_clipping.capture.graphed_results import GraphedResults
from flash_clipping.engine import norms
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.finish.clipping import total_norm


@contextmanager
def captures(model: GradSampleHooksFlashClipping) -> Iterator[GraphedResults]:
    """Let backward passes be captured as a CUDA graph. What reads norms meanwhile reads those
    that replays will write; afterwards the norms are again those from before."""
    params = model.trainable_parameters
    rows = norms.published_rows(params)
    total_B: Any = getattr(model, "per_sample_gradient_norms", None)
    upper = model.upper_bounds
    if params:
        model._session.padding.prepare(params[0].device)
    try:
        with model._session.captures() as captured:
            yield captured
    finally:
        norms.put_back(params, rows)
        model.per_sample_gradient_norms = total_B
        model.upper_bounds = upper


def take_over(
    model: GradSampleHooksFlashClipping, captured: GraphedResults, draw: DrawnBatch | None
) -> None:
    """Leave what the backward passes of a replayed CUDA graph would have left, of this batch."""
    step = model.running_step
    for number, (params, norms_PB, upper) in enumerate(captured.norms):
        if not number:
            step.begin_backward(params, model.clipping, model.grad_accumulation_allowed)
        model.upper_bounds = upper.clone()
        norms_PB = norms_PB.clone()
        norms.publish(params, norms_PB)
        total_B = model.per_sample_gradient_norms = total_norm(norms_PB)
        step.count_backward(total_B, draw)
    for coef in captured.coefs:
        model._session.non_finite.note(coef)
