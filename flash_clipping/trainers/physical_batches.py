"""Poisson batches in parts that fit in memory.

A Poisson batch has any size. The loader gives it as one object that holds parts of at most
``part_size`` samples, each collated by itself; a step is one such object. An empty batch has one
part, without samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, default_collate

from flash_clipping._compat import pin_memory
from flash_clipping.capture.no_samples import CollateWithEmpty
from flash_clipping.engine.sampling.loaders import PoissonLoader, settings_of
from flash_clipping.randomness import SecretStream


@dataclass
class LogicalBatch:
    """All samples of one step.

    Attributes:
        parts: what the collate function made of at most so many samples as fit.
        sizes: how many samples each part has.
    """

    parts: list[Any]
    sizes: list[int]

    def pin_memory(self, device: Any = None) -> LogicalBatch:
        """Called by PyTorch's loader, which does not look into classes."""
        return LogicalBatch([pin_memory(part, device) for part in self.parts], self.sizes)


class CollateParts:
    """Collates a logical batch in parts."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, part_size: int):
        self._collate = CollateWithEmpty(collate, dataset)
        self.part_size = part_size

    def part(self, samples: list[Any]) -> Any:
        """One part, of these samples."""
        return self._collate(samples)

    def __call__(self, samples: list[Any]) -> LogicalBatch:
        starts = range(0, max(1, len(samples)), self.part_size)
        parts = [samples[start : start + self.part_size] for start in starts]
        return LogicalBatch([self._collate(part) for part in parts], [*map(len, parts)])


class LogicalLoader(PoissonLoader):
    """A :class:`~flash_clipping.engine.sampling.loaders.PoissonLoader` of logical batches.

    Args:
        loader: whose dataset and collate function are taken, and how it loads; not its sampling.
        steps: batches in an epoch; each draws every sample with probability ``1 / steps``.
        part_size: the most samples of a part.
        stream: what to draw with.
        distributed: whether every process draws its own part of the samples.
    """

    @classmethod
    def of(
        cls,
        loader: DataLoader[Any],
        *,
        steps: int,
        part_size: int,
        stream: SecretStream,
        distributed: bool = False,
    ) -> LogicalLoader:
        return cls(
            loader.dataset,
            sample_rate=1 / steps,
            collate_fn=loader.collate_fn,
            part_size=part_size,
            generator=loader.generator,
            **settings_of(loader),
            stream=stream,
            distributed=distributed,
        )

    def __init__(self, dataset: Any, *, part_size: int, collate_fn: Any, **kwargs: Any):
        super().__init__(dataset, collate_fn=collate_fn, **kwargs)
        self.part_size = part_size
        # In the place of one that announces batches to the model, which sees parts only.
        self.collate_fn = CollateParts(collate_fn or default_collate, dataset, part_size)
