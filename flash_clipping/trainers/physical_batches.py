"""Poisson batches in parts that fit in memory.

A Poisson batch has any size. The loader gives it as one object that holds parts of at most
``part_size`` samples, each collated by itself; a step is one such object. An empty batch has one
part, without samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from flash_clipping._compat import pin_memory
from flash_clipping.capture.no_samples import CollateWithEmpty
from flash_clipping.engine.sampling.loaders import PoissonLoader
from flash_clipping.randomness import SecretStream

if TYPE_CHECKING:
    from flash_clipping.distributed.process_groups import ProcessGroups


@dataclass
class LogicalBatch:
    """All samples of one step: what the collate function made of at most so many samples as fit,
    and how many samples each part has."""

    parts: list[Any]
    sizes: list[int]

    def pin_memory(self, device: Any = None) -> LogicalBatch:
        """Called by PyTorch's loader, which does not look into classes."""
        return LogicalBatch([pin_memory(part, device) for part in self.parts], self.sizes)


class CollateParts:
    """Collates a logical batch in parts."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, part_size: int):
        #: Collates one part.
        self.part = CollateWithEmpty(collate, dataset)
        self.part_size = part_size

    def __call__(self, samples: list[Any]) -> LogicalBatch:
        starts = range(0, max(1, len(samples)), self.part_size)
        parts = [samples[start : start + self.part_size] for start in starts]
        return LogicalBatch([self.part(part) for part in parts], [*map(len, parts)])


class LogicalLoader(PoissonLoader):
    """A :class:`~flash_clipping.engine.sampling.loaders.PoissonLoader` of logical batches.

    Args:
        part_size: the most samples of a part.
        **kwargs: as of ``PoissonLoader``.
    """

    def __init__(self, dataset: Any, *, part_size: int, collate_fn: Any, **kwargs: Any):
        super().__init__(dataset, collate_fn=collate_fn, **kwargs)
        # In the place of one that announces batches to the model, which sees parts only.
        self.collate_fn = CollateParts(collate_fn or default_collate, dataset, part_size)
        self._processes: ProcessGroups | None = None

    def share(self, processes: ProcessGroups) -> None:
        """Draw this process's samples, in as many parts as the other processes have, some of them
        empty: all run the model equally often."""
        super().share(processes)
        self._processes, self.batch_sampler.part_size = processes, self.collate_fn.part_size

    def draw_with(self, stream: SecretStream) -> None:
        """Draw the next epochs' batches with it; all processes of a sharded model call it."""
        processes = self._processes
        self.batch_sampler.stream = stream if processes is None else processes.shared_stream(stream)

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            if self._processes is not None:
                while len(batch.parts) < self.batch_sampler.parts[0]:
                    batch.parts.append(self.collate_fn.part([]))
                    batch.sizes.append(0)
                self.batch_sampler.parts.popleft()
            yield batch
