"""A step is looked at once before it is captured: what a replay would not do is refused."""

from __future__ import annotations

import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from flash_clipping._compat import memory_id
from flash_clipping.engine.grad_sample_module import GradSampleHooksFlashClipping
from flash_clipping.errors import FlashClippingError


def rehearse(
    run: Callable[[], Any],
    module: nn.Module,
    models: Sequence[GradSampleHooksFlashClipping],
    device: torch.device,
) -> Any:
    """Run a step as it is, before it is captured; ``FlashClippingError`` where a replay would be
    something else."""
    params = [p for p in module.parameters() if p.requires_grad]
    weights = [p._version for p in params]
    held = [(p, p.grad, p.grad._version) for p in params if p.grad is not None]
    held = [each for each in held if each[1].layout == torch.strided]
    counts = [wrapped.running_step.clipped_backwards for wrapped in models]
    randomness = _randomness_of_the_host()
    with _no_waiting(device), _as_if_captured():
        output = run()
    if randomness != _randomness_of_the_host():
        refuse(
            "draws random numbers on the host (random, numpy.random, torch's CPU generator), "
            "which every replay would find as they were drawn for the capture. Draw on the "
            "GPU, or before the step, and pass them as an argument"
        )
    if weights != [p._version for p in params]:
        refuse("changes parameters. Call the optimizer's step() outside")
    # How often a model in one pass has added to its gradients; others are not known to count.
    additions = {
        id(param): wrapped.running_step.clipped_backwards - count
        for wrapped, count in zip(models, counts, strict=True)
        if wrapped.mode == "one_pass" and wrapped._session.enabled
        for param in wrapped.trainable_parameters
    }
    # Gradients in one memory, as views of one sum are, count their changes together.
    most: dict[int, float] = {}
    for param, grad, _ in held:
        memory = memory_id(grad.untyped_storage())
        most[memory] = most.get(memory, 0) + additions.get(id(param), math.inf)
    for param, grad, version in held:
        changes = grad._version - version
        if param.grad is not grad or changes > most[memory_id(grad.untyped_storage())]:
            refuse(
                "clears gradients, or does more to them than adding, which no replay would do. "
                "Call zero_grad() outside"
            )
    return output


def _randomness_of_the_host() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))
    return random.getstate(), torch.get_rng_state().tolist(), of_numpy


@contextmanager
def _as_if_captured() -> Iterator[None]:
    """Take the way that the capture will take: who asks whether a graph is being captured hears
    that one is. ``transformers`` looks into its masks, and waits for them, in no capture."""
    before = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = before


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """Refuse what waits for the device, which a capture could not hold."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        refuse(
            f"waits for the device ({error}), which no CUDA graph can. Take item(), print() of "
            "values, nonzero() and copies to the CPU out of it",
            error,
        )
    finally:
        torch.cuda.set_sync_debug_mode(before)


def refuse(what: str, cause: Exception | None = None) -> NoReturn:
    """Say why a step cannot be replayed."""
    raise FlashClippingError(
        f"GraphedStep: the step {what}, or call it without GraphedStep."
    ) from cause
