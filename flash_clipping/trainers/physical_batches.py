"""Poisson batches in parts that fit in memory.

A Poisson batch has any size. The loader gives it as one object that holds parts of at most
``part_size`` samples, each collated by itself; a step is one such object. An empty batch has one
part, without samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from flash_clipping._compat import pin_memory
from flash_clipping.capture.no_samples import CollateWithEmpty
from flash_clipping.engine.micro_batches import Parts
from flash_clipping.engine.sampling.loaders import PoissonLoader
from flash_clipping.randomness import SecretStream

if TYPE_CHECKING:
    from flash_clipping.distributed.process_groups import ProcessGroups


@dataclass
class LogicalBatch(Parts):
    """All samples of one step: what the collate function made of at most so many samples as fit.

    Attributes:
        items: the samples themselves, where parts may have to be collated anew.
        collate: collates a part.
    """

    items: list[Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None

    def samples(self, start: int, stop: int) -> Any:
        assert self.items is not None and self.collate is not None
        return self.collate(self.items[start:stop])

    def pin_memory(self, device: Any = None) -> LogicalBatch:
        """Called by PyTorch's loader, which does not look into classes."""
        return replace(self, parts=[pin_memory(part, device) for part in self.parts])


class CollateParts:
    """Collates a logical batch in parts; ``keeps_items``: with the samples, so that it can be done
    again."""

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        dataset: Any,
        part_size: int,
        keeps_items: bool = False,
    ):
        #: Collates one part.
        self.part = CollateWithEmpty(collate, dataset)
        self.part_size = part_size
        self.keeps_items = keeps_items

    def __call__(self, samples: list[Any]) -> LogicalBatch:
        items = None
        if self.keeps_items:  # collate functions may take samples apart
            items = [copy.copy(sample) for sample in samples]
        starts = range(0, max(1, len(samples)), self.part_size)
        parts = [samples[start : start + self.part_size] for start in starts]
        return LogicalBatch([self.part(part) for part in parts], [*map(len, parts)], items)


class LogicalLoader(PoissonLoader):
    """A :class:`~flash_clipping.engine.sampling.loaders.PoissonLoader` of logical batches.

    Args:
        part_size: the most samples of a part.
        keeps_items: whether batches keep their samples, so that parts can be halved.
        **kwargs: as of ``PoissonLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        part_size: int,
        collate_fn: Any,
        keeps_items: bool = False,
        **kwargs: Any,
    ):
        super().__init__(dataset, collate_fn=collate_fn, **kwargs)
        # In the place of one that announces batches to the model, which sees parts only.
        collate = collate_fn or default_collate
        self.collate_fn = CollateParts(collate, dataset, part_size, keeps_items)
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
            batch.collate = self.collate_fn.part
            if self._processes is not None:
                while len(batch.parts) < self.batch_sampler.parts[0]:
                    batch.parts.append(self.collate_fn.part([]))
                    batch.sizes.append(0)
                self.batch_sampler.parts.popleft()
            yield batch
