"""A clipping bound that follows a quantile of the norms (Andrew, Thakkar, McMahan and Ramaswamy
2021), in exact accounting.

A step clips by one bound ``C`` and releases two things: the clipped sum with noise, and how many
samples were within ``C``, with noise. From the second comes the bound of the next step. Both
together cost what one sum with noise ``z C`` costs (their Theorem 1) when the sum gets

    ``(z^-2 - (2 s)^-2)^(-1/2) C``

and the count noise of standard deviation ``s``: a sample counts as 1/2 or -1/2, so that adding or
removing one changes the count by 1/2. The size of the batch is private, its expectation is not:
``s`` and the fraction use the expectation over the whole logical batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flash_clipping.errors import FlashClippingError, InvalidValue, checked_number

#: Standard deviation of the count's noise, as a part of the expected batch (Andrew et al. 2021).
COUNT_NOISE = 1 / 20


@dataclass(frozen=True)
class AdaptiveBound:
    """How the bound moves at the end of a logical step.

    Args:
        target_unclipped_quantile: share of samples that should be within the bound.
        min_clipbound, max_clipbound: where it stays.
        clipbound_learning_rate: how fast it moves.

    Raises:
        ValueError: values that contradict each other.
    """

    target_unclipped_quantile: float = 0.5
    min_clipbound: float = 1.0
    max_clipbound: float = 1e8
    clipbound_learning_rate: float = 0.2

    def __post_init__(self) -> None:
        quantile, rate = self.target_unclipped_quantile, self.clipbound_learning_rate
        checked_number("target_unclipped_quantile", quantile, "[0, 1]", example=0.5)
        checked_number("clipbound_learning_rate", rate, "[0, inf)", example=0.2)
        checked_number("min_clipbound", self.min_clipbound, "(0, inf)", example=0.1)
        checked_number("max_clipbound", self.max_clipbound, "(0, inf]", example=1e8)
        if not self.min_clipbound <= self.max_clipbound:
            raise InvalidValue(
                f"FC321 Adaptive clipping: found min_clipbound={self.min_clipbound} and "
                f"max_clipbound={self.max_clipbound}; expected min_clipbound <= max_clipbound."
            )

    def noise_multiplier(self, accounted: float, batch_size: float) -> float:
        """The multiplier for the sum that pays for the count as well, of the one that the
        accountant is told and the expected size of the logical batch, over all processes.
        ``FlashClippingError`` for a batch that is too small."""
        if accounted <= 0:
            return accounted
        of_count = 2 * COUNT_NOISE * batch_size
        if of_count <= accounted:
            raise FlashClippingError(
                f"FC321 Adaptive clipping: found noise_multiplier={accounted:.4g} and an expected "
                f"batch of {batch_size:.4g} samples; expected more than {10 * accounted:.4g} "
                "samples (10 noise multipliers). Use larger batches, a smaller noise multiplier, "
                "or clipping='flat'."
            )
        return float((accounted**-2 - of_count**-2) ** -0.5)

    def next_bound(self, bound: float, noisy_count: float, batch_size: float) -> float:
        """The bound of the next step."""
        fraction = 0.5 + noisy_count / batch_size
        change = -self.clipbound_learning_rate * (fraction - self.target_unclipped_quantile)
        return min(max(bound * math.exp(change), self.min_clipbound), self.max_clipbound)
