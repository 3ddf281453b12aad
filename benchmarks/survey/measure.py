"""One model against each sample by itself through an ordinary backward.

In float64 samples run alone. In other dtypes, and with dropout, they go backward one by one from
one forward of the batch, as another forward rounds, and draws, otherwise.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.errors import FlashClippingError

#: Largest error of what is exact: many models normalize and take softmax in fp32 at any dtype.
TOLERANCE = 1e-6

#: The same for a model whose code does not run in float64, on a CPU, and for what runs in 32 and in
#: 16 bits, where kernels differ.
TOLERANCE_FLOAT32 = 1e-5
TOLERANCE_32, TOLERANCE_16 = 1e-3, 5e-2

#: Gradients below this part of the whole are rounding, by the tolerance.
SMALL = {TOLERANCE: 1e-3, TOLERANCE_FLOAT32: 1e-3, TOLERANCE_32: 1e-2, TOLERANCE_16: 0.1}

#: In a batch: what the loss reads, and the model does not.
LABELS = "labels of the survey"

#: (what the model returned, the batch, samples) -> a loss of each sample ``[B]``.
Losses = Callable[[Any, Mapping[str, Any], int], Tensor]

#: What a model is called with, and how many samples that is.
Batch = tuple[Mapping[str, Any], int]

#: Outputs that a loss must not read: of all pairs of samples, or caches of the forward.
_NOT_OF_SAMPLES = (
    "logits_per_image",
    "logits_per_text",
    "logits_per_audio",
    "logits_per_video",
    "past_key_values",
    "loss",
)

EXACT, REFUSED, WRONG, MIXES, FAILED = "exact", "refused", "WRONG", "mixes samples", "failed"

#: Dropout falls otherwise than in the plain model, as under ``vmap``: served, and not compared.
DRAWS = "other draws"


@dataclass(frozen=True)
class Outcome:
    """What became of one model: its errors, or the first line of a message."""

    verdict: str
    norms: float = 0.0
    sums: float = 0.0
    message: str = ""
    #: What it warned of.
    notes: tuple[str, ...] = ()


def without_chance(model: nn.Module) -> nn.Module:
    """Nothing is left out at random, so that one sample at a time is the truth for a batch."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            chance = "drop" in name or name in ("mask_time_prob", "mask_feature_prob")
            if isinstance(value, float) and chance:
                setattr(module, name, 0.0)
    return model


