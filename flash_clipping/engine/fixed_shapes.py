"""Poisson batches of one size: cut where more samples were drawn, filled up where fewer were.

Steps that are compiled, or captured as CUDA graphs, want one shape. What is cut is accounted for
(:mod:`flash_clipping.engine.accounting`); what fills up counts nothing
(:mod:`flash_clipping.capture.padding`).
"""

from __future__ import annotations

from typing import Any

import torch

from flash_clipping.engine.sampling.samplers import BatchSizeNotifier, PoissonSampler
from flash_clipping.randomness import Purpose
from flash_clipping.randomness.choices import coin_tosses, subset


class FixedShapeSampler(PoissonSampler):
    """Every step draws every sample independently, and takes at most so many of them.

    Of more than ``max_batch_size`` samples a uniformly random subset of that size is left. Of fewer
    the batch is filled up with samples that were not drawn: other rows than those that count, so
    that a rehearsal can tell rows apart. Rows that count are the first.

    Args:
        max_batch_size: rows of every batch.
        **kwargs: as in :class:`~flash_clipping.engine.sampling.samplers.PoissonSampler`.

    Raises:
        ValueError: ``max_batch_size`` is not between 1 and the number of samples.
    """

    def __init__(self, *, max_batch_size: int, **kwargs: Any):
        super().__init__(**kwargs)
        if isinstance(max_batch_size, bool) or not 1 <= max_batch_size <= self.num_samples:
            raise ValueError(
                f"max_batch_size: found {max_batch_size!r}; expected the rows of every batch, 1 to "
                f"the {self.num_samples} samples of the dataset."
            )
        self.max_batch_size = max_batch_size
        self.announce = BatchSizeNotifier(strict=True)
        self._counted = 0

    def _draw(self) -> list[int]:
        draw = self.stream.draw(Purpose.SAMPLING)
        mask_N = coin_tosses(draw, self.num_samples, self.sample_rate)
        counted = mask_N.nonzero().flatten()
        if len(counted) > self.max_batch_size:
            # Words of another nonce: which are left does not depend on which were drawn.
            counted = counted[subset(draw, len(counted), self.max_batch_size, tensor=1)]
        self._counted = len(counted)
        padding = (~mask_N).nonzero().flatten()[: self.max_batch_size - len(counted)]
        indices: list[int] = torch.cat([counted, padding]).tolist()
        return indices

    def _samples(self, indices: list[Any]) -> int:
        return self._counted
