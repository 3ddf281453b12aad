"""What the clipped sums of one logical step were clipped by: the noise follows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flash_clipping.capture.draws import DrawnBatch, of_one_draw
from flash_clipping.errors import FlashClippingError

#: One bound, or one for each trainable parameter (per-layer clipping).
Bound = float | list[float]


@dataclass(frozen=True)
class StepRecord:
    """What the sums of one logical step have in common.

    Attributes:
        bound: what the samples were clipped by; a tuple with one for each parameter when per layer.
        clipping: how they were clipped.
        backwards: backward passes that the sums add up.
        params: ``id`` of every parameter that has a sum.
        unclipped: adaptive clipping: over all samples, the sum of 1/2 for each one within the bound
            and of -1/2 for each other one; ``[]``.
        draw: the loader's batch whose samples they are, if that is known.
    """

    bound: float | tuple[float, ...]
    clipping: str
    backwards: int = 1
    params: frozenset[int] = frozenset()
    unclipped: Tensor | None = None
    draw: DrawnBatch | None = None

    @property
    def sensitivity(self) -> float:
        """How far one sample can move all sums together."""
        return total_bound(self.bound)

    def check_same_bound(self, bound: float | tuple[float, ...], clipping: str) -> None:
        """Raise unless a further backward pass of this step clips alike.

        Raises:
            FlashClippingError: the bound, or the way to clip, has changed within the step.
        """
        if (bound, clipping) == (self.bound, self.clipping):
            return
        found = f"clipping={clipping!r}, max_grad_norm={_shown(bound)}"
        raise FlashClippingError(
            f"This backward pass clips by {found}, but the step that it belongs to has been "
            f"clipped by clipping={self.clipping!r}, max_grad_norm={_shown(self.bound)} so far, "
            "and its noise is for that. Change the bound between steps: after optimizer.step(), "
            "not skipped, and before the next backward(). Or let go of the step first: "
            "optimizer.zero_grad(), after skipped steps also optimizer.discard_step()."
        )

    def plus(self, later: StepRecord) -> StepRecord:
        """The record of these sums and of those of a later part of the same step.

        Raises:
            FlashClippingError: the parts were clipped differently, have other parameters, or are
                of several draws.
        """
        self.check_same_bound(later.bound, later.clipping)
        if self.params != later.params:
            raise FlashClippingError(
                "The parts of this step have clipped sums of different parameters: "
                f"{len(self.params)} until now, {len(later.params)} in this one. Freeze and "
                "unfreeze parameters (requires_grad) between steps, not between the parts of one; "
                "optimizer.discard_step() lets go of the parts."
            )
        return replace(
            later,
            backwards=max(self.backwards, later.backwards),
            unclipped=added(self.unclipped, later.unclipped),
            draw=of_one_draw((self.draw, later.draw)),
        )


def added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of what there is."""
    if first is None or second is None:
        return first if second is None else second
    return first + second


def checked_bound(value: Any) -> Bound:
    """A clipping bound as it is kept: a float, or a list of one for each parameter.

    Raises:
        ValueError: a bound is not a positive number.
    """
    bound: Bound = [float(one) for one in value] if isinstance(value, Sequence) else float(value)
    if not all(one > 0 for one in (bound if isinstance(bound, list) else [bound])):
        raise ValueError(f"max_grad_norm={value!r}: expected positive numbers.")
    return bound


def total_bound(bound: float | Sequence[float]) -> float:
    """The sensitivity of the sum: the bound, or the norm of the bounds of all parameters."""
    return math.hypot(*bound) if isinstance(bound, Sequence) else bound


def rescaled(bound: Bound, value: Any) -> Bound:
    """What a bound becomes when it is set to ``value``.

    Bounds of many parameters keep their proportions when one number is given, which becomes their
    norm: clipping schedulers of Opacus know one number only.
    """
    if isinstance(bound, list) and not isinstance(value, Sequence):
        total = checked_bound(value)
        assert isinstance(total, float)
        factor = total / total_bound(bound)
        return [one * factor for one in bound]
    return checked_bound(value)


def _shown(bound: float | tuple[float, ...]) -> str:
    if not isinstance(bound, tuple):
        return f"{bound:.6g}"
    return f"{len(bound)} bounds of norm {total_bound(bound):.6g}"