def _floats(output: Any, B: int) -> Iterator[Tensor]:
    """What a model returned that has a row for each sample and a gradient."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.requires_grad and output.shape[:1] == (B,):
            yield output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            if name not in _NOT_OF_SAMPLES:
                yield from _floats(value, B)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _floats(value, B)


def losses_of(output: Any, given: Mapping[str, Any], B: int) -> Tensor:
    """``[B]``: a number of each sample that all of its outputs take part in, none of others', and
    no padding."""
    mask = given.get("attention_mask")
    losses: Any = 0
    for x in _floats(output, B):
        if mask is not None and x.dim() >= mask.dim() and x.shape[: mask.dim()] == mask.shape:
            x = torch.where(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())) > 0, x, 0)
        x = torch.where(x.detach().abs() < 1e4, x, 0).double().reshape(B, -1)
        weights = torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype, device=x.device)
        turn = torch.arange(x[0].numel(), dtype=x.dtype, device=x.device).cos().view(x.shape[1:])
        losses = losses + (x.square() * weights / 2 + x * turn).flatten(1).sum(1)
    if not isinstance(losses, Tensor):
        raise ValueError("it returned nothing with a row for each sample and a gradient")
    return losses


def rows_of(batch: Mapping[str, Any], b: int, B: int) -> dict[str, Any]:
    """The inputs of sample ``b`` alone."""
    return {
        name: x[b * (len(x) // B) : (b + 1) * (len(x) // B)] if isinstance(x, Tensor) else x
        for name, x in batch.items()
    }


@dataclass(frozen=True)
class _Truth:
    """Gradients of every parameter ``[B, ...]``, norms ``[P, B]``, losses ``[B]``."""

    grads: dict[str, Tensor]
    norms_PB: Tensor
    losses: Tensor


def _seed() -> None:
    """Every generator that models draw from."""
    import numpy

    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


def _truth(model: nn.Module, of_one: Callable[[int], Tensor], B: int) -> _Truth:
    # No copy, which models with hooks or parametrizations of their own do not allow.
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in params}
    losses = []
    for b in range(B):
        model.zero_grad()
        loss = of_one(b)
        loss.backward(retain_graph=True)
        losses.append(loss.detach())
        for name, p in params.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    model.zero_grad()
    grads = {name: torch.stack(row) for name, row in rows.items()}
    norms = [g.double().reshape(B, -1).norm(dim=1) for g in grads.values()]
    device = losses[0].device
    return _Truth(grads, torch.stack([x.to(device) for x in norms]), torch.stack(losses))


def measure(
    model: nn.Module,
    batch: Mapping[str, Any],
    B: int,
    *,
    then: Sequence[Batch] = (),
    losses: Losses = losses_of,
    chance: bool = False,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    tolerance: float | None = None,
    prepare: Callable[[Any], Any] = lambda model: None,
    **options: Any,
) -> Outcome:
    """A step of ``model``, clipped at the median norm, beside the truth.

    Args:
        then: batches of further steps.
        losses: a loss of each sample.
        chance: dropout stays; norms are those of one forward of the batch, with its draws.
        around: what forwards run in (autocast).
        tolerance: largest relative error; given for 32 and 16 bits, where the truth is of one
            forward as well.
        prepare: what is done to the model once the truth is known (checkpointing).
        options: of the wrapper.
    """
    model = model.train() if chance else without_chance(model.train())
    of_one_forward = chance or tolerance is not None
    double = next(model.parameters()).dtype == torch.float64
    tolerance = tolerance or (TOLERANCE if double else TOLERANCE_FLOAT32)
    batches: list[Batch] = [(batch, B), *then]
    truths, mixes = [], ""

    def losses_in(run: Any, given: Mapping[str, Any], B: int) -> Tensor:
        _seed()
        with around():
            read = {name: x for name, x in given.items() if name != LABELS}
            return losses(run(**read), given, B)

    try:
        for given, n in batches:
            if of_one_forward:
                together = losses_in(model, given, n)
                truth = _truth(model, together.__getitem__, n)
            else:
                truth = _truth(
                    model,
                    lambda b, given=given, n=n: losses_in(model, rows_of(given, b, n), 1)[0],
                    n,
                )
                together = losses_in(model, given, n).detach()
                difference = (together - truth.losses).abs().max() / together.abs().max()
                if not difference <= tolerance:
                    mixes = f"its losses differ by {difference:.0e} from those of one at a time"
            truths.append(truth)
            del together
    except Exception as error:
        return Outcome(FAILED, message=f"{type(error).__name__}: {error}")
    if not all(truth.norms_PB.isfinite().all() for truth in truths):
        return Outcome(FAILED, message="the norms of one sample at a time are not finite")
    bound = truths[0].norms_PB.norm(dim=0).median().item() or 1.0
    found = []
    prepare(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound, **options)
            for (given, n), truth in zip(batches, truths, strict=True):
                model.zero_grad(set_to_none=True)
                losses_B = losses_in(flash, given, n)
                losses_B.mean().backward()
                scale = truth.losses.abs().max().clamp(min=1e-30)
                difference = (losses_B - truth.losses).abs().max() / scale
                if chance and not difference <= tolerance:
                    return Outcome(DRAWS, message=f"losses differ by {difference:.0e}")
                found.append(_errors(flash, model, truth, bound, tolerance))
        except (FlashClippingError, ValueError, NotImplementedError) as error:
            at = f"step {len(found) + 1}: " if found else ""
            if mixes:
                return Outcome(MIXES, message=f"{mixes}; refused: {error}")
            return Outcome(REFUSED, message=f"{at}{error}")
        except Exception as error:
            return Outcome(FAILED, message=f"{type(error).__name__}: {error}")
    notes = tuple(
        str(w.message) for w in caught if "flash" in w.filename or "vmap" in str(w.message)
    )
    norm_error, sum_error = (max(errors) for errors in zip(*found, strict=True))
    if mixes:
        return Outcome(MIXES, norm_error, sum_error, mixes, notes)
    exact = norm_error <= tolerance and sum_error <= tolerance
    return Outcome(EXACT if exact else WRONG, norm_error, sum_error, "", notes)


def _errors(
    flash: Any, model: nn.Module, truth: _Truth, bound: float, tolerance: float
) -> tuple[float, float]:
    """Relative errors of the norms and of the clipped sums that a step has left."""
    norms_B = truth.norms_PB.norm(dim=0)
    found = flash.get_norm_sample().double().to(norms_B.device)
    norm_error = ((found - norms_B).abs() / norms_B.clamp(min=1e-30)).max().item()
    coefs_B = flash.get_clipping_coef().double().to(norms_B.device)
    # They may be a little smaller, never larger: norms are raised to cover what rounding may hide.
    ratio_B = coefs_B * norms_B.clamp(min=1e-30) / norms_B.clamp(max=bound, min=1e-30)
    if not (ratio_B.max() <= 1 + tolerance and ratio_B.min() >= 0.99 - tolerance):
        norm_error = max(norm_error, (ratio_B - 1).abs().max().item())
    total = truth.norms_PB.amax(1).norm().item()
    sum_error = 0.0
    for name, g in truth.grads.items():
        expected = torch.einsum("b,b...->...", coefs_B.to(g.device), g.double())
        grad = model.get_parameter(name).grad
        grad = torch.zeros_like(expected) if grad is None else grad.double()
        scale = max(expected.norm().item(), SMALL[tolerance] * total)
        sum_error = max(sum_error, (grad - expected).norm().item() / max(scale, 1e-30))
    return norm_error, sum_error
