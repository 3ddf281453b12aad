"""One model against one sample at a time through an ordinary backward, in float64.

Shape suffixes: ``B`` samples, ``P`` parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flash_clipping import GradSampleModuleFlashClipping
from flash_clipping.errors import FlashClippingError

#: Largest error of what is exact: many models normalize and take softmax in fp32 at any dtype.
TOLERANCE = 1e-6

#: The same for a model whose code does not run in float64.
TOLERANCE_FLOAT32 = 1e-5

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


def losses_of(output: Any, B: int) -> Tensor:
    """``[B]``: a number of each sample that all of its outputs take part in, none of others'."""
    losses = torch.zeros(B, dtype=torch.float64)
    for x in _floats(output, B):
        x = torch.where(x.detach().abs() < 1e4, x, 0).double().reshape(B, -1)
        weights = torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)
        turn = torch.cos(torch.arange(x[0].numel(), dtype=x.dtype)).view(x.shape[1:])
        losses = losses + (x.square() * weights / 2 + x * turn).flatten(1).sum(1)
    return losses


def rows_of(batch: Mapping[str, Any], b: int, B: int) -> dict[str, Any]:
    """The inputs of sample ``b`` alone."""
    return {
        name: x[b * (len(x) // B) : (b + 1) * (len(x) // B)] if isinstance(x, Tensor) else x
        for name, x in batch.items()
    }


def measure(model: nn.Module, batch: Mapping[str, Any], B: int, **options: Any) -> Outcome:
    """A step of ``model``, clipped at the median norm, beside the truth."""
    model = without_chance(model.train())
    double = next(model.parameters()).dtype == torch.float64
    tolerance = TOLERANCE if double else TOLERANCE_FLOAT32
    # No copy, which models with hooks or parametrizations of their own do not allow.
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in params}
    alone = []
    try:
        for b in range(B):
            model.zero_grad()
            loss = losses_of(model(**rows_of(batch, b, B)), 1)[0]
            loss.backward()
            alone.append(loss.detach())
            for name, p in params.items():
                rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
        together = losses_of(model(**batch), B).detach()
        model.zero_grad()
    except Exception as error:
        return Outcome(FAILED, message=f"{type(error).__name__}: {error}")
    difference = (together - torch.stack(alone)).abs().max() / together.abs().max()
    grads = {name: torch.stack(row) for name, row in rows.items()}
    norms_PB = torch.stack([g.reshape(B, -1).norm(dim=1) for g in grads.values()])
    norms_B = norms_PB.norm(dim=0)
    if not norms_B.isfinite().all():
        return Outcome(FAILED, message="the norms of one sample at a time are not finite")
    if not difference <= tolerance:
        mixes = f"its losses differ by {difference:.0e} from those of one sample at a time"
    else:
        mixes = ""
    bound = norms_B.median().item() or 1.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            flash = GradSampleModuleFlashClipping(model, max_grad_norm=bound, **options)
            losses_of(flash(**batch), B).mean().backward()
            found: Any = flash.get_norm_sample()
        except (FlashClippingError, ValueError, NotImplementedError) as error:
            if mixes:
                return Outcome(MIXES, message=mixes + "; refused: " + str(error))
            return Outcome(REFUSED, message=str(error))
        except Exception as error:
            return Outcome(FAILED, message=f"{type(error).__name__}: {error}")
    notes = tuple(
        str(w.message) for w in caught if "flash" in w.filename or "vmap" in str(w.message)
    )
    norm_error = ((found.double() - norms_B).abs() / norms_B.clamp(min=1e-30)).max().item()
    coefs_B = flash.get_clipping_coef().double()
    # They may be a little smaller, never larger: norms are raised to cover what rounding may hide.
    ratio_B = coefs_B * norms_B.clamp(min=1e-30) / norms_B.clamp(max=bound, min=1e-30)
    if not (ratio_B.max() <= 1 + tolerance and ratio_B.min() >= 0.99):
        norm_error = max(norm_error, (ratio_B - 1).abs().max().item())
    total = norms_PB.amax(1).norm().item()
    sum_error = 0.0
    for name, g in grads.items():
        expected = torch.einsum("b,b...->...", coefs_B, g.double())
        grad = model.get_parameter(name).grad
        grad = torch.zeros_like(expected) if grad is None else grad.double()
        scale = max(expected.norm().item(), 1e-3 * total)
        sum_error = max(sum_error, (grad - expected).norm().item() / max(scale, 1e-30))
    exact = norm_error <= tolerance and sum_error <= tolerance
    if mixes:
        return Outcome(MIXES, norm_error, sum_error, mixes, notes)
    return Outcome(EXACT if exact else WRONG, norm_error, sum_error, "", notes)
